"""The moments accountant, as a reference for comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vfl.core.registry import require_range
from vfl.privacy.accountants.base import Accountant, all_moments
from vfl.privacy.events import GaussianSteps


class Moments(Accountant):
    """The moments accountant of Abadi et al., as first published.

    Abadi et al. 2016, theorem 2 and section 3.2.

    Args:
        most: largest order of the moments that the accountant uses; the smallest order is 1.

    >>> round(Moments().epsilon([GaussianSteps(4.0, 10_000, 0.01)], 1e-5), 4)
    1.2586

    Raises:
        BadOptionError: a number is out of range.
    """

    def __init__(self, most: int = 32) -> None:
        require_range("most", most, 1, 1024)
        self._orders = tuple(range(2, most + 2))

    def epsilon(self, steps: Sequence[GaussianSteps], delta: float) -> float:
        orders, logs = all_moments(steps, self._orders)
        found = (logs - math.log(delta)) / (orders - 1)
        return float(found.min())
