"""Mode "thesis": algorithm 5.1 as printed, with the division, the sign and the seeds it lacks.

Every product masks both operands anew. P1 opens first; P0 answers with its own opening and the
index lists of the division, so a product takes two messages one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vfl.mpc.helper import Helper, shape_only
from vfl.mpc.holder import Holder
from vfl.mpc.ring import Operation, product_shape
from vfl.mpc.rules import P0, P1, P2
from vfl.mpc.shares import Shared
from vfl.mpc.truncation import Scaling, bits_after


class ThesisHolder(Holder):
    """P0 or P1."""

    def open(self, *tensors: Shared, phase: str = "online") -> list[Shared]:
        return list(tensors)

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
        u = self.pad(P2, left.shape, "left mask", number)
        v = self.pad(P2, right.shape, "right mask", number)
        own = [left.words - u, right.words - v]
        more = [] if beside is None else [beside.words]
        side = self._first if self.first else self._second
        parts = side(number, own, (u, v), operation, scalings, more, where)
        bits = bits_after(left.bits + right.bits, scalings)
        shared = [Shared(part, bits) for part in parts]
        return shared[0], shared[1] if more else None

    def _first(
        self,
        number: int,
        own: list[Tensor],
        masks: tuple[Tensor, Tensor],
        operation: Operation,
        scalings: Sequence[Scaling],
        more: list[Tensor],
        where: str,
    ) -> list[Tensor]:
        theirs = self.channels[P1].receive([each.shape for each in own], number)
        e, d = own[0] + theirs[0], own[1] + theirs[1]
        z = operation(e, d + masks[1]) + operation(masks[0], d)
        z += self.pad(P2, z.shape, "product", number)
        parts, moved = self._scale_first([z, *more], scalings)
        self.channels[P1].send_moved(own, moved, number)
        return parts

    def _second(
        self,
        number: int,
        own: list[Tensor],
        masks: tuple[Tensor, Tensor],
        operation: Operation,
        scalings: Sequence[Scaling],
        more: list[Tensor],
        where: str,
    ) -> list[Tensor]:
        self.channels[P0].send(own, number)
        shape = product_shape(operation, *own)
        elements = math.prod(shape) + sum(each.numel() for each in more)
        shapes = [each.shape for each in own]
        theirs, moved = self.channels[P0].receive_moved(shapes, [elements] * len(scalings), number)
        e, d = own[0] + theirs[0], own[1] + theirs[1]
        z = operation(e, masks[1]) + operation(masks[0], d)
        z += self._from_helper([shape], number)[0]
        return self._scale_second([z, *more], scalings, moved, where)


class ThesisHelper(Helper):
    """P2 deals each product when its turn comes."""

    def open(self, *tensors: Shared, phase: str = "online") -> list[Shared]:
        return list(tensors)

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
        masks = []
        for operand, purpose in ((left, "left mask"), (right, "right mask")):
            halves = [self.pad(holder, operand.shape, purpose, number) for holder in (P0, P1)]
            masks.append(torch.add(*halves))
        product = operation(*masks)
        product -= self.pad(P0, product.shape, "product", number)
        self.channels[P1].send([product], number, "offline")
        bits = bits_after(left.bits + right.bits, scalings)
        rest = None if beside is None else shape_only(beside.shape, bits)
        return shape_only(product.shape, bits), rest
