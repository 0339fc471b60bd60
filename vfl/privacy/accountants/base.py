"""The accountant contract: the cost of steps of noise."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from vfl.privacy.events import GaussianSteps


class Accountant(ABC):
    """Computes an upper bound of epsilon for steps of Gaussian noise on sums of records.

    A member implements `epsilon`. Options are the arguments of its constructor.
    """

    @abstractmethod
    def epsilon(self, steps: Sequence[GaussianSteps], delta: float) -> float:
        """Return an upper bound of epsilon at a delta, for a record that is added or removed.

        Args:
            steps: steps of one kind, or of several kinds in sequence; at least one kind, each of at
                least one step.
            delta: between 0 and 1.

        Raises:
            MissingPackageError: a package that it needs is not installed.
        """


def all_moments(
    steps: Sequence[GaussianSteps], orders: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Return orders, and the log-moments of all steps at each; independent steps add up."""
    total = np.zeros(len(orders))
    for one in steps:
        total += one.steps * log_moments(one.sampling_rate, one.noise, orders)
    return np.array(orders, dtype=float), total


@lru_cache(maxsize=256)
def log_moments(rate: float, noise: float, orders: tuple[int, ...]) -> np.ndarray:
    """Return (order - 1) times the Renyi divergence of one step at each order.

    It is ln sum_i binom(a, i) (1 - q)^(a - i) q^i exp((i^2 - i) / (2 noise^2)) at order a.
    """
    if rate == 1:
        exact = np.array(orders, dtype=float)
        logs: np.ndarray = exact * (exact - 1) / (2 * noise**2)
        return logs
    from scipy.special import gammaln, logsumexp

    def of(order: int) -> float:
        i = np.arange(order + 1, dtype=float)
        binomial = gammaln(order + 1) - gammaln(i + 1) - gammaln(order - i + 1)
        terms = binomial + (order - i) * math.log1p(-rate) + i * math.log(rate)
        return float(logsumexp(terms + (i * i - i) / (2 * noise**2)))

    return np.array([of(order) for order in orders])
