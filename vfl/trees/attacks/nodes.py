"""Label inference from tree nodes: rows in the same node tend to have similar labels."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl.attacks.base import Attack
from vfl.attacks.labels.classifiers import fit_logistic
from vfl.attacks.view import Grant, View
from vfl.core.registry import require_range
from vfl.trees.attacks.splits import numbers_of_splits


class Nodes(Attack):
    """Infers labels from the tree nodes of training rows, with a few known labels for fitting.

    A feature party of SecureBoost (Cheng et al. 2021) learns which rows are in which node; so, for
    these rows, it learns the directions at splits on the columns of all parties. A logistic
    regression reads the nodes, one-hot encoded; it weights the nodes of boosting round n by
    n^-decay. The regression also reads, with weight 1, the numbers that the attack `splits`
    computes from the party's own columns.

    Args:
        decay: exponent by which the weight of later rounds falls; 0 gives all rounds the same
            weight.
        strength: weight of the log loss relative to the squared (L2) penalty in the logistic
            regression.

    Raises:
        BadOptionError: an option is out of range.

    >>> Grant.GRADIENTS in Nodes().needs
    True
    """

    goal = "labels"
    needs = frozenset({Grant.INPUTS, Grant.LEAKED, Grant.GRADIENTS, Grant.PROTOCOL})

    def __init__(self, decay: float = 0.0, strength: float = 1.0) -> None:
        require_range("decay", decay, 0, 100)
        require_range("strength", strength, 1e-9)
        self.decay, self.strength = decay, strength

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        groups = view.targets, view.leaked
        parts = [torch.cat([numbers_of_splits(view, seen, self.decay) for seen in groups])]
        weights = [1.0]
        for one in view.exchanges:
            parts.append(one.gradients)
            weights.append(one.epoch**-self.decay)
        scaled = map(_of_one_variance, parts)
        rows = torch.cat([w * one for w, one in zip(weights, scaled, strict=True)], 1)
        asked, known = rows[: view.targets.rows], rows[view.targets.rows :]
        return fit_logistic(known, view.leaked.labels, view.classes, self.strength)(asked)


def _of_one_variance(numbers: Tensor) -> Tensor:
    """Return centred numbers, scaled by one factor so that the columns' variances add up to 1."""
    centred = numbers - numbers.mean(0)
    return centred / centred.square().mean(0).sum().sqrt().clamp_min(1e-9)
