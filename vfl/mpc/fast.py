"""Mode "fast": the same protocol and the same trust, with fewer bytes and hops.

A tensor is opened under one mask, both ways at once, and every product that has it uses that
opening; the dealer's share of each product is fresh. Products that go to P2 keep their scale, so
nothing is divided before a function. Where a product is divided, P0 sends the index lists of
algorithm 5.1 right behind its opening.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vfl.mpc.ahead import Ahead
from vfl.mpc.helper import Helper, shape_only
from vfl.mpc.holder import Holder
from vfl.mpc.party import Party
from vfl.mpc.ring import Operation, product_shape
from vfl.mpc.rules import P0, P1, P2
from vfl.mpc.shares import Opened, Shared
from vfl.mpc.truncation import Scaling, bits_after


class FastHolder(Holder):
    """P0 or P1.

    Attributes:
        delivered: P1's shares of products that were dealt ahead, by operation.
    """

    def __init__(self, *arguments: object, **more: object) -> None:
        super().__init__(*arguments, **more)  # type: ignore[arg-type]
        self.delivered: dict[int, Tensor] = {}

    def deal(self, program: Callable[[Party], None]) -> None:
        if not self.first:
            program(Ahead(self, self._deliver))

    def open(self, *tensors: Shared, phase: str = "online") -> list[Shared]:
        number = self.next_number()
        closed = [each for each in tensors if each.opened is None]
        if not closed:
            return list(tensors)
        masks = [
            self.pad(P2, each.shape, "mask", index, number) for index, each in enumerate(closed)
        ]
        own = [each.words - mask for each, mask in zip(closed, masks, strict=True)]
        channel = self.channels[self.other]
        channel.send(own, number, phase)
        theirs = channel.receive([each.shape for each in own], number)
        opened = iter(
            [
                replace(each, opened=Opened(mask, one + other))
                for each, mask, one, other in zip(closed, masks, own, theirs, strict=True)
            ]
        )
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

    def _product(self, left: Shared, right: Shared, operation: Operation, number: int) -> Tensor:
        (u, e), (v, d) = left.opening(), right.opening()
        z = operation(e, d + v if self.first else v) + operation(u, d)
        z += self._dealt(number, product_shape(operation, e, d))
        return z

    def _deliver(self, number: int, left: Shared, right: Shared, operation: Operation) -> None:
        shape = product_shape(operation, left.words, right.words)
        (self.delivered[number],) = self.channels[P2].receive([shape], number)

    def _dealt(self, number: int, shape: torch.Size) -> Tensor:
        if self.first:
            return self.pad(P2, shape, "product", number)
        if number in self.delivered:
            return self.delivered.pop(number)
        return self.channels[P2].receive([shape], number)[0]


class FastHelper(Helper):
    """P2: it deals a product when its turn comes, or ahead of it.

    Attributes:
        masks: those drawn ahead, by operation.
        dealt: operations whose products P1 has already.
    """

    def __init__(self, *arguments: object, **more: object) -> None:
        super().__init__(*arguments, **more)  # type: ignore[arg-type]
        self.masks: dict[int, list[Tensor]] = {}
        self.dealt: set[int] = set()

    def deal(self, program: Callable[[Party], None]) -> None:
        program(Ahead(self, self._deal_ahead, self._draw_ahead))

    def open(self, *tensors: Shared, phase: str = "online") -> list[Shared]:
        number = self.next_number()
        closed = [each.words for each in tensors if each.opened is None]
        masks = iter(self.masks.pop(number, []) or self._draw(number, closed))
        return [
            each if each.opened is not None else replace(each, opened=Opened(next(masks), None))
            for each in tensors
        ]

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
        shape = product_shape(operation, left.words, right.words)
        if number in self.dealt:
            self.dealt.discard(number)
        else:
            self._send_product(number, left, right, operation)
        bits = bits_after(left.bits + right.bits, scalings)
        return shape_only(shape, bits), None if beside is None else shape_only(beside.shape, bits)

    def _deal_ahead(self, number: int, left: Shared, right: Shared, operation: Operation) -> None:
        self._send_product(number, left, right, operation)
        self.dealt.add(number)

    def _draw_ahead(self, number: int, closed: Sequence[Tensor]) -> list[Tensor]:
        self.masks[number] = self._draw(number, closed)
        return self.masks[number]

    def _draw(self, number: int, closed: Sequence[Tensor]) -> list[Tensor]:
        return [
            self.pad(P0, each.shape, "mask", index, number)
            + self.pad(P1, each.shape, "mask", index, number)
            for index, each in enumerate(closed)
        ]

    def _send_product(self, number: int, left: Shared, right: Shared, operation: Operation) -> None:
        product = operation(left.mask(), right.mask())
        product -= self.pad(P0, product.shape, "product", number)
        self.channels[P1].send([product], number, "offline")
