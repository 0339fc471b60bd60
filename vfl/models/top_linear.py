"""One linear layer as top."""

from __future__ import annotations

from torch import nn

from vfl.models.base import Top


class LinearTop(Top):
    """Logistic or linear regression on the merged cut.

    >>> sum(p.numel() for p in LinearTop().build(width=16, outputs=10).parameters())
    170
    """

    def build(self, width: int, outputs: int) -> nn.Module:
        return nn.Linear(width, outputs)
