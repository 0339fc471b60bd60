"""Logistic regression on features that are scaled by rows without labels."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl.attacks.features import EmbeddingAttack, Layer
from vfl.attacks.scaling import Scaler, scale_by
from vfl.attacks.threat import Grant
from vfl.attacks.view import View


class Logistic(EmbeddingAttack):
    """Fits the leaked rows by a logistic regression, after scaling by the unlabelled rows.

    What hides classes in directions of low variance (distance correlation, potential energy)
    stands against fine-tuning and falls here.

    Args:
        scaler: see `scale_by`.
        strength: inverse weight of the squared penalty (C of scikit-learn).
        at: the layer it reads.
    """

    uses = frozenset({Grant.LEAKED, Grant.UNLABELLED})

    def __init__(
        self, scaler: Scaler = "standard", strength: float = 1.0, at: Layer = "cut"
    ) -> None:
        super().__init__(at)
        self.scaler: Scaler = scaler
        self.strength = strength

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        from sklearn.linear_model import LogisticRegression

        scale = scale_by(self.scaler, self.rows(view, view.unlabelled))
        leaked = view.leaked
        model = LogisticRegression(C=self.strength, max_iter=1000)
        model.fit(scale(self.rows(view, leaked)).numpy(), leaked.labels.numpy())
        found = model.decision_function(scale(self.rows(view, view.targets)).numpy())
        if found.ndim == 1:  # two classes: one number a row
            return torch.from_numpy(found).float()[:, None] * torch.tensor([-0.5, 0.5])
        return torch.from_numpy(found).float()
