"""What attacks on gradients read: training exchanges, gathered row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from vfl.attacks.base import Attack
from vfl.attacks.evidence import Heard
from vfl.attacks.threat import Grant
from vfl.attacks.view import View
from vfl.errors import DataError
from vfl.options import require_range


class GradientAttack(Attack):
    """An attack that reads what came down in the first epochs of a training.

    Early gradients tell most: once a row is fitted, its gradient is small and about other things.

    Attributes:
        uses: grants it needs besides the gradients.

    Args:
        epochs: how many epochs it reads.

    Raises:
        BadOptionError: not a single epoch.
    """

    uses: ClassVar[frozenset[Grant]] = frozenset()

    def __init__(self, epochs: int = 1) -> None:
        require_range("epochs", epochs, 1)
        self.epochs = epochs
        self.needs = frozenset({Grant.GRADIENTS}) | self.uses

    def by_epoch(self, view: View) -> list[list[Heard]]:
        """The exchanges of each epoch it reads, at least one.

        Raises:
            DataError: the recording holds no training exchange.
        """
        wanted = sorted({one.epoch for one in view.heard})[: self.epochs]
        if not wanted:
            raise DataError(
                "no training exchange was recorded", fix="record them: [trace] phases = train"
            )
        return [[one for one in view.heard if one.epoch == epoch] for epoch in wanted]

    def exchanges(self, view: View) -> list[Heard]:
        """All exchanges it reads, in their order."""
        return [one for epoch in self.by_epoch(view) for one in epoch]


def mean_by_row(
    exchanges: Iterable[Heard], told: Callable[[Heard], Tensor], rows: int, width: int
) -> Tensor:
    """What the exchanges tell of each row, on average; 0 of a row that is in none of them.

    Args:
        exchanges: some of the training.
        told: what one exchange tells of its rows, axes (rows, width).
        rows: how many rows are of interest, the first ones.
        width: columns of what is told.

    Returns:
        float32, axes (rows, width).
    """
    total, count = torch.zeros(rows, width), torch.zeros(rows, 1)
    for one in exchanges:
        known = one.rows < rows
        total.index_add_(0, one.rows[known], told(one)[known])
        count.index_add_(0, one.rows[known], torch.ones(int(known.sum()), 1))
    return total / count.clamp(min=1)


def directions(one: Heard) -> Tensor:
    """The gradients of an exchange at length 1; one of length 0 stays what it is."""
    return normalize(one.gradients, dim=1)


def directions_by_row(exchanges: Sequence[Heard], rows: int) -> Tensor:
    """The mean direction of each row's gradients, axes (rows, width)."""
    return mean_by_row(exchanges, directions, rows, exchanges[0].gradients.shape[1])
