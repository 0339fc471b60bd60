"""Two defenses that change gradients: averages over groups of rows, and sparsification per row."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from vfl.compression import StepContext
from vfl.core.registry import require, require_range
from vfl.defenses.base import (
    MOST_ROWS,
    Defense,
)
from vfl.privacy import PrivacyStatement


class GradientAveraging(Defense):
    """Divides a batch into random groups; each row receives the mean gradient of its group.

    In every step, the label party's secret determines new groups. The groups do not depend on
    labels: if each group held rows of only one class, equal gradients would show which rows have
    the same class.

    Args:
        rows: smallest number of rows per group; the group sizes of a batch differ by at most one
            row. 0 makes one group of the whole batch, and then a bottom learns little. The group
            means of many exchanges are linear equations in single rows' gradients; the attack
            `batch_sums` solves these equations.

    >>> grad, one_group = torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0])
    >>> averaged(grad, one_group).tolist()
    [[2.0], [2.0]]

    Raises:
        BadOptionError: an option is out of range.
    """

    side = "label"
    label_free = True

    def __init__(self, rows: int = 2) -> None:
        require_range("rows", rows, 0, MOST_ROWS)
        self.rows = rows

    def gradient(self, grad: Tensor, labels: Tensor, context: StepContext) -> Tensor:
        assert context.secret is not None, "gradients are sent only in training"
        groups = max(1, len(grad) // self.rows) if self.rows else 1
        draws = context.secret.uniform((len(grad),), "gradient_averaging", context.step)
        indices = np.argsort(np.argsort(draws))
        return averaged(grad, torch.from_numpy(indices % groups))

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        against = "a feature party that scores the gradients of one exchange, not of many"
        return (PrivacyStatement("labels", against),)


def averaged(grad: Tensor, groups: Tensor) -> Tensor:
    """Return, for each row, the mean gradient of its group.

    Args:
        grad: gradients, axes (rows, width).
        groups: group number of each row, consecutive from 0; axes (rows,).
    """
    if not len(grad):
        return grad
    sums = grad.new_zeros(int(groups.max()) + 1, grad.shape[1]).index_add_(0, groups, grad)
    means = sums / groups.bincount().to(grad.dtype)[:, None]
    return means[groups]


class GradientSparsification(Defense):
    """Keeps the gradient values of largest magnitude in each row, and sets other values to zero.

    The defense drops values of small magnitude, as Aji and Heafield (2017) do. Unlike them, it does
    not add the dropped values to the gradient of the next step, because the next batch has other
    rows. The protection is weak, because the signs of the kept values disclose labels.

    Args:
        share: share of each row's values to keep; the number of kept values is rounded up.

    >>> kept(torch.tensor([[1.0, -4.0, 2.0, 3.0]]), share=0.5).tolist()
    [[0.0, -4.0, 0.0, 3.0]]

    Raises:
        BadOptionError: an option is out of range.
    """

    side = "label"
    label_free = True
    rows_apart = True

    def __init__(self, share: float = 0.25) -> None:
        require("share", share, "above 0, at most 1", 0 < share <= 1)
        self.share = share

    def gradient(self, grad: Tensor, labels: Tensor, context: StepContext) -> Tensor:
        return kept(grad, self.share)

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        return (PrivacyStatement("labels", "a feature party that reads small values of gradients"),)


def kept(grad: Tensor, share: float) -> Tensor:
    """Zero each row's values except the `share` of largest magnitude; axes (rows, width)."""
    most = math.ceil(share * grad.shape[1])
    indices = grad.abs().topk(most, dim=1).indices
    return torch.zeros_like(grad).scatter(1, indices, grad.gather(1, indices))
