"""Rows whose gradients point the same way share a label, and one leaked row a class names it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from vfl.attacks.gradients import GradientAttack, directions_by_row
from vfl.attacks.threat import Grant
from vfl.attacks.view import View
from vfl.options import require_range


class GradientSimilarity(GradientAttack):
    """Clusters the rows by the cosine of their gradients, around the leaked ones of each class.

    Source: Liu et al. 2024, "Similarity-based label inference attack against training and
    inference of split learning"; the centres then move as in k-means.

    Args:
        epochs: how many epochs it reads; a row's directions of all of them are compared.
        rounds: how often the centres move.

    Raises:
        BadOptionError: an option out of range.
    """

    uses = frozenset({Grant.LEAKED})

    def __init__(self, epochs: int = 1, rounds: int = 10) -> None:
        require_range("rounds", rounds, 0)
        super().__init__(epochs)
        self.rounds = rounds

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        rows, leaked = view.targets.rows, view.leaked
        found = torch.cat(
            [directions_by_row(epoch, rows + leaked.rows) for epoch in self.by_epoch(view)], dim=1
        )
        targets, known = normalize(found[:rows], dim=1), normalize(found[rows:], dim=1)
        fixed = one_hot(leaked.labels, view.classes).float()
        scores = targets @ normalize(fixed.T @ known, dim=1).T
        for _ in range(self.rounds):
            near = one_hot(scores.argmax(1), view.classes).float()
            centres = normalize(fixed.T @ known + near.T @ targets, dim=1)
            scores = targets @ centres.T
        return scores
