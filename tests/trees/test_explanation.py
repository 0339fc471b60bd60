"""Forests without some answers, and Shapley values, against definitions and XGBoost."""

import itertools
import math

import numpy as np
import pytest

from vfl.core.seeds import permutation
from vfl.trees.boosting import Booster, Boosting
from vfl.trees.explanation import Leaves, importance
from vfl.trees.grow import Growth, Layout
from vfl.trees.histograms import Local, goes_left
from vfl.trees.objectives import Binary, Classes, Poisson, Squared

ROWS, COLUMNS, BINS = 1500, 6, 12
LAYOUT = Layout((BINS,) * COLUMNS, (False,) * COLUMNS)


@pytest.fixture(scope="module", params=[Binary(), Classes(3)], ids=["binary", "classes"])
def grown(request):
    """A forest on cells of which some are missing; bins, and the answers of all rows."""
    draw, objective = np.random.default_rng(0), request.param
    bins = draw.integers(0, BINS, (ROWS, COLUMNS)).astype(np.uint8)
    score = (bins[:, 0] - 6) / 3 + np.sin(bins[:, 1]) + (bins[:, 2] > 5) * (bins[:, 3] - 5) / 4
    labels = np.digitize(
        score + draw.normal(size=ROWS), [0.0] if objective.outputs == 1 else [-1, 1]
    )
    bins[draw.random(bins.shape) < 0.1] = BINS
    settings = Boosting(Growth(max_depth=4))
    booster = Booster(settings, objective, Local(bins, LAYOUT), labels, np.ones(ROWS), ROWS)
    booster.forest.start[:] = booster.margins[:] = 0
    for _ in range(4):
        booster.add_round()
    return booster.forest, bins, labels, goes_left(booster.forest.splits, bins, LAYOUT)


def expected(forest, bins, known):
    """The margins of one row by recursion, where the columns that are not known are averaged."""

    def below(tree, node):
        split = tree.splits[node]
        if split is None:
            return tree.values[node]
        left, right = tree.children[node]
        if split.column in known:
            cell = bins[split.column]
            there = split.missing_left if cell == BINS else cell in split.left
            return below(tree, left if there else right)
        one, other = tree.weights[left], tree.weights[right]
        return (one * below(tree, left) + other * below(tree, right)) / (one + other)

    return forest.start + np.sum(
        [[below(tree, 0) for tree in one] for one in forest.rounds], axis=0
    )


def columns_of(forest):
    return np.array([split.column for split in forest.splits])


@pytest.mark.parametrize("away", [(), (0,), (1, 2), range(COLUMNS)])
def test_a_split_without_an_answer_is_averaged(grown, away):
    forest, bins, _, answers = grown
    known = ~np.isin(columns_of(forest), list(away))
    found = Leaves(forest).margins(answers[:20], known)
    wanted = [expected(forest, row, set(range(COLUMNS)) - set(away)) for row in bins[:20]]
    assert np.allclose(found, wanted, atol=1e-12)


def test_blocks_of_rows_give_what_all_rows_give(grown, monkeypatch):
    forest, _, _, answers = grown
    known = columns_of(forest) != 1
    whole = Leaves(forest).margins(answers, known)
    monkeypatch.setattr("vfl.trees.explanation._MOST_NUMBERS", 2000)
    assert np.array_equal(Leaves(forest).margins(answers, known), whole)


@pytest.mark.parametrize("owners", [range(COLUMNS), (0, 0, 1, 1, 2, 2)])
def test_contributions_are_shapley_values(grown, owners):
    forest, bins, _, answers = grown
    count = max(owners) + 1
    found = Leaves(forest).contributions(answers[:5], np.array(owners)[columns_of(forest)], count)
    for row, own in zip(bins, found, strict=False):
        game = {
            group: expected(forest, row, {c for c in range(COLUMNS) if owners[c] in group})
            for size in range(count + 1)
            for group in map(frozenset, itertools.combinations(range(count), size))
        }
        for player in range(count):
            wanted = sum(
                (game[group | {player}] - game[group]) / (count * math.comb(count - 1, len(group)))
                for group in game
                if player not in group
            )
            assert np.allclose(own[player], wanted, atol=1e-12)


def test_contributions_add_up_to_the_margins(grown):
    forest, _, _, answers = grown
    leaves = Leaves(forest)
    found = leaves.contributions(answers[:200], columns_of(forest), COLUMNS)
    wanted = forest.margins(answers[:200])
    assert np.allclose(leaves.base + found.sum(axis=1), wanted, atol=1e-10)


