"""A merger of your own in one file: attention of every party's cut to the cuts of all parties.

This file registers the merger in the process that runs the file. A package instead declares its
member in the package's pyproject.toml:

    [project.entry-points."vfl.mergers"]
    attention = "outside_merger:Attention"

The package tests the merger with `vfl.testing`:

    class TestMine(MergerContract):
        specs = ["attention"]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from vfl import VFLClassifier
from vfl.core.registry import require_range
from vfl.models import MERGERS, Merger
from vfl.models.mergers import Sum


class Attention(Merger):
    """Scaled dot-product attention (Vaswani et al. 2017, equation 1), with a query for each party.

    Args:
        heads: number of attention heads, at most the width of a cut; each has width // heads units.
    """

    def __init__(self, heads: int = 2) -> None:
        require_range("heads", heads, 1, 64)
        self._heads = heads

    def width(self, widths: Sequence[int]) -> int:
        width = Sum().width(widths)  # all cuts must have the same width
        require_range("heads", self._heads, 1, width)
        return width // self._heads * self._heads * len(widths)

    def build(self, widths: Sequence[int]) -> nn.Module:
        return _Attention(widths[0], self._heads)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.of_each = heads, width // heads
        self.project = nn.Linear(width, 3 * heads * self.of_each)

    def forward(self, *cuts: Tensor) -> Tensor:
        rows = torch.stack(cuts, 1)  # (rows, parties, width)
        made = self.project(rows).unflatten(2, (3, self.heads, self.of_each))
        query, key, value = made.permute(2, 0, 3, 1, 4)  # (rows, heads, parties, width of a head)
        found = nn.functional.scaled_dot_product_attention(query, key, value)
        return found.transpose(1, 2).flatten(1)


MERGERS.register("attention", Attention)

if __name__ == "__main__":
    X, y = load_digits(return_X_y=True)
    for merge in ("max", "attention"):
        model = VFLClassifier(4, merge=merge, epochs=10, random_state=0).fit(X[:1400], y[:1400])
        print(f"{merge:<10} accuracy {model.score(X[1400:], y[1400:]):.3f}")
