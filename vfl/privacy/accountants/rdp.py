"""Renyi differential privacy, the default accountant of a training; needs no other package."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vfl.privacy.accountants.base import Accountant, all_moments
from vfl.privacy.events import GaussianSteps

_ORDERS = (*range(2, 65), *range(72, 257, 8), 320, 384, 512, 768, 1024)


class RenyiDP(Accountant):
    """Renyi differential privacy of the sampled Gaussian mechanism.

    Source: Mironov, Talwar and Zhang 2019, section 3.3, at integer orders. Between two integer
    orders the log-moments are convex, so a straight line between their values at these orders is an
    upper bound. The conversion from moments to epsilon is proposition 12 of Canonne, Kamath and
    Steinke 2020.

    >>> round(RenyiDP().epsilon([GaussianSteps(4.0, 10_000, 0.01)], 1e-5), 4)
    1.0355
    """

    def epsilon(self, steps: Sequence[GaussianSteps], delta: float) -> float:
        whole, logs = all_moments(steps, _ORDERS)
        orders = np.concatenate([np.arange(1.1, 12, 0.1), whole])
        logs = np.interp(orders, np.append(1, whole), np.append(0, logs))
        renyi = logs / (orders - 1)
        found = renyi + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
        return max(0.0, float(found.min()))
