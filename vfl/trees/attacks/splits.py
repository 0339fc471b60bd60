"""Label inference from splits: a feature party learns where trees split on its columns."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl.attacks.base import Attack
from vfl.attacks.labels.classifiers import fit_logistic
from vfl.attacks.view import Grant, GrantedRows, View
from vfl.core.registry import require_range


class Splits(Attack):
    """Infers labels from splits on the attacker's columns; a few known labels fit a regression.

    A split shows that labels differ between its left and right rows, but not which class is more
    frequent on the left. For each column, a row gets one number: the sum of its directions (left 1,
    right 0) at all splits on the column; the n-th split of the forest has weight n^-decay. This
    number changes most at the values where the column separates labels. A logistic regression on
    one such number per column has few coefficients. The penalty of the regression favours the
    columns of the first splits, whose numbers have a larger variance. If no split is on the party's
    columns, the attack reads the columns themselves, like an attacker without trees.

    Args:
        decay: exponent by which the weight of later splits falls; 0 gives all splits the same
            weight.
        strength: weight of the log loss relative to the squared (L2) penalty in the logistic
            regression.

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
        # All numbers are divided by the same number, so that the penalty still favours columns
        # whose numbers have a larger variance.
        mean, spread = asked.mean(0), asked.std(0).max().clamp_min(1e-9)
        learned = fit_logistic(
            (known - mean) / spread, view.leaked.labels, view.classes, self.strength
        )
        return learned((asked - mean) / spread)


def numbers_of_splits(view: View, seen: GrantedRows, decay: float) -> Tensor:
    """Return one number per column from rows' directions at splits, or the inputs without splits.

    Args:
        view: a view with grants for inputs and the protocol's messages.
        seen: target rows or leaked rows of the view.
        decay: see `Splits`.
    """
    told = view.told
    if not told.columns:
        return seen.inputs.flatten(1)
    columns = torch.tensor(told.columns)
    weights = torch.arange(1, len(columns) + 1).float() ** -decay
    sums = torch.zeros(seen.rows, int(columns.max()) + 1)
    return sums.index_add_(1, columns, told.sides(seen.inputs) * weights)
