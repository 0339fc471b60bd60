"""Tests that every accountant must pass; an author of a plug-in subclasses `AccountantContract`.

    class TestMine(AccountantContract):
        specs = ["mine:orders=32"]

pytest then runs every test of the contract once for each spec (name and options of a member).
"""

from __future__ import annotations

import math
from unittest import SkipTest

from vfl.core.errors import MissingPackageError
from vfl.core.registry import parse
from vfl.privacy.accountants import ACCOUNTANTS, epsilon_by, gaussian_epsilon, noise_for, steps_for
from vfl.privacy.events import GaussianSteps
from vfl.testing.base import Contract, global_states, require_still

#: Gaussian noise steps under test, with little and with much noise, with and without sampling.
_KINDS = (
    GaussianSteps(0.8, 1),
    GaussianSteps(4.0, 20),
    GaussianSteps(1.1, 300, 0.02),
    GaussianSteps(0.7, 50, 0.2),
)
_DELTA = 1e-5
#: Factor by which an accountant's epsilon may be too small, because of rounding.
_CLOSE = 1 - 1e-3


class AccountantContract(Contract):
    """Properties of every upper bound of the epsilon of Gaussian noise steps."""

    family = "accountant"

    def test_epsilon_is_at_least_its_lower_bound(self, spec: str) -> None:
        for kind in _KINDS:
            found = self.cost(spec, kind)
            assert math.isfinite(found), "an epsilon is not finite"
            assert found >= _CLOSE * _least(kind), (
                "an epsilon is below a lower bound of the steps' cost"
            )

    def test_epsilon_is_monotone_in_steps_noise_and_delta(self, spec: str) -> None:
        for kind in _KINDS:
            found, rate = self.cost(spec, kind), kind.sampling_rate
            more = self.cost(spec, GaussianSteps(kind.noise, 2 * kind.steps, rate))
            louder = self.cost(spec, GaussianSteps(2 * kind.noise, kind.steps, rate))
            surer = self.cost(spec, kind, _DELTA / 100)
            assert louder <= found <= min(more, surer), (
                "an epsilon rises where it must fall, or falls where it must rise"
            )

    def test_composed_epsilon_is_at_least_that_of_each_part(self, spec: str) -> None:
        found = self.cost(spec, _KINDS)
        assert found >= _CLOSE * max(self.cost(spec, kind) for kind in _KINDS)
        assert self.cost(spec, (*_KINDS, GaussianSteps(1.0, 0))) == found

    def test_no_steps_have_an_epsilon_of_zero(self, spec: str) -> None:
        assert self.cost(spec, GaussianSteps(1.0, 0)) == 0.0

    def test_epsilon_is_deterministic(self, spec: str) -> None:
        states = global_states()
        for kind in _KINDS:
            assert self.cost(spec, kind) == self.cost(spec, kind)
        require_still(states)

    def test_computed_noise_and_steps_stay_within_the_budget(self, spec: str) -> None:
        self.cost(spec, _KINDS[0])
        noise = noise_for(3.0, _DELTA, 100, 0.02, spec)
        assert self.cost(spec, GaussianSteps(noise, 100, 0.02)) <= 3.0
        steps = steps_for(3.0, _DELTA, noise, 0.02, spec)
        assert steps >= 100
        assert self.cost(spec, GaussianSteps(noise, steps, 0.02)) <= 3.0

    def test_name_is_registered(self, spec: str) -> None:
        assert parse(spec)[0] in ACCOUNTANTS.names()

    def cost(
        self, spec: str, steps: GaussianSteps | tuple[GaussianSteps, ...], delta: float = _DELTA
    ) -> float:
        """Return the epsilon of noise steps; skip the test if the accountant lacks a package."""
        try:
            return epsilon_by(steps, delta, spec)
        except MissingPackageError as missing:
            raise SkipTest(str(missing)) from None


def _least(kind: GaussianSteps) -> float:
    """Return a lower bound of epsilon: exact without sampling, otherwise the bound for one step.

    A sampled step includes the record with probability q, so a test for the record errs at least as
    often as a test at delta / q does.
    """
    rate = kind.sampling_rate
    if rate == 1:
        return gaussian_epsilon(kind.noise, math.sqrt(kind.steps), _DELTA)
    alone = gaussian_epsilon(kind.noise, 1.0, _DELTA / rate)
    return math.log1p(rate * math.expm1(alone))
