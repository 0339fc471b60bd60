"""The grower against XGBoost's `hist` with the same bins, and histograms against a loop."""

import json

import numpy as np
import pytest

from vfl.trees import grow as grow_module
from vfl.trees import histograms
from vfl.trees.grow import Growth, Layout, Search, Split, grow, values_of
from vfl.trees.histograms import Local, add_up, divide, goes_left, sides, total_of
from vfl.trees.objectives import Binary, Classes, Poisson, Squared

ROWS, COLUMNS, BINS, ROUNDS = 1500, 6, 12, 5


def table(seed):
    """Whole numbers as cells, which are their own bins, some missing; and a number a row."""
    draw = np.random.default_rng(seed)
    bins = draw.integers(0, BINS, (ROWS, COLUMNS))
    outcome = (bins[:, 0] - 6) / 3 + np.sin(bins[:, 1]) + (bins[:, 2] > 5) * (bins[:, 3] - 5) / 4
    missing = draw.random((ROWS, COLUMNS)) < 0.1
    missing[:, 4:] = False
    cells = np.where(missing, np.nan, bins)
    return cells, np.where(missing, BINS, bins).astype(np.uint8), outcome, draw


LABELS = {
    "binary:logistic": lambda outcome, draw: draw.random(ROWS) < 1 / (1 + np.exp(-outcome)),
    "multi:softprob": lambda outcome, draw: np.digitize(outcome + draw.normal(size=ROWS), [-1, 1]),
    "reg:squarederror": lambda outcome, draw: outcome + draw.normal(size=ROWS),
    "count:poisson": lambda outcome, draw: draw.poisson(np.exp(outcome / 2)),
}
OBJECTIVES = {
    "binary:logistic": Binary(),
    "multi:softprob": Classes(3),
    "reg:squarederror": Squared(),
    "count:poisson": Poisson(),
}
POISSON = {"max_delta_step": 0.7}


@pytest.mark.parametrize(
    ("objective", "growth"),
    [
        ("binary:logistic", {}),
        ("binary:logistic", {"max_depth": 4, "reg_alpha": 1.0, "gamma": 0.5,
                             "min_child_weight": 5.0, "reg_lambda": 3.0}),
        ("binary:logistic", {"max_leaves": 12, "max_depth": 0, "grow_policy": "lossguide"}),
        ("binary:logistic", {"max_leaves": 12}),
        ("binary:logistic", {"monotone": (1, -1, 0, 1, 0, 0)}),
        ("binary:logistic", {"max_delta_step": 0.3}),
        ("multi:softprob", {"max_depth": 3}),
        ("reg:squarederror", {"learning_rate": 0.1}),
        ("count:poisson", POISSON),
    ],
)  # fmt: skip
def test_trees_are_those_of_xgboost(objective, growth):
    xgboost = pytest.importorskip("xgboost")
    cells, bins, outcome, draw = table(1)
    labels = LABELS[objective](outcome, draw).astype(float)
    loss = OBJECTIVES[objective]
    parameters = {k: v for k, v in growth.items() if k != "monotone"}
    if "monotone" in growth:
        parameters["monotone_constraints"] = growth["monotone"]
    if objective == "multi:softprob":
        parameters["num_class"] = 3
    theirs = xgboost.train(
        {"objective": objective, "tree_method": "hist", "base_score": 0.5, "nthread": 1}
        | {"max_bin": 64} | parameters,
        xgboost.DMatrix(cells, labels),
        ROUNDS,
    )  # fmt: skip
    dumped = theirs.get_dump(dump_format="json", with_stats=True)
    trees = [json.loads(one.replace("-inf", "-Infinity")) for one in dumped]
    start = {"binary:logistic": 0.0, "count:poisson": np.log(0.5)}.get(objective, 0.5)
    margins = np.full((ROWS, loss.outputs), np.float32(start))
    source = Local(bins, Layout((BINS,) * COLUMNS, (False,) * COLUMNS))
    ties = 0
    for number in range(ROUNDS):
        first, second = loss.derivatives(margins, labels.astype(margins.dtype if loss.outputs == 1
                                                                else int))  # fmt: skip
        wanted = theirs.predict(xgboost.DMatrix(cells), output_margin=True,
                                iteration_range=(0, number + 1)).reshape(ROWS, -1)  # fmt: skip
        for output in range(loss.outputs):
            gradients = np.stack([first[:, output], second[:, output]], 1).astype(np.float32)
            source.start(gradients, np.arange(ROWS))
            tree = grow(Growth(**growth), source)
            if tied := ties_between(tree, 0, trees[number * loss.outputs + output]):
                ties += tied
                continue
            for leaf in tree.leaves:
                margins[source._rows[leaf], output] += np.float32(tree.values[leaf])
            assert np.abs(wanted[:, output] - margins[:, output]).max() < 1e-5
        margins = wanted  # the next trees start from equal margins, whatever a tie gave
    assert ties <= 1, "of some 150 splits"


