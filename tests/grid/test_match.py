"""The number in a spec against a search through all of them."""

import pytest
import torch

from vfl.compression import Moment, make
from vfl.errors import BadOptionError, WidthError
from vfl.frame import HEADER_BYTES
from vfl.grid.match import Cut, frame_bytes, matched
from vfl.seeds import Secret

SPECS = [
    "topk:k=?",
    "topk:k=?,values=8",
    "topk:k=?,packer=bitmap",
    "randtopk:k=?,alpha=0.2,values=4,packer=index",
    "size:k=?",
    "size:k=?,kind=mask,values=4",
    "sign:width=?",
    "topk:k=3,values=?",
    "quantise:values=?",
    "relu:values=?,packer=dense",
]


def plain_frame_bytes(spec, width, rows):
    """Built without the code under test: a cut of the wire's width, whatever it holds."""
    codec = make(spec)
    codec.check(width)
    cut = torch.ones(rows, codec.wire_width(width))
    moment = Moment(training=True, secret=Secret(bytes(32)))
    return HEADER_BYTES + len(codec.encode(cut, moment).payload)


def largest(spec, level, width, rows):
    """The number before the first whose frame is too large, by trying one after the other."""
    found = None
    for number in range(1, 32 * width + 1):
        try:
            size = plain_frame_bytes(spec.replace("?", str(number)), width, rows)
        except (BadOptionError, WidthError):
            break
        if size > level / 100 * 4 * rows * width:
            break
        found = number
    return found


@pytest.mark.parametrize("level", [0.5, 2.86, 5.71, 12.38, 60])
@pytest.mark.parametrize("spec", SPECS)
def test_the_largest_number_that_fits(spec, level):
    number = largest(spec, level, width=24, rows=16)
    expected = None if number is None else spec.replace("?", str(number))
    assert matched(spec, level, Cut((24,), 16)) == expected


@pytest.mark.parametrize(("level", "k"), [(2.86, 3), (5.71, 6), (12.38, 13)])
def test_the_levels_of_the_thesis(level, k):
    """Its own k come out, for our frames are a little smaller than its formula says."""
    assert matched("topk:k=?", level, Cut((128,), 256)) == f"topk:k={k}"


def test_parties_share_a_level():
    cut = Cut((16, 48), 32)
    spec = matched("topk:k=?", 10, cut)
    alone = [plain_frame_bytes(spec, width, 32) for width in cut.widths]
    assert frame_bytes(spec, cut) == sum(alone) <= 0.1 * cut.dense_bytes
    assert frame_bytes("topk:k=3", cut) > 0.1 * cut.dense_bytes
    assert spec == "topk:k=2"


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("topk:k=?,values=4,packer=range", "depends on the data"),
        ("l1:target=?", "depends on the data"),
        ("rate:bits=?", "depends on the data"),
        ("relu:values=?,packer=bitmap", "depends on the data"),
        ("l1:target=?,packer=dense", "do not grow"),
        ("randtopk:k=3,alpha=?", "do not grow"),
        ("sign:grad=?", "no such choice"),
    ],
)
def test_what_cannot_be_matched_is_refused(spec, reason):
    with pytest.raises(BadOptionError, match=reason):
        matched(spec, 5, Cut((24,), 16))
