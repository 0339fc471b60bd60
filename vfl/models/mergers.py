"""Mergers without weights: they concatenate the cuts, or combine them element by element.

Liu et al. 2022 (arXiv 2211.12814, section 2) call this combination of cuts the aggregation of a
global module.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vfl.core.errors import SpecError
from vfl.models.base import Merger


class Concat(Merger):
    """Concatenates all cuts in the agreed order of the parties.

    >>> Concat().build([1, 2])(torch.ones(1, 1), torch.zeros(1, 2))
    tensor([[1., 0., 0.]])
    """

    def width(self, widths: Sequence[int]) -> int:
        return sum(widths)

    def blocks(self, widths: Sequence[int]) -> list[int]:
        return list(widths)

    def build(self, widths: Sequence[int]) -> nn.Module:
        return _SideBySide()


class Pooling(Merger):
    """Base class of mergers for which all cuts and the merged cut have the same width."""

    def width(self, widths: Sequence[int]) -> int:
        if len(set(widths)) > 1:
            raise SpecError(
                "this merger accepts only cuts of equal width, because it works column by column",
                got=f"widths {', '.join(map(str, widths))}",
                want="equal widths of all parties, or merge = 'concat'",
            )
        return widths[0]

    def build(self, widths: Sequence[int]) -> nn.Module:
        self.width(widths)
        return _Pooled(self)

    @abstractmethod
    def pool(self, cuts: Sequence[Tensor]) -> Tensor:
        """Combine the cuts, each of axes (rows, width), into one cut of the same axes."""


class Sum(Pooling):
    """The sum of all cuts; secure sums support only this merger.

    >>> Sum().build([2, 2])(torch.tensor([[1.0, 4.0]]), torch.tensor([[3.0, 0.0]]))
    tensor([[4., 4.]])
    """

    def pool(self, cuts: Sequence[Tensor]) -> Tensor:
        first, *others = cuts
        return sum(others, start=first)


class Mean(Pooling):
    """The mean of all cuts.

    >>> Mean().build([2, 2])(torch.tensor([[1.0, 4.0]]), torch.tensor([[3.0, 0.0]]))
    tensor([[2., 2.]])
    """

    def pool(self, cuts: Sequence[Tensor]) -> Tensor:
        return torch.stack([*cuts]).mean(0)


class Maximum(Pooling):
    """The maximum over all cuts, element by element.

    >>> Maximum().build([2, 2])(torch.tensor([[1.0, 4.0]]), torch.tensor([[3.0, 0.0]]))
    tensor([[3., 4.]])
    """

    def pool(self, cuts: Sequence[Tensor]) -> Tensor:
        return torch.stack([*cuts]).amax(0)


class _SideBySide(nn.Module):
    def forward(self, *cuts: Tensor) -> Tensor:
        return torch.cat(cuts, dim=1)


class _Pooled(nn.Module):
    def __init__(self, how: Pooling) -> None:
        super().__init__()
        self._how = how

    def forward(self, *cuts: Tensor) -> Tensor:
        return self._how.pool(cuts)
