"""Means over repeats, and how far they can be trusted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.special import stdtrit

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and half of its 95 % interval.

    Attributes:
        mean: over the repeats.
        half_width: of Student's interval; None for a single repeat.
        count: repeats.
    """

    mean: float
    half_width: float | None
    count: int

    @property
    def low(self) -> float:
        """Lower end of the interval; without bound for a single repeat."""
        return -math.inf if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float:
        """Upper end of the interval; without bound for a single repeat."""
        return math.inf if self.half_width is None else self.mean + self.half_width

    @property
    def standard_error(self) -> float:
        """Of the mean; without bound for a single repeat."""
        if self.half_width is None:
            return math.inf
        return self.half_width / _quantile(self.count)


def estimate(values: Sequence[float]) -> Estimate | None:
    """The mean of independent repeats with Student's 95 % interval; None without any.

    mean +/- t(0.975, n - 1) s / sqrt(n), s the deviation of the sample (Student 1908).

    >>> found = estimate([0.70, 0.72, 0.74])
    >>> f"{found.mean:.2f} +- {found.half_width:.4f}"  # t = 4.3027, s = 0.02
    '0.72 +- 0.0497'
    """
    if not values:
        return None
    count, mean = len(values), statistics.fmean(values)
    if count == 1:
        return Estimate(mean, None, 1)
    half_width = _quantile(count) * statistics.stdev(values) / math.sqrt(count)
    return Estimate(mean, half_width, count)


def paired_difference(ours: Mapping[Any, float], reference: Mapping[Any, float]) -> Estimate | None:
    """The mean of ours minus the reference's, over the repeats that both have.

    Repeats share rows and seeds, so their differences vary less than they do themselves.
    """
    return estimate([ours[repeat] - reference[repeat] for repeat in ours if repeat in reference])


def _quantile(count: int) -> float:
    """Student's, for so many repeats."""
    return float(stdtrit(count - 1, (1 + CONFIDENCE) / 2))
