"""The position of a cut along the cuts' principal direction, as a score of the rarer class."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl.attacks.base import EmbeddingAttack, Layer, require_two_classes
from vfl.attacks.view import View
from vfl.defenses.components import principal


class Principal(EmbeddingAttack):
    """The spectral attack of Sun et al.: projects cuts on their first principal direction.

    In a task with two classes, the top separates the classes, so cuts vary most along this
    direction. The attack assumes that the rows in the longer tail of the projections are of the
    rarer class, and gives them high scores.

    Source: Sun et al. 2022, "Label leakage and protection from forward embedding in vertical
    federated learning" (following Tran et al. 2018). The attack `spectral` is a different attack,
    which clusters the targets.

    Args:
        at: the layer whose outputs the attack projects.
    """

    goal = "scores"

    def __init__(self, at: Layer = "cut") -> None:
        super().__init__(at)

    def check(self, classes: int, width: int) -> None:
        require_two_classes(classes, "kmeans or gaussian_mixture")

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        rows = self.rows(view, view.targets)
        self.check(view.classes, rows.shape[1])
        centred, _, directions = principal(rows)
        projections = centred @ directions[:, 0]
        scores: Tensor = (projections * projections.pow(3).mean().sign()).float()
        return scores
