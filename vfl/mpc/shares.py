"""Additive shares: a holder has its share of a tensor, the dealer only the tensor's shape.

The module defines shares; `vfl.mpc.engine` multiplies shared tensors. The file also truncates
shares between two holders: a division by a power of two, without the rare large error of separate
divisions.

In a truncation, each holder divides its own share. The result is off by at most one unit, unless
the first holder's share is within |z| of the point where the ring wraps around; z is the shared
value. Near this point the result can be off by N / 2^shift, where N = 2^64; this happens with a
probability of at most 2 |z| / N (thesis, 2025, theorem 5.3.1, after Mohassel and Zhang 2017, 4.1).
The first holder therefore moves such a share by a quarter of the ring, and sends the index of the
moved share to the second holder. The second holder moves its own share at this index by a quarter
of the ring in the opposite direction (algorithm 5.1, with the division that it lacks). The second
holder thus learns that the first holder's shares at these indices were near the wrap-around point,
within a range of about zmax (the largest safe |z|). The ledger of leakage counts these indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

_ZERO = torch.zeros((), dtype=torch.int64)
_QUARTER, _TURN = 1 << 62, 1 << 63
#: Number of elements that one pass truncates, so that they fit into a processor's cache.
_PIECE = 2**15


@dataclass(frozen=True, slots=True)
class Opened:
    """One party's record of a tensor's opening, which makes further products of it cheap.

    Attributes:
        mask: at a holder, its own part of the mask U; at the dealer of fast mode, P0's part, and at
            any other dealer, the whole mask; None at a holder that no longer needs the mask.
        difference: the opened value X - U that a holder received; for a tensor opened in one
            direction, only the other holder's part of it. None at the dealer, which must not know
            the opened value, and in a run on shapes.
        second: at the dealer of fast mode, P1's part of the mask U.
        turn: only for a quotient: at a holder, the public bit of every element, which selects one
            of two masks; at the dealer, the difference between these two masks. Element-wise
            products use this value.
    """

    mask: Tensor | None
    difference: Tensor | None = None
    second: Tensor | None = None
    turn: Tensor | None = None

    def map(self, transposed: bool, rows: Tensor | None) -> Opened:
        """Return the record for the transposed tensor, or for selected rows of the tensor."""
        return self.moved(lambda each: _map(each, transposed, rows))

    def moved(self, move: Callable[[Tensor], Tensor]) -> Opened:
        """Return the record for a tensor whose elements were moved by `move`."""
        parts = (self.mask, self.difference, self.second, self.turn)
        return Opened(*(None if each is None else move(each) for each in parts))


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """One party's part of a shared tensor; the methods of this class send no message.

    Fast mode opens two kinds of tensors in one direction: columns that one holder knows in
    plaintext, and, of a right factor for such columns, the share of the other holder.

    Attributes:
        share: this holder's share, int64; at the dealer a placeholder with the tensor's shape.
        bits: fraction bits of the shared value.
        opened: record of the tensor's opening under a mask; None before the tensor was opened.
        owned: number of leading columns that P0 owns (knows in plaintext); P1 owns the other
            columns. The owner's share of an owned column is the plaintext, and the other holder's
            share is zero. None if the tensor has ordinary shares.
        faced: for a tensor that is a right factor: the number of columns of the left factor that P0
            owns.
        foreseen: in a run on shapes, whether the tensor is a future answer of P2; P0's share is
            then a pad.
    """

    share: Tensor
    bits: int
    opened: Opened | None = None
    owned: int | None = None
    faced: int | None = None
    foreseen: bool = False

    @property
    def shape(self) -> torch.Size:
        """Axes of the whole tensor."""
        return self.share.shape

    @property
    def is_quotient(self) -> bool:
        """Return whether a division opened the tensor; see `Opened.turn`."""
        return self.opened is not None and self.opened.turn is not None

    def mask_part(self, part: int) -> Tensor:
        """Return the mask of the opening, or, for part 1 of a quotient, the value `Opened.turn`."""
        turn = self._opening().turn
        if part == 0:
            return self.mask()
        assert turn is not None, "a quotient has it"
        return turn

    def part(self, holder: int) -> Tensor:
        """Return the elements that a holder opens; only their axes are public."""
        if self.owned is not None:
            return self.share[:, self.owned :] if holder else self.share[:, : self.owned]
        if self.faced is not None:
            return self.share[: self.faced] if holder else self.share[self.faced :]
        return self.share

    def mask(self) -> Tensor:
        """Return this party's part of the mask under which the tensor was opened; see `Opened`."""
        mask = self._opening().mask
        assert mask is not None, "a mask was kept"
        return mask

    def difference(self) -> Tensor:
        """Return the opened value that a holder received; see `Opened`."""
        difference = self._opening().difference
        assert difference is not None, "a holder knows what was opened"
        return difference

    def masks(self) -> tuple[Tensor, Tensor]:
        """Return both parts of the opening's mask, as the dealer knows them."""
        second = self._opening().second
        assert second is not None, "the dealer draws both"
        return self.mask(), second

    def facing(self, left: SharedTensor) -> SharedTensor:
        """Return this tensor as the right factor of `left`.

        An opening that such a product cannot use is dropped.
        """
        serves = self.opened is not None and self.owned is None
        if serves and self.faced in (None, left.owned):
            return self
        return SharedTensor(self.share, self.bits, faced=left.owned)

    def transposed(self) -> SharedTensor:
        """Exchange the axes (rows, columns); an opening in both directions stays valid."""
        if self.owned is not None or self.faced is not None:
            return SharedTensor(self.share.t(), self.bits)
        return self._map(True, None)

    def rows(self, index: Tensor) -> SharedTensor:
        """Select rows; an opening of the tensor stays valid for the result.

        The tensor must not be a right factor of an owned tensor.
        """
        return self._map(False, index)

    def plus(self, other: SharedTensor) -> SharedTensor:
        """Return the sum of two tensors; a vector is added to every row.

        Raises:
            ValueError: the tensors have different numbers of fraction bits.
        """
        self._same_bits(other)
        return SharedTensor(self.share + other.share, self.bits)

    def minus(self, other: SharedTensor) -> SharedTensor:
        """Return the difference; see `plus`."""
        self._same_bits(other)
        return SharedTensor(self.share - other.share, self.bits)

    def finer(self, bits: int) -> SharedTensor:
        """Return the same value with more fraction bits.

        Raises:
            ValueError: `bits` is smaller than the present number of fraction bits; a reduction
                takes a message, see `Party.truncate`.
        """
        if bits < self.bits:
            raise ValueError(f"{self.bits} fraction bits are reduced to {bits} by `truncate`")
        if bits == self.bits:
            return self
        return SharedTensor(self.share << (bits - self.bits), bits)

    def beside(self, other: SharedTensor) -> SharedTensor:
        """Join the columns of two tensors.

        Owned columns stay owned if P0's columns come first.
        """
        self._same_bits(other)
        owned = None
        if self.owned is not None and other.owned is not None:
            in_order = self.owned == self.shape[1] or other.owned == 0
            owned = self.owned + other.owned if in_order else None
        return SharedTensor(torch.cat([self.share, other.share], 1), self.bits, owned=owned)

    def row_sum(self) -> SharedTensor:
        """Return the sum over all rows; axes (columns,)."""
        return SharedTensor(self.share.sum(0), self.bits)

    def alone(self) -> SharedTensor:
        """Return a tensor with the same share and fraction bits, but without opening and owner."""
        return SharedTensor(self.share, self.bits)

    def _opening(self) -> Opened:
        assert self.opened is not None, "an operand is opened before it is multiplied"
        return self.opened

    def _same_bits(self, other: SharedTensor) -> None:
        if self.bits != other.bits:
            raise ValueError(
                f"shares of {self.bits} and {other.bits} fraction bits cannot be combined"
            )

    def _map(self, transposed: bool, rows: Tensor | None) -> SharedTensor:
        opened = None if self.opened is None else self.opened.map(transposed, rows)
        return replace(self, share=_map(self.share, transposed, rows), opened=opened)


