"""Membership inference by loss: a network has a lower loss on rows that it was trained on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from vfl.attacks.base import Attack
from vfl.attacks.view import Grant, View


class Membership(Attack):
    """Scores a row by its negative cross-entropy; rows of the training set have higher scores.

    Source: Yeom et al. 2018, "Privacy risk in machine learning: analyzing the connection to
    overfitting" (the attack on the loss). The paper's attack also chooses a threshold; vfl
    evaluates scores, which need no threshold.
    """

    goal = "scores"
    needs = frozenset({Grant.OUTPUTS, Grant.LABELS})

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        return -cross_entropy(view.targets.outputs, view.targets.labels, reduction="none")
