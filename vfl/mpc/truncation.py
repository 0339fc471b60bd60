"""Division of shares by a power of two without the rare huge error: the index fix.

Each holder divides its own share. That is off by one unit at most, unless the first share lies
within |z| of the ring's turning point: then it is off by N / 2^shift, with probability 2 |z| / N
(thesis, 2025, theorem 5.3.1, after Mohassel and Zhang 2017, 4.1). The first holder therefore moves
such a share by a quarter of the ring and tells the second where, who moves the other share back
(algorithm 5.1, with the division it lacks). What the second learns is that these shares were near
the turning point, so a range about zmax wide for those values; the ledger counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_QUARTER = 1 << 62
_TURN = 1 << 63


@dataclass(frozen=True, slots=True)
class Scaling:
    """z <- z times / 2^shift on shares.

    Attributes:
        shift: bits divided away.
        zmax_bits: bits of the largest |z times| that is safe; beyond it the huge error returns.
        times: a public whole factor, multiplied first.
        rate: whether the value is divided, and not only its fraction shortened.
    """

    shift: int
    zmax_bits: int
    times: int = 1
    rate: bool = False


def bits_after(bits: int, scalings: Sequence[Scaling]) -> int:
    """Fraction bits of what had `bits` before the scalings.

    >>> bits_after(40, [Scaling(20, 48), Scaling(18, 38, times=819, rate=True)])
    20
    """
    return bits - sum(scaling.shift for scaling in scalings if not scaling.rate)


@dataclass(frozen=True, slots=True)
class Moved:
    """Where the first holder moved its share by a quarter of the ring.

    Attributes:
        large: flat indices of shares just below the turning point, which were lowered.
        small: flat indices of shares just above the opposite end, which were raised.
    """

    large: Tensor
    small: Tensor

    def __len__(self) -> int:
        return len(self.large) + len(self.small)


def scale_first(share: Tensor, scaling: Scaling) -> tuple[Tensor, Moved]:
    """The first holder's side; the new share, and what to tell the second.

    Args:
        share: int64 of any shape.
        scaling: the same at both holders.
    """
    words = (share * scaling.times).reshape(-1)
    moved = _near_the_turn(words, 1 << scaling.zmax_bits)
    words[moved.large] -= _QUARTER
    words[moved.small] += _QUARTER
    words >>= scaling.shift
    return words.reshape(share.shape), moved


def scale_second(share: Tensor, scaling: Scaling, moved: Moved) -> Tensor:
    """The second holder's side: it moves the same places back, and divides towards the other side.

    Rounding one share down and the other up keeps the error of the sum within one unit.
    """
    words = (share * -scaling.times).reshape(-1)
    words[moved.large] -= _QUARTER
    words[moved.small] += _QUARTER
    words >>= scaling.shift
    return words.neg_().reshape(share.shape)


def _near_the_turn(words: Tensor, zmax: int) -> Moved:
    """Shares less than zmax from where the ring turns from its largest number to its smallest."""
    # Counted from the lowest of these they are the numbers below 2 zmax: one comparison for both.
    from_lowest = words.numpy().view(np.uint64) + np.uint64(_TURN + zmax)
    near = torch.from_numpy(np.flatnonzero(from_lowest < np.uint64(2 * zmax)))
    high = words[near] >= 0
    return Moved(near[high], near[~high])