def owned_by(owner: int, shape: Sequence[int]) -> int | None:
    """Return the value of `SharedTensor.owned` for a tensor that the holder `owner` shares.

    >>> owned_by(0, (5, 3)), owned_by(1, (5, 3)), owned_by(2, (5, 3))
    (3, 0, None)
    """
    if len(shape) != 2 or owner not in (0, 1):
        return None
    return 0 if owner else shape[1]


def stacked(parts: Sequence[SharedTensor]) -> SharedTensor:
    """Stack the rows of several tensors with the same owner, all opened in the same way."""
    if len(parts) == 1:
        return parts[0]
    first, opened = parts[0], None
    if first.opened is not None:
        kept = [
            (each.mask, each.difference, each.second) for part in parts if (each := part.opened)
        ]
        opened = Opened(*map(_joined, zip(*kept, strict=True)))
    return replace(first, share=torch.cat([part.share for part in parts]), opened=opened)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.cat(known) if known else None


def blank(shape: Sequence[int]) -> Tensor:
    """Return a tensor without content: a single zero represents every element.

    torch's own meta tensors, which have no content either, take seconds to load.
    """
    return _ZERO.expand(tuple(shape))


def _map(elements: Tensor, transposed: bool, rows: Tensor | None) -> Tensor:
    if rows is not None:
        return elements.index_select(0, rows)
    return elements.mT if transposed else elements


