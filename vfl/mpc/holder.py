"""P0 and P1: they hold the shares. What does not depend on the mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vfl.mpc.cut40 import cut
from vfl.mpc.functions import Function
from vfl.mpc.hiding import Hiding
from vfl.mpc.party import Party
from vfl.mpc.ring import decode, encode
from vfl.mpc.rules import P0, P1, P2
from vfl.mpc.shares import Shared
from vfl.mpc.truncation import Moved, Scaling, bits_after, scale_first, scale_second


@dataclass(frozen=True, slots=True)
class Cover:
    """What a holder needs to ask P2 for a function; drawn when asked, or before.

    Attributes:
        hiding: order, dummies and signs.
        fresh: see `Holder._for_helper`.
        results: P0's share of what P2 answers, a row a result; None at P1.
    """

    hiding: Hiding
    fresh: Tensor
    results: Tensor | None


class Holder(Party):
    """One of the two parties that hold shares.

    Attributes:
        covers: drawn before, by operation.
    """

    def __init__(self, *arguments: object, **more: object) -> None:
        super().__init__(*arguments, **more)  # type: ignore[arg-type]
        self.covers: dict[int, Cover] = {}

    @property
    def first(self) -> bool:
        """Whether this is P0, who takes the public parts."""
        return self.role == P0

    @property
    def other(self) -> int:
        """The other holder."""
        return P1 - self.role

    def share(
        self, owner: int, shape: Sequence[int], values: Tensor | None, where: str, bits: int = -1
    ) -> Shared:
        number, bits = self.next_number(), self.rules.bits if bits < 0 else bits
        if owner == P2:
            if self.first:
                return Shared(self.pad(P2, shape, "share", number), bits)
            (words,) = self.channels[P2].receive([shape], number)
            return Shared(words, bits)
        mask = self.pad(self.other, shape, "share", number)
        if owner != self.role:
            return Shared(mask, bits)
        assert values is not None, "the owner has the values"
        return Shared(encode(values, bits, where) - mask, bits)

    def reveal(self, shared: Shared, to: int, where: str) -> Tensor | None:
        number = self.next_number()
        if to != self.role:
            words = shared.words
            if to == P2:
                words = self._for_helper(words, self.pad(self.other, words.shape, "fresh", number))
            self.channels[to].send([words], number)
            return None
        (theirs,) = self.channels[self.other].receive([shared.shape], number)
        self.leakage.count("result", where, theirs.numel(), theirs.numel())
        return decode(shared.words + theirs, shared.bits)

    def apply(
        self,
        shared: Shared,
        function: Function,
        where: str,
        *,
        value: bool,
        slope: bool,
        bits: int = -1,
    ) -> list[Shared]:
        number = self.next_number()
        shown = shared.finer(self.shown_bits(shared))
        given = self.result_bits(function, value, slope, bits)
        cover = self.covers.pop(number, None)
        if cover is None:
            cover = self._cover(number, shown.words.numel(), function, len(given))
        hiding = cover.hiding
        hidden = hiding.hide(shown.words, shown.bits, self.first)
        hidden = self._for_helper(hidden, cover.fresh)
        if self.cuts(function):
            self.channels[P2].send_bytes(cut(hidden), number, "online")
        else:
            self.channels[P2].send([hidden], number)
        results: Sequence[Tensor]
        if cover.results is None:
            results = self.channels[P2].receive([(hiding.count,)] * len(given), number)
        else:
            results = cover.results.unbind()
        found = []
        for index, (words, each) in enumerate(zip(results, given, strict=True)):
            own = hiding.find(words, each, self.first, mirrored=value and index == 0)
            found.append(Shared(own.reshape(shared.shape), each))
        return found

    def scale(self, shared: Shared, scalings: Sequence[Scaling], where: str) -> Shared:
        number = self.next_number()
        (words,) = self._scaled([shared.words], scalings, number, where)
        return Shared(words, bits_after(shared.bits, scalings))

    def _cover(self, number: int, elements: int, function: Function, given: int) -> Cover:
        hiding = Hiding(self.pads[self.other], self.rules, elements, function, number)
        fresh = self.pad(self.other, (hiding.count,), "fresh", number)
        shape = (given, hiding.count)
        return Cover(hiding, fresh, self.pad(P2, shape, "result", number) if self.first else None)

    def _for_helper(self, words: Tensor, fresh: Tensor) -> Tensor:
        """Another share of the same, of which P2 learns no more than the sum.

        A share as it comes out of a product is one holder's openings times masks that P2 dealt:
        an equation in inputs and weights, which few and small values solve. And of what a holder
        has in clear, its share is the value.
        """
        return words + fresh if self.first else words - fresh

    def _scaled(
        self, parts: Sequence[Tensor], scalings: Sequence[Scaling], number: int, where: str
    ) -> list[Tensor]:
        """The divisions in a message of their own."""
        if self.first:
            found, moved = self._scale_first(parts, scalings)
            self.channels[P1].send_moved([], moved, number)
            return found
        sizes = [sum(part.numel() for part in parts)] * len(scalings)
        _, moved = self.channels[P0].receive_moved([], sizes, number)
        return self._scale_second(parts, scalings, moved, where)

    def _scale_first(
        self, parts: Sequence[Tensor], scalings: Sequence[Scaling]
    ) -> tuple[list[Tensor], list[Moved]]:
        """P0's side of all divisions of a product and what is scaled beside it."""
        words = _joined(parts)
        moved = []
        for scaling in scalings:
            words, places = scale_first(words, scaling)
            moved.append(places)
        return _parted(words, parts), moved

    def _scale_second(
        self,
        parts: Sequence[Tensor],
        scalings: Sequence[Scaling],
        moved: Sequence[Moved],
        where: str,
    ) -> list[Tensor]:
        """P1's side, with what P0 told."""
        words = _joined(parts)
        for scaling, places in zip(scalings, moved, strict=True):
            words = scale_second(words, scaling, places)
            self.leakage.count("indices near the turning point", where, len(places), words.numel())
        return _parted(words, parts)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def _parted(words: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    pieces = torch.split(words, [part.numel() for part in parts])
    return [piece.reshape(part.shape) for piece, part in zip(pieces, parts, strict=True)]
