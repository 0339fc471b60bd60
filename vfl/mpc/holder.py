"""P0 and P1: they hold the shares. What does not depend on the mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vfl.mpc.ahead import require_same
from vfl.mpc.channel import pack, parted
from vfl.mpc.cut40 import cut
from vfl.mpc.functions import Function
from vfl.mpc.hiding import Hiding
from vfl.mpc.party import Asked, Party
from vfl.mpc.ring import decode, encode
from vfl.mpc.rules import P0, P1, P2
from vfl.mpc.shares import Shared
from vfl.mpc.truncation import Moved, Scaling, bits_after, scale_first, scale_second


@dataclass(frozen=True, slots=True)
class Cover:
    """What a holder needs to ask P2 for a function; drawn when asked, or before.

    Attributes:
        asked, function: the question it was drawn for.
        hiding: order, dummies and signs.
        fresh: see `Holder._for_helper`.
        results: P0's shares of what P2 will answer; empty at P1.
    """

    asked: Asked
    function: Function
    hiding: Hiding
    fresh: Tensor
    results: Sequence[Tensor]


class Holder(Party):
    """One of the two parties that hold shares.

    Attributes:
        covers: of questions that have not been answered, by operation.
    """

    def __init__(self, *arguments: object, **more: object) -> None:
        super().__init__(*arguments, **more)  # type: ignore[arg-type]
        self.covers: dict[int, Cover] = {}
        self._owed: list[tuple[Asked, int, int]] = []
        self._taken: dict[tuple[int, int], Tensor] = {}

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
            (words,) = self._from_helper([shape], number)
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

    def ask(
        self,
        shared: Shared,
        function: Function,
        where: str,
        *,
        value: bool,
        slope: bool,
        bits: int = -1,
    ) -> Asked:
        asked = self.question(shared, function, value=value, slope=slope, bits=bits)
        cover = self.covers.get(asked.number)
        if cover is None:
            cover = self.covers[asked.number] = self._cover(asked, function)
        require_same((cover.asked, cover.function), (asked, function), asked.number)
        shown = shared.finer(self.shown_bits(shared))
        hidden = cover.hiding.hide(shown.words, shown.bits, self.first)
        hidden = self._for_helper(hidden, cover.fresh)
        for part in self.parts(len(hidden)):
            words = hidden[part]
            payload = cut(words) if self.cuts(function) else pack([words])
            self.channels[P2].send_bytes(payload, asked.number, "online")
        return asked

    def answer(self, asked: Asked, index: int = 0) -> Shared:
        cover, last = self.covers[asked.number], index == len(asked.bits) - 1
        words = cover.results[index] if self.first else self._received(asked, index)
        if last:
            del self.covers[asked.number]
        return Shared(words, asked.bits[index])

    def scale(self, shared: Shared, scalings: Sequence[Scaling], where: str) -> Shared:
        number = self.next_number()
        (words,) = self._scaled([shared.words], scalings, number, where)
        return Shared(words, bits_after(shared.bits, scalings))

    def _cover(self, asked: Asked, function: Function) -> Cover:
        elements = math.prod(asked.shape)
        hiding = Hiding(self.pads[self.other], self.rules, elements, function, asked.number)
        fresh = self.pad(self.other, (hiding.count,), "fresh", asked.number)
        if not self.first:
            return Cover(asked, function, hiding, fresh, [])
        pads = self.pad(P2, (len(asked.bits), hiding.count), "result", asked.number)
        found = [self._found(asked, index, pad, hiding) for index, pad in enumerate(pads)]
        return Cover(asked, function, hiding, fresh, found)

    def _found(self, asked: Asked, index: int, words: Tensor, hiding: Hiding) -> Tensor:
        """This holder's share of a result, as it comes from P2, in the values' own order."""
        mirrored = asked.mirrored and index == 0
        found = hiding.find(words, asked.bits[index], self.first, mirrored)
        return found.reshape(asked.shape)

    def _received(self, asked: Asked, index: int) -> Tensor:
        hiding = self.covers[asked.number].hiding
        if index:
            self._take_owed()
            words = self._taken.pop((asked.number, index))
        else:
            sizes = [part.stop - part.start for part in self.parts(hiding.count)]
            parts = [self._from_helper([(size,)], asked.number)[0] for size in sizes]
            words = parts[0] if len(parts) == 1 else torch.cat(parts)
            self._owed += [(asked, each, hiding.count) for each in range(1, len(asked.bits))]
        return self._found(asked, index, words, hiding)

    def _from_helper(self, shapes: Sequence[Sequence[int]], number: int) -> list[Tensor]:
        """P2's next message, after those it sent before."""
        self._take_owed()
        return self.channels[P2].receive(shapes, number)

    def _take_owed(self) -> None:
        """Results behind the first, which P2 sends at once and nobody takes at once."""
        for asked, index, count in self._owed:
            (words,) = self.channels[P2].receive([(count,)], asked.number)
            self._taken[asked.number, index] = words
        self._owed.clear()

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
        return parted(words, [part.shape for part in parts]), moved

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
        return parted(words, [part.shape for part in parts])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])
