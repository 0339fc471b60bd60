"""Parts of a scorecard against independent computations: bins, statistics, points."""

from itertools import combinations, product

import numpy as np
import pytest
from scipy.stats import ks_2samp
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LinearRegression
from sklearn.metrics import roc_auc_score

from vfl.session.label.scored import Scored
from vfl.trees.scorecard.binning import merged
from vfl.trees.scorecard.points import Scale, points_of, reasons
from vfl.trees.scorecard.statistics import correlations, evidence, variance_inflation


def drawn_counts(seed, fine=9):
    draw = np.random.default_rng(seed)
    rows = draw.integers(5, 60, fine + 1)
    bads = draw.binomial(rows, draw.uniform(0.05, 0.9, fine + 1))
    return np.stack([rows - bads, bads], axis=1)


def grouped(counts, groups):
    found = np.zeros((groups[-1] + 1, 2), np.int64)
    np.add.at(found, groups, counts)
    return found


def value_of(counts, groups):
    cells = grouped(counts, groups)[:-1]
    shares = (cells + 0.5 * (cells == 0).any(axis=1, keepdims=True)) / counts.sum(axis=0)
    return ((shares[:, 0] - shares[:, 1]) * np.log(shares[:, 0] / shares[:, 1])).sum()


def best_by_hand(counts, most, least_rows, signs):
    """The largest information value of every way to cut the fine bins."""
    fine, best = len(counts) - 1, -np.inf
    for cuts in range(most):
        for ends in combinations(range(1, fine), cuts):
            groups = np.append(np.searchsorted(ends, np.arange(fine), side="right"), cuts + 1)
            cells = grouped(counts, groups)[:-1]
            rates = cells[:, 1] / cells.sum(axis=1)
            fits = cells.sum(axis=1).min() >= least_rows
            fits = fits and any((sign * np.diff(rates) >= 0).all() for sign in signs)
            best = max(best, value_of(counts, groups)) if fits else best
    return best


@pytest.mark.parametrize(
    ("seed", "how"),
    [*product(range(4), [("none", 0), ("auto", 0), ("none", 1), ("none", -1)])],
)
def test_bins_are_the_best_of_all(seed, how):
    monotone, sign = how
    counts = drawn_counts(seed)
    signs = {("none", 0): [0], ("auto", 0): [1, -1]}.get(how, [sign])
    groups = merged(counts, most=4, least_rows=40, monotone=monotone, sign=sign)
    want = best_by_hand(counts, 4, 40, signs)
    assert value_of(counts, groups) == pytest.approx(want)
    assert (np.diff(groups[:-1]) >= 0).all()
    assert groups[-1] == groups[:-1].max() + 1, "missing cells have a bin of their own"


#: Ends of bins and information values by optbinning 1.0.0, of columns of scikit-learn's breast
#: cancer, malignant as event: OptimalBinning(dtype="numerical", solver="cp", divergence="iv",
#: user_splits=the edges below, max_n_bins=5, min_bin_size=0.05, monotonic_trend="auto_asc_desc" or
#: None), by the column and whether its rate is monotone. optbinning makes no bin without an event;
#: in these columns no best merge has one.
OPTBINNING = {
    (1, True): ([13.846666666666666, 16.17, 18.09, 19.786666666666665], 1.1704305663052734),
    (9, False): ([0.055, 0.0565, 0.060566666666666664, 0.07303333333333333], 0.19404399729401464),
    (9, True): ([0.055, 0.0565], 0.11966321240262426),
    (20, False): ([13.01, 14.97, 16.80333333333333, 18.79], 6.6744363089728385),
    (24, True): (
        [0.1097, 0.13673333333333332, 0.146, 0.16406666666666667],
        0.9431170046180619,
    ),
}


@pytest.mark.parametrize(("column", "monotone"), OPTBINNING)
def test_bins_and_information_values_are_those_of_optbinning(column, monotone):
    table, benign = load_breast_cancer(return_X_y=True)
    cells, bad = table[:, column].round(4), 1 - benign
    edges = np.unique(np.quantile(cells, np.linspace(0, 1, 13)[1:-1]))
    counts = np.zeros((len(edges) + 2, 2), np.int64)
    np.add.at(counts, (np.searchsorted(edges, cells, side="right"), bad), 1)
    how = "auto" if monotone else "none"
    groups = merged(counts, most=5, least_rows=int(np.ceil(0.05 * len(cells))), monotone=how)
    splits, value = OPTBINNING[column, monotone]
    assert edges[np.flatnonzero(np.diff(groups[:-1]))].tolist() == pytest.approx(splits)
    _, values = evidence(grouped(counts, groups)[:-1], counts.sum(axis=0))
    assert values.sum() == pytest.approx(value, rel=1e-9)