def ties_between(tree, node, theirs):
    """Compare two trees; returns the number of splits that differ and gain the same.

    Sums of another order can turn such a tie, so that another version of XGBoost decides otherwise.
    """
    split = tree.splits[node]
    if split is None:
        assert tree.values[node] == pytest.approx(theirs["leaf"], abs=1e-6)
        return 0
    assert tree.weights[node] == pytest.approx(theirs["cover"], rel=1e-5)
    last = split.left == range(BINS)  # XGBoost puts that threshold above the largest cell
    threshold = max(0, theirs["split_condition"])  # below all cells, in 3.3 at -inf
    if (
        f"f{split.column}" != theirs["split"]
        or not (last or len(split.left) == round(threshold))
        or split.missing_left != (theirs["missing"] == theirs["yes"])
    ):
        assert tree.gains[node] == pytest.approx(theirs["gain"], rel=1e-6)
        return 1
    assert tree.gains[node] == pytest.approx(theirs["gain"], rel=1e-4, abs=1e-4)
    children = {one["nodeid"]: one for one in theirs["children"]}
    left, right = tree.children[node]
    return ties_between(tree, left, children[theirs["yes"]]) + ties_between(
        tree, right, children[theirs["no"]]
    )


@pytest.mark.parametrize("count", [0, 1, 2, 601])
@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_histograms_are_a_loops(monkeypatch, kind, count):
    _, bins, _, draw = table(2)
    bins, gradients = bins.astype(kind), draw.normal(size=(ROWS, 2)).astype(np.float32)
    rows = np.sort(draw.choice(ROWS, count, replace=False)).astype(np.uint32)
    plain = np.zeros((COLUMNS, BINS + 1, 2))
    for row in rows:
        for column in range(COLUMNS):
            plain[column, bins[row, column]] += gradients[row].astype(float)
    for loops in {False, histograms.COMPILED}:
        monkeypatch.setattr(histograms, "COMPILED", loops)
        found = np.zeros_like(plain)
        add_up(bins, rows, gradients, found)
        assert np.array_equal(found, plain)


def test_the_best_division_of_categories_is_found():
    """Fisher 1958: no division of few categories gains more than the one that is found."""
    draw = np.random.default_rng(3)
    bins = draw.integers(0, 6, (400, 1)).astype(np.uint8)
    effects = draw.normal(size=6)
    gradients = np.stack([effects[bins[:, 0]] + draw.normal(size=400), np.ones(400)], 1)
    gradients = gradients.astype(np.float32)
    source = Local(bins, Layout((6,), (True,)))
    source.start(gradients, np.arange(400))
    tree = grow(Growth(max_depth=1, min_child_weight=0), source)

    def gain(left):
        inside = np.isin(bins[:, 0], left)
        parts = (gradients[inside].sum(0), gradients[~inside].sum(0), gradients.sum(0))
        one, other, whole = (g * g / (h + 1) for g, h in parts)
        return one + other - whole

    every = [[c for c in range(6) if code >> c & 1] for code in range(1, 63)]
    assert tree.gains[0] == pytest.approx(max(map(gain, every)), rel=1e-5)
    assert gain(tree.splits[0].left) == pytest.approx(tree.gains[0], rel=1e-5)


