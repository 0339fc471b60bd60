import math

import numpy as np
import pytest

from vfl.compression.coding.bits import Enumerative, PlainIndex, index_set, to_bits
from vfl.core.errors import CorruptFrameError, WidthError

THESIS = [
    *((128, k) for k in (3, 6, 13)),
    *((300, k) for k in (2, 4, 9)),
    *((600, k) for k in (2, 4, 9, 14)),
    *((1280, k) for k in (2, 4, 9)),
]


def random_sets(width, k, rows=50):
    draw = np.random.default_rng(0)
    chosen = [np.sort(draw.choice(width, k, replace=False)) for _ in range(rows)]
    first, last = np.arange(k), np.arange(width - k, width)
    return np.array([first, last, *chosen], np.int64)


def rank_by_definition(indices):
    return sum(math.comb(int(place), j + 1) for j, place in enumerate(indices))


@pytest.mark.parametrize(("width", "k"), [*THESIS, (40, 40), (200, 100), (1280, 64)])
def test_large_sets_have_the_rank_of_the_definition(width, k):
    indices = random_sets(width, k)
    sets = Enumerative(width, k)
    bits = sets.to_bits(indices)
    assert sets.bits == math.ceil(math.log2(math.comb(width, k)))
    for row, spelt in zip(indices, bits, strict=True):
        assert int("0" + "".join(map(str, spelt)), 2) == rank_by_definition(row)
    assert (sets.from_bits(bits) == indices).all()


@pytest.mark.parametrize("width", [1, 2, 100, 128, 129])
def test_plain_places_are_read_back(width):
    k = min(3, width)
    sets = PlainIndex(width, k)
    indices = random_sets(width, k)
    assert sets.bits == k * math.ceil(math.log2(width))
    assert (sets.from_bits(sets.to_bits(indices)) == indices).all()


@pytest.mark.parametrize("indices", [[0, 1, 100], [5, 5, 6], [7, 3, 9]])
def test_plain_places_out_of_range_or_order_are_refused(indices):
    bits = to_bits(np.array([[0, 1, 2], indices]), 7)
    with pytest.raises(CorruptFrameError, match="increasing"):
        PlainIndex(100, 3).from_bits(bits)


def test_a_table_too_large_is_refused_with_the_cure():
    with pytest.raises(WidthError) as caught:
        index_set("enumerative", 4096, 2048)
    assert caught.value.fix == "packer=index"
    assert index_set("index", 4096, 2048).bits == 2048 * 12
