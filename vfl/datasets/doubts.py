"""Warnings about the data before a training; the warnings do not stop the training.

Each warning is one line with what was found, in which column, and a suggested fix. A warning
contains names and counts, but no cells. The checks use the data that the training has read anyway,
so no table is read twice. In a federation, each party gets the warnings about its own columns. Only
a label party with columns is warned of columns that predict the label, namely of its own ones.

`vfl.datasets.alone` scores columns too, in few bins each, for tables of many thousand columns. The
trees of this module also find columns whose middle values mean a rare class; they take longer per
column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd

from vfl.datasets.encode import TableEncoder, TextColumn
from vfl.datasets.party import PartyData
from vfl.datasets.table import misread, spaced

FEW_ROWS = 20  #: number of test rows below which a metric is mostly chance
NEARLY = 0.98  #: balanced accuracy or R2 from which a single column counts as nearly the label
_MOST_ROWS, _FEWEST_ROWS = 4000, 40
#: Least number of scored rows with which a class counts; fewer rows could be right by chance.
_FEWEST_OF_CLASS = 5
#: Largest number of leaves of a tree: for two classes (it grows with the number of classes), and
#: for numeric labels.
_LEAVES, _MANY_LEAVES = 20, 200
#: A gain below this limit may be a rounding error, for targets whose squares are about 1.
_NO_GAIN = 1e-9


def doubts(data: Mapping[str, PartyData]) -> list[str]:
    """Return warnings about aligned rows, party by party.

    Args:
        data: data of the parties in this process; if one of them has labels, all columns are
            compared with the labels.
    """
    lines = [line for own in data.values() for line in _misread(own)]
    label = next((own for own in data.values() if own.labels is not None), None)
    if label is None:
        return lines
    if (tested := len(label.split.test)) < FEW_ROWS:
        lines.append(
            f"{spaced(tested)} test and {spaced(len(label.split.train))} training rows: "
            "metrics of so few rows are mostly chance; add rows, or increase data.test"
        )
    return lines + [line for own in data.values() for line in _alone(own, label)]


def _misread(own: PartyData) -> Iterator[str]:
    if isinstance(own.encoder, TableEncoder):
        for column in own.encoder.columns:
            if isinstance(column, TextColumn) and (why := misread(column.name, column.categories)):
                yield f"column '{column.name}' of {own.name} is read as categories, but {why}"


def _alone(own: PartyData, label: PartyData) -> Iterator[str]:
    """Yield each column that nearly determines the label, by a small tree on half of a sample."""
    if not isinstance(own.encoder, TableEncoder) or own.inputs is None or label.labels is None:
        return
    rows = label.split.train
    if own.name in label.held:
        rows = rows[label.held[own.name][rows]]
    if len(rows) < _FEWEST_ROWS:
        return
    codes = np.zeros(len(rows)) if label.classes is None else label.labels[rows].numpy()
    order, half = _halves(codes)
    rows = rows[order]
    # A sum of two cells could lose its last digits in float32, and a split would separate nothing.
    inputs = np.nan_to_num(own.inputs[rows].numpy()).astype(np.float64)
    truth = label.labels[rows].numpy()
    start = 0
    for name, width in own.encoder.widths.items():
        cells = inputs[:, start : start + width]
        start += width
        if label.classes is None:
            score = _explained(cells, truth, half)
        else:
            score = _recognised(cells, truth, half, len(label.classes))
        if score >= NEARLY:
            yield (
                f"column '{name}' of {own.name} alone is nearly the label: is it known "
                "before the label is? If not, leave it out of 'columns'"
            )


def _halves(codes: np.ndarray) -> tuple[np.ndarray, int]:
    """Choose a sample of rows in which each class is in both halves, if it has two rows.

    Rare classes keep all their rows in the sample.

    Args:
        codes: class of each row, axes (rows,).

    Returns:
        Positions of the sample's rows, the first half first; and the size of the first half.

    >>> _halves(np.array([0, 0, 0, 0, 1, 1]))
    (array([0, 4, 2, 1, 5, 3]), 3)
    """
    turns = pd.Series(codes).groupby(codes).cumcount().to_numpy()
    chosen = np.argsort(turns, kind="stable")[:_MOST_ROWS]
    first = turns[chosen] % 2 == 0
    return np.concatenate([chosen[first], chosen[~first]]), int(first.sum())


def _explained(cells: np.ndarray, numbers: np.ndarray, half: int) -> float:
    """Return R2, on the second half of the rows, of a tree fitted to the first half.

    The result is the larger one of the R2 of the numbers and the R2 of their ranks: of a copy of
    skewed numbers, such as incomes, a tree explains only the ranks.
    """
    ranks = pd.Series(numbers).rank().to_numpy()
    return max(_r2(cells, each, half) for each in (numbers, ranks))


def _r2(cells: np.ndarray, numbers: np.ndarray, half: int) -> float:
    numbers = (numbers - numbers.mean()) / (numbers.std() or 1.0)
    guess = _tree(cells[:half], numbers[:half, None], np.ones(half), _MANY_LEAVES)(cells[half:])
    rest = numbers[half:]
    spread = np.sum((rest - rest.mean()) ** 2)
    return 1 - float(np.sum((rest - guess[:, 0]) ** 2) / spread) if spread else 0.0


def _recognised(cells: np.ndarray, codes: np.ndarray, half: int, classes: int) -> float:
    """Fit a tree with equally weighted classes; return its balanced accuracy on the second half."""
    counts = np.bincount(codes[:half], minlength=classes)
    weights = 1 / counts[codes[:half]]
    targets = np.eye(classes)[codes[:half]]
    guess = _tree(cells[:half], targets, weights, max(_LEAVES, 2 * classes))(cells[half:])
    right = guess.argmax(axis=1) == codes[half:]
    each = [right[codes[half:] == code] for code in range(classes)]
    shares = [hits.mean() for hits in each if len(hits) >= _FEWEST_OF_CLASS]
    return float(np.mean(shares)) if len(shares) > 1 else 0.0


class _Split(NamedTuple):
    """Best split of a leaf; its gain is 0 if no split reduces the sum of squares."""

    gain: float
    column: int = 0
    threshold: float = 0.0


def _tree(
    cells: np.ndarray, targets: np.ndarray, weights: np.ndarray, leaves: int
) -> Callable[[np.ndarray], np.ndarray]:
    """Fit a regression tree (Breiman et al. 1984, chapter 8), the split of the largest gain first.

    If classes are unit vectors, the sum of squares is Gini's impurity. scikit-learn's trees would
    do as well, but importing scikit-learn takes longer than a small training.

    Args:
        cells: cells of the rows, axes (rows, columns).
        targets: targets of the rows, axes (rows, outputs).
        weights: weights of the rows, axes (rows,).
        leaves: most leaves.

    Returns:
        A function that returns, for the cells of other rows, the mean target of each row's leaf,
        axes (rows, outputs).
    """
    members = [np.arange(len(cells))]
    best = [_best_split(cells, targets, weights)]
    cuts: list[tuple[int, _Split]] = []
    while len(members) < leaves and max(best).gain > _NO_GAIN:
        leaf = best.index(max(best))
        split, rows = best[leaf], members[leaf]
        cuts.append((leaf, split))
        above = cells[rows, split.column] > split.threshold
        members[leaf] = rows[~above]
        members.append(rows[above])
        best.append(_Split(0.0))
        for part in (leaf, len(members) - 1):
            own = members[part]
            best[part] = _best_split(cells[own], targets[own], weights[own])
    means = np.stack([np.average(targets[own], axis=0, weights=weights[own]) for own in members])

    def predict(others: np.ndarray) -> np.ndarray:
        at = np.zeros(len(others), dtype=np.int64)
        for new, (leaf, split) in enumerate(cuts, start=1):
            at[(at == leaf) & (others[:, split.column] > split.threshold)] = new
        found: np.ndarray = means[at]
        return found

    return predict


def _best_split(cells: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> _Split:
    """Return the split after which the sum of squares within its two parts is smallest."""
    best, total, weight = _Split(0.0), weights @ targets, weights.sum()
    for column, values in enumerate(cells.T):
        order = np.argsort(values, kind="stable")
        values = values[order]
        (ends,) = np.nonzero(values[1:] > values[:-1])
        if not len(ends):
            continue
        sums = np.cumsum(weights[order, None] * targets[order], axis=0)[ends]
        below = np.cumsum(weights[order])[ends]
        kept = (sums**2).sum(axis=1) / below
        kept += ((total - sums) ** 2).sum(axis=1) / (weight - below)
        place = int(kept.argmax())
        end = ends[place]
        gain = float(kept[place] - (total**2).sum() / weight)
        best = max(best, _Split(gain, column, float(values[end] + values[end + 1]) / 2))
    return best
