"""P2 in mode "fast": it deals a product when its turn comes, or ahead of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vfl.mpc import one_way
from vfl.mpc.ahead import Ahead
from vfl.mpc.functions import Function
from vfl.mpc.helper import Helper, shape_only
from vfl.mpc.party import Asked, Party
from vfl.mpc.ring import Operation, product_shape
from vfl.mpc.rules import P0, P1
from vfl.mpc.shares import Opened, Shared, owned_by
from vfl.mpc.truncation import Scaling, bits_after


class FastHelper(Helper):
    """P2.

    Attributes:
        masks: those drawn ahead, by operation.
        dealt: operations whose products P1 has already.
    """

    def __init__(self, *arguments: object, **more: object) -> None:
        super().__init__(*arguments, **more)
        self.masks: dict[int, list[Opened]] = {}
        self.dealt: set[int] = set()

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
        masks = iter(self._draw(number, closed) if drawn is None else drawn)
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
        if number in self.dealt:
            self.dealt.discard(number)
        else:
            self._send_product(number, left, right, operation)
        bits = bits_after(left.bits + right.bits, scalings)
        return shape_only(shape, bits), None if beside is None else shape_only(beside.shape, bits)

    def draw_ahead(self, number: int, closed: Sequence[Shared]) -> list[Opened]:
        self.masks[number] = self._draw(number, closed)
        return self.masks[number]

    def deal_ahead(self, number: int, left: Shared, right: Shared, operation: Operation) -> None:
        self._send_product(number, left, right, operation)
        self.dealt.add(number)

    def hide_ahead(self, asked: Asked, function: Function) -> None:
        self.covers[asked.number] = self._cover(asked)

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
