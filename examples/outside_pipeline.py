"""scikit-learn pipelines as an attack on victims that others trained:

    vfl grid quick
    vfl grid --add-attack examples/outside_pipeline.py runs/quick
    vfl grid --add-attack examples/outside_pipeline.py runs/quick --attack pipeline:learner=mlp

Author: the examples of vfl
Date: 2026-11-25

The two lines above state the author and the date of this attack; the leaderboard prints them beside
the attack's results.
"""

import numpy as np
import torch
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.semi_supervised import LabelSpreading, SelfTrainingClassifier
from sklearn.svm import SVC
from torch import Tensor

from vfl.attacks import ATTACKS, Attack, Grant, View

LEARNERS = {
    "svm": lambda seed: SVC(C=10.0),
    "spreading": lambda seed: LabelSpreading(kernel="knn", n_neighbors=10),
    "self_training": lambda seed: SelfTrainingClassifier(
        SVC(C=10.0, probability=True, random_state=seed), threshold=0.9
    ),
    "mlp": lambda seed: MLPClassifier((128,), max_iter=1000, random_state=seed),
    "logistic": lambda seed: LogisticRegression(C=1.0, max_iter=1000),
    "discriminant": lambda seed: LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto"),
    "forest": lambda seed: RandomForestClassifier(300, random_state=seed),
}


class Pipeline(Attack):
    """Standardises cuts, computes their principal components, and trains a classifier on them."""

    goal = "labels"
    needs = frozenset({Grant.CUTS, Grant.LEAKED, Grant.UNLABELLED})

    def __init__(self, learner: str = "svm", components: float = 0.99) -> None:
        self.learner, self.components = learner, components

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        scale = make_pipeline(StandardScaler(), PCA(self.components, svd_solver="full"))
        further = scale.fit_transform(view.unlabelled.cuts.numpy())
        rows, labels = scale.transform(view.leaked.cuts.numpy()), view.leaked.labels.numpy()
        seed = int(torch.randint(2**31, (), generator=draw))  # fixes the score of a draw of labels
        machine = LEARNERS[self.learner](seed)
        if self.learner in ("spreading", "self_training"):  # -1 marks a row without a known label
            rows = np.concatenate([rows, further])
            labels = np.concatenate([labels, np.full(len(further), -1)])
        machine.fit(rows, labels)
        answer = machine.decision_function if self.learner == "svm" else machine.predict_proba
        found = answer(scale.transform(view.targets.cuts.numpy()))
        # With two classes, a support-vector machine returns only the score of the second class.
        if found.ndim == 1:
            found = np.stack([-found, found], axis=1)
        scores = torch.full((view.targets.rows, view.classes), -1e3)
        # For a row that no labelled row reaches through neighbours, label spreading returns NaN.
        scores[:, machine.classes_] = torch.from_numpy(np.nan_to_num(found)).float()
        return scores


ATTACKS.register("pipeline", Pipeline)
