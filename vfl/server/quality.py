"""How good answers are: scikit-learn's own figures over the rows of a whole phase.

A figure that is not defined for these rows is left out: an AUC where a class is missing, an R2 of
labels that never vary, anything of outputs that are not finite.
"""

from __future__ import annotations

import numpy as np
import torch
from sklearn.metrics import (
    accuracy_score,
    f1_score,
    log_loss,
    mean_absolute_error,
    r2_score,
    roc_auc_score,
    root_mean_squared_error,
)
from torch import Tensor


def classification_quality(logits: Tensor, codes: Tensor) -> dict[str, float]:
    """Accuracy, AUC, log loss and F1.

    Of two classes, the second in sorted order is the positive one. Of more, F1 is the mean over
    the classes that occur, and AUC the mean over each class against the rest.

    Args:
        logits: axes (rows, classes).
        codes: classes as 0..C-1, axes (rows,).

    >>> logits, codes = torch.tensor([[2.0, 0], [0, 1], [1, 0], [1, 0]]), torch.tensor([0, 1, 0, 1])
    >>> figures = classification_quality(logits, codes)
    >>> {name: round(figures[name], 3) for name in ("accuracy", "auc", "f1")}
    {'accuracy': 0.75, 'auc': 0.875, 'f1': 0.667}
    """
    truth, guess = codes.numpy(), logits.argmax(dim=1).numpy()
    found = {"accuracy": accuracy_score(truth, guess)}
    if not torch.isfinite(logits).all():
        return _plain(found)
    chances = torch.softmax(logits.double(), dim=1).numpy()
    classes = range(logits.shape[1])
    if len(np.unique(truth)) == len(classes):
        found["auc"] = _auc(truth, chances)
    found["log_loss"] = log_loss(truth, chances, labels=classes)
    if len(classes) > 2:
        found["f1"] = f1_score(truth, guess, average="macro")
    elif truth.any() or guess.any():
        found["f1"] = f1_score(truth, guess)
    return _plain(found)


def regression_quality(answers: Tensor, labels: Tensor) -> dict[str, float]:
    """Root of the mean squared error, mean absolute error and R2.

    Args:
        answers: in the labels' own units, axes (rows, 1).
        labels: axes (rows,).

    >>> answers = torch.tensor([[1.0], [2.0], [6.0]])
    >>> regression_quality(answers, torch.tensor([1.0, 2.0, 3.0]))["mae"]
    1.0
    """
    if not torch.isfinite(answers).all():
        return {}
    truth, guess = labels.double().numpy(), answers[:, 0].double().numpy()
    found = {
        "rmse": root_mean_squared_error(truth, guess),
        "mae": mean_absolute_error(truth, guess),
    }
    if np.ptp(truth) > 0:
        found["r2"] = r2_score(truth, guess)
    return _plain(found)


def _auc(truth: np.ndarray, chances: np.ndarray) -> float:
    if chances.shape[1] == 2:
        return float(roc_auc_score(truth, chances[:, 1]))
    return float(roc_auc_score(truth, chances, multi_class="ovr", average="macro"))


def _plain(figures: dict[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in figures.items()}
