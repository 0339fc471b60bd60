"""Products in the ring 2^64 by float64 ones, for machines on which whole numbers multiply slowly.

torch multiplies int64 matrices without a BLAS: where its compiler had the instructions for it, at
half the speed of float64, elsewhere forty times slower. A word in three signed limbs of 22, 21 and
21 bits, at the places 0, 22 and 43, makes six products of float64 that are exact; those of higher
places are multiples of 2^64. With 512 terms the largest sum is below 2^53.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_TERMS = 512
_LOW, _MIDDLE = 22, 43
_HALVES = np.uint64((1 << 21) + (1 << 20 + _LOW) + (1 << 20 + _MIDDLE))
_PROBE = 128
#: Smaller products are not worth taking apart: rows and columns, what is between, terms in all.
_LEAST_SIDE, _LEAST_INNER, _LEAST_TERMS = 32, 16, 1 << 18


def pays(rows: int, inner: int, columns: int) -> bool:
    """Whether `limb_matmul` is faster than torch for axes (rows, inner) and (inner, columns)."""
    wide = min(rows, columns) >= _LEAST_SIDE and inner >= _LEAST_INNER
    return wide and rows * inner * columns >= _LEAST_TERMS and _words_are_slow()


def limb_matmul(left: Tensor, right: Tensor) -> Tensor:
    """What ``left @ right`` is in int64, wrapping around; axes (rows, inner), (inner, columns).

    >>> limb_matmul(torch.tensor([[2**40, -3]]), torch.tensor([[2**30], [5]])).tolist()
    [[-15]]
    """
    total = torch.zeros(left.shape[0], right.shape[1], dtype=torch.int64)
    for start in range(0, left.shape[1], _TERMS):
        low, middle, high = _limbs(left[:, start : start + _TERMS])
        across = torch.cat([high, middle, low], 1)
        down = torch.cat(_limbs(right[start : start + _TERMS]))
        width = low.shape[1]
        total += (across[:, 2 * width :] @ down[:width]).long()
        total += (across[:, width:] @ down[: 2 * width]).long() << _LOW
        across[:, width : 2 * width] *= 2  # middle times middle belongs to place 44
        total += (across @ down).long() << _MIDDLE
    return total


def _limbs(words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The lower 22 bits, the next 21 and the last 21, each with a sign; float64.

    Digits with a sign are those without one of the word plus half of every place, less that half;
    so they take unsigned shifts, which every processor has for many words at once.
    """
    raised = words.numpy().view(np.uint64) + _HALVES
    low = raised & np.uint64((1 << _LOW) - 1)
    middle = raised >> np.uint64(_LOW) & np.uint64((1 << _MIDDLE - _LOW) - 1)
    high = raised >> np.uint64(_MIDDLE)
    return _signed(low, _LOW), _signed(middle, _MIDDLE - _LOW), _signed(high, 64 - _MIDDLE)


def _signed(digits: np.ndarray, bits: int) -> Tensor:
    return torch.from_numpy(digits.view(np.int64)).double().sub_(1 << bits - 1)


@lru_cache(maxsize=1)
def _words_are_slow() -> bool:
    """Tried once a process, in a few milliseconds; both ways give the same words."""
    square = torch.arange(_PROBE * _PROBE).reshape(_PROBE, _PROBE) * 0x1E3779B97F4A7C15 // 3
    return _fastest(limb_matmul, square) < _fastest(torch.matmul, square)


def _fastest(product: Callable[[Tensor, Tensor], Tensor], square: Tensor) -> float:
    def once() -> float:
        began = time.perf_counter()
        product(square, square)
        return time.perf_counter() - began

    return min(once() for _ in range(4))
