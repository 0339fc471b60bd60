"""Intervals, protection and Holm's method, against scipy and by simulation."""

import itertools

import numpy as np
import pytest
from scipy import stats

from benchmarks.verdicts import LAWS, shares
from vfl.experiments import estimate
from vfl.experiments.statistics import (
    ONE_SIDED,
    advantage,
    below_best,
    chance_below,
    claims,
    holm,
    judge,
    leaking,
    over_victims,
    protected,
    rivals_of,
    steady_interval,
)

DRAW = np.random.default_rng(0)
VICTIMS, DRAWS = 5, 5
#: Deviations of victims and of draws in points, as they were measured on MNIST.
COMPONENTS = [(0.9, 1.5), (1.9, 2.4), (4.1, 2.0), (8.9, 3.0)]
_START = DRAW.bit_generator.state


@pytest.fixture(autouse=True)
def _same_draws_whatever_ran_before():
    DRAW.bit_generator.state = _START


def values_of(table):
    """Values by (victim, draw) of an array, axes (victims, draws)."""
    return {(v, d): float(x) for v, row in enumerate(table) for d, x in enumerate(row)}


def test_the_interval_is_students_over_the_means_of_victims():
    table = DRAW.normal(0.7, 0.1, (VICTIMS, DRAWS))
    found = over_victims(values_of(table))
    test = stats.ttest_1samp(table.mean(axis=1), 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((test.low, test.high))
    assert found.standard_error == pytest.approx(stats.sem(table.mean(axis=1)))


def test_an_advantage_is_paired_by_victim():
    ours, theirs = DRAW.normal(0.7, 0.1, (2, VICTIMS, DRAWS))
    found = advantage(values_of(ours), values_of(theirs))
    test = stats.ttest_rel(ours.mean(axis=1), theirs.mean(axis=1)).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((test.low, test.high))
    once = {(victim, 0): float(row.mean()) for victim, row in enumerate(theirs)}
    assert advantage(values_of(ours), once).half_width == pytest.approx(found.half_width)


@pytest.mark.parametrize("bound", [0.0, 0.1, -0.3])
def test_the_chance_is_that_of_a_one_sided_test(bound):
    sample = DRAW.normal(0.05, 0.1, 5)
    test = stats.ttest_1samp(sample, bound, alternative="less")
    assert chance_below(estimate(sample.tolist()), bound) == pytest.approx(test.pvalue)


def test_nothing_follows_from_one_victim():
    alone = estimate([-0.5])
    assert (alone.low, alone.high) == (-np.inf, np.inf)
    assert chance_below(alone, 0.0) == chance_below(None, 0.0) == 1.0
    assert leaking([{(0, 0): 0.9}], {(0, 0): 0.1}) == 1.0
    assert protected([{(0, 0): 0.1}], [{(0, 0): 0.9}]) == protected([], [{(0, 0): 0.9}]) == 1.0


def test_holm_is_the_closed_test_of_all_subsets():
    """Rejecting what every subset's Bonferroni test rejects is another way to the same values."""
    for chances in DRAW.uniform(0, 0.3, (20, 4)):
        named = dict(enumerate(chances.tolist()))
        subsets = [s for n in range(1, 5) for s in itertools.combinations(named, n)]
        for key, adjusted in holm(named).items():
            slow = max(len(s) * min(named[one] for one in s) for s in subsets if key in s)
            assert adjusted == pytest.approx(min(1.0, slow))


def test_protection_needs_every_attack_to_fail():
    baseline = values_of([[0.5], [0.5], [0.5]])
    weak, strong = values_of([[0.3], [0.29], [0.31]]), values_of([[0.7], [0.71], [0.69]])
    assert protected([weak, weak], [baseline]) < ONE_SIDED
    assert protected([weak, strong], [baseline]) > 0.5
    assert protected([weak, {(9, 0): 0.1}], [baseline]) == 1.0


def passing(gap, count=500, among=10):
    """Shares of grids in which an attack as good as the best baseline passes as worse.

    The others lie `gap` lower. Beside the best alone, and beside all of them.
    """
    passed = np.zeros(2)
    for _ in range(count):
        victims = DRAW.normal(0, 1, (VICTIMS, 1))
        attack, *rest = (victims + DRAW.normal(0, 1, (VICTIMS, 1 + among))).T
        rest = [one - gap * bool(place) for place, one in enumerate(rest)]
        attack, *baselines = (values_of(one[:, None]) for one in (attack, *rest))
        best = max(baselines, key=lambda one: sum(one.values()))
        passed += [protected([attack], of) <= ONE_SIDED for of in ([best], baselines)]
    return passed / count


def test_an_attack_that_is_as_good_as_the_best_of_many_baselines_rarely_passes_as_worse():
    alone, adjusted = passing(gap=0)
    assert alone > 0.08
    assert adjusted <= 0.03
    alone, adjusted = passing(gap=8)  # one is clearly the best: nothing is lost
    assert alone == adjusted <= 0.05


def test_what_is_far_below_ten_equal_baselines_is_seen_by_three_victims():
    """Bonferroni's factor of ten would need an error of .0025 of two degrees of freedom."""
    baselines = [values_of(row[:, None]) for row in DRAW.normal(0.9, 0.01, (10, 3))]
    low = values_of([[0.5], [0.42], [0.46]])
    assert below_best(low, rivals_of(baselines)) < ONE_SIDED


def leaks_of(worth, attacks, spread=1.0, count=600):
    """Share of grids in which attacks that are so much above the best baseline pass as a leak.

    The first is `worth` deviations above it and the others are alike.
    """
    hits = 0
    for _ in range(count):
        victims = DRAW.normal(0, 1, (VICTIMS, 1))
        base, *found = (victims + DRAW.normal(0, spread, (VICTIMS, 1 + attacks))).T
        found[0] = found[0] + worth
        tried = [values_of(one[:, None]) for one in found]
        hits += leaking(tried, values_of(base[:, None])) <= ONE_SIDED
    return hits / count


@pytest.mark.parametrize("attacks", [1, 5, 20])
def test_attacks_that_are_worth_the_best_baseline_rarely_pass_as_a_leak(attacks):
    assert leaks_of(0, attacks) < 0.045  # 2.5 % and three deviations of 600 grids


def test_a_leak_is_found_among_many_attacks():
    assert leaks_of(20, 20) > 0.95


def test_what_leaks_is_told_by_simes_test_of_the_rivals():
    baseline = values_of(DRAW.normal(0.5, 0.01, (VICTIMS, 1)))
    one, other = (values_of(DRAW.normal(0.6, 0.05, (VICTIMS, 1))) for _ in range(2))
    weak = values_of(DRAW.normal(0.1, 0.01, (VICTIMS, 1)))
    tested = [
        stats.ttest_rel(list(each.values()), list(baseline.values()), alternative="greater").pvalue
        for each in (one, other)
    ]
    assert leaking([one, weak, other], baseline) == pytest.approx(min(2 * min(tested), max(tested)))


def worlds(count, victims, draws, shared=False):
    """Many grids at once, true value 0: axes (count, victims, draws)."""
    sizes = DRAW.normal(0, 1, (count, VICTIMS, 1)) * victims
    leaks = DRAW.normal(0, 1, (count, 1 if shared else VICTIMS, DRAWS)) * draws
    return sizes + leaks


def covered(tables):
    """Share of grids whose interval holds 0."""
    found = [over_victims(values_of(table)) for table in tables]
    return float(np.mean([one.low <= 0 <= one.high for one in found]))


def bootstrap_covered(tables, repeats=300):
    """The same of percentile intervals that draw victims anew and, within them, draws."""
    hits = 0
    for table in tables:
        victims = DRAW.integers(0, VICTIMS, (repeats, VICTIMS))
        draws = DRAW.integers(0, DRAWS, (repeats, VICTIMS, DRAWS))
        means = table[victims[:, :, None], draws].mean(axis=(1, 2))
        low, high = np.quantile(means, [0.025, 0.975])
        hits += low <= 0 <= high
    return hits / len(tables)


def test_five_victims_with_five_draws_are_covered():
    shares = [covered(worlds(600, *components)) for components in COMPONENTS]
    assert all(abs(share - 0.95) < 0.04 for share in shares)  # four deviations of 600 grids


@pytest.mark.slow
@pytest.mark.parametrize(("victims", "draws"), COMPONENTS)
def test_coverage(victims, draws):
    """Student's interval covers 95 %; a bootstrap too little, shared leaks far too little."""
    assert abs(covered(worlds(20_000, victims, draws)) - 0.95) < 0.006
    assert bootstrap_covered(worlds(3000, victims, draws)) < 0.93
    assert covered(worlds(20_000, victims, draws, shared=True)) < 0.945


SCORES = np.random.default_rng(0).normal(0.8, 0.02, 10)


def test_one_repeat_has_no_interval_and_none_has_no_mean():
    assert estimate([0.5]).half_width is None
    assert estimate([]) is None


RUNS = 400
#: What 400 runs err by at most where the truth is 5 % (three standard errors).
_ALLOWED = 0.05 + 3 * (0.05 * 0.95 / RUNS) ** 0.5


@pytest.mark.parametrize("victims", [3, 10])
@pytest.mark.parametrize("law", ["normal", "skewed", "skewed to the left", "two-point, half leak"])
def test_a_verdict_errs_no_more_than_stated(law, victims):
    """At the margin nothing is "no easier"; at 0 nothing is "easier"; the interval holds both."""
    at, none = (shares(LAWS[law], victims, mean, 1.0, RUNS) for mean in (1.0, 0.0))
    assert at["no easier"] <= _ALLOWED
    assert none["easier"] <= _ALLOWED
    if law != "two-point, half leak":
        assert 1 - at["covered"] <= _ALLOWED


def test_victims_that_agree_and_few_victims_do_not_decide_by_themselves():
    assert judge([0.0] * 5).verdict == "no easier"
    assert judge([0.0] * 4).verdict == "undecided"
    assert judge([0.009] * 5).verdict != "no easier"
    assert judge([0.5]).verdict == "undecided"
    assert judge([0.5, 0.5, 0.5]).verdict == "easier"
    assert judge([0.015, 0.016, 0.0155]).verdict == "undecided"


def test_as_many_more_victims_as_said_decide():
    gains = [0.008, -0.012, 0.006, -0.008, 0.004]
    found = judge(gains)
    assert found.verdict == "undecided"
    assert f"{found.more} more victims" in found.sentence
    spread = np.std(gains, ddof=1)
    later = np.array([-1, 1] * 50)[: found.victims + found.more]
    more = np.mean(gains) + spread * (later - later.mean()) / later.std(ddof=1)
    assert judge(more.tolist()).verdict == "no easier"
    assert judge(more.tolist()[:5]).verdict == "undecided"


def test_the_steady_interval_is_students_at_a_smaller_error():
    low, high = steady_interval(SCORES.tolist())
    test = stats.ttest_1samp(SCORES, 0).confidence_interval(0.991)
    assert (low, high) == pytest.approx((test.low, test.high))


@pytest.mark.parametrize("found", [[0.0], [0.03], [0.0, 0.004], [0.001, 0.02]])
def test_one_or_two_victims_forecast_nothing(found):
    judged = judge(found)
    assert (judged.verdict, judged.more) == ("undecided", None)
    assert "would decide" not in judged.sentence
    assert judge([*found, 0.004, 0.002][:3]).more is not None


def test_claims_are_adjusted_as_scipy_does():
    chances = dict(enumerate([0.2, 0.001, 0.04, 0.03, 0.03, 1.0]))
    adjusted = claims(chances)
    assert [*adjusted] == [*chances]
    assert [*adjusted.values()] == pytest.approx(stats.false_discovery_control([*chances.values()]))
    assert claims({}) == {}


@pytest.mark.parametrize(("margin", "leaks"), [(0.0, True), (0.05, False)])
def test_a_leak_counts_from_a_margin(margin, leaks):
    baseline = {(seed, 0): 0.5 + 0.001 * seed for seed in range(5)}
    attack = {(seed, 0): 0.54 + 0.002 * (seed % 2) for seed in range(5)}
    assert (leaking([attack], baseline, margin) < 0.025) == leaks
    assert (protected([attack], [baseline], margin) < 0.025) == (not leaks)
