"""P2 in mode "fast": it deals a product when its turn comes, or ahead of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vfl.mpc import one_way
from vfl.mpc.ahead import Ahead, factors, openings, require_same
from vfl.mpc.functions import Function
from vfl.mpc.helper import Cover, Helper, shape_only
from vfl.mpc.party import Asked, Party
from vfl.mpc.ring import Operation, product_shape
from vfl.mpc.rules import P0, P1
from vfl.mpc.shares import Opened, Shared, owned_by
from vfl.mpc.truncation import Scaling, bits_after


class FastHelper(Helper):
    """P2.

    Attributes:
        masks: those drawn ahead, by operation; with what they are for.
        dealt: factors of products that P1 has already, by operation.
    """

    def __init__(self, *arguments: object, **more: object) -> None:
        super().__init__(*arguments, **more)
        self.masks: dict[int, tuple[list[Opened], object]] = {}
        self.dealt: dict[int, object] = {}

    def deal(self, program: Callable[[Party], None]) -> None:
        program(Ahead(self, self))

    def share(
        self, owner: int, shape: Sequence[int], values: Tensor | None, where: str, bits: int = -1
    ) -> Shared:
        shared = super().share(owner, shape, values, where, bits)
        return replace(shared, owned=owned_by(owner, shape))

    def open(self, *tensors: Shared, phase: str = "online") -> list[Shared]:
        number = self.next_number()
        closed = [each for each in tensors if each.opened is None]
        drawn = self.masks.pop(number, None)
        if drawn is None:
            drawn = self._draw(number, closed), None
        else:
            require_same(drawn[1], openings(closed), number)
        masks = iter(drawn[0])
        return [
            each if each.opened is not None else replace(each, opened=next(masks))
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
        dealt = self.dealt.pop(number, None)
        if dealt is None:
            self._send_product(number, left, right, operation)
        else:
            require_same(dealt, factors(left, right, operation), number)
        bits = bits_after(left.bits + right.bits, scalings)
        return shape_only(shape, bits), None if beside is None else shape_only(beside.shape, bits)

    def draw_ahead(self, number: int, closed: Sequence[Shared]) -> list[Opened]:
        masks = self._draw(number, closed)
        self.masks[number] = masks, openings(closed)
        return masks

    def deal_ahead(self, number: int, left: Shared, right: Shared, operation: Operation) -> None:
        self._send_product(number, left, right, operation)
        self.dealt[number] = factors(left, right, operation)

    def hide_ahead(self, asked: Asked, function: Function) -> None:
        self.covers[asked.number] = Cover(asked, function, self._drawn(asked))

    def foreseen(self, asked: Asked, index: int) -> Tensor | None:
        return None

    def _draw(self, number: int, closed: Sequence[Shared]) -> list[Opened]:
        return [
            Opened(
                self.pad(P0, each.part(P0).shape, "mask", index, number),
                second=self.pad(P1, each.part(P1).shape, "mask", index, number),
            )
            for index, each in enumerate(closed)
        ]

    def _send_product(self, number: int, left: Shared, right: Shared, operation: Operation) -> None:
        one_way.require_factors(left, right, operation)
        if left.owned is not None:
            product = one_way.dealt(left, right, operation)
        else:
            product = operation(torch.add(*left.masks()), torch.add(*right.masks()))
        product -= self.pad(P0, product.shape, "product", number)
        self.channels[P1].send([product], number, "offline")
