"""Quality of predictions: the metrics of scikit-learn, over all rows of a phase (validation, test).

A metric that is undefined for these rows is omitted: AUC if a class has no rows, F1 of two classes
if the second class is neither true nor predicted, and R2 if all labels are equal. If an output is
not finite, all metrics except a classification's accuracy are omitted.

With many classes, the outputs of all rows of a phase need too much memory, and computing one AUC
for each class takes too long. `reduced` therefore stores three numbers for each row, from which
`reduced_quality` computes all metrics except AUC.

The metrics are implemented here, because importing scikit-learn takes as long as a small training.
Tests compare these metrics with the metrics of scikit-learn.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from vfl.session.label.scored import Scored

#: Probabilities below the epsilon of float64 are raised to it, as in scikit-learn.
_LEAST_CHANCE = np.finfo(np.float64).eps
_MOST_SURPRISE = -np.log(_LEAST_CHANCE)


def classification_quality(logits: Tensor, codes: Tensor, hits: int = 0) -> dict[str, float]:
    """Compute accuracy, AUC, log loss, F1 and hit rate of classification logits.

    If there are two classes, the second class in sorted order is the positive class. With more
    classes, F1 is the mean of the F1 of each class that occurs, and AUC is the mean AUC of each
    class against all others.

    Args:
        logits: logits, axes (rows, classes).
        codes: classes as 0..C-1, axes (rows,).
        hits: k of the hit rate at k: the fraction of rows whose true class is among the k classes
            with the largest outputs; 0 omits the hit rate.

    >>> logits, codes = torch.tensor([[2.0, 0], [0, 1], [1, 0], [1, 0]]), torch.tensor([0, 1, 0, 1])
    >>> figures = classification_quality(logits, codes)
    >>> {name: round(figures[name], 3) for name in ("accuracy", "auc", "f1")}
    {'accuracy': 0.75, 'auc': 0.875, 'f1': 0.667}
    """
    truth, guess = codes.numpy(), logits.argmax(dim=1).numpy()
    found = {"accuracy": np.mean(truth == guess)}
    if not torch.isfinite(logits).all():
        return _plain(found)
    chances = torch.softmax(logits.double(), dim=1).numpy()
    classes = logits.shape[1]
    if len(np.unique(truth)) == classes:
        positive = range(classes) if classes > 2 else [1]
        found["auc"] = np.mean(
            [Scored.counted(chances[:, one], truth == one).auc() for one in positive]
        )
    own = np.take_along_axis(chances, truth[:, None], axis=1)
    found["log_loss"] = -np.log(np.maximum(own, _LEAST_CHANCE)).mean()
    if classes > 2:
        found["f1"] = _f1(truth, guess).mean()
    elif truth.any() or guess.any():
        found["f1"] = _f1(truth, guess)[-1]
    if hits:
        found["hit_rate"] = np.mean(label_ranks(logits.numpy(), truth) < hits)
    return _plain(found)


def brier_score(logits: Tensor, codes: Tensor) -> float:
    """Return the mean squared error of probabilities (Brier 1950).

    For two classes, only the probability of the second class counts. For more classes, the squared
    errors of a row's classes are summed.

    Args:
        logits: logits, axes (rows, classes).
        codes: classes as 0..C-1, axes (rows,).

    >>> logits = torch.tensor([[0.8, 0.2], [0.4, 0.6]]).log()
    >>> round(brier_score(logits, torch.tensor([0, 0])), 4)
    0.2
    """
    chances = torch.softmax(logits.double(), dim=1)
    missed = chances - one_hot(codes, logits.shape[1])
    squared = missed[:, 1] ** 2 if logits.shape[1] == 2 else (missed**2).sum(dim=1)
    return float(squared.mean())


def label_ranks(logits: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return the rank of each row's true class among the outputs, int64, axes (rows,).

    The class with the largest output has rank 0. If classes have equal outputs, the class with the
    lower code comes first.

    Args:
        logits: logits, axes (rows, classes).
        codes: classes as 0..C-1, axes (rows,).

    >>> label_ranks(np.array([[0.5, 2.0, 0.5], [0.5, 2.0, 0.5]]), np.array([0, 2])).tolist()
    [1, 2]
    """
    own = np.take_along_axis(logits, codes[:, None], axis=1)
    found: np.ndarray = np.count_nonzero(logits > own, axis=1)
    (tied,) = np.nonzero(np.count_nonzero(logits == own, axis=1) > 1)
    lower = np.arange(logits.shape[1]) < codes[tied, None]
    found[tied] += np.count_nonzero((logits[tied] == own[tied]) & lower, axis=1)
    return found


