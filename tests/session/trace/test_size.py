"""The size that is told beforehand: never too small, and close where a codec's bytes are known."""

import re
import shutil
from collections import namedtuple

import pytest

from vfl.core.errors import ConfigError
from vfl.session.trace import expected_bytes

Disk = namedtuple("Disk", "total used free")


def measured(training, party):
    return sum(path.stat().st_size for path in training.path(party).iterdir())


def expected(session, party, settings):
    own = session.weights()[party]
    return expected_bytes(settings, session.terms, party, session.label.data.split, own)


@pytest.mark.parametrize(
    ("codec", "most", "snapshots"),
    [("none", 1.03, 0), ("none", 1.03, 3), ("topk:k=3,values=8", 2, 1), ("randtopk:k=3", 2, 1)],
)
def test_the_size_is_never_below_the_real_one_and_close_to_it(training, codec, most, snapshots):
    parties = {"bank": {"width": 64, "bottom": "mlp:hidden=8"}, "shop": {"width": 32}}
    train = {"epochs": 4, "batch_size": 100, "checkpoint_every": 5}
    trace = {"phases": ["train", "validation", "test"], "snapshots": snapshots}
    session = training.session(codec=codec, parties=parties, train=train, trace=trace).run()
    settings = training.read("bank").settings
    for party in ("bank", "shop", "lender"):
        real = measured(training, party)
        assert real <= expected(session, party, settings) <= most * real


def test_it_is_told_before_the_training(training):
    told = []
    session = training.session()
    session._say = told.append
    session.run()
    (line,) = told
    assert re.fullmatch(r"the trace of bank, shop, lender takes up to [\d.]+ kB on disk", line)


def test_a_disk_without_room(training, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(10**9, 10**9 - 1000, 1000))
    with pytest.raises(ConfigError, match="too little free space for the trace") as caught:
        training.session().run()
    assert caught.value.got == "1.00 kB free"
    assert caught.value.where == str(tmp_path)
    assert not training.path("bank").exists()
    training.session(trace={}).run()  # without a trace the disk is not asked
