"""Mode "fast": the same protocol and the same trust, with fewer bytes and hops.

What a holder owns stays in clear with it while the other's share is zero; such a tensor, and what
is multiplied with it, are opened one way each (`one_way`). Other tensors are opened under one mask,
both ways at once. Every product of a tensor uses its one opening; the dealer's share of each
product is fresh. Products that go to P2 keep their scale, so nothing is divided before a function.
Where a product is divided, P0 sends the index lists of algorithm 5.1 right behind its opening.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vfl.mpc.ahead import Ahead
from vfl.mpc.functions import Function
from vfl.mpc.holder import Holder
from vfl.mpc.one_way import add_known, add_own, require_factors
from vfl.mpc.party import Party
from vfl.mpc.ring import Operation, encode, product_shape
from vfl.mpc.rules import P1, P2
from vfl.mpc.shares import Opened, Shared, owned_by
from vfl.mpc.truncation import Scaling, bits_after


class FastHolder(Holder):
    """P0 or P1.

    Attributes:
        masks: those drawn ahead, by operation.
        dealt: this holder's shares of products that were dealt ahead, by operation; with what is
            known of the product by then, if that is so.
    """

    def __init__(self, *arguments: object, **more: object) -> None:
        super().__init__(*arguments, **more)  # type: ignore[arg-type]
        self.masks: dict[int, list[Opened]] = {}
        self.dealt: dict[int, tuple[Tensor, bool]] = {}

    def deal(self, program: Callable[[Party], None]) -> None:
        program(Ahead(self, self))

    def share(
        self, owner: int, shape: Sequence[int], values: Tensor | None, where: str, bits: int = -1
    ) -> Shared:
        if owner == P2:
            return super().share(owner, shape, values, where, bits)
        self.next_number()
        bits = self.rules.bits if bits < 0 else bits
        words = torch.zeros(tuple(shape), dtype=torch.int64)
        if owner == self.role:
            assert values is not None, "the owner has the values"
            words = encode(values, bits, where)
        return Shared(words, bits, owned=owned_by(owner, shape))

    def open(self, *tensors: Shared, phase: str = "online") -> list[Shared]:
        number = self.next_number()
        closed = [each for each in tensors if each.opened is None]
        if not closed:
            return list(tensors)
        drawn = self.masks.pop(number, None) or self._draw(number, closed)
        whole, own = _masked([each.part(self.role) for each in closed], drawn)
        theirs = self._exchanged(whole, [each.part(self.other) for each in closed], number, phase)
        found = iter(
            [
                replace(each, opened=_learned(each, masks, *parts))
                for each, masks, *parts in zip(closed, drawn, own, theirs, strict=True)
            ]
        )
        return [each if each.opened is not None else next(found) for each in tensors]

    def multiply(
        self,
        left: Shared,
        right: Shared,
        operation: Operation,
        scalings: Sequence[Scaling] = (),
        *,
        beside: Shared | None = None,
        where: str,
    ) -> tuple[Shared, Shared | None]:
        number = self.next_number()
        parts = [self._product(left, right, operation, number)]
        if beside is not None:
            parts.append(beside.words)
        if scalings:
            parts = self._scaled(parts, scalings, number, where)
        bits = bits_after(left.bits + right.bits, scalings)
        shared = [Shared(part, bits) for part in parts]
        return shared[0], None if beside is None else shared[1]

    def draw_ahead(self, number: int, closed: Sequence[Shared]) -> list[Opened]:
        self.masks[number] = self._draw(number, closed)
        return self.masks[number]

    def deal_ahead(self, number: int, left: Shared, right: Shared, operation: Operation) -> None:
        z = self._dealt(number, product_shape(operation, left.words, right.words))
        assert left.opened is not None, "an operand is opened before it is multiplied"
        known = left.owned is not None and left.opened.difference is not None
        if known:
            add_known(z, left, right, operation, self.role)
        self.dealt[number] = z, known

    def hide_ahead(self, number: int, elements: int, function: Function, given: int) -> None:
        self.covers[number] = self._cover(number, elements, function, given)

    def _draw(self, number: int, closed: Sequence[Shared]) -> list[Opened]:
        return [
            Opened(self.pad(P2, each.part(self.role).shape, "mask", index, number))
            for index, each in enumerate(closed)
        ]

    def _exchanged(
        self, own: Tensor, theirs: Sequence[Tensor], number: int, phase: str
    ) -> list[Tensor]:
        """What the other holder opens; the message of one who opens nothing is left out."""
        channel = self.channels[self.other]
        if len(own):
            channel.send([own], number, phase)
        shapes = [each.shape for each in theirs]
        if any(each.numel() for each in theirs):
            return channel.receive(shapes, number)
        return [torch.empty(shape, dtype=torch.int64) for shape in shapes]

    def _product(self, left: Shared, right: Shared, operation: Operation, number: int) -> Tensor:
        require_factors(left, right, operation)
        shape = product_shape(operation, left.words, right.words)
        z, known = self.dealt.pop(number, None) or (self._dealt(number, shape), False)
        if left.owned is not None:
            if not known:
                add_known(z, left, right, operation, self.role)
            add_own(z, left, right, operation, self.role)
            return z
        e, d, v = left.difference(), right.difference(), right.mask()
        z += operation(e, d + v if self.first else v)
        z += operation(left.mask(), d)
        return z

    def _dealt(self, number: int, shape: torch.Size) -> Tensor:
        if self.first:
            return self.pad(P2, shape, "product", number)
        return self.channels[P2].receive([shape], number)[0]


def _masked(parts: Sequence[Tensor], drawn: Sequence[Opened]) -> tuple[Tensor, list[Tensor]]:
    """What is opened, as one array to send, and its pieces."""
    sizes = [part.numel() for part in parts]
    whole = torch.empty(sum(sizes), dtype=torch.int64)
    pieces = [
        piece.view(part.shape) for piece, part in zip(whole.split(sizes), parts, strict=True)
    ]
    for piece, part, each in zip(pieces, parts, drawn, strict=True):
        torch.sub(part, each.mask, out=piece)
    return whole, pieces


def _learned(shared: Shared, drawn: Opened, own: Tensor, theirs: Tensor) -> Opened:
    if shared.owned is not None:
        return Opened(None, theirs)
    return Opened(drawn.mask, theirs if shared.faced is not None else own + theirs)
