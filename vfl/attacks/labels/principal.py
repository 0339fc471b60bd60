"""The principal direction of the cut, as a score of the rare class."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl.attacks.base import EmbeddingAttack, Layer, require_two_classes
from vfl.attacks.view import View
from vfl.defenses.components import principal


class Principal(EmbeddingAttack):
    """The spectral attack of Sun et al.: each target's projection on the first principal direction.

    In a binary task the top separates the classes, so the cut varies most in this direction. The
    longer tail is assumed to be the rarer class, which the attack looks for.

    Source: Sun et al. 2022, "Label leakage and protection from forward embedding in vertical
    federated learning" (after Tran et al. 2018). `spectral` is another attack, which clusters.

    Args:
        at: the layer it reads.
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
