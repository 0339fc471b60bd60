"""A tensor that two holders share: what one of them has of it, or only its shape at the dealer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_ZERO = torch.zeros((), dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Opened:
    """What makes a shared tensor cheap to multiply again, as one party has it.

    Attributes:
        mask: a holder's own part of the mask U; at the dealer P0's part. None where a holder has
            no more use for it.
        difference: what a holder learned: X - U, or only what the other one opened of a tensor
            that is opened one way. None at the dealer, who must not know it, and ahead of time.
        second: at the dealer P1's part of the mask.
    """

    mask: Tensor | None
    difference: Tensor | None = None
    second: Tensor | None = None

    def map(self, transposed: bool, rows: Tensor | None) -> Opened:
        """The same for a transposed or row-selected tensor."""
        parts = (self.mask, self.difference, self.second)
        return Opened(*(None if each is None else _map(each, transposed, rows) for each in parts))


@dataclass(frozen=True, slots=True)
class Shared:
    """A shared tensor as one party sees it; what it does to itself needs no message.

    Fast mode opens two kinds one way: columns that one holder has in clear, and, of what is
    multiplied from the right with those, the share of the holder who lacks them.

    Attributes:
        words: this holder's share, int64; at the dealer a blank, which has a shape only.
        bits: fraction bits of the shared value.
        opened: set once the tensor was opened under a mask.
        owned: so many first columns are P0's, the others P1's, each in clear at its owner: the
            other holder's share is zero. None where shares are what they are.
        faced: it is to be the right factor of a tensor of which P0 owns so many columns.
        foreseen: what P2 answers, while a program is followed ahead: P0's share of it is a pad.
    """

    words: Tensor
    bits: int
    opened: Opened | None = None
    owned: int | None = None
    faced: int | None = None
    foreseen: bool = False

    @property
    def shape(self) -> torch.Size:
        """Its axes."""
        return self.words.shape

    def part(self, holder: int) -> Tensor:
        """What a holder opens of it: of axes that all parties know, of words that it has."""
        if self.owned is not None:
            return self.words[:, self.owned :] if holder else self.words[:, : self.owned]
        if self.faced is not None:
            return self.words[: self.faced] if holder else self.words[self.faced :]
        return self.words

    def mask(self) -> Tensor:
        """This party's part of the mask it was opened under; see `Opened`."""
        mask = self._opening().mask
        assert mask is not None, "a mask was kept"
        return mask

    def difference(self) -> Tensor:
        """What a holder learned from the opening; see `Opened`."""
        difference = self._opening().difference
        assert difference is not None, "a holder knows what was opened"
        return difference

    def masks(self) -> tuple[Tensor, Tensor]:
        """Both parts of the mask, as the dealer has them."""
        second = self._opening().second
        assert second is not None, "the dealer draws both"
        return self.mask(), second

    def facing(self, left: Shared) -> Shared:
        """The same as the right factor of a tensor; opened before only if that opening serves."""
        serves = self.opened is not None and self.owned is None
        if serves and self.faced in (None, left.owned):
            return self
        return Shared(self.words, self.bits, faced=left.owned)

    def transposed(self) -> Shared:
        """Axes (rows, columns) exchanged; an opening of both shares stays one."""
        if self.owned is not None or self.faced is not None:
            return Shared(self.words.t(), self.bits)
        return self._map(True, None)

    def rows(self, index: Tensor) -> Shared:
        """Some rows of a tensor that is no right factor; an opening stays one."""
        return self._map(False, index)

    def plus(self, other: Shared) -> Shared:
        """The sum; a vector is added to every row.

        Raises:
            ValueError: the two have different fractions.
        """
        self._same_bits(other)
        return Shared(self.words + other.words, self.bits)

    def minus(self, other: Shared) -> Shared:
        """The difference; see `plus`."""
        self._same_bits(other)
        return Shared(self.words - other.words, self.bits)

    def finer(self, bits: int) -> Shared:
        """The same value with more fraction bits.

        Raises:
            ValueError: fewer are asked for, which takes a message; see `Party.scale`.
        """
        if bits < self.bits:
            raise ValueError(f"{self.bits} fraction bits cannot become {bits} by themselves")
        if bits == self.bits:
            return self
        return Shared(self.words << (bits - self.bits), bits)

    def beside(self, other: Shared) -> Shared:
        """The columns of two tensors side by side; those that are owned stay so, P0's first."""
        self._same_bits(other)
        owned = None
        if self.owned is not None and other.owned is not None:
            in_order = self.owned == self.shape[1] or other.owned == 0
            owned = self.owned + other.owned if in_order else None
        return Shared(torch.cat([self.words, other.words], 1), self.bits, owned=owned)

    def row_sum(self) -> Shared:
        """The sum over rows; axes (columns,)."""
        return Shared(self.words.sum(0), self.bits)

    def alone(self) -> Shared:
        """The words and what they stand for, forgetting openings and owners."""
        return Shared(self.words, self.bits)

    def _opening(self) -> Opened:
        assert self.opened is not None, "an operand is opened before it is multiplied"
        return self.opened

    def _same_bits(self, other: Shared) -> None:
        if self.bits != other.bits:
            raise ValueError(f"shares of {self.bits} and {other.bits} fraction bits do not join")

    def _map(self, transposed: bool, rows: Tensor | None) -> Shared:
        opened = None if self.opened is None else self.opened.map(transposed, rows)
        return replace(self, words=_map(self.words, transposed, rows), opened=opened)


def owned_by(owner: int, shape: Sequence[int]) -> int | None:
    """Who owns the columns of a tensor that a party shares, as `Shared.owned` says it.

    >>> owned_by(0, (5, 3)), owned_by(1, (5, 3)), owned_by(2, (5, 3))
    (3, 0, None)
    """
    if len(shape) != 2 or owner not in (0, 1):
        return None
    return 0 if owner else shape[1]


def stacked(parts: Sequence[Shared]) -> Shared:
    """The rows of several tensors one after another, which are owned and opened alike."""
    if len(parts) == 1:
        return parts[0]
    first, opened = parts[0], None
    if first.opened is not None:
        kept = [
            (each.mask, each.difference, each.second) for part in parts if (each := part.opened)
        ]
        opened = Opened(*map(_joined, zip(*kept, strict=True)))
    return replace(first, words=torch.cat([part.words for part in parts]), opened=opened)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.cat(known) if known else None


def blank(shape: Sequence[int]) -> Tensor:
    """Axes without content: one zero that stands for every element.

    torch's own tensors without content (meta) take seconds to load.
    """
    return _ZERO.expand(tuple(shape))


def _map(words: Tensor, transposed: bool, rows: Tensor | None) -> Tensor:
    if rows is not None:
        return words.index_select(0, rows)
    return words.t() if transposed else words
