"""Division of shares by a power of two without the rare huge error: the index fix.

Each holder divides its own share. That is off by one unit at most, unless the first share lies
within |z| of the ring's turning point: then it is off by N / 2^shift, with probability 2 |z| / N
(thesis, 2025, theorem 5.3.1, after Mohassel and Zhang 2017, 4.1). The first holder therefore moves
such a share by a quarter of the ring and tells the second where, who moves the other share back
(algorithm 5.1, with the division it lacks). What the second learns is that these shares were near
the turning point, so a range about zmax wide for those values; the ledger counts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_QUARTER = 1 << 62
_TURN = 1 << 63
_PIECE = 2**15


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
    words = torch.empty(share.shape, dtype=torch.int64)
    places = []
    for start, source, piece in _pieces(share, words):
        torch.mul(source, scaling.times, out=piece)
        near = _near_the_turn(piece, 1 << scaling.zmax_bits)
        if len(near):
            places.append(start + near)
            piece[near] = torch.where(
                piece[near] < 0, piece[near] + _QUARTER, piece[near] - _QUARTER
            )
        piece >>= scaling.shift
    moved = torch.cat(places) if places else torch.empty(0, dtype=torch.int64)
    # A quarter of the ring is more than zmax, so what was lowered is still above 0.
    high = words.view(-1)[moved] >= 0
    return words, Moved(moved[high], moved[~high])


def scale_second(share: Tensor, scaling: Scaling, moved: Moved) -> Tensor:
    """The second holder's side: it moves the same places back, and divides towards the other side.

    Rounding one share down and the other up keeps the error of the sum within one unit.
    """
    words = torch.empty(share.shape, dtype=torch.int64)
    flat = share.reshape(-1)
    for _, source, piece in _pieces(share, words):
        torch.mul(source, -scaling.times, out=piece)
        piece >>= scaling.shift
        piece.neg_()
    for places, step in ((moved.large, _QUARTER), (moved.small, -_QUARTER)):
        moved_back = flat[places] * scaling.times + step
        words.view(-1)[places] = -((-moved_back) >> scaling.shift)
    return words


def _pieces(share: Tensor, words: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Where each piece begins, and it, of both: small enough to stay in a processor's cache."""
    source, target = share.reshape(-1), words.view(-1)
    for start in range(0, len(source), _PIECE):
        yield start, source[start : start + _PIECE], target[start : start + _PIECE]


def _near_the_turn(words: Tensor, zmax: int) -> Tensor:
    """Where shares are less than zmax from the turn from the largest number to the smallest."""
    # Counted from the lowest of these they are the numbers below 2 zmax: one comparison for both.
    from_lowest = words.numpy().view(np.uint64) + np.uint64(_TURN + zmax)
    return torch.from_numpy(np.flatnonzero(from_lowest < np.uint64(2 * zmax)))
