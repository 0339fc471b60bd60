"""Lower bounds of epsilon: beside simulations of mechanisms whose epsilon is known."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from vfl.core.errors import BadOptionError
from vfl.privacy.accountants import gaussian_epsilon
from vfl.privacy.audit import bound_of, bound_of_many, many_runs_epsilon, one_run_epsilon

DELTA = 1e-5


def test_all_right_guesses_prove_what_a_fair_coin_would_not():
    """With delta 0 it is a test of a binomial law: p^r = 1 - confidence at the bound."""
    for guesses in (10, 100, 1000):
        p = 0.05 ** (1 / guesses)
        assert one_run_epsilon(guesses, guesses, guesses, 0.0) == pytest.approx(
            math.log(p / (1 - p))
        )


def test_delta_lowers_what_is_proved_and_confidence_too():
    plain = one_run_epsilon(500, 100, 95, 0.0)
    assert one_run_epsilon(500, 100, 95, 1e-3) < plain
    assert one_run_epsilon(500, 100, 95, 0.0, confidence=0.999) < plain
    assert one_run_epsilon(500, 100, 95, 0.0, confidence=0.5) > plain
    assert one_run_epsilon(500, 0, 0, 0.0) == 0


def test_the_slack_of_delta_is_the_largest_of_all():
    """By a loop over the theorem's terms."""
    canaries, guesses, right, delta, epsilon = 60, 40, 33, 1e-3, 1.0
    p = 1 / (1 + math.exp(-epsilon))
    law = [math.comb(guesses, w) * p**w * (1 - p) ** (guesses - w) for w in range(guesses + 1)]
    slack = max(sum(law[right - i : right]) / i for i in range(1, right + 1))
    surprise = sum(law[right:]) + 2 * canaries * delta * slack
    found = one_run_epsilon(canaries, guesses, right, delta, confidence=1 - surprise)
    assert found == pytest.approx(epsilon, abs=1e-6)


def gaussian(draw, canaries, sigma):
    """Every canary adds 1 to a number of its own; so one epsilon holds for all of them."""
    included = draw.random(canaries) < 0.5
    return included, included + sigma * draw.normal(size=canaries)


def test_a_right_mechanism_is_seldom_refuted_and_a_wrong_one_is():
    draw = np.random.default_rng(0)
    claimed = gaussian_epsilon(1.0, 1.0, DELTA)
    bounds = [bound_of({"s": s}, i, DELTA, 0.95) for i, s in
              (gaussian(draw, 400, 1.0) for _ in range(40))]  # fmt: skip
    proved = [bound.epsilon for bound in bounds]
    assert max(proved) < claimed
    assert np.median(proved) > 0.25
    included, scores = gaussian(draw, 400, 0.05)
    broken = bound_of({"noise": draw.normal(size=400), "s": scores}, included, DELTA, 0.95)
    assert broken.epsilon > 0.6 * claimed
    assert broken.score == "s"
    assert broken.right == broken.guesses


def test_many_runs_prove_what_the_rates_of_errors_do():
    draw = np.random.default_rng(2)
    included, scores = gaussian(draw, 4000, 1.0)
    epsilon, guesses, _ = many_runs_epsilon(scores.tolist(), included.tolist(), DELTA)
    best = max(math.log(norm.sf(t - 1) / norm.sf(t)) for t in np.linspace(-1, 2, 200))
    assert 0.5 < epsilon < min(best, gaussian_epsilon(1.0, 1.0, DELTA))
    assert guesses == 2000
    exact = many_runs_epsilon([1.0, 0.0] * 100, [True, False] * 100, 0.0)[0]
    assert exact == pytest.approx(math.log(0.025 ** (1 / 50) / (1 - 0.025 ** (1 / 50))), rel=1e-6)
    assert many_runs_epsilon([0.0] * 100, [True, False] * 50, 0.0)[0] == 0
    both = bound_of_many({"s": scores, "t": -scores}, included, DELTA, 0.95)
    assert both.score == "s"
    assert both.epsilon < epsilon


@pytest.mark.parametrize("wrong", [(10, 11, 0), (10, 5, 6), (10, 5, -1)])
def test_numbers_that_cannot_be(wrong):
    with pytest.raises(BadOptionError):
        one_run_epsilon(*wrong, 0.0)
