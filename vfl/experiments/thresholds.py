"""Quality of a two-class model at a decision threshold, and calibration of its probabilities.

All functions of this module take a `Scored` (counts of rows by score) whose scores are
probabilities. Up to a thousand rows, a `Scored` contains single rows; with more rows, it contains
groups of rows with neighbouring probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vfl.core.errors import ConfigError

if TYPE_CHECKING:
    from vfl.session.label.scored import Scored

#: Shares of flagged rows for which the table of thresholds has a line.
FLAGGED = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
#: Distance by which probabilities are kept from 0 and 1, as for the log loss of summaries; see
#: `vfl.session.label.quality`.
_LEAST = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Confusion:
    """Counts of rows by true class and by predicted class at one decision threshold.

    Attributes:
        threshold: probability from which on rows are flagged as positive.
        true_positives, false_positives, false_negatives, true_negatives: rows.
    """

    threshold: float
    true_positives: int
    false_positives: int
    false_negatives: int
    true_negatives: int

    @property
    def precision(self) -> float | None:
        """Share of positives among flagged rows; None if no row is flagged."""
        flagged = self.true_positives + self.false_positives
        return self.true_positives / flagged if flagged else None

    @property
    def recall(self) -> float:
        """Share of positives that are flagged."""
        return self.true_positives / (self.true_positives + self.false_negatives)

    @property
    def flagged(self) -> float:
        """Share of all rows that are flagged."""
        flagged = self.true_positives + self.false_positives
        return flagged / (flagged + self.false_negatives + self.true_negatives)


def confusions(scored: Scored) -> list[Confusion]:
    """Return the confusion at each threshold that separates rows; the highest comes first."""
    totals = scored.counts.sum(axis=0)
    above = np.cumsum(scored.counts[::-1], axis=0)
    return [
        Confusion(float(p), int(own[1]), int(own[0]), int(totals[1] - own[1]),
                  int(totals[0] - own[0]))
        for p, own in zip(scored.values[::-1], above, strict=True)
    ]  # fmt: skip


def confusion_at(scored: Scored, threshold: float) -> Confusion:
    """Return the confusion (counts of rows) at a given threshold.

    >>> from vfl.session.label.scored import Scored
    >>> scored = Scored(np.array([0.1, 0.4, 0.8]), np.array([[5, 0], [2, 1], [0, 2]]))
    >>> found = confusion_at(scored, 0.4)
    >>> found.precision, found.recall, found.flagged
    (0.6, 1.0, 0.5)
    """
    flagged = scored.counts[scored.values >= threshold].sum(axis=0)
    negatives, positives = scored.counts.sum(axis=0) - flagged
    return Confusion(threshold, int(flagged[1]), int(flagged[0]), int(positives), int(negatives))


def average_precision(scored: Scored) -> float:
    """Return the area under the precision-recall step function, as scikit-learn defines it.

    >>> from vfl.session.label.scored import Scored
    >>> scored = Scored(np.array([0.1, 0.4, 0.8]), np.array([[5, 0], [2, 1], [0, 2]]))
    >>> round(average_precision(scored), 4)
    0.8667
    """
    area, recall = 0.0, 0.0
    for one in confusions(scored):
        area += (one.recall - recall) * (one.precision or 0.0)
        recall = one.recall
    return area


def cheapest_threshold(scored: Scored, missed_cost: float) -> float:
    """Return the threshold with the lowest total cost, given the cost of one missed positive.

    Args:
        scored: counts of rows that the model was not trained on, such as validation rows.
        missed_cost: cost of one false negative, as a number of false positives.

    Raises:
        ConfigError: `missed_cost` is not larger than 0.

    >>> from vfl.session.label.scored import Scored
    >>> scored = Scored(np.array([0.1, 0.4, 0.8]), np.array([[5, 0], [2, 1], [0, 2]]))
    >>> cheapest_threshold(scored, 10.0), cheapest_threshold(scored, 1.0)
    (0.4, 0.8)
    """
    if not 0 < missed_cost < float("inf"):
        raise ConfigError("a cost must be a number above 0", where="--cost", got=f"{missed_cost:g}")
    found = min(
        confusions(scored), key=lambda one: one.false_negatives * missed_cost + one.false_positives
    )
    return found.threshold


def best_f1_threshold(scored: Scored) -> float:
    """Return the threshold with the largest F1 score."""

    def f1(one: Confusion) -> float:
        wrong = one.false_positives + one.false_negatives
        return 2 * one.true_positives / (2 * one.true_positives + wrong)

    return max(confusions(scored), key=f1).threshold


def flagging(scored: Scored, share: float) -> float:
    """Return the highest threshold that flags at least this share of the rows."""
    return next(one.threshold for one in confusions(scored) if one.flagged >= share - 1e-12)


@dataclass(frozen=True)
class Band:
    """A group of rows with neighbouring predicted probabilities.

    Attributes:
        rows, positives: number of rows in the band, and number of positives among them.
        expected: mean predicted probability of the band's rows.
        captured: share of all positives that are in this band or in bands with higher
            probabilities.
    """

    rows: int
    positives: int
    expected: float
    captured: float


def bands(scored: Scored, most: int = 10) -> list[Band]:
    """Return at most `most` bands of about equal size; the band of highest probabilities is first.

    >>> from vfl.session.label.scored import Scored
    >>> scored = Scored(np.array([0.1, 0.4, 0.8]), np.array([[5, 0], [2, 1], [0, 2]]))
    >>> [(one.rows, one.positives, round(one.captured, 2)) for one in bands(scored, 2)]
    [(5, 3, 1.0), (5, 0, 1.0)]
    """
    found, captured = [], 0
    for band in scored.bands(most, highest_first=True):
        captured += band.positives
        expected = float(band.values[::-1] @ band.counts.sum(axis=1)[::-1] / band.rows)
        found.append(Band(band.rows, band.positives, expected, captured / scored.positives))
    return found


def calibration_error(scored: Scored) -> float:
    """Return the mean difference of predicted and observed shares of positives, over ten bands."""
    return sum(
        one.rows / scored.rows * abs(one.expected - one.positives / one.rows)
        for one in bands(scored)
    )


def log_loss(scored: Scored, probability: np.ndarray | None = None) -> float:
    """Return the mean log loss, for the stored probabilities of the groups or for given ones."""
    chances = scored.values if probability is None else probability
    chances = np.clip(chances, _LEAST, 1 - _LEAST)
    negatives, positives = scored.counts.T
    total = positives @ np.log(chances) + negatives @ np.log(1 - chances)
    return float(-total / scored.rows)


def brier(scored: Scored, probability: np.ndarray | None = None) -> float:
    """Return the mean squared error of probabilities (Brier 1950); see `log_loss`."""
    chances = scored.values if probability is None else probability
    negatives, positives = scored.counts.T
    return float((positives @ (1 - chances) ** 2 + negatives @ chances**2) / scored.rows)


def calibrated(validation: Scored, probability: np.ndarray, how: str = "isotonic") -> np.ndarray:
    """Calibrate probabilities on the validation rows; see `Calibration`.

    Args:
        validation: counts of rows of both classes that the model was not trained on.
        probability: probabilities to calibrate, axes (rows,).
        how: method, "isotonic" or "platt".
    """
    import torch

    from vfl.session.label.calibration import CURVES

    curve, rows = CURVES[how](), validation.counts.ravel()
    chances = np.repeat(np.repeat(validation.values, 2), rows)
    curve.fit(chances, np.repeat(np.tile([0, 1], len(validation.values)), rows))
    found: np.ndarray = curve(torch.from_numpy(probability)).numpy()
    return found
