"""A pipeline of scikit-learn as an attack, to be set against what others trained:

    vfl grid quick
    vfl grid --add-attack examples/outside_pipeline.py runs/quick

Author: the examples of vfl
Date: 2026-11-25

The two lines above say whose attack this is; the leaderboard names them beside what it reaches.
"""

import torch
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import Tensor

from vfl.attacks import ATTACKS, Attack, Grant, View


class Pipeline(Attack):
    """Standardised cuts, their principal components, a support-vector machine."""

    goal = "labels"
    needs = frozenset({Grant.CUTS, Grant.LEAKED, Grant.UNLABELLED})

    def __init__(self, components: float = 0.99, strength: float = 10.0) -> None:
        self.components, self.strength = components, strength

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        scale = make_pipeline(StandardScaler(), PCA(self.components, svd_solver="full"))
        scale.fit(view.unlabelled.cuts.numpy())
        machine = SVC(C=self.strength)
        machine.fit(scale.transform(view.leaked.cuts.numpy()), view.leaked.labels.numpy())
        found = machine.decision_function(scale.transform(view.targets.cuts.numpy()))
        if found.ndim == 1:  # of two classes it gives the second one's alone
            found = [[-one, one] for one in found]
        scores = torch.full((view.targets.rows, view.classes), -1e3)
        scores[:, machine.classes_] = torch.tensor(found, dtype=torch.float32)
        return scores


ATTACKS.register("pipeline", Pipeline)
