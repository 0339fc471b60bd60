"""The random laws against the exact probability of every set of indices."""

from collections import Counter
from itertools import combinations, permutations

import numpy as np
import pytest
from scipy.stats import chi2

from vfl.compression.topk import (
    DRAWS,
    random_indices,
)

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


@pytest.mark.parametrize(("width", "k", "alpha"), [c for c in CASES if c[2] < 1])
def test_multinomial_law_is_that_of_fixed_weights(width, k, alpha):
    law = fixed_weights(width, k, alpha)
    counts = sample(width, k, alpha, "multinomial")
    assert sum(law.values()) == pytest.approx(1)
    assert chi_square_p(counts, law) > 1e-3
    if width - k > 1:  # a single other place is nearly always taken, under either law
        assert chi_square_p(counts, equation_3_19(width, k, alpha)) < 5e-9


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
