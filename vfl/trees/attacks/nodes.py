"""Labels from nodes: rows that trees keep together have like labels."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl.attacks.base import Attack
from vfl.attacks.labels.classifiers import fit_logistic
from vfl.attacks.view import Grant, View
from vfl.core.registry import require_range
from vfl.trees.attacks.splits import numbers_of_splits


class Nodes(Attack):
    """Fits a few labels by the nodes that training rows came to, early trees most.

    A feature party of SecureBoost (Cheng et al. 2021) is told which rows are in which node, so it
    learns what splits on everybody's columns say of them. A row's nodes in the n-th round weigh
    n^-decay, and what `splits` makes of the own columns stands beside them as one more round.

    Args:
        decay: how fast later rounds count less; 0 counts all alike.
        strength: weight of the errors against the squared penalty.

    Raises:
        BadOptionError: an option out of range.

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
    """Centred numbers whose variances add up to 1."""
    centred = numbers - numbers.mean(0)
    return centred / centred.square().mean(0).sum().sqrt().clamp_min(1e-9)
