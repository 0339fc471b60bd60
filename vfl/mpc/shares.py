"""A tensor that two holders share: what one of them has of it, or only its shape at the dealer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Opened:
    """What makes a shared tensor cheap to multiply again: its mask, and the masked value.

    Attributes:
        mask: a holder's share of the mask U; the whole of U at the dealer.
        difference: X - U, which both holders know and the dealer must not; None there.
    """

    mask: Tensor
    difference: Tensor | None

    def map(self, transposed: bool, rows: Tensor | None) -> Opened:
        """The same for a transposed or row-selected tensor."""
        difference = None if self.difference is None else _map(self.difference, transposed, rows)
        return Opened(_map(self.mask, transposed, rows), difference)


@dataclass(frozen=True, slots=True)
class Shared:
    """A shared tensor as one party sees it; what it does to itself needs no message.

    Attributes:
        words: this holder's share, int64; at the dealer a blank, which has a shape only.
        bits: fraction bits of the shared value.
        opened: set once the tensor was opened under a mask.
    """

    words: Tensor
    bits: int
    opened: Opened | None = None

    @property
    def shape(self) -> torch.Size:
        """Its axes."""
        return self.words.shape

    def mask(self) -> Tensor:
        """The mask it was opened under: a share of it, or the whole at the dealer."""
        assert self.opened is not None, "an operand is opened before it is multiplied"
        return self.opened.mask

    def opening(self) -> tuple[Tensor, Tensor]:
        """Mask and difference, as a holder has them."""
        mask = self.mask()
        assert self.opened is not None
        assert self.opened.difference is not None, "a holder knows what was opened"
        return mask, self.opened.difference

    def transposed(self) -> Shared:
        """Axes (rows, columns) exchanged; an opening stays one."""
        return self._map(True, None)

    def rows(self, index: Tensor) -> Shared:
        """Some rows; an opening stays one."""
        return self._map(False, index)

    def plus(self, other: Shared) -> Shared:
        """The sum; a vector is added to every row.

        Raises:
            ValueError: the two have different fractions.
        """
        if self.bits != other.bits:
            raise ValueError(f"shares of {self.bits} and {other.bits} fraction bits do not add")
        return Shared(self.words + other.words, self.bits)

    def minus(self, other: Shared) -> Shared:
        """The difference; see `plus`."""
        return self.plus(other.times(-1))

    def times(self, factor: int) -> Shared:
        """The multiple by a public whole number."""
        return Shared(self.words * factor, self.bits)

    def finer(self, bits: int) -> Shared:
        """The same value with more fraction bits.

        Raises:
            ValueError: fewer are asked for, which takes a message; see `Party.scale`.
        """
        if bits < self.bits:
            raise ValueError(f"{self.bits} fraction bits cannot become {bits} by themselves")
        return Shared(self.words << (bits - self.bits), bits)

    def beside(self, other: Shared) -> Shared:
        """The columns of two tensors side by side."""
        if self.bits != other.bits:
            raise ValueError(f"shares of {self.bits} and {other.bits} fraction bits do not join")
        return Shared(torch.cat([self.words, other.words], 1), self.bits)

    def row_sum(self) -> Shared:
        """The sum over rows; axes (columns,)."""
        return Shared(self.words.sum(0), self.bits)

    def reshaped(self, *shape: int) -> Shared:
        """Other axes of the same elements; an opening is forgotten."""
        return Shared(self.words.reshape(shape), self.bits)

    def shape_only(self) -> Shared:
        """What somebody who holds nothing of it has; opened if it was."""
        words = blank(self.shape)
        return Shared(words, self.bits, None if self.opened is None else Opened(words, None))

    def _map(self, transposed: bool, rows: Tensor | None) -> Shared:
        opened = None if self.opened is None else self.opened.map(transposed, rows)
        return replace(self, words=_map(self.words, transposed, rows), opened=opened)


def blank(shape: Sequence[int]) -> Tensor:
    """Axes without content: one zero that stands for every element.

    torch's own tensors without content (meta) take seconds to load.
    """
    return torch.zeros((), dtype=torch.int64).expand(tuple(shape))


def _map(words: Tensor, transposed: bool, rows: Tensor | None) -> Tensor:
    if rows is not None:
        return words.index_select(0, rows)
    return words.t() if transposed else words
