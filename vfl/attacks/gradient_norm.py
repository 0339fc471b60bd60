"""The norm of a gradient gives the rarer class away."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl.attacks.base import require_two_classes
from vfl.attacks.evidence import Heard
from vfl.attacks.gradients import GradientAttack, mean_by_row
from vfl.attacks.view import View


class GradientNorm(GradientAttack):
    """Scores a row by the norm of its gradient, against the others of its batch.

    A network that was taught little of a rare class is more surprised by each of its rows.
    Several epochs are averaged. The rarer class is what it looks for.

    Source: Li et al. 2022, "Label leakage and protection in two-party split learning".

    Args:
        epochs: how many epochs it reads.
    """

    goal = "scores"

    def check(self, classes: int, width: int) -> None:
        require_two_classes(classes, "gradient_similarity or surrogate")

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        exchanges = self.exchanges(view)
        self.check(view.classes, exchanges[0].gradients.shape[1])
        return mean_by_row(exchanges, _loudness, view.targets.rows, 1)[:, 0]


def _loudness(one: Heard) -> Tensor:
    """Each row's norm over the mean of its batch, axes (rows, 1)."""
    norms: Tensor = one.gradients.norm(dim=1, keepdim=True)
    mean: Tensor = norms.mean().clamp(min=torch.finfo(norms.dtype).tiny)
    return norms / mean
