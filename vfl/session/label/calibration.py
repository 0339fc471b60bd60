"""Calibration: curves, fitted to the validation rows, correct predicted probabilities.

A curve maps the predicted probability of one class (one class against all others) to a corrected
probability. Each curve is fitted once, at the end of a training, to the validation rows with the
final weights. For two classes there is one curve, for the second class. For more classes there is
one curve for each class; each row's corrected probabilities are then divided by their sum (Zadrozny
and Elkan 2002, section 4.3). A curve that has not been fitted yet leaves probabilities unchanged.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

#: Probabilities below this value are raised to it, also in `vfl.session.label.quality`.
_LEAST = float(np.finfo(np.float64).eps)
#: With fewer rows than about this number, isotonic regression overfits (Niculescu-Mizil and Caruana
#: 2005).
_ISOTONIC_ROWS = 1000
_MOST_STEPS, _MOST_HALVINGS = 100, 30


def smoothed(truth: np.ndarray) -> np.ndarray:
    """Return Platt's targets (1999) in place of 1 and 0: (N+ + 1) / (N+ + 2), 1 / (N- + 2).

    Because of these targets, no fitted curve reaches 0 or 1, where a single misclassified row would
    have an infinite log loss.

    Args:
        truth: 1 for each of the N+ rows of the class, 0 for each of the N- other rows, axes
            (rows,).

    >>> smoothed(np.array([0, 0, 1])).round(3).tolist()
    [0.25, 0.25, 0.667]
    """
    hits = int(truth.sum())
    return np.where(truth > 0, (hits + 1) / (hits + 2), 1 / (len(truth) - hits + 2))


def isotonic(chances: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Fit a non-decreasing step function with the least squared error (pool adjacent violators).

    The method is that of Ayer et al. 1955, and of Zadrozny and Elkan 2002, section 3.

    Args:
        chances: predicted probabilities of the class, axes (rows,).
        target: target value of each row, axes (rows,).

    Returns:
        knots of the curve, axes (knots, 2): the first and the last probability of each step, both
        with the step's mean target. Between two steps, the curve is linear.

    >>> isotonic(np.array([0.1, 0.3, 0.6, 0.9]), np.array([0, 1, 0, 1])).tolist()
    [[0.1, 0.0], [0.3, 0.5], [0.6, 0.5], [0.9, 1.0]]
    """
    values, place, rows = np.unique(chances, return_inverse=True, return_counts=True)
    sums = np.bincount(place, weights=target)
    steps: list[list[float]] = []  # each step: first and last probability, sum of targets, rows
    for value, own, count in zip(values.tolist(), sums.tolist(), rows.tolist(), strict=True):
        steps.append([value, value, own, count])
        while len(steps) > 1 and steps[-2][2] * steps[-1][3] >= steps[-1][2] * steps[-2][3]:
            _, last, own, count = steps.pop()
            steps[-1] = [steps[-1][0], last, steps[-1][2] + own, steps[-1][3] + count]
    knots = [(at, own / count) for first, last, own, count in steps for at in (first, last)]
    return np.array(list(dict.fromkeys(knots)))


def platt(logits: np.ndarray, target: np.ndarray) -> tuple[float, float]:
    """Fit slope and intercept of a logistic curve over logits by Newton's method.

    The method is that of Platt 1999; a Newton step that does not improve the fit is halved (Lin,
    Lin and Weng 2007).

    Args:
        logits: logits, axes (rows,).
        target: target probability of each row, above 0 and below 1, axes (rows,).

    >>> slope, intercept = platt(np.array([1.0, 3.0]), np.array([0.25, 0.75]))
    >>> round(slope, 4), round(intercept, 4)
    (1.0986, -2.1972)
    """
    columns = np.stack([logits, np.ones(len(logits))], axis=1)

    def loss(line: np.ndarray) -> float:
        margins = columns @ line
        return float(np.sum(np.logaddexp(0, margins) - target * margins))

    mean = target.mean()
    line = np.array([0.0, np.log(mean / (1 - mean))])
    least = loss(line)
    for _ in range(_MOST_STEPS):
        likely = 1 / (1 + np.exp(-(columns @ line)))
        gradient = columns.T @ (likely - target)
        spread = (columns * (likely * (1 - likely))[:, None]).T @ columns
        step = np.linalg.solve(spread + 1e-12 * np.eye(2), gradient)
        for halving in range(_MOST_HALVINGS):
            found = loss(line - step / 2**halving)
            if found < least:
                line, least = line - step / 2**halving, found
                break
        else:
            break
    return float(line[0]), float(line[1])


class Curve(nn.Module):
    """A curve that corrects the probability of one class."""

    name: ClassVar[str]

    def fit(self, chances: np.ndarray, truth: np.ndarray) -> None:
        """Fit the curve to predicted probabilities and truth (1 or 0), both axes (rows,)."""
        raise NotImplementedError

    def record(self) -> dict[str, Any]:
        """Return the curve's parameters as a record for JSON."""
        raise NotImplementedError


