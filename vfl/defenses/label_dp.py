"""Randomised response: some training labels are other labels, drawn once before the training."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from vfl.defenses.base import Defense, LabelKind, PrivacyStatement, Side
from vfl.defenses.refusals import require_classes
from vfl.errors import BadOptionError, SpecError
from vfl.options import require, require_range
from vfl.seeds import Secret


class LabelDP(Defense):
    """Each training label is replaced at random before the first step (Warner 1965).

    Without a prior, another label, all equally likely, comes in its place with probability `flip`;
    epsilon = ln((1 - flip)(K - 1) / flip) for K classes. With a public `prior`, RRWithPrior (Ghazi
    et al. 2021, algorithm 2): answers are among the likely classes only, as many as keep
    most labels true on average.

    It is the one promise that holds for everything that follows: all epochs, messages and weights.

    Args:
        epsilon: of one label.
        flip: probability of another label; instead of `epsilon`.
        prior: what everybody knows about the classes, their shares joined by dashes, in the order
            of the sorted classes; it must not come from the training labels.

    >>> defense = LabelDP(flip=0.1)
    >>> defense.prepare(LabelKind(classes=10))
    >>> round(defense.privacy()[0].epsilon, 4)  # ln(0.9 * 9 / 0.1)
    4.3944

    Raises:
        BadOptionError: an option out of range.
    """

    side: ClassVar[Side] = "label"
    once: ClassVar[bool] = True

    def __init__(
        self, epsilon: float | None = None, flip: float | None = None, prior: str | None = None
    ) -> None:
        if (epsilon is None) == (flip is None):
            raise BadOptionError(
                "randomised response needs one strength",
                want="'epsilon' or 'flip', not both",
                fix="label_dp:epsilon=2",
            )
        if epsilon is not None:
            require_range("epsilon", epsilon, 0)
        if flip is not None:
            require("flip", flip, "above 0 and below 1", 0 < flip < 1)
            require("prior", prior, "'epsilon' with it, not 'flip'", prior is None)
        self.epsilon = epsilon
        self.flip = flip
        self.prior = None if prior is None else _shares(prior)
        self._classes: int | None = None if self.prior is None else self.prior.size

    def prepare(self, kind: LabelKind) -> None:
        classes = require_classes("label_dp", kind)
        if self.prior is not None and self.prior.size != classes:
            raise SpecError(
                "the prior of 'label_dp' has another number of classes than the labels",
                got=f"{self.prior.size} shares",
                want=f"{classes}, joined by dashes",
            )
        if self.flip is not None and self.flip > 1 - 1 / classes:
            raise SpecError(
                f"'label_dp' flips more often than pure chance does among {classes} classes",
                got=f"flip={self.flip:g}",
                want=f"at most {1 - 1 / classes:.4g}",
            )
        self._classes = classes

    def labels(self, labels: Tensor, secret: Secret) -> Tensor:
        assert self._classes is not None, "prepare comes first"
        draws = secret.uniform((len(labels), 2), "label_dp")
        exact = labels.numpy()
        if self.prior is not None and self.epsilon is not None:
            answers = respond_with_prior(exact, self.prior, self.epsilon, draws)
        else:
            flip = self.flip
            if flip is None:
                assert self.epsilon is not None, "one of the two was given"
                flip = flip_of(self.epsilon, self._classes)
            answers = respond(exact, self._classes, flip, draws)
        return torch.from_numpy(answers).to(labels.dtype)

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        against = "everybody, in one training; a second one draws anew"
        if self.epsilon is None and self._classes is None:
            return (PrivacyStatement(protects="labels", against=against),)
        epsilon = self.epsilon
        if epsilon is None:
            assert self.flip is not None, "one of the two was given"
            assert self._classes is not None, "checked above"
            epsilon = max(0.0, math.log((1 - self.flip) * (self._classes - 1) / self.flip))
        return (PrivacyStatement("labels", against, epsilon, 0.0, "one training label"),)


def flip_of(epsilon: float, classes: int) -> float:
    """The probability of another label under which a label keeps `epsilon`.

    >>> round(flip_of(math.log(9), classes=10), 4)  # 9 / (9 + 9)
    0.5
    """
    return (classes - 1) / (math.exp(min(epsilon, 700.0)) + classes - 1)


def respond(
    labels: np.ndarray, classes: int | np.ndarray, flip: float | np.ndarray, draws: np.ndarray
) -> np.ndarray:
    """Labels of which some are others, all others equally likely.

    Args:
        labels: codes, axes (rows,).
        classes: how many there are, of each row where they differ.
        flip: probability of another label, likewise.
        draws: uniform on [0, 1), axes (rows, 2).
    """
    shift = 1 + np.floor(draws[:, 1] * (classes - 1)).astype(labels.dtype)
    return np.where(draws[:, 0] < flip, (labels + shift) % classes, labels)


def respond_with_prior(
    labels: np.ndarray, priors: np.ndarray, epsilon: float, draws: np.ndarray
) -> np.ndarray:
    """RRWithPrior: randomised response among the classes it is best to answer with.

    A label among them is told with probability e^epsilon / (e^epsilon + k - 1), else each of the
    others alike; a label that is not among them is answered by any of them alike.

    Args:
        labels: codes, axes (rows,).
        priors: shares of the classes, axes (rows, classes), or (1, classes) for all rows.
        epsilon: of one label.
        draws: as in `respond`.
    """
    order, counts = answers_of(priors, epsilon)
    of_row = np.arange(len(labels)) % len(order)
    place, count = np.argsort(order, axis=1)[of_row, labels], counts[of_row]
    flips = np.array([flip_of(epsilon, k) for k in range(1, priors.shape[1] + 1)])
    told = respond(place, count, flips[count - 1], draws)
    anything = np.floor(draws[:, 1] * count).astype(told.dtype)
    chosen: np.ndarray = order[of_row, np.where(place < count, told, anything)]
    return chosen


def answers_of(priors: np.ndarray, epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    """Each row's classes, likeliest first, and how many keep most labels true as answers.

    Ghazi et al. 2021, algorithm 2; axes (rows, classes) give (rows, classes) and (rows,).
    """
    order = np.argsort(-priors, axis=1, kind="stable")
    reached = np.cumsum(np.take_along_axis(priors, order, axis=1), axis=1)
    kept = np.array([1 - flip_of(epsilon, k) for k in range(1, priors.shape[1] + 1)])
    return order, 1 + np.argmax(kept * reached, axis=1)


def _shares(text: str) -> np.ndarray:
    try:
        shares = [float(part) for part in text.split("-")]
    except ValueError:
        shares = []
    right = len(shares) > 1 and min(shares) >= 0 and abs(sum(shares) - 1) < 1e-3
    require("prior", text, "shares that add up to 1, such as 0.6-0.3-0.1", right)
    return np.array([shares])
