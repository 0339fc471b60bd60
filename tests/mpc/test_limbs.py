"""Products by limbs are those of int64, word for word."""

import pytest
import torch

from vfl.core.seeds import generator
from vfl.mpc import ring

LEAST, MOST = -(2**63), 2**63 - 1
LARGEST = (2**21 - 1) + (2**20 - 1 << 22) + (2**20 - 1 << 43)  # every limb of it, and odd


@pytest.mark.parametrize(
    ("rows", "inner", "columns"),
    [(1, 1, 1), (3, 5, 2), (40, 511, 33), (7, 512, 9), (5, 513, 4), (2, 2000, 3), (4, 0, 3)],
)
def test_any_words(rows, inner, columns):
    draw = generator(0, "words", rows * inner)
    left = torch.randint(LEAST, MOST, (rows, inner), generator=draw)
    right = torch.randint(LEAST, MOST, (inner, columns), generator=draw)
    assert torch.equal(ring.limb_matmul(left, right), left @ right)
    assert torch.equal(ring.limb_matmul(right.t(), left.t()), (left @ right).t())


@pytest.mark.parametrize(
    "word", [LARGEST, -LARGEST, LEAST, MOST, -1, 2**21, -(2**21), 2**42, 2**43 - 1, 2**22 - 1]
)
def test_the_largest_sums_are_exact(word):
    left, right = torch.full((2, 4096), word), torch.full((4096, 2), word)
    for other in (right, ~right, right ^ 1):
        assert torch.equal(ring.limb_matmul(left, other), left @ other)


@pytest.mark.parametrize("slow", [True, False])
def test_either_way_gives_the_same_words(monkeypatch, slow):
    asked = []
    monkeypatch.setattr(ring, "_int64_is_slow", lambda: slow)
    monkeypatch.setattr(ring, "limb_matmul", lambda *both: asked.append(1) or both[0] @ both[1])
    draw = generator(1, "words")
    left = torch.randint(LEAST, MOST, (64, 100), generator=draw)
    right = torch.randint(LEAST, MOST, (100, 64), generator=draw)
    assert torch.equal(ring.matmul(left, right), left @ right)
    assert torch.equal(ring.inner(right, right), right.t() @ right)
    ring.matmul(left[:4], right)
    ring.matmul(left, right[:, :1])
    assert len(asked) == (2 if slow else 0)
