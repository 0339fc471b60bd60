"""Accountants beside published values, Google's, closed forms and each other."""

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from scipy.stats import norm

from vfl.core.errors import BadOptionError, MissingPackageError, PrivacyError, UnknownNameError
from vfl.core.registry import parse
from vfl.privacy.accountants import (
    ACCOUNTANTS,
    GaussianSteps,
    epsilon_by,
    epsilon_of,
    gaussian_epsilon,
    noise_for,
    steps_for,
)
from vfl.privacy.accountants.base import log_moments
from vfl.testing import AccountantContract

CASE = GaussianSteps(noise=4.0, steps=10_000, sampling_rate=0.01)
#: Abadi et al. 2016, section 3 and 5.2, recomputed, and what later accountants make of it.
KNOWN = {"moments": 1.2586, "strong_composition": 9.3536, "rdp": 1.0355, "pld": 0.947}


def needs(name):
    if name == "pld":
        pytest.importorskip("dp_accounting")


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_the_reference_case(name):
    needs(name)
    assert epsilon_by(CASE, 1e-5, name) == pytest.approx(KNOWN[name], rel=0.005)


def test_a_moment_is_the_integral_it_stands_for():
    rate, noise, order = 0.1, 1.3, 5

    def integrand(x):
        mixed = (1 - rate) * norm.pdf(x, 0, noise) + rate * norm.pdf(x, 1, noise)
        return norm.pdf(x, 0, noise) * (mixed / norm.pdf(x, 0, noise)) ** order

    log_moment = math.log(quad(integrand, -30, 40, limit=500)[0])
    assert log_moments(rate, noise, (order,))[0] == pytest.approx(log_moment, rel=1e-6)


@pytest.mark.parametrize(
    ("rate", "noise", "steps"),
    [(0.01, 1.1, 1000), (0.2, 20.0, 10)],
)
def test_ours_beside_googles(rate, noise, steps):
    events = pytest.importorskip("dp_accounting")
    from dp_accounting.rdp import RdpAccountant

    step = events.PoissonSampledDpEvent(rate, events.GaussianDpEvent(noise))
    theirs = RdpAccountant().compose(events.SelfComposedDpEvent(step, steps)).get_epsilon(1e-5)
    steps_of = GaussianSteps(noise, steps, rate)
    pld, rdp, moments = (epsilon_of(steps_of, 1e-5, name) for name in ("pld", "rdp", "moments"))
    assert rdp == pytest.approx(theirs, rel=0.06)
    assert pld <= rdp <= moments


def test_without_sampling_it_is_exact_and_every_bound_lies_above():
    many = GaussianSteps(noise=20.0, steps=16)
    exact = epsilon_of(many, 1e-5)
    assert exact == gaussian_epsilon(5.0, 1.0, 1e-5)
    for name in ("rdp", "moments", "strong_composition"):
        assert epsilon_by(many, 1e-5, name) >= exact


@pytest.mark.parametrize(("rate", "epsilon"), [(0.02, 2.0), (1.0, 0.5), (1.0, 8.0)])
def test_the_way_back_keeps_the_budget_and_wastes_little(rate, epsilon):
    noise = noise_for(epsilon, 1e-5, 500, rate)
    spent = epsilon_of(GaussianSteps(noise, 500, rate), 1e-5)
    assert 0.999 * epsilon <= spent <= epsilon
    most = steps_for(epsilon, 1e-5, noise, rate)
    assert 500 <= most <= 505
    assert epsilon_of(GaussianSteps(noise, most + 1, rate), 1e-5) > epsilon


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_steps_of_several_kinds_cost_what_google_says_or_more(name):
    events = pytest.importorskip("dp_accounting")
    from dp_accounting.pld import PLDAccountant

    kinds = [GaussianSteps(7.0, 1), CASE]
    account = PLDAccountant().compose(events.GaussianDpEvent(7.0))
    sampled = events.PoissonSampledDpEvent(0.01, events.GaussianDpEvent(4.0))
    theirs = account.compose(events.SelfComposedDpEvent(sampled, 10_000)).get_epsilon(1e-5)
    ours = epsilon_by(kinds, 1e-5, name)
    assert ours == pytest.approx(theirs) if name == "pld" else ours > theirs
    halves = [GaussianSteps(4.0, 4000, 0.01), GaussianSteps(4.0, 6000, 0.01)]
    if name != "strong_composition":
        assert epsilon_by(halves, 1e-5, name) == pytest.approx(epsilon_by(CASE, 1e-5, name))