def test_a_missing_cell_goes_its_own_way():
    split = Split(0, range(3), missing_left=True)
    assert sides(split, 6).tolist() == [True, True, True, False, False, True]


def rows_of(draw, layout, rows=60, missing=0.2):
    """Bins with missing cells, and gradients."""
    bins = np.stack([draw.integers(0, count, rows) for count in layout.bins], axis=1)
    bins[draw.random(bins.shape) < missing] = layout.width - 1
    gradients = np.stack([draw.normal(size=rows), draw.random(rows)], axis=1)
    return bins.astype(np.uint8), gradients.astype(np.float32)


@pytest.mark.parametrize("missing", [0.0, 0.2])
@pytest.mark.parametrize("penalties", [{}, {"reg_alpha": 0.5}, {"min_child_weight": 5.0}])
def test_a_loop_finds_the_splits_that_passes_find(monkeypatch, penalties, missing):
    draw, layout = np.random.default_rng(3), Layout((9, 5, 12), (False,) * 3)
    allowed = np.array([True, True, False])
    for columns in [None] * 10 + [allowed] * 5:
        bins, gradients = rows_of(draw, layout, missing=missing)
        histogram = np.zeros((3, layout.width, 2))
        add_up(bins, np.arange(len(bins), dtype=np.uint32), gradients, histogram)
        totals = gradients.sum(0, dtype=float)[None]
        search, found = Search(Growth(**penalties), layout, columns), []
        for loops in (False, True):
            monkeypatch.setattr(grow_module, "COMPILED", loops)
            found += search.best(histogram[None], totals, [(-np.inf, np.inf)])
        passes, loop = found
        assert (passes is None) is (loop is None)
        if passes is not None:
            assert (loop.gain, loop.split) == (passes.gain, passes.split)
            assert np.array_equal(loop.left, passes.left)
            assert np.array_equal(loop.right, passes.right)


def test_a_loop_divides_rows_as_passes_do(monkeypatch):
    draw = np.random.default_rng(0)
    rows = np.sort(draw.choice(200, 80, replace=False)).astype(np.uint32)
    bins, left = draw.integers(0, 9, (200, 3)).astype(np.uint8), draw.random(9) < 0.5
    goes_left = left[bins[rows, 1]]
    for loops in {False, histograms.COMPILED}:
        monkeypatch.setattr(histograms, "COMPILED", loops)
        found = rows.copy()
        count = divide(found, bins, 1, left, np.empty_like(rows))
        assert np.array_equal(found[:count], rows[goes_left])
        assert np.array_equal(found[count:], rows[~goes_left])


def test_a_loop_adds_as_passes_do(monkeypatch):
    draw = np.random.default_rng(0)
    gradients = draw.normal(size=(30_000, 2)).astype(np.float32)
    rows = np.sort(draw.choice(30_000, 20_000, replace=False)).astype(np.uint32)
    found = []
    for loops in (False, histograms.COMPILED):
        monkeypatch.setattr(histograms, "COMPILED", loops)
        found.append(total_of(rows, gradients))
    assert np.array_equal(*found)
    assert found[0] == pytest.approx(gradients[rows].sum(0, dtype=float), rel=1e-12)


def test_rows_that_grew_no_tree_get_the_values_of_their_leaves():
    draw, layout = np.random.default_rng(1), Layout((9, 5, 12), (False, True, False))
    bins, gradients = rows_of(draw, layout, rows=400)
    source, some = Local(bins, layout), np.arange(0, 400, 3)
    source.start(gradients, some)
    tree = grow(Growth(max_depth=3, min_child_weight=0), source)
    splits = [one for one in tree.splits if one is not None]
    assert len(splits) > 3
    wanted = values_of(tree, goes_left(splits, bins, layout))
    assert np.array_equal(source.values(tree), wanted)
    assert np.array_equal(Local(bins, layout).values(tree), wanted)  # where none has begun
