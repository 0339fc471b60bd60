"""The random laws against the exact probability of every set of indices."""

import math
from collections import Counter
from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from vfl.compression.topk import (
    DRAWS,
    find_top,
    multinomial_drops,
    random_indices,
    sequential_drops,
)
from vfl.core.errors import NonFiniteError

ROWS = 30_000
CASES = [(8, 3, 0.1), (8, 3, 0.3), (6, 4, 0.5), (5, 4, 0.9), (7, 2, 1.0), (9, 3, 0.05), (6, 3, 0.9)]


def sample(width, k, alpha, law, rows=ROWS):
    """How often each set was drawn when the top k indices are 0..k-1."""
    draws = np.random.default_rng([width, k]).random((rows, DRAWS[law] * k))
    top = np.broadcast_to(np.arange(k), (rows, k))
    indices = random_indices(top, width, alpha, law, draws)
    return Counter(map(tuple, indices.tolist()))


def equation_3_19(width, k, alpha):
    """P(S) when the k draws of equation (3-19) are followed one after another."""

    def draw(chosen, left):
        if left == 0:
            yield tuple(sorted(chosen)), 1.0
            return
        pools = [[p for p in range(k) if p not in chosen]]
        pools.append([p for p in range(k, width) if p not in chosen])
        weights = [1 - alpha if pools[0] else 0, alpha if pools[1] else 0]
        weights = weights if sum(weights) else [bool(pools[0]), bool(pools[1])]
        for pool, weight in zip(pools, weights, strict=True):
            for place in pool if weight else ():
                share = weight / sum(weights) / len(pool)
                for indices, chance in draw((*chosen, place), left - 1):
                    yield indices, share * chance

    return total(draw((), k))


def fixed_weights(width, k, alpha):
    """P(S) of k draws without replacement with weights (1-a)/k and a/(d-k): sum over orders."""
    weight = [(1 - alpha) / k] * k + [alpha / (width - k)] * (width - k)

    def chance(order):
        product, left = 1.0, sum(weight)
        for place in order:
            product *= weight[place] / left
            left -= weight[place]
        return product

    return total((tuple(sorted(order)), chance(order)) for order in permutations(range(width), k))


def total(pairs):
    law = Counter()
    for indices, chance in pairs:
        law[indices] += chance
    return law


def chi_square_p(counts, law):
    """p-value of the counts under a law, sets expected fewer than 5 times taken together."""
    expected = {indices: ROWS * chance for indices, chance in law.items()}
    cells = [(counts[s], e) for s, e in expected.items() if e >= 5]
    rest = ROWS - sum(c for c, _ in cells), ROWS - sum(e for _, e in cells)
    if rest[1] >= 5:
        cells.append(rest)
    elif rest[1] < 1e-6:
        assert rest[0] == 0
    statistic = sum((count - e) ** 2 / e for count, e in cells)
    return chi2.sf(statistic, len(cells) - 1)


@pytest.mark.parametrize(("width", "k", "alpha"), CASES)
def test_sequential_law_is_equation_3_19(width, k, alpha):
    law = equation_3_19(width, k, alpha)
    assert sum(law.values()) == pytest.approx(1)
    assert chi_square_p(sample(width, k, alpha, "sequential"), law) > 1e-3


@pytest.mark.parametrize(("width", "k", "alpha"), CASES[:-1])
def test_equation_3_19_has_the_closed_form(width, k, alpha):
    """P(S) = P(m) / (C(k,m) C(d-k,m)) with m = min(Binomial(k, a), d-k) places from outside."""
    others = width - k
    law = equation_3_19(width, k, alpha)
    for indices in combinations(range(width), k):
        outside = sum(place >= k for place in indices)
        hits = range(k + 1) if outside == others else [outside]
        chance = sum(
            math.comb(k, n) * alpha**n * (1 - alpha) ** (k - n)
            for n in hits
            if min(n, others) == outside
        )
        share = chance / (math.comb(k, outside) * math.comb(others, outside))
        assert law[indices] == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize(("width", "k", "alpha"), [c for c in CASES if c[2] < 1])
