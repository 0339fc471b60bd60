"""Mode "fast": the same protocol and the same trust, with fewer bytes and hops.

What a holder owns stays in clear with it while the other's share is zero; such a tensor, and what
is multiplied with it, are opened one way each (`one_way`). Other tensors are opened under one mask,
both ways at once. Every product of a tensor uses its one opening; the dealer's share of each
product is fresh. Products that go to P2 keep their scale, so nothing is divided before a function.
Where a product is divided, P0 sends the index lists of algorithm 5.1 right behind its opening.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vfl.mpc.ahead import Ahead, factors, openings, require_same
from vfl.mpc.functions import Function
from vfl.mpc.holder import Holder
from vfl.mpc.one_way import add_known, add_own, require_factors
from vfl.mpc.party import Asked, Party
from vfl.mpc.ring import Operation, encode, product_shape
from vfl.mpc.rules import P2
from vfl.mpc.shares import Opened, Shared, owned_by
from vfl.mpc.truncation import Scaling, bits_after


class FastHolder(Holder):
    """P0 or P1.

    Attributes:
        masks: those drawn ahead, by operation; with what they are for.
        early: what P0 opened ahead, of tensors of which its share is a pad; by operation.
        dealt: this holder's shares of products that were dealt ahead, by operation; with what is
            known of the product by then, if that is so, and of what factors.
    """

    def __init__(self, *arguments: object, **more: object) -> None:
        super().__init__(*arguments, **more)
        self.masks: dict[int, tuple[list[Tensor], object]] = {}
        self.early: dict[int, list[Tensor]] = {}
        self.dealt: dict[int, tuple[Tensor, bool, object]] = {}

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
        masks = self._masks(number, closed)
        if not closed:
            return list(tensors)
        own = theirs = self.early.pop(number, None)
        if own is None or not self.first:
            own = self._open_own(closed, masks, number, phase)
        if theirs is None or self.first:
            theirs = self._hear_opened(closed, number)
        opened = iter(map(_opened, closed, masks, own, theirs))
        return [each if each.opened is not None else next(opened) for each in tensors]

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
        masks = self._draw(number, closed)
        self.masks[number] = masks, openings(closed)
        opened = [Opened(mask) for mask in masks]
        if closed and all(each.foreseen for each in closed):
            if self.first:
                self.early[number] = self._open_own(closed, masks, number, "offline")
            else:
                self.early[number] = self._hear_opened(closed, number)
        return opened

    def deal_ahead(self, number: int, left: Shared, right: Shared, operation: Operation) -> None:
        z = self._dealt(number, product_shape(operation, left.words, right.words))
        assert left.opened is not None, "an operand is opened before it is multiplied"
        known = left.owned is not None and left.opened.difference is not None
        if known:
            add_known(z, left, right, operation, self.role)
        self.dealt[number] = z, known, factors(left, right, operation)

    def hide_ahead(self, asked: Asked, function: Function) -> None:
        self.covers[asked.number] = self._cover(asked, function)

    def foreseen(self, asked: Asked, index: int) -> Tensor | None:
        return self.covers[asked.number].results[index] if self.first else None

    def _masks(self, number: int, closed: Sequence[Shared]) -> list[Tensor]:
        """Those drawn ahead, or new ones."""
        drawn = self.masks.pop(number, None)
        if drawn is None:
            return self._draw(number, closed)
        masks, wanted = drawn
        require_same(wanted, openings(closed), number)
        return masks

    def _draw(self, number: int, closed: Sequence[Shared]) -> list[Tensor]:
        return [
            self.pad(P2, each.part(self.role).shape, "mask", index, number)
            for index, each in enumerate(closed)
        ]

    def _open_own(
        self, closed: Sequence[Shared], masks: Sequence[Tensor], number: int, phase: str
    ) -> list[Tensor]:
        """Send what this holder opens, if that is anything; what it sent."""
        own = [each.part(self.role) - mask for each, mask in zip(closed, masks, strict=True)]
        if any(each.numel() for each in own):
            self.channels[self.other].send(own, number, phase)
        return own

    def _hear_opened(self, closed: Sequence[Shared], number: int) -> list[Tensor]:
        """What the other holder opens."""
        shapes = [each.part(self.other).shape for each in closed]
        if any(shape.numel() for shape in shapes):
            return self.channels[self.other].receive(shapes, number)
        return [torch.empty(shape, dtype=torch.int64) for shape in shapes]

    def _product(self, left: Shared, right: Shared, operation: Operation, number: int) -> Tensor:
        require_factors(left, right, operation)
        begun = self.dealt.pop(number, None)
        if begun is None:
            known = False
            z = self._dealt(number, product_shape(operation, left.words, right.words))
        else:
            z, known, wanted = begun
            require_same(wanted, factors(left, right, operation), number)
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
        return self._from_helper([shape], number)[0]


def _opened(shared: Shared, mask: Tensor, own: Tensor, theirs: Tensor) -> Shared:
    """With what a holder learned of it."""
    if shared.owned is not None:
        opened = Opened(None, theirs)
    else:
        opened = Opened(mask, theirs if shared.faced is not None else own + theirs)
    return Shared(shared.words, shared.bits, opened, shared.owned, shared.faced)