def test_categories_of_like_rates_share_a_bin():
    counts = np.array([[90, 10], [20, 80], [80, 20], [10, 90], [3, 4]])
    groups = merged(counts, categorical=True, most=2)
    assert groups[0] == groups[2] != groups[1] == groups[3]


def test_a_bin_without_bads_has_finite_evidence_and_few_rows_stay_together():
    counts = np.array([[40, 0], [30, 10], [10, 30], [0, 0]])
    assert merged(counts, most=3).tolist() == [0, 1, 2, 3]
    assert (merged(counts, most=3, least_rows=1000) == [0, 0, 0, 1]).all()
    weights, values = evidence(np.array([[40, 0], [60, 100]]), np.array([100, 100]))
    assert np.isfinite(weights).all()
    assert values.sum() > 0


def test_nothing_is_computed_of_bins_below_the_floor():
    weights, values = evidence(np.array([[3, 9], [97, 91]]), np.array([100, 100]), floor=20)
    assert weights[0] == values[0] == 0
    assert weights[1] != 0


def test_statistics_of_scores_are_those_of_other_libraries():
    draw = np.random.default_rng(0)
    bad = draw.random(500) < 0.3
    scores = draw.integers(300, 340, 500) - 8 * bad
    found = Scored.counted(scores[:200], bad[:200]) + Scored.counted(scores[200:], bad[200:])
    assert found.auc(of=0) == pytest.approx(roc_auc_score(~bad, scores))
    assert found.auc() == pytest.approx(roc_auc_score(bad, scores))
    apart = ks_2samp(scores[bad], scores[~bad]).statistic
    assert found.kolmogorov_smirnov() == pytest.approx(apart)
    bands = found.bands(5)
    assert sum(band.rows for band in bands) == 500
    assert max(band.rows for band in bands) < 150
    assert found.stability(found) == 0
    assert found.stability(Scored(found.values + 9, found.counts)) > 0.1
    assert np.isnan(Scored.counted(scores, np.zeros(500, bool)).auc())


def test_inflation_is_that_of_a_regression_on_the_other_columns():
    draw = np.random.default_rng(1)
    columns = draw.normal(size=(300, 3))
    columns = np.column_stack([columns, columns[:, 0] + 0.5 * draw.normal(size=300), np.ones(300)])
    correlation = correlations(columns.copy())
    np.testing.assert_allclose(correlation[:4, :4], np.corrcoef(columns[:, :4].T))
    assert (correlation[4, :4] == 0).all(), "a constant column goes with none"
    others = LinearRegression().fit(columns[:, 1:4], columns[:, 0])
    explained = others.score(columns[:, 1:4], columns[:, 0])
    assert variance_inflation(correlation)[0] == pytest.approx(1 / (1 - explained))
    twice = correlations(np.column_stack([columns[:, 0], columns[:, 0], columns[:, 1]]))
    assert np.isinf(variance_inflation(twice)).tolist() == [True, True, False]


def test_points_add_up_to_the_score_of_log_odds():
    scale, effects = Scale(), [np.array([0.7, -0.4]), np.array([0.1, 0.0, -1.2])]
    base, points = points_of(scale, 1.5, effects)
    for one, other in product(range(2), range(3)):
        exact = scale.score(1.5 + effects[0][one] + effects[1][other])
        assert abs(base + points[0][one] + points[1][other] - exact) <= 1
    assert scale.log_odds(np.array([620.0])) == pytest.approx(np.log(100))
    base, points = points_of(scale, 0.0, [np.zeros(2)])
    assert base == round(scale.offset)
    assert not points[0].any()


def test_reasons_are_where_points_are_missing():
    points, usual = np.array([[10, 30, 20], [40, 40, 40]]), np.array([25.0, 20.0, 21.0])
    assert reasons(points, usual, 3) == [[0, 2], []]
