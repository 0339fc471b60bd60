"""Scores how well each column of a table alone predicts the label, for many columns at once.

A column of numbers is cut into 20 bins with about equally many rows, and the lowest and the highest
1 % of the rows get bins of their own: they can be the rows of a rare class. If the column has at
most 20 different numbers, each gets a bin. A column of texts has one bin per text. The prediction
of a bin is the mean label of its rows that are used for fitting. This mean is shrunk towards the
overall mean, as if the bin had one more row with the overall mean. All rows of a bin have the same
prediction, so the AUC follows from the counts in the bins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from vfl.datasets.facts import Facts, column_groups
from vfl.datasets.table import COLUMN_ROWS, Table, as_days, as_texts, row_blocks, texts_of

_BINS = 20
_SHARES = np.concatenate([[0.01], np.linspace(0, 1, _BINS + 1)[1:-1], [0.99]])


@dataclass(frozen=True)
class Truth:
    """Labels of a sample of the rows: bins are fitted to one part and scored on the other part.

    Attributes:
        rows: positions of the sample's rows in the table, ascending.
        fitted: mask of the sample's rows to which a column's predictions are fitted; the other rows
            of the sample score these predictions.
        values: labels, axes (rows, classes) of 0 and 1; for a regression the numbers and their
            ranks, axes (rows, 2).
    """

    task: str
    rows: np.ndarray
    fitted: np.ndarray
    values: np.ndarray
    notes: tuple[str, ...] = field(default=())


def sampled(table: Table, names: Sequence[str], taken: np.ndarray) -> Iterator[pd.DataFrame]:
    """Yield some columns at the rows `taken`, block by block; `taken` is ascending."""
    start = 0
    for block in row_blocks(table, names, COLUMN_ROWS):
        low, high = np.searchsorted(taken, (start, start + len(block)))
        whole = high - low == len(block)
        yield block if whole else block.iloc[taken[low:high] - start]
        start += len(block)


def scores(
    table: Table,
    facts: Sequence[Facts],
    truth: Truth,
    say: Callable[[str], None] | None = None,
) -> dict[str, tuple[float, float]]:
    """Score each column alone, by AUC or R2 (regression), on held-out rows.

    For a regression, the score is the larger one of the R2 of the labels and the R2 of their ranks.
    If a few labels are very large, as some incomes are, the bins explain only the ranks.

    Args:
        table: the table.
        facts: facts about the columns to score.
        truth: labels of a sample of the table's rows.
        say: function that receives a progress line after every few thousand columns.

    Returns:
        For each column, the score and its standard error. With several classes, the score is the
            mean of each class's AUC, weighted by the class's rows, and the error is the largest of
            the classes. For an R2, the error is 0.
    """
    found, by_name = dict[str, tuple[float, float]](), {fact.name: fact for fact in facts}
    for names in column_groups([*by_name], len(truth.rows), say, "compared"):
        blocks = list(sampled(table, names, truth.rows))
        texts = [name for name in names if by_name[name].kind == "text"]
        for name in texts:
            codes = _codes_of_texts([block[name] for block in blocks])
            found[name] = _scores(codes[None], truth)[0]
        if numbers := [name for name in names if by_name[name].kind != "text"]:
            own = [by_name[name] for name in numbers]
            cells = np.concatenate([_numbers(block[numbers], own) for block in blocks], axis=1)
            found |= zip(
                numbers, _scores(_codes_of_numbers(cells, truth.fitted), truth), strict=True
            )
    return found


def _numbers(block: pd.DataFrame, facts: Sequence[Facts]) -> np.ndarray:
    """Return numbers, booleans and days of some columns, float64, axes (columns, rows)."""
    if all(isinstance(dtype, np.dtype) and dtype.kind in "iufb" for dtype in block.dtypes):
        plain = all(fact.dates is None for fact in facts)
        if plain:
            return np.ascontiguousarray(block.to_numpy(dtype=float).T)
    cells = np.empty((len(facts), len(block)))
    dated = dict[str, list[int]]()
    for at, fact in enumerate(facts):
        column = block[fact.name]
        if fact.kind != "date":
            cells[at] = column.to_numpy(dtype=float, na_value=np.nan)
        elif fact.dates is None:
            cells[at] = as_days(column)
        else:
            dated.setdefault(fact.dates, []).append(at)
    for form, places in dated.items():
        if len(block):
            texts = np.concatenate([as_texts(block[facts[at].name]) for at in places])
            name = facts[places[0]].name
            cells[places] = as_days(pd.Series(texts, name=name), form).reshape(len(places), -1)
    return cells


def _codes_of_texts(blocks: Sequence[pd.Series]) -> np.ndarray:
    """Number the different texts from 1; a missing text gets 0; axes (rows,)."""
    parts = [texts_of(block) for block in blocks]
    if any(part is None for part in parts):
        parts = [pa.array(as_texts(block), pa.large_string()) for block in blocks]
    coded = pa.concat_arrays(parts).dictionary_encode()
    alike = pc.utf8_trim_whitespace(coded.dictionary).dictionary_encode().indices
    codes = alike.take(coded.indices).fill_null(-1).to_numpy(False)
    return np.asarray(codes, dtype=np.int64) + 1


def _codes_of_numbers(cells: np.ndarray, fitted: np.ndarray) -> np.ndarray:
    """Return each number's bin, counted from 1; a missing number gets 0; axes (columns, rows).

    Up to 20 different numbers get a bin each; otherwise the edges are quantiles of the fitted rows.
    """
    ordered = np.sort(cells, 1)  # NaN is sorted last
    fresh = ordered[:, 1:] != ordered[:, :-1]
    fresh &= ~np.isnan(ordered[:, 1:])
    edges = _quantiles(np.sort(cells[:, fitted], 1))
    few = fresh.sum(1) < _BINS
    for at in np.flatnonzero(few | np.isnan(edges[:, 0])):
        own = np.unique(ordered[at, :-1][fresh[at]])
        if few[at]:
            edges[at] = np.inf
            edges[at, : len(own)] = own
    codes = np.zeros(cells.shape, dtype=np.int64)
    for edge in edges.T:
        codes += cells > edge[:, None]
    return np.where(np.isnan(cells), 0, codes + 1)


def _quantiles(ordered: np.ndarray) -> np.ndarray:
    """Return the quantiles `_SHARES` of each sorted row, where NaN is last; axes (columns, 21).

    The results are bit-equal to numpy's quantiles.
    """
    counts = (~np.isnan(ordered)).sum(1)
    at = np.maximum(counts - 1, 0)[:, None] * _SHARES
    low = np.floor(at).astype(np.int64)
    high = np.minimum(low + 1, np.maximum(counts - 1, 0)[:, None])
    share, rows = at - low, np.arange(len(ordered))[:, None]
    if not ordered.shape[1]:
        return np.full((len(ordered), len(_SHARES)), np.nan)
    left, right = ordered[rows, low], ordered[rows, high]
    gap = right - left
    found: np.ndarray = np.where(share >= 0.5, right - gap * (1 - share), left + gap * share)
    return found


def _scores(codes: np.ndarray, truth: Truth) -> list[tuple[float, float]]:
    """Return each column's score and standard error; the bins have axes (columns, rows)."""
    fitted, values = truth.fitted, truth.values
    columns, bins, classes = len(codes), int(codes.max(initial=0)) + 1, values.shape[1]
    mean = values[fitted].mean(0)
    places = codes + bins * np.arange(columns)[:, None]
    known, rest = places[:, fitted].ravel(), places[:, ~fitted]

    def sums(at: np.ndarray, own: np.ndarray | None) -> np.ndarray:
        weights = None if own is None else np.tile(own, columns)
        return np.bincount(at, weights, columns * bins).reshape(columns, bins)

    counts = sums(known, None) + 1
    guesses = np.stack(
        [(sums(known, values[fitted, one]) + mean[one]) / counts for one in range(classes)], axis=1
    )
    actual = values[~fitted]
    if truth.task == "regression":
        spread = ((actual - mean) ** 2).mean(0)
        if not spread.all():
            return [(0.0, 0.0)] * columns
        guessed = [guesses[:, one].ravel()[rest] for one in range(classes)]
        error = [((actual[:, one] - own) ** 2).mean(1) for one, own in enumerate(guessed)]
        found = (1 - np.stack(error, axis=1) / spread).max(1)
        return [(float(one), 0.0) for one in found]
    totals = sums(rest.ravel(), None)
    positive = np.stack([sums(rest.ravel(), actual[:, one]) for one in range(classes)], axis=1)
    area, errors = _auc(guesses, positive, totals[:, None] - positive)
    weights = actual.mean(0) + 1e-12
    means = (area * weights).sum(1) / weights.sum()
    return [(float(one), float(error)) for one, error in zip(means, errors.max(1), strict=True)]