@dataclass(frozen=True, slots=True)
class Truncation:
    """Truncation of shares: a value z becomes z times / 2^shift.

    Attributes:
        shift: number of bits by which to divide.
        zmax_bits: number of bits of the largest safe |z times|; larger values may suffer the large
            error of separate divisions.
        times: public integer factor, by which z is multiplied first.
        rate: whether the truncation divides the value (and not only its representation, by a change
            of the fraction bits).
    """

    shift: int
    zmax_bits: int
    times: int = 1
    rate: bool = False


def bits_after(bits: int, truncations: Sequence[Truncation]) -> int:
    """Return the fraction bits of a value that had `bits` fraction bits before truncations.

    >>> bits_after(40, [Truncation(20, 48), Truncation(18, 38, times=819, rate=True)])
    20
    """
    return bits - sum(truncation.shift for truncation in truncations if not truncation.rate)


@dataclass(frozen=True, slots=True)
class MovedIndices:
    """Indices at which the first holder moved its share by a quarter of the ring.

    Attributes:
        large: flat indices of shares just below the wrap-around point; the holder lowered these
            shares.
        small: flat indices of shares just above the wrap-around point; the holder raised these
            shares.
    """

    large: Tensor
    small: Tensor

    def __len__(self) -> int:
        return len(self.large) + len(self.small)


def truncate_first(elements: Tensor, truncations: Sequence[Truncation]) -> list[MovedIndices]:
    """Truncate at the first holder, in place.

    The function returns the indices that this holder must send to the second holder.

    Args:
        elements: the first holder's share, int64 with one axis.
        truncations: truncations, one after the other; equal at both holders.
    """
    lists: list[tuple[list[np.ndarray], list[np.ndarray]]] = [([], []) for _ in truncations]
    steps = list(zip(truncations, _reach_the_turn(truncations), lists, strict=True))
    for start in range(0, len(elements), _PIECE):
        piece = elements[start : start + _PIECE]
        for truncation, may_be_near, (large, small) in steps:
            if truncation.times > 1:
                piece *= truncation.times
            if may_be_near and len(near := _near_the_turn(piece, 1 << truncation.zmax_bits)):
                # Subtract a quarter of the ring from large shares, and add a quarter to small
                # shares.
                moved = piece.numpy()[near] ^ _QUARTER
                piece.numpy()[near] = moved
                # A quarter of the ring is more than zmax, so a lowered share is still above 0.
                large.append(start + near[moved >= 0])
                small.append(start + near[moved < 0])
            piece >>= truncation.shift
    return [MovedIndices(_whole(large), _whole(small)) for large, small in lists]


def truncate_second(
    elements: Tensor, truncations: Sequence[Truncation], moved: Sequence[MovedIndices]
) -> None:
    """Truncate at the second holder, in place: move the shares at the received indices, and divide.

    One holder rounds down and the other rounds up, so that the sum of shares is off by at most one
    unit.
    """
    elements.neg_()
    for truncation, indices in zip(truncations, moved, strict=True):
        if truncation.times > 1:
            elements *= truncation.times
        for moved_back, step in ((indices.large, -_QUARTER), (indices.small, _QUARTER)):
            if len(moved_back):
                elements.numpy()[moved_back.numpy()] += step
        elements >>= truncation.shift
    elements.neg_()


def _reach_the_turn(truncations: Sequence[Truncation]) -> Iterator[bool]:
    """Yield for each truncation whether a share can be near the wrap-around point before it.

    After a division, no share can be near this point, unless the next factor is large.
    """
    most = _TURN
    for truncation in truncations:
        most *= truncation.times
        yield most > _TURN - (1 << truncation.zmax_bits)
        most = min(most, _TURN) >> truncation.shift


def _whole(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *parts]))


def _near_the_turn(elements: Tensor, zmax: int) -> np.ndarray:
    """Return the indices of shares within zmax of the wrap-around point."""
    # Counted from the lowest such share, these shares are below 2 zmax, so one comparison finds the
    # shares on both sides of the wrap-around point.
    from_lowest = elements.numpy().view(np.uint64) + np.uint64(_TURN + zmax)
    return np.flatnonzero(from_lowest < np.uint64(2 * zmax))
