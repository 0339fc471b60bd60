"""Labels from splits: a feature party learns which of its columns matter, and where."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl.attacks.base import Attack
from vfl.attacks.labels.classifiers import fit_logistic
from vfl.attacks.view import Grant, GrantedRows, View
from vfl.core.registry import require_range


class Splits(Attack):
    """Fits a few known labels by the splits on the own columns; early splits weigh most.

    A split shows that labels differ between its two sides, but not in which direction. The sides of
    a row at all splits on a column are summed to one number, in which the n-th split of the forest
    has weight n^-decay. This number changes most at values where the column matters. A logistic
    regression on one such number per column has few coefficients, and the penalty favours the
    columns that were split first. Without a known split it reads the columns themselves, like an
    attacker without trees.

    Args:
        decay: rate at which the weight of later splits falls; 0 gives all the same weight.
        strength: weight of the errors against the squared penalty.

    Raises:
        BadOptionError: an option is out of range.

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
        # One scale for all numbers, so that the penalty still favours those that vary more.
        mean, spread = asked.mean(0), asked.std(0).max().clamp_min(1e-9)
        learned = fit_logistic(
            (known - mean) / spread, view.leaked.labels, view.classes, self.strength
        )
        return learned((asked - mean) / spread)


def numbers_of_splits(view: View, seen: GrantedRows, decay: float) -> Tensor:
    """Return one number per column from the splits of rows, or the inputs without splits.

    Args:
        view: grants inputs and the protocol.
        seen: rows of the view.
        decay: see `Splits`.
    """
    told = view.told
    if not told.columns:
        return seen.inputs.flatten(1)
    columns = torch.tensor(told.columns)
    weights = torch.arange(1, len(columns) + 1).float() ** -decay
    sums = torch.zeros(seen.rows, int(columns.max()) + 1)
    return sums.index_add_(1, columns, told.sides(seen.inputs) * weights)
