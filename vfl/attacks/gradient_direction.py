"""The direction of a gradient gives the class away, once that of one positive row is known."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl.attacks.base import rarest, require_two_classes
from vfl.attacks.gradients import GradientAttack, directions_by_row
from vfl.attacks.threat import Grant
from vfl.attacks.view import View
from vfl.errors import DataError


class GradientDirection(GradientAttack):
    """Scores a row by the cosine between its gradient and those of leaked rows of the rarer class.

    Gradients of one class point the same way and those of the other the opposite way. Cosines are
    taken within an epoch, while the top has moved little, and averaged over the epochs.

    Source: Li et al. 2022, "Label leakage and protection in two-party split learning".

    Args:
        epochs: how many epochs it reads.
    """

    goal = "scores"
    uses = frozenset({Grant.LEAKED, Grant.PRIOR})

    def check(self, classes: int, width: int) -> None:
        require_two_classes(classes, "gradient_similarity or surrogate")

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        epochs = self.by_epoch(view)
        self.check(view.classes, epochs[0][0].gradients.shape[1])
        leaked, rows = view.leaked, view.targets.rows
        sought = rarest(view.prior)
        positive = rows + torch.nonzero(leaked.labels == sought)[:, 0]
        if not len(positive):
            raise DataError(
                "no leaked row is positive",
                got=f"{leaked.rows} leaked rows, all of class {1 - sought}",
                want=f"at least one leaked row of class {sought}, the rarer one",
            )
        scores = torch.zeros(rows)
        for exchanges in epochs:
            found = directions_by_row(exchanges, rows + leaked.rows)
            scores += found[:rows] @ found[positive].mean(0)
        return scores