def _auc(
    guesses: np.ndarray, positive: np.ndarray, negative: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """AUC, where ties count half, and its standard error (Hanley and McNeil 1982, eq. 2).

    Args:
        guesses: prediction of each bin; like the other two arguments, axes (columns, classes,
            bins).
        positive: number of rows in each bin that have the class.
        negative: number of rows in each bin that do not have the class.
    """
    order = np.argsort(guesses, axis=2)
    guesses, positive, negative = (
        np.take_along_axis(each, order, 2) for each in (guesses, positive, negative)
    )
    tied = np.zeros(guesses.shape, dtype=np.int64)  # bins with equal guesses get the same index
    np.cumsum(guesses[..., 1:] != guesses[..., :-1], axis=2, out=tied[..., 1:])
    bins = guesses.shape[2]
    tied += bins * np.arange(guesses[..., 0].size).reshape(*guesses.shape[:2], 1)
    positive, negative = (
        np.bincount(tied.ravel(), each.ravel(), guesses.size).reshape(guesses.shape)
        for each in (positive, negative)
    )
    ones, zeros = positive.sum(2), negative.sum(2)
    below = np.cumsum(negative, axis=2) - negative
    pairs = (positive * (below + negative / 2)).sum(2)
    with np.errstate(invalid="ignore", divide="ignore"):
        area = pairs / (ones * zeros)
        first, second = area / (2 - area), 2 * area**2 / (1 + area)
        spread = area * (1 - area) + (ones - 1) * (first - area**2)
        spread = spread + (zeros - 1) * (second - area**2)
        error = np.sqrt(np.maximum(0.0, spread) / (ones * zeros))
    both = (ones > 0) & (zeros > 0)
    return np.where(both, area, 0.5), np.where(both, error, 0.5)
