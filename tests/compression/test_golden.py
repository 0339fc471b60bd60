"""Frames of randomised top-k have the bytes they always had, with loops and without."""

import hashlib

import pytest
import torch

from vfl.compression import StepContext, make
from vfl.core import compiled
from vfl.core.frame import Frame, Kind, to_bytes
from vfl.core.seeds import Secret, generator

SECRET = Secret.of_simulation(0, "feature")
FORMATS = ("values=8", "law=multinomial", "alpha=0.5,values=4,scale=row,packer=index")
#: Of the frames below, as they were before ties and replacements were made quicker.
DIGESTS = {
    (128, 3): "763020fe3c7f5b83",
    (300, 4): "c943d1faf7378234",
    (33, 13): "bca6cb75db7b0591",
    (5, 4): "28c87fd76d470f74",
}


def cuts(width):
    """Whole numbers, so that they are the same on every processor: with many ties and with few."""
    for levels in (2, 1000, 10**6):
        draw = generator(levels, "golden", width)
        cut = torch.randint(-levels, levels + 1, (40, width), generator=draw) / 64
        yield cut
        yield cut.relu()
        mixed = cut.relu()
        mixed[::7] = mixed[::7].round()  # ties in some rows
        yield mixed


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("shape", DIGESTS)
def test_frames_have_the_bytes_they_always_had(monkeypatch, shape, loops):
    monkeypatch.setattr(compiled, "COMPILED", loops)
    width, k = shape
    found = hashlib.sha256()
    for form in FORMATS:
        codec = make(f"randtopk:k={k},{form}")
        for step, cut in enumerate(cuts(width)):
            payload = codec.encode(cut, StepContext(step, training=True, secret=SECRET)).payload
            found.update(to_bytes(Frame(Kind.CUT, step, payload)))
    assert found.hexdigest()[:16] == DIGESTS[shape]
