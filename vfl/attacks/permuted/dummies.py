"""Few values among dummies: which are real."""

from __future__ import annotations

import torch
from torch import Tensor


def stands_out(seen: Tensor, real: int = 1) -> Tensor:
    """Places of the values that dummies, normal around 0, are least likely to take; axes (real,).

    >>> stands_out(torch.tensor([0.5, -7.0, 1.0])).tolist()
    [1]
    """
    return seen.abs().topk(real).indices


def seen_twice(first: Tensor, second: Tensor, tolerance: float = 1e-5) -> Tensor:
    """Places in `first` of values that are in `second` too, by size; axes (found,).

    Dummies are drawn anew for every question, real values are not. With 32 values each of a
    spread near 2, some dummy meets another within the tolerance in about one of a hundred pairs.
    """
    apart = (first.abs()[:, None] - second.abs()).abs().min(1).values
    return torch.nonzero(apart <= tolerance).flatten()
