"""Sets of any size: every number is one set, in as few bits as there are sets."""

import math
from itertools import combinations

import numpy as np
import pytest

from vfl.compression.coding import bits as module
from vfl.compression.coding.bits import Supports, to_bits
from vfl.core.errors import CorruptFrameError


def masks(width, counts, seed=0):
    """Rows of random sets of the given sizes."""
    draw = np.random.default_rng(seed)
    used = np.zeros((len(counts), width), np.bool_)
    for row, count in zip(used, counts, strict=True):
        row[draw.choice(width, count, replace=False)] = True
    return used


def rank_by_definition(row):
    """Of its indices, or of its zeros where those are fewer."""
    indices = row.nonzero()[0] if row.sum() <= len(row) // 2 else (~row).nonzero()[0]
    return sum(math.comb(int(place), j + 1) for j, place in enumerate(indices))


@pytest.mark.parametrize(
    ("width", "count"), [(1, 0), (1, 1), (6, 2), (6, 3), (6, 5), (9, 4), (7, 7)]
)
def test_numbers_are_every_set_of_a_size_once(width, count):
    sets = Supports(width)
    used = np.zeros((math.comb(width, count), width), np.bool_)
    for row, indices in zip(used, combinations(range(width), count), strict=True):
        row[list(indices)] = True
    used = used[np.argsort([rank_by_definition(row) for row in used])]
    bits = sets.to_bits(used)
    every = to_bits(np.arange(len(used))[:, None], int(sets.bits[count]))
    assert bits.tolist() == every.reshape(-1).tolist()
    assert (sets.from_bits(bits, used.sum(axis=1)) == used).all()


@pytest.mark.parametrize("width", [2, 61, 62, 63, 64, 65, 128, 200, 600])
def test_rows_of_all_sizes_come_back_and_fewer_places_come_first(width):
    """Sets that machine words number, and those that they do not."""
    counts = np.random.default_rng(width).integers(0, width + 1, 30)
    counts[:6] = 0, 1, 2, width, width - 1, width // 2
    used, sets = masks(width, counts), Supports(width)
    bits = sets.to_bits(used)
    text = "".join(
        f"{rank_by_definition(used[row]):0{sets.bits[counts[row]]}b}"
        for row in np.argsort(counts, kind="stable")
        if sets.bits[counts[row]]
    )
    assert "".join(map(str, bits)) == text
    assert (sets.from_bits(bits, counts) == used).all()


def test_a_table_has_its_limit(monkeypatch):
    """Beyond it a row is a bit for every place, so that memory stays bounded."""
    monkeypatch.setattr(module, "SUPPORT_TABLE_LIMIT", 60)
    sets, counts = Supports(20), np.array([4, 16, 3, 17, 10, 0, 20])
    assert (sets.bits[[3, 4, 16, 17]] == [11, 20, 20, 11]).all()
    used = masks(20, counts)
    bits = sets.to_bits(used)
    assert (sets.from_bits(bits, counts) == used).all()
    assert sets._columns.size <= 60


@pytest.mark.parametrize(("width", "count"), [(5, 2), (128, 3), (128, 60), (128, 125)])
def test_a_number_without_a_set_is_refused(width, count):
    sets = Supports(width)
    for rank in (math.comb(width, count), 2 ** int(sets.bits[count]) - 1):
        bits = to_bits(np.array([[rank]], object), int(sets.bits[count]))
        with pytest.raises(CorruptFrameError, match="does not exist"):
            sets.from_bits(bits.reshape(-1), np.array([count]))


def test_a_plain_row_with_another_number_of_places_is_refused(monkeypatch):
    monkeypatch.setattr(module, "SUPPORT_TABLE_LIMIT", 20)
    bits = masks(20, [9]).astype(np.uint8).reshape(-1)
    with pytest.raises(CorruptFrameError, match="a number of indices that differs"):
        Supports(20).from_bits(bits, np.array([10]))
