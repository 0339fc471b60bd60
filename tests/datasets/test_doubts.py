"""What one column tells of the label is found by the tree that scikit-learn would grow."""

import numpy as np
import pandas as pd
import pytest
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from vfl.core.seeds import derive
from vfl.datasets import doubts
from vfl.datasets.load import Dealing, Label, load_own
from vfl.datasets.table import OwnTable, TableFormat

HALF = 300


def drawn(columns):
    """Cells of one number, or of so many categories as unit vectors; and a noisy sum of them."""
    draw = np.random.default_rng(derive(columns, "test doubts"))
    if columns == 1:
        cells = draw.normal(size=(2 * HALF, 1)).round(2)
    else:
        cells = np.eye(columns)[draw.integers(0, columns, 2 * HALF)]
    hidden = np.sin(3 * cells @ np.arange(1, columns + 1))
    return cells.astype(np.float32), hidden + 0.05 * draw.normal(size=2 * HALF)


@pytest.mark.parametrize("columns", [1, 6])
@pytest.mark.parametrize("classes", [2, 5])
def test_classes(columns, classes):
    cells, hidden = drawn(columns)
    codes = np.digitize(hidden, np.linspace(-1, 1, classes + 1)[1:-1])
    tree = DecisionTreeClassifier(max_leaf_nodes=20, class_weight="balanced", random_state=0)
    guess = tree.fit(cells[:HALF], codes[:HALF]).predict(cells[HALF:])
    right, true = guess == codes[HALF:], codes[HALF:]
    each = [right[true == code].mean() if code in true else 0.0 for code in range(classes)]
    found = doubts._recognised(cells, codes, HALF, classes)
    assert found == pytest.approx(np.mean(each), abs=0.01)
    assert found > 1 / classes


@pytest.mark.parametrize("columns", [1, 6])
def test_numbers_in_any_unit(columns):
    cells, hidden = drawn(columns)
    tree = DecisionTreeRegressor(max_leaf_nodes=200, random_state=0)
    expected = tree.fit(cells[:HALF], hidden[:HALF]).score(cells[HALF:], hidden[HALF:])
    for unit in (1.0, 1e-9, 1e9):
        found = doubts._r2(cells, unit * hidden, HALF)
        assert found == pytest.approx(expected, abs=0.01)


def test_large_cells_that_differ_little_are_split():
    """In float32, the mean of 2**24 + 2 and 2**24 + 4 is the larger one, so no cell is above it."""
    large = np.tile([2.0**24 + 2, 2.0**24 + 4], HALF)
    table = pd.DataFrame({"id": range(2 * HALF), "x": large, "y": large > 2**24 + 2})
    own = OwnTable(table, "id", ["x"], TableFormat(cells=True))
    found = doubts.doubts({"a": load_own("a", own, Label("a", "y"), Dealing(0))})
    assert len(found) == 1
    assert "'x' of a alone is nearly the label" in found[0]


def warned(x, y, task="classification"):
    own = OwnTable(pd.DataFrame({"id": range(len(y)), "x": x, "y": y}), "id", ["x"], TableFormat())
    lines = doubts.doubts({"a": load_own("a", own, Label("a", "y", task), Dealing(0))})
    return [line for line in lines if "alone is nearly the label" in line]


@pytest.mark.parametrize("rows", [4000, 40_000])
def test_a_copy_of_a_rare_class_is_found_and_noise_is_not(rows):
    """The first 4000 rows of the large table hold about 2 of its 20 rows of the rare class."""
    draw = np.random.default_rng(3)
    labels = np.zeros(rows, dtype=int)
    labels[draw.choice(rows, 20, replace=False)] = 1
    assert warned(labels + draw.normal(0, 0.05, rows), labels)
    assert not warned(draw.normal(size=rows), labels)
    assert not warned(np.where(labels, 1, draw.random(rows) < 0.1), labels)


def test_a_copy_of_skewed_numbers_is_found():
    draw = np.random.default_rng(4)
    incomes = draw.pareto(1.2, 3000)
    assert warned(2 * incomes + 1, incomes, "regression")
    assert not warned(incomes * draw.lognormal(0, 0.5, 3000), incomes, "regression")