def test_multinomial_law_is_that_of_fixed_weights(width, k, alpha):
    law = fixed_weights(width, k, alpha)
    counts = sample(width, k, alpha, "multinomial")
    assert sum(law.values()) == pytest.approx(1)
    assert chi_square_p(counts, law) > 1e-3
    if width - k > 1:  # a single other place is nearly always taken, under either law
        assert chi_square_p(counts, equation_3_19(width, k, alpha)) < 5e-9


@pytest.mark.parametrize(
    ("width", "k", "alpha", "effective", "none"),
    [(128, 3, 0.1, 0.155, 0.578), (128, 13, 0.1, 0.180, 0.030), (300, 9, 0.2, 0.291, None)],
)
def test_multinomial_replaces_more_than_alpha(width, k, alpha, effective, none):
    """Shares of replaced indices, and chances of none, measured on the released program's law."""
    draws = np.random.default_rng(0).random((ROWS, 2 * k))
    drops = multinomial_drops(draws, width - k, alpha)
    assert drops.mean() == pytest.approx(effective, abs=0.002)
    if none is not None:
        assert (~drops.any(axis=1)).mean() == pytest.approx(none, abs=0.005)
    assert sequential_drops(draws, width - k, alpha).mean() == pytest.approx(alpha, abs=0.002)


def test_alpha_one_takes_no_top_place_and_alpha_zero_only_them():
    """Erratum E6: alpha = 1 is not a uniform choice, for which alpha is (d - k)/d."""
    for law in ("sequential", "multinomial"):
        assert all(min(indices) >= 3 for indices in sample(8, 3, 1.0, law, rows=5000))
        assert set(sample(8, 3, 0.0, law, rows=5000)) == {(0, 1, 2)}
        assert set(sample(4, 4, 0.5, law, rows=5000)) == {(0, 1, 2, 3)}


@pytest.mark.parametrize("law", ["sequential", "multinomial"])
def test_an_exhausted_pool_passes_its_mass_on(law):
    """Erratum E7: with one other place and alpha = 1, it is taken and k - 1 top places stay."""
    counts = sample(5, 4, 1.0, law)
    sets = {indices: 1 / 4 for indices in combinations(range(5), 4) if 4 in indices}
    assert set(counts) == set(sets)
    assert chi_square_p(counts, sets) > 1e-3


def test_each_row_uses_its_own_draws():
    draws = np.random.default_rng(0).random((20, 3))
    top = np.sort(np.random.default_rng(1).permuted(np.tile(np.arange(30), (20, 1)), axis=1)[:, :3])
    together = random_indices(top, 30, 0.4, "sequential", draws)
    for row in range(20):
        alone = random_indices(top[row : row + 1], 30, 0.4, "sequential", draws[row : row + 1])
        assert (alone == together[row]).all()


def top_by_sorting(row, k):
    return sorted(sorted(range(len(row)), key=lambda place: (-abs(row[place]), place))[:k])


@pytest.mark.parametrize("k", [1, 2, 5, 9, 10])
@pytest.mark.parametrize("levels", [2, 3, 1000])
def test_top_places_are_the_first_of_a_stable_sort(k, levels):
    draw = np.random.default_rng([k, levels])
    cut = torch.from_numpy(draw.integers(-levels, levels, (200, 10)).astype(np.float32))
    assert find_top(cut, k).indices.tolist() == [top_by_sorting(row, k) for row in cut.tolist()]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 6])
def test_a_cut_that_is_not_finite_is_refused(bad, place):
    cut = torch.ones(3, 7)
    cut[1, place] = bad
    for k in (1, 7):
        with pytest.raises(NonFiniteError):
            find_top(cut, k)
