"""Membership by loss: what a network was trained on surprises it less."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from vfl.attacks.base import Attack
from vfl.attacks.view import Grant, View


class Membership(Attack):
    """Scores a row by minus the cross-entropy of its prediction; a member scores high.

    Source: Yeom et al. 2018, "Privacy risk in machine learning: analyzing the connection to
    overfitting" (the attack on the loss). A threshold is all it adds, and no score needs one.
    """

    goal = "scores"
    needs = frozenset({Grant.OUTPUTS, Grant.LABELS})

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        return -cross_entropy(view.targets.outputs, view.targets.labels, reduction="none")
