"""Privacy loss distributions, which give the smallest epsilon of all accountants of vfl."""

from __future__ import annotations

from collections.abc import Sequence

from vfl.core.errors import MissingPackageError
from vfl.core.registry import require_range
from vfl.privacy.accountants.base import Accountant
from vfl.privacy.events import GaussianSteps


class PrivacyLoss(Accountant):
    """Privacy loss distributions, by Google's dp-accounting.

    Koskela, Jalko and Honkela 2020; Doroshenko et al. 2022.

    Args:
        interval: width of the grid to which privacy losses are rounded up.

    Raises:
        BadOptionError: a number is out of range.
    """

    def __init__(self, interval: float = 1e-4) -> None:
        require_range("interval", interval, 1e-6, 1.0)
        self._interval = interval

    def epsilon(self, steps: Sequence[GaussianSteps], delta: float) -> float:
        try:
            import dp_accounting as events
            from dp_accounting.pld import PLDAccountant
        except ImportError:
            raise MissingPackageError(
                "the accountant 'pld' needs dp-accounting",
                fix="pip install 'vfl[dp]', or use the accountant 'rdp', whose epsilon is a"
                " little larger",
            ) from None
        account = PLDAccountant(value_discretization_interval=self._interval)
        for one in steps:
            step = events.GaussianDpEvent(one.noise)
            if one.sampling_rate < 1:
                step = events.PoissonSampledDpEvent(one.sampling_rate, step)
            account.compose(events.SelfComposedDpEvent(step, one.steps))
        return float(account.get_epsilon(delta))
