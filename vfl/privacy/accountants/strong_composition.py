"""Strong composition, as a reference for comparison."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vfl.privacy.accountants.base import Accountant
from vfl.privacy.events import GaussianSteps


class StrongComposition(Accountant):
    """Strong composition of Gaussian steps on sampled rows, with the best division of delta.

    Source: Dwork, Rothblum and Vadhan 2010, theorem III.3. With sampling rate q, a step costs q
    times the epsilon and q times the delta of a step on all rows. For steps of several kinds, delta
    is divided equally among the kinds, and the kinds' epsilons are added.

    >>> round(StrongComposition().epsilon([GaussianSteps(4.0, 10_000, 0.01)], 1e-5), 3)
    9.353
    """

    def epsilon(self, steps: Sequence[GaussianSteps], delta: float) -> float:
        return sum(_of_one_kind(one, delta / len(steps)) for one in steps)


def _of_one_kind(kind: GaussianSteps, delta: float) -> float:
    rate, steps, noise = kind.sampling_rate, kind.steps, kind.noise
    share = 1 / (1 + np.exp(np.linspace(-12, 12, 4001)))
    one = rate * np.sqrt(2 * np.log(1.25 * rate * steps / (share * delta))) / noise
    left = (1 - share) * delta
    with np.errstate(over="ignore"):  # the result is infinite if one step's epsilon is large
        total = one * np.sqrt(2 * steps * np.log(1 / left)) + steps * one * np.expm1(one)
    return float(total.min())
