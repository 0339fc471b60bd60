"""Bottoms of several parties as one, for whoever holds all their columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn


class JointBottom(nn.Module):
    """All parties' bottoms as one, from whole rows to what the top is given.

    Args:
        bottoms: in the order in which their columns stand in a row.
        shapes: axes of a row of each.
        summed: whether the top is given their sum.
    """

    def __init__(
        self, bottoms: Sequence[nn.Module], shapes: Sequence[tuple[int, ...]], summed: bool
    ) -> None:
        super().__init__()
        self.bottoms, self.shapes, self.summed = nn.ModuleList(bottoms), shapes, summed

    def forward(self, rows: Tensor) -> Tensor:
        """What the top is given, axes (rows, width), of rows with axes (rows, columns)."""
        cuts = [bottom(part) for bottom, part in self.parts(rows)]
        return torch.stack(cuts).sum(0) if self.summed else torch.cat(cuts, 1)

    def parts(self, rows: Tensor) -> Iterator[tuple[nn.Module, Tensor]]:
        """Each bottom and its party's columns of whole rows."""
        columns = torch.split(rows, [math.prod(shape) for shape in self.shapes], 1)
        for bottom, part, shape in zip(self.bottoms, columns, self.shapes, strict=True):
            yield bottom, part.reshape(-1, *shape)

    def each(self, change: Callable[[nn.Module], nn.Module]) -> JointBottom:
        """The same with something else in each bottom's place."""
        return JointBottom([change(one) for one in self.bottoms], self.shapes, self.summed)
