"""The thesis' own evidence that a permutation hides: weak, for it is about averages."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl.defenses.dcor import distances


def correlation(one: Tensor, other: Tensor) -> float:
    """Distance correlation of two samples of vectors, between 0 and 1 (thesis eq 5-9, its root).

    From distances centred without bias (Szekely & Rizzo 2014, definition 2 and eq 3.3): the plain
    sample statistic is near 1 for independent vectors of many numbers, so few rows would make
    anything look dependent. A negative estimate counts as 0.

    Args:
        one: axes (rows, ...).
        other: axes (rows, ...).

    >>> rows = torch.tensor([[0.0], [1.0], [3.0], [4.0], [8.0]])
    >>> round(correlation(rows, -2 * rows), 4)
    1.0
    """
    a, b = _centred(distances(one.double())), _centred(distances(other.double()))
    squared = (a * b).sum() / (a.square().sum() * b.square().sum()).sqrt().clamp_min(1e-300)
    return float(squared.clamp_min(0).sqrt())


def _centred(away: Tensor) -> Tensor:
    rows = len(away)
    sums = away.sum(1)
    centred = away - (sums[:, None] + sums) / (rows - 2) + sums.sum() / ((rows - 1) * (rows - 2))
    return centred.fill_diagonal_(0)


def nearest(seen: Tensor, neighbours: int) -> Tensor:
    """The nearest other rows of each, nearest first; int64, axes (rows, neighbours).

    Args:
        seen: axes (rows, ...); compared at length 1, as the thesis does.
        neighbours: how many.
    """
    flat = torch.nn.functional.normalize(seen.double().flatten(1))
    away = distances(flat).fill_diagonal_(torch.inf)
    return away.topk(neighbours, largest=False).indices


def same_class(seen: Tensor, classes: Tensor, neighbours: int = 5) -> float:
    """Share of the nearest other rows that are of the row's class (thesis 5.5.4.2).

    Args:
        seen: axes (rows, ...); see `nearest`.
        classes: int64, axes (rows,).
        neighbours: how many of each row.

    >>> seen = torch.tensor([[0.0, 1], [0.1, 1], [1, 0], [1, 0.1]])
    >>> same_class(seen, torch.tensor([0, 0, 1, 1]), neighbours=1)
    1.0
    """
    return float((classes[nearest(seen, neighbours)] == classes[:, None]).double().mean())
