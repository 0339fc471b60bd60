"""Gradients averaged over groups of rows, so that none is about one row alone."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from vfl.compression import Moment
from vfl.defenses.base import Defense, PrivacyStatement, Side
from vfl.options import require_range


class GradientAveraging(Defense):
    """Rows are put into groups at random, and each gets the mean gradient of its group.

    The groups follow from the label party's secret, anew in every step, and know no label: a mean
    over the rows of one class would show which rows share it.

    Args:
        rows: rows in a group; 0 takes the whole batch, which shows no row's label and teaches a
            bottom little.

    >>> grad, one_group = torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0])
    >>> averaged(grad, one_group).tolist()
    [[2.0], [2.0]]

    Raises:
        BadOptionError: an option out of range.
    """

    side: ClassVar[Side] = "label"
    label_free: ClassVar[bool] = True

    def __init__(self, rows: int = 2) -> None:
        require_range("rows", rows, 0)
        self.rows = rows

    def gradient(self, grad: Tensor, labels: Tensor, moment: Moment) -> Tensor:
        assert moment.secret is not None, "gradients travel in training only"
        groups = max(1, len(grad) // self.rows) if self.rows else 1
        draws = moment.secret.uniform((len(grad),), "gradient_averaging", moment.step)
        places = np.argsort(np.argsort(draws))
        return averaged(grad, torch.from_numpy(places % groups))

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        against = "a feature party that scores single gradients; of one exchange, not of many"
        return (PrivacyStatement("labels", against),)


def averaged(grad: Tensor, groups: Tensor) -> Tensor:
    """Each row's mean over the rows of its group.

    Args:
        grad: axes (rows, width).
        groups: of every row, from 0 on without a gap; axes (rows,).
    """
    if not len(grad):
        return grad
    sums = grad.new_zeros(int(groups.max()) + 1, grad.shape[1]).index_add_(0, groups, grad)
    means = sums / groups.bincount().to(grad.dtype)[:, None]
    return means[groups]
