"""Mode "thesis": algorithm 5.1 as printed, with the division, the sign and the seeds it lacks.

Every product masks both operands anew. P1 opens first; P0 answers with its own opening and the
index lists of the division, so a product takes two messages one after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vfl.mpc.party import Dealer, Party, Product, ShareHolder
from vfl.mpc.rules import P0, P1, P2
from vfl.mpc.shares import SharedTensor


class Thesis(Party):
    """What all three parties of the mode do alike."""

    def open(self, *tensors: SharedTensor, phase: str = "online") -> list[SharedTensor]:
        return list(tensors)  # each product opens anew, and no operation is counted


class ThesisHolder(Thesis, ShareHolder):
    """P0 or P1."""

    def _product(self, product: Product, more: list[Tensor]) -> list[Tensor]:
        left, right, operation = product.left, product.right, product.operation
        number, truncations = product.number, product.truncations
        u = self.pad(P2, left.shape, "left mask", number)
        v = self.pad(P2, right.shape, "right mask", number)
        own = [left.share - u, right.share - v]
        shapes = [each.shape for each in own]
        if self.first:
            theirs = self.channels[P1].receive(shapes, number)
            e, d = own[0] + theirs[0], own[1] + theirs[1]
            z = operation(e, d + v) + operation(u, d)
            z += self.pad(P2, z.shape, "product", number)
            parts, moved = self._truncate_first([z, *more], truncations)
            self.channels[P1].send_moved(own, moved, number)
            return parts
        self.channels[P0].send(own, number)
        elements = product.shape.numel() + sum(each.numel() for each in more)
        sizes = [elements] * len(truncations)
        theirs, moved = self.channels[P0].receive_moved(shapes, sizes, number)
        e, d = own[0] + theirs[0], own[1] + theirs[1]
        z = operation(e, v) + operation(u, d)
        z += self._from_dealer([z.shape], number)[0]
        return self._truncate_second([z, *more], truncations, moved, product.where)


class ThesisDealer(Thesis, Dealer):
    """P2 deals each product when its turn comes."""

    def _deal_product(self, product: Product) -> None:
        number = product.number
        masks = []
        for operand, purpose in ((product.left, "left mask"), (product.right, "right mask")):
            halves = [self.pad(holder, operand.shape, purpose, number) for holder in (P0, P1)]
            masks.append(torch.add(*halves))
        share = product.operation(*masks)
        share -= self.pad(P0, share.shape, "product", number)
        self.channels[P1].send([share], number, "offline")