class Isotonic(Curve):
    """Isotonic regression on smoothed targets; the curve is constant outside its knots."""

    name = "isotonic"
    knots: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("knots", torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64))

    def fit(self, chances: np.ndarray, truth: np.ndarray) -> None:
        self.knots = torch.from_numpy(isotonic(chances, smoothed(truth))).to(self.knots.device)

    def forward(self, chances: Tensor) -> Tensor:
        """Evaluate the curve by sums of clamps (ONNX has no binary search); axes (rows,)."""
        at, value = self.knots.to(chances.device).unbind(1)
        width = at.diff()
        within = (chances[:, None] - at[:-1]).clamp(min=0.0).minimum(width)
        return value[0] + (within * (value.diff() / width)).sum(dim=1)

    def record(self) -> dict[str, Any]:
        return {"knots": self.knots.tolist()}

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        """Load a state with any number of knots."""
        if (kept := state.get(f"{prefix}knots")) is not None:
            self.knots = self.knots.new_empty(kept.shape)
        super()._load_from_state_dict(state, prefix, *rest)


class Platt(Curve):
    """A logistic curve whose input is the logit of the probability."""

    name = "platt"
    line: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("line", torch.tensor([1.0, 0.0], dtype=torch.float64))

    def fit(self, chances: np.ndarray, truth: np.ndarray) -> None:
        clipped = np.clip(chances, _LEAST, 1 - _LEAST)
        self.line.copy_(torch.tensor(platt(np.log(clipped / (1 - clipped)), smoothed(truth))))

    def forward(self, chances: Tensor) -> Tensor:
        """Return the curve's values for probabilities, axes (rows,)."""
        clipped = chances.clamp(_LEAST, 1 - _LEAST)
        slope, intercept = self.line.to(chances.device)
        return torch.sigmoid(slope * (clipped / (1 - clipped)).log() + intercept)

    def record(self) -> dict[str, Any]:
        return dict(zip(("slope", "intercept"), self.line.tolist(), strict=True))


CURVES: dict[str, type[Curve]] = {one.name: one for one in (Isotonic, Platt)}


class Calibration(nn.Module):
    """Calibration curves of a classification.

    Args:
        how: kind of the curves, "isotonic" or "platt".
        classes: number of classes, at least two.

    Attributes:
        doubts: texts of warnings about the fit.

    >>> made = Calibration("isotonic", 2)
    >>> made.fit(torch.tensor([[0.0, -1.0], [0.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0, 1]))
    >>> round(float(made(torch.tensor([[0.0, 0.5]])).exp()[0, 1]), 3)
    0.471
    """

    def __init__(self, how: str, classes: int) -> None:
        super().__init__()
        self.how, self.doubts = how, list[str]()
        self.curves = nn.ModuleList(CURVES[how]() for _ in range(1 if classes == 2 else classes))

    def fit(self, logits: Tensor, codes: Tensor) -> None:
        """Fit every curve; fit no curve if a class has no row or an output is not finite.

        Args:
            logits: logits of rows on which the model was not trained, axes (rows, classes).
            codes: classes of the rows as 0..C-1, axes (rows,).
        """
        rows, classes = logits.shape
        missing = classes - len(torch.unique(codes))
        self.doubts = []
        for curve in self.curves:  # curves that a warm start loaded belong to other weights
            curve.load_state_dict(CURVES[self.how]().state_dict())
        if missing or not torch.isfinite(logits).all():
            why = "have outputs that are not finite"
            if missing:
                why = f"lack {missing} of {classes} classes"
            self.doubts = [f"probabilities are not calibrated: the {rows} validation rows {why}"]
            return
        if self.how == "isotonic" and rows < _ISOTONIC_ROWS:
            self.doubts = [
                f"isotonic calibration is fitted to {rows} validation rows, and overfits below "
                f"about {_ISOTONIC_ROWS}: label.calibration = 'platt' needs fewer"
            ]
        chances, truth = torch.softmax(logits.double(), dim=1).cpu().numpy(), codes.cpu().numpy()
        for one, curve in zip(self._of_curves(), self.curves, strict=True):
            assert isinstance(curve, Curve)
            curve.fit(chances[:, one], (truth == one).astype(np.int64))

    def forward(self, logits: Tensor) -> Tensor:
        """Return the logarithms of the calibrated probabilities, axes (rows, classes)."""
        chances = torch.softmax(logits.double(), dim=1)
        found = [
            curve(chances[:, one])
            for one, curve in zip(self._of_curves(), self.curves, strict=True)
        ]
        if len(found) == 1:
            shares = torch.stack([1 - found[0], found[0]], dim=1)
        else:
            values = torch.stack(found, dim=1)
            total = values.sum(dim=1, keepdim=True)
            even = torch.full_like(values, 1 / len(found))
            shares = torch.where(total > 0, values / total.clamp(min=_LEAST), even)
        return shares.clamp(min=_LEAST).log().to(logits.dtype)

    def record(self) -> dict[str, Any]:
        """Return a record for JSON: the method, and each class's curve.

        For two classes the record contains only the second class's curve.
        """
        curves = [curve.record() for curve in self.curves if isinstance(curve, Curve)]
        return {"calibration": self.how, "curves": curves}

    def _of_curves(self) -> range:
        """Return the codes of the classes that have a curve."""
        return range(1, 2) if len(self.curves) == 1 else range(len(self.curves))
