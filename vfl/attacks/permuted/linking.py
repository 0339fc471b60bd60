"""The same rows seen again: whose value is whose, and which batch is which.

On a line, matching by rank costs least of all matchings, whatever convex price a distance has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor


def by_rank(before: Tensor, after: Tensor, signed: bool = True) -> Tensor:
    """For each value seen before, the place of the same row among those seen after.

    Args:
        before: axes (values,).
        after: the same rows in another order, after small changes of the weights.
        signed: whether signs are true; else only sizes are compared.

    >>> by_rank(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.1, 2.2, 2.9])).tolist()
    [2, 0, 1]
    """
    if not signed:
        before, after = before.abs(), after.abs()
    found = torch.empty(len(before), dtype=torch.long)
    found[before.argsort()] = after.argsort()
    return found


def recognised(before: Sequence[Tensor], after: Sequence[Tensor], signed: bool = True) -> Tensor:
    """For each batch seen before, which of those seen after has the same rows.

    The assignment of least total distance between sorted values (Kuhn 1955).

    Args:
        before: values of each batch, as many in every one.
        after: of the same batches in another order.
        signed: see `by_rank`.

    >>> first, second = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 6.0])
    >>> recognised([first, second], [second.flip(0), first.flip(0)]).tolist()
    [1, 0]
    """
    sides = [torch.stack(list(side)) for side in (before, after)]
    one, other = ((side if signed else side.abs()).sort(1).values for side in sides)
    _, found = linear_sum_assignment(torch.cdist(one, other).numpy())
    return torch.from_numpy(found)
