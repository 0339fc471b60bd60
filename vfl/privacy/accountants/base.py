"""Contract of an accountant, which computes the epsilon of noise steps."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from vfl.privacy.events import GaussianSteps


class Accountant(ABC):
    """Base class that bounds the epsilon of steps that add Gaussian noise to sums over records.

    A member implements `epsilon`. Options are the arguments of the subclass's constructor.
    """

    @abstractmethod
    def epsilon(self, steps: Sequence[GaussianSteps], delta: float) -> float:
        """Return an upper bound of epsilon at a delta.

        Neighbouring data differ by one added or removed record.

        Args:
            steps: noise steps of one kind, or of several kinds one after the other; at least one
                kind, and each kind has at least one step.
            delta: delta between 0 and 1.

        Raises:
            MissingPackageError: a package that the accountant needs is not installed.
        """


def all_moments(
    steps: Sequence[GaussianSteps], orders: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Return Renyi orders, and at each order the sum of all steps' privacy-loss log-moments."""
    total = np.zeros(len(orders))
    for one in steps:
        total += one.steps * log_moments(one.sampling_rate, one.noise, orders)
    return np.array(orders, dtype=float), total


@lru_cache(maxsize=256)
def log_moments(rate: float, noise: float, orders: tuple[int, ...]) -> np.ndarray:
    """Return (order - 1) times the Renyi divergence of one noise step, at each order.

    At order a, the result is ln sum_i binom(a, i) (1 - q)^(a - i) q^i exp((i^2 - i) / (2 noise^2)),
    where q is the sampling rate.
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