def dwork(one, delta):
    """Strong composition of one kind, its delta shared out as well as a minimiser can."""

    def total(share):
        step = one.sampling_rate / one.noise
        step *= math.sqrt(2 * math.log(1.25 * one.sampling_rate * one.steps / (share * delta)))
        rest = math.sqrt(2 * one.steps * math.log(1 / ((1 - share) * delta)))
        return step * rest + one.steps * step * math.expm1(step)

    return minimize_scalar(total, bounds=(1e-4, 1 - 1e-4), method="bounded").fun


@pytest.mark.parametrize("count", [2, 3, 5])
def test_strong_composition_of_several_kinds_spends_delta_once_in_all(count):
    kinds = [GaussianSteps(4.0 + one, 1000 * (one + 1), 0.01) for one in range(count)]
    found = epsilon_by(kinds, 1e-5, "strong_composition")
    assert found == pytest.approx(sum(dwork(one, 1e-5 / count) for one in kinds), rel=1e-4)
    assert found > 1.001 * sum(dwork(one, 1e-5) for one in kinds)  # each with the whole delta


def test_kinds_without_steps_take_no_share_of_delta():
    none = GaussianSteps(1.0, 0)
    name = "strong_composition"
    assert epsilon_by([CASE, none], 1e-5, name) == epsilon_by(CASE, 1e-5, name)


def test_epsilon_grows_with_steps_and_rate_and_falls_with_noise():
    at = [epsilon_of(GaussianSteps(2.0, steps, 0.02), 1e-5) for steps in (0, 1, 10, 100, 1000)]
    assert at[0] == 0
    assert np.all(np.diff(at) > 0)
    rates = [epsilon_of(GaussianSteps(2.0, 100, rate), 1e-5) for rate in (0.01, 0.1, 0.5, 1)]
    assert np.all(np.diff(rates) > 0)
    assert epsilon_of(GaussianSteps(3.0, 100, 0.1), 1e-5) < rates[1]


def test_no_steps_fit_a_budget_that_is_too_small():
    assert steps_for(0.01, 1e-5, noise=0.5, sampling_rate=0.5) == 0


@pytest.mark.parametrize(
    "wrong",
    [{"noise": 0.0}, {"noise": math.inf}, {"steps": -1}, {"sampling_rate": 0.0},
     {"sampling_rate": 1.5}],
    ids=str,
)  # fmt: skip
def test_numbers_out_of_range(wrong):
    with pytest.raises(BadOptionError):
        GaussianSteps(**{"noise": 1.0, "steps": 1} | wrong)


def test_what_cannot_be_asked(monkeypatch):
    with pytest.raises(BadOptionError):
        epsilon_by(CASE, 0.0, "rdp")
    with pytest.raises(UnknownNameError, match="accountant"):
        epsilon_by(CASE, 1e-5, "guess")
    with pytest.raises(PrivacyError, match="no noise"):
        noise_for(1e-9, 1e-12, 10**9)
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(MissingPackageError, match="pld"):
        epsilon_by(CASE, 1e-5, "pld")


class TestRegisteredAccountants(AccountantContract):
    # pld without a coarser interval is the same code, and takes minutes.
    specs = ("rdp", "pld:interval=1e-3", "moments", "moments:most=64", "strong_composition")


def test_every_accountant_is_under_contract():
    tested = {parse(spec)[0] for spec in TestRegisteredAccountants.specs}
    assert tested == set(ACCOUNTANTS.names())
