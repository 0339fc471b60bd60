"""A support-vector machine with a radial kernel."""

from __future__ import annotations

from torch import Tensor

from vfl.attacks.features import Layer
from vfl.attacks.reader import Read, Reader, as_scores
from vfl.attacks.scaling import Scaler
from vfl.options import require_range


class SVM(Reader):
    """Fits the leaked rows by a support-vector machine with kernel exp(-|x - x'|^2 / (d v)).

    d is the number of features and v their variance over the leaked rows, so that nothing is left
    to tune. It reads classes that no linear boundary separates.

    Source: Cortes and Vapnik 1995; several classes one against one.

    Args:
        scaler: see `scale_by`.
        strength: weight of the errors (C of scikit-learn).
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
        from sklearn.svm import SVC

        # Nothing in it is random, but without a seed it asks numpy's global generator for one.
        model = SVC(C=self.strength, kernel="rbf", gamma="scale", random_state=0)
        model.fit(rows.numpy(), labels.numpy())
        return lambda some: as_scores(
            model.decision_function(some.numpy()), model.classes_, classes
        )