def reduced(logits: Tensor, codes: Tensor) -> Tensor:
    """Reduce the logits of a batch to the three numbers per row that `reduced_quality` needs.

    Args:
        logits: logits, axes (rows, classes).
        codes: classes as 0..C-1, axes (rows,).

    Returns:
        float64, axes (rows, 3): the predicted class, the rank of the row's true class, and the
        row's log loss, which is NaN if an output of the row is not finite.
    """
    logits, codes = logits.cpu(), codes.cpu()
    surprise = cross_entropy(logits, codes, reduction="none").double()
    finite = torch.isfinite(logits.amax(dim=1)) & torch.isfinite(logits.amin(dim=1))
    outputs, truth = logits.numpy(), codes.numpy()
    # On a CPU, numpy counts and compares many times faster than torch.
    guess, place = (
        torch.from_numpy(n) for n in (outputs.argmax(axis=1), label_ranks(outputs, truth))
    )
    return torch.stack([guess, place, surprise.where(finite, torch.nan)], dim=1)


def reduced_quality(rows: Tensor, codes: Tensor, hits: int = 0) -> dict[str, float]:
    """Compute accuracy, log loss, F1 and hit rate for more than two classes.

    Args:
        rows: three numbers for each row, as returned by `reduced`, axes (rows, 3).
        codes: classes as 0..C-1, axes (rows,).
        hits: see `classification_quality`.
    """
    guess, place, surprise = rows.numpy().T
    truth, guess = codes.numpy(), guess.astype(np.int64)
    found = {"accuracy": np.mean(truth == guess)}
    if np.isnan(surprise).any():
        return _plain(found)
    found["log_loss"] = np.minimum(surprise, _MOST_SURPRISE).mean()
    found["f1"] = _f1(truth, guess).mean()
    if hits:
        found["hit_rate"] = (place < hits).mean()
    return _plain(found)


def regression_quality(answers: Tensor, labels: Tensor) -> dict[str, float]:
    """Compute root mean squared error, mean absolute error and R2.

    Args:
        answers: predictions in the unit of the labels, axes (rows, 1).
        labels: labels, axes (rows,).

    >>> answers = torch.tensor([[1.0], [2.0], [6.0]])
    >>> regression_quality(answers, torch.tensor([1.0, 2.0, 3.0]))["mae"]
    1.0
    """
    if not torch.isfinite(answers).all():
        return {}
    truth, guess = labels.double().numpy(), answers[:, 0].double().numpy()
    squared = np.mean((truth - guess) ** 2)
    found = {"rmse": np.sqrt(squared), "mae": np.mean(np.abs(truth - guess))}
    if np.ptp(truth) > 0:
        found["r2"] = 1 - squared / np.var(truth)
    return _plain(found)


def _f1(truth: np.ndarray, guess: np.ndarray) -> np.ndarray:
    """Return the F1 score of each class that occurs in either array, by class code."""
    classes, codes = np.unique(np.concatenate([truth, guess]), return_inverse=True)
    true, guessed = np.split(codes, 2)
    right, held, said = (
        np.bincount(each, minlength=len(classes)) for each in (true[true == guessed], true, guessed)
    )
    scores: np.ndarray = 2 * right / (held + said)
    return scores


def _plain(figures: dict[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in figures.items()}
