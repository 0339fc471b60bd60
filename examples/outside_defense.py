"""A defense from outside the package, in one file: the label party rounds its gradients.

This file registers the defense in the process that runs the file. A package instead declares its
member in the package's pyproject.toml:

    [project.entry-points."vfl.defenses"]
    rounded_gradient = "my_package.rounded_gradient:RoundedGradient"
"""

from typing import ClassVar

from torch import Tensor

from vfl import VFLClassifier
from vfl.compression import StepContext
from vfl.defenses import DEFENSES, Defense, PrivacyStatement, Side


class RoundedGradient(Defense):
    """Rounds each value of a gradient to a multiple of the batch's largest magnitude / `steps`."""

    side: ClassVar[Side] = "label"
    label_free: ClassVar[bool] = True  # `gradient` does not use its argument with the labels

    def __init__(self, steps: int = 8) -> None:
        self.steps = steps

    def gradient(self, grad: Tensor, labels: Tensor, context: StepContext) -> Tensor:
        step = grad.abs().max().clamp_min(1e-30) / self.steps
        return (grad / step).round() * step

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        return (PrivacyStatement("labels", "an observer of small differences of gradients"),)


DEFENSES.register("rounded_gradient", RoundedGradient)

if __name__ == "__main__":
    from sklearn.datasets import load_breast_cancer

    X, y = load_breast_cancer(return_X_y=True)
    for spec in ("none", "rounded_gradient:steps=8", "rounded_gradient:steps=2"):
        model = VFLClassifier(2, defense=spec, random_state=0).fit(X[:400], y[:400])
        print(f"{spec:<32} accuracy {model.score(X[400:], y[400:]):.3f}")
