"""Which labels leak: k of each class, drawn alike for every defense that is compared."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl.errors import TooFewRowsError


def draw_leak(labels: Tensor, k: int, draw: torch.Generator, classes: int | None = None) -> Tensor:
    """Positions of k rows of each class, ascending by class; int64, axes (classes * k,).

    The first k of a larger draw with the same generator state are the same rows, so that a curve
    over k is about more leaks and not about other leaks.

    Args:
        labels: int64 codes 0..C-1 of the rows that may leak, axes (rows,).
        k: rows of each class.
        draw: where the choice comes from.
        classes: how many there are; None takes those up to the highest code of these rows, which
            does not see that a higher one has no row among them.

    Raises:
        TooFewRowsError: a class has fewer rows, or none.

    >>> labels = torch.tensor([0, 1, 0, 1, 0])
    >>> draw_leak(labels, 2, torch.Generator().manual_seed(0)).shape
    torch.Size([4])
    """
    if classes is None:
        classes = 1 + int(labels.max()) if len(labels) else 1
    order = torch.randperm(len(labels), generator=draw)
    shuffled = labels[order]
    chosen = []
    for code in range(classes):
        found = order[shuffled == code][:k]
        if len(found) < k:
            raise TooFewRowsError(
                f"{k} labels of each class are to leak, and a class has fewer rows",
                got=f"{len(found)} rows",
                fix="a smaller k, or more rows",
            )
        chosen.append(found)
    return torch.cat(chosen)
