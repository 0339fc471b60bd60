"""Gradients of which only the largest values are told."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from vfl.compression import Moment
from vfl.defenses.base import Defense, PrivacyStatement, Side
from vfl.options import require


class GradientSparsification(Defense):
    """The values of largest magnitude of each row of the gradient; the rest are zeros.

    As Aji and Heafield (2017) drop gradients, but what is dropped is not added to a
    later step: it belongs to other rows by then. A weak defense: signs of what is left tell.

    Args:
        share: of each row's values that are kept, rounded up.

    >>> kept(torch.tensor([[1.0, -4.0, 2.0, 3.0]]), share=0.5).tolist()
    [[0.0, -4.0, 0.0, 3.0]]

    Raises:
        BadOptionError: an option out of range.
    """

    side: ClassVar[Side] = "label"
    label_free: ClassVar[bool] = True
    rows_apart: ClassVar[bool] = True

    def __init__(self, share: float = 0.25) -> None:
        require("share", share, "above 0, at most 1", 0 < share <= 1)
        self.share = share

    def gradient(self, grad: Tensor, labels: Tensor, moment: Moment) -> Tensor:
        return kept(grad, self.share)

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        return (PrivacyStatement("labels", "a feature party that reads small values of gradients"),)


def kept(grad: Tensor, share: float) -> Tensor:
    """The largest `share` of each row's values, by magnitude; axes (rows, width)."""
    most = math.ceil(share * grad.shape[1])
    places = grad.abs().topk(most, dim=1).indices
    return torch.zeros_like(grad).scatter(1, places, grad.gather(1, places))
