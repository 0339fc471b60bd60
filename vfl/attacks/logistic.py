"""Logistic regression on features that are scaled by rows without labels."""

from __future__ import annotations

from torch import Tensor

from vfl.attacks.features import Layer
from vfl.attacks.reader import Read, Reader, as_scores
from vfl.attacks.scaling import Scaler
from vfl.options import require_range


class Logistic(Reader):
    """Fits the leaked rows by a logistic regression, after scaling by the unlabelled rows.

    What hides classes in directions of low variance (distance correlation, potential energy)
    stands against fine-tuning and falls here.

    Args:
        scaler: see `scale_by`.
        strength: inverse weight of the squared penalty (C of scikit-learn).
        at: the layer it reads.

    Raises:
        BadOptionError: an option out of range.
    """

    def __init__(
        self, scaler: Scaler = "standard", strength: float = 1.0, at: Layer = "cut"
    ) -> None:
        require_range("strength", strength, 1e-9)
        super().__init__(scaler, at)
        self.strength = strength

    def learn(self, rows: Tensor, labels: Tensor, classes: int) -> Read:
        return fit_logistic(rows, labels, classes, self.strength)


def fit_logistic(
    rows: Tensor, labels: Tensor, classes: int, strength: float, weights: Tensor | None = None
) -> Read:
    """A logistic regression; softmax of what it gives is what it believes.

    Args:
        rows: axes (rows, features).
        labels: int64, axes (rows,).
        classes: how many there are.
        strength: inverse weight of the squared penalty.
        weights: how much each row counts, axes (rows,); None counts all alike.
    """
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=strength, max_iter=1000)
    counts = None if weights is None else weights.numpy()
    model.fit(rows.numpy(), labels.numpy(), sample_weight=counts)
    return lambda some: as_scores(model.decision_function(some.numpy()), model.classes_, classes)
