"""Mode "thesis": the thesis' algorithm 5.1, with three additions that the algorithm needs.

The printed algorithm lacks the division of products by their scale, a sign, and seeds of masks.

Every product masks both of its factors again. P1 sends its openings first; P0 replies with its own
openings and the index lists of the division, so a product takes two sequential messages.
"""

from __future__ import annotations

from torch import Tensor

from vfl.mpc.engine import masked_product
from vfl.mpc.rules import P0, P1
from vfl.mpc.shares import SharedTensor
from vfl.mpc.three_party.party import Dealer, Party, Product, ShareHolder


class Thesis(Party):
    """A party in thesis mode; the steps in this class are the same at all three parties."""

    def _factor_masks(self, product: Product) -> tuple[Tensor, Tensor]:
        """Return a holder's parts of the masks of both factors; at the dealer, the whole masks."""
        left, right, number = product.left.shape, product.right.shape, product.number
        u = self._mask(left, "left mask", number=number)
        return u, self._mask(right, "right mask", number=number)

    def open(self, *tensors: SharedTensor, phase: str = "online") -> list[SharedTensor]:
        # Each product opens its factors itself, so this operation does nothing and is not counted.
        return list(tensors)


class ThesisHolder(Thesis, ShareHolder):
    """P0 or P1, the holders of shares, in thesis mode."""

    def _product(self, product: Product, more: list[Tensor]) -> list[Tensor]:
        left, right, operation = product.left, product.right, product.operation
        number, truncations = product.number, product.truncations
        u, v = self._factor_masks(product)
        own = [left.share - u, right.share - v]
        shapes = [each.shape for each in own]
        if self.first:
            theirs = self.channels[P1].receive(shapes, number)
        else:
            self.channels[P0].send(own, number)
            elements = product.shape.numel() + sum(each.numel() for each in more)
            theirs, moved = self.channels[P0].receive_moved(
                shapes, [elements] * len(truncations), number
            )
        e, d = own[0] + theirs[0], own[1] + theirs[1]
        z = masked_product(self.numbers, operation, (e, d), u, d + v if self.first else v)
        z += self._dealt([z.shape], "product", number)[0]
        if not self.first:
            return self._truncate_second([z, *more], truncations, moved, product.where)
        parts, moved = self._truncate_first([z, *more], truncations)
        self.channels[P1].send_moved(own, moved, number)
        return parts


class ThesisDealer(Thesis, Dealer):
    """P2 in thesis mode, which deals for each product at the time of its computation."""

    def _deal_product(self, product: Product) -> None:
        masks = self._factor_masks(product)
        self._deal([product.operation(*masks)], "product", product.number)
