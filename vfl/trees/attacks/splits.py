"""Labels from splits: a feature party learns which of its columns matter, and where they turn."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl.attacks.base import Attack
from vfl.attacks.labels.classifiers import fit_logistic
from vfl.attacks.view import Grant, GrantedRows, View
from vfl.core.registry import require_range


class Splits(Attack):
    """Fits a few labels by what the splits on the own columns say, early ones most.

    A split says that labels differ between its two sides, and not which way. The sides of a row at
    all splits on a column, the n-th of the forest weighing n^-decay, add up to one number, which
    changes most where that column matters. A logistic regression on one such number a column has
    few directions to learn, and the penalty lets it use most the columns that were split first.
    Where no split is known it reads the columns themselves, which is the attacker without trees.

    Args:
        decay: how fast later splits count less; 0 counts all alike.
        strength: weight of the errors against the squared penalty.

    Raises:
        BadOptionError: an option out of range.

    >>> Splits(decay=1.0).needs == {Grant.INPUTS, Grant.LEAKED, Grant.PROTOCOL}
    True
    """

    goal = "labels"
    needs = frozenset({Grant.INPUTS, Grant.LEAKED, Grant.PROTOCOL})

    def __init__(self, decay: float = 0.5, strength: float = 1.0) -> None:
        require_range("decay", decay, 0, 100)
        require_range("strength", strength, 1e-9)
        self.decay, self.strength = decay, strength

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        known, asked = (
            numbers_of_splits(view, seen, self.decay) for seen in (view.leaked, view.targets)
        )
        # One scale for all, so that numbers that vary more stay those that cost less.
        mean, spread = asked.mean(0), asked.std(0).max().clamp_min(1e-9)
        learned = fit_logistic(
            (known - mean) / spread, view.leaked.labels, view.classes, self.strength
        )
        return learned((asked - mean) / spread)


def numbers_of_splits(view: View, seen: GrantedRows, decay: float) -> Tensor:
    """What splits say of rows, a number a column; the inputs where there are no splits.

    Args:
        view: grants inputs and the protocol.
        seen: the rows.
        decay: of `Splits`.
    """
    told = view.told
    if not told.columns:
        return seen.inputs.flatten(1)
    columns = torch.tensor(told.columns)
    weights = torch.arange(1, len(columns) + 1).float() ** -decay
    sums = torch.zeros(seen.rows, int(columns.max()) + 1)
    return sums.index_add_(1, columns, told.sides(seen.inputs) * weights)