def test_contributions_of_columns_are_those_of_xgboost(grown):
    xgboost = pytest.importorskip("xgboost")
    forest, bins, labels, answers = grown
    outputs = len(forest.start)
    kind = {"objective": "binary:logistic"}
    if outputs > 1:
        kind = {"objective": "multi:softprob", "num_class": outputs}
    kind |= {"max_depth": 4, "max_bin": 64, "base_score": 0.5, "nthread": 1}
    cells = np.where(bins == BINS, np.nan, bins)
    theirs = xgboost.train(kind, xgboost.DMatrix(cells, labels), 4)
    wanted = theirs.predict(xgboost.DMatrix(cells[:200]), pred_contribs=True)
    wanted = wanted.reshape(200, outputs, COLUMNS + 1)[..., :-1].transpose(0, 2, 1)
    found = Leaves(forest).contributions(answers[:200], columns_of(forest), COLUMNS)
    assert np.allclose(found, wanted, atol=1e-5)


def test_importance_is_by_gain_permutation_and_shapley_values(grown):
    xgboost = pytest.importorskip("xgboost")
    forest, bins, labels, answers = grown
    objective = Binary() if len(forest.start) == 1 else Classes(3)
    players, some = columns_of(forest), slice(0, 200)
    found = importance(forest, objective, answers[some], labels[some], players, COLUMNS)
    kind = {"objective": "binary:logistic"}
    if objective.outputs > 1:
        kind = {"objective": "multi:softprob", "num_class": 3}
    cells = np.where(bins == BINS, np.nan, bins)
    kind |= {"max_depth": 4, "max_bin": 64, "base_score": 0.5, "nthread": 1}
    theirs = xgboost.train(kind, xgboost.DMatrix(cells, labels), 4)
    gains = theirs.get_score(importance_type="total_gain")
    wanted = np.array([gains.get(f"f{column}", 0) for column in range(COLUMNS)])
    assert np.allclose(found.gain, wanted / wanted.sum(), atol=1e-5)
    counts = theirs.get_score(importance_type="weight")
    assert found.splits.tolist() == [counts.get(f"f{column}", 0) for column in range(COLUMNS)]
    values = theirs.predict(xgboost.DMatrix(cells[some]), pred_contribs=True)
    values = np.abs(values.reshape(200, objective.outputs, -1)[..., :-1]).sum(axis=1).mean(axis=0)
    assert np.allclose(found.shapley, values, atol=1e-5)

    def loss(bins):
        margins = forest.margins(goes_left(forest.splits, bins, LAYOUT))
        return objective.loss(margins, labels[some])

    grown_by = np.zeros(COLUMNS)
    for column, number in itertools.product(range(COLUMNS), range(5)):
        mixed = bins[some].copy()
        mixed[:, column] = mixed[permutation(number, 200, "importance"), column]
        grown_by[column] += (loss(mixed) - loss(bins[some])) / 5
    assert np.allclose(found.permutation, grown_by, atol=1e-12)
    assert found.permutation[0] > 0.05 > abs(found.permutation[5])


@pytest.mark.parametrize("objective", [Binary(), Classes(3), Squared(), Poisson()])
def test_derivatives_are_those_of_the_loss(objective):
    draw, rows = np.random.default_rng(1), 5
    margins = draw.normal(size=(rows, objective.outputs))
    labels = draw.integers(0, 3 if objective.outputs > 1 else 2, rows)
    first, _ = objective.derivatives(margins, labels)
    for place in np.ndindex(*margins.shape):
        step = np.zeros_like(margins)
        step[place] = 1e-6
        rise = objective.loss(margins + step, labels) - objective.loss(margins - step, labels)
        assert rise * rows / 2e-6 == pytest.approx(first[place], abs=1e-6)


def test_a_forest_without_a_split_adds_nothing():
    bins, labels = np.zeros((10, 1), np.uint8), np.arange(10) % 2
    booster = Booster(Boosting(), Binary(), Local(bins, Layout((1,), (False,))), labels,
                      np.ones(10), 10)  # fmt: skip
    booster.add_round()
    leaves, nothing = Leaves(booster.forest), np.empty((10, 0), bool)
    assert not leaves.contributions(nothing, np.empty(0, np.int64), 2).any()
    assert np.array_equal(leaves.margins(nothing, np.empty(0, bool)), booster.margins)
