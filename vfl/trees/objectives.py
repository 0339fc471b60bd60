"""Losses for boosting, with the first and second derivatives of each row's loss by its margins.

Margins have axes (rows, outputs): there is one output for two classes and for regression, and
otherwise one output per class. Formulas and bounds are those of XGBoost, so that vfl and XGBoost
grow the same trees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import expit, log_softmax, softmax

from vfl.core.errors import DataError

_LEAST_SECOND = 1e-16


@dataclass(frozen=True)
class Objective:
    """A loss as a function of each row's margins (outputs of the trees before the link function).

    Attributes:
        outputs: number of margins per row.
    """

    outputs: int = 1

    def start(self, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the constant margins with the lowest loss, for the first tree; axes (outputs,)."""
        raise NotImplementedError

    def derivatives(self, margins: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return first and second derivatives of each row's loss, axes (rows, outputs) each."""
        raise NotImplementedError

    def loss(self, margins: np.ndarray, labels: np.ndarray) -> float:
        """Return the mean loss of rows; for counts, without the term that margins do not change."""
        likely = log_softmax(self.parts(margins), axis=1)
        return float(-likely[np.arange(len(labels)), labels].mean())

    def logits(self, margins: np.ndarray) -> np.ndarray:
        """Return logits, axes (rows, classes), or expected labels, axes (rows, 1)."""
        return self.parts(margins)

    def parts(self, margins: np.ndarray) -> np.ndarray:
        """Convert the columns' contributions to the margins into contributions to `logits`.

        For counts, these are contributions to the logarithm of the expected count.
        """
        return margins


class Binary(Objective):
    """Cross-entropy of two classes."""

    def start(self, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
        share = np.clip(np.average(labels, weights=weights), 1e-7, 1 - 1e-7)
        return np.array([np.log(share / (1 - share))])

    def derivatives(self, margins: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        likely = expit(margins)
        return likely - labels[:, None], np.maximum(likely * (1 - likely), _LEAST_SECOND)

    def parts(self, margins: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros_like(margins), margins], axis=1)


class Classes(Objective):
    """Cross-entropy of several classes."""

    def start(self, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
        counts = np.bincount(labels, weights=weights, minlength=self.outputs)
        shares: np.ndarray = np.log(np.maximum(counts / counts.sum(), 1e-7))
        return shares

    def derivatives(self, margins: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        likely = softmax(margins, axis=1)
        first = likely.copy()
        first[np.arange(len(labels)), labels] -= 1
        return first, np.maximum(2 * likely * (1 - likely), _LEAST_SECOND)


class Squared(Objective):
    """Half of the squared error, for numeric labels."""

    def start(self, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return np.array([np.average(labels, weights=weights)])

    def loss(self, margins: np.ndarray, labels: np.ndarray) -> float:
        return float(np.square(margins[:, 0] - labels).mean() / 2)

    def derivatives(self, margins: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return margins - labels[:, None], np.ones_like(margins)


@dataclass(frozen=True)
class Poisson(Objective):
    """Negative log-likelihood of counts under a Poisson distribution.

    Attributes:
        max_delta_step: number added to the margin in the formula of the second derivative; this
            keeps leaf weights small for low counts.
    """

    max_delta_step: float = 0.7

    def start(self, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
        if labels.min() < 0:
            raise DataError(
                "counts must not be negative",
                where="the label party's column of labels",
                got="a negative number",
                want="numbers from 0 on",
                fix="objective=auto, the squared error, for numbers that may be negative",
            )
        return np.array([np.log(max(np.average(labels, weights=weights), 1e-7))])

    def loss(self, margins: np.ndarray, labels: np.ndarray) -> float:
        return float((np.exp(margins[:, 0]) - labels * margins[:, 0]).mean())

    def derivatives(self, margins: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        expected = np.exp(margins)
        return expected - labels[:, None], np.exp(margins + self.max_delta_step)

    def logits(self, margins: np.ndarray) -> np.ndarray:
        expected: np.ndarray = np.exp(margins)
        return expected
