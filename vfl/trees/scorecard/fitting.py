"""Fit of a scorecard from counts and sums: bins, weights of evidence, regression, points.

A `Source` returns the number of good and of bad rows in each fine bin, and sums over rows that the
regression on weights of evidence needs. The source is `Local` if one party has all bins; on
additive shares, it is `OnShares` of `vfl.trees.scorecard.shared`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vfl.core.errors import DataError
from vfl.trees.grow import Layout
from vfl.trees.newton import Fit, Outcome, Penalty, Sums, family, fit, local_sums, outcome_of
from vfl.trees.scorecard.binning import merged
from vfl.trees.scorecard.card import Card, CardColumn
from vfl.trees.scorecard.points import points_of
from vfl.trees.scorecard.statistics import correlations, evidence, stability, variance_inflation

if TYPE_CHECKING:
    from vfl.trees.scorecard.mode import Scorecard

#: Distribution family of a scorecard's regression.
FAMILY = family("binomial")


@dataclass(frozen=True)
class Counted:
    """A column before its bins are merged.

    Attributes:
        counts: number of good and of bad training rows in each fine bin, int64, axes (fine bins,
            2); the last bin is that of missing cells.
        categorical: whether the fine bins have no order.
        sign: 1: the bad rate may only rise with the column; -1: it may only fall; 0 allows both.
    """

    counts: np.ndarray
    categorical: bool
    sign: int


@dataclass(frozen=True)
class MergedColumn:
    """A column after its bins are merged; see `CardColumn`.

    The attribute `value` is the column's information value.
    """

    groups: np.ndarray
    counts: np.ndarray
    weights: np.ndarray
    value: float


class Source(Protocol):
    """Source of counts and sums over training rows, for the party that fits the scorecard."""

    def counted(self) -> Sequence[Counted]:
        """Return each column's good and bad counts, in the order of the scorecard's columns."""

    def shifts(self, columns: Sequence[MergedColumn]) -> Sequence[float]:
        """Return each column's population stability index: later rows relative to training rows.

        Later rows are the validation rows, and on shares also the test rows; without them the index
        is NaN.
        """

    def correlation(self, columns: Sequence[MergedColumn]) -> np.ndarray:
        """Return the correlation matrix of the columns' weights of evidence; see `correlations`.

        The caller calls this method once, before `regression`.
        """

    def regression(
        self, columns: Sequence[MergedColumn], chosen: np.ndarray
    ) -> tuple[Outcome, Callable[[np.ndarray], Sums]]:
        """Return label statistics and a function for sums, for regression on weights of evidence.

        The results are the arguments `outcome` and `sums` of `fit`.

        Args:
            columns: all columns.
            chosen: for each column, whether the regression uses it, bool, axes (columns,). The
                regression has an intercept before these columns.
        """


class Local:
    """A source of counts and sums at a party that has the fine bins of all columns.

    Args:
        parts: for each party, its fine bins, first of the training rows and then of the validation
            rows, and their layout.
        signs: for each column, the direction in which its bad rate may change; see `Counted`.
        bad: whether each training row belongs to the bad class.
    """

    def __init__(
        self,
        parts: Mapping[str, tuple[np.ndarray, Layout]],
        signs: Sequence[int],
        bad: np.ndarray,
    ) -> None:
        self._signs, self._bad = signs, bad
        #: For each column: the fine bin of each row, the number of bins without the bin of missing
        #: cells, and whether the column has categories.
        self._cells = [
            (np.minimum(bins[:, place], count).astype(np.int64), count, kind)
            for bins, layout in parts.values()
            for place, (count, kind) in enumerate(zip(layout.bins, layout.categorical, strict=True))
        ]

    def counted(self) -> Sequence[Counted]:
        rows = len(self._bad)
        return [
            Counted(counts_of(fine[:rows], self._bad, 1 + count), kind, sign)
            for (fine, count, kind), sign in zip(self._cells, self._signs, strict=True)
        ]

    def shifts(self, columns: Sequence[MergedColumn]) -> Sequence[float]:
        rows = len(self._bad)
        return [
            shift_of(column.counts.sum(axis=1), column.groups[fine[rows:]])
            for column, (fine, _, _) in zip(columns, self._cells, strict=True)
        ]

    def correlation(self, columns: Sequence[MergedColumn]) -> np.ndarray:
        return correlations(self._weights(columns))

    def regression(
        self, columns: Sequence[MergedColumn], chosen: np.ndarray
    ) -> tuple[Outcome, Callable[[np.ndarray], Sums]]:
        inputs = np.concatenate(
            [np.ones((len(self._bad), 1)), self._weights(columns)[:, chosen]], axis=1
        )
        labels = (~self._bad).astype(np.float64)
        return outcome_of(FAMILY, inputs.T @ labels, labels), local_sums(FAMILY, inputs)

    def _weights(self, columns: Sequence[MergedColumn]) -> np.ndarray:
        rows = len(self._bad)
        return np.stack(
            [
                column.weights[column.groups[fine[:rows]]]
                for column, (fine, _, _) in zip(columns, self._cells, strict=True)
            ],
            axis=1,
        )


def counts_of(fine: np.ndarray, bad: np.ndarray, count: int) -> np.ndarray:
    """Count the good and the bad rows in each bin, int64, axes (bins, 2).

    Args:
        fine: bin number of each row, int64.
        bad: whether each row belongs to the bad class.
        count: number of bins, with the bin of missing cells.

    >>> counts_of(np.array([0, 1, 1]), np.array([True, False, True]), 2).tolist()
    [[0, 1], [1, 1]]
    """
    return np.bincount(2 * fine + bad, minlength=2 * count).reshape(count, 2)


def shift_of(trained: np.ndarray, later: np.ndarray) -> float:
    """Return the population stability index of later (validation or test) rows; NaN without them.

    Args:
        trained: number of training rows in each merged bin.
        later: number of the merged bin of each later row.
    """
    return (
        stability(trained, np.bincount(later, minlength=len(trained))) if len(later) else math.nan
    )


def fit_card(mode: Scorecard, source: Source, goods: int, bads: int) -> Card:
    """Fit a scorecard: merge bins, choose columns, fit the regression, and compute points.

    Args:
        mode: settings of the scorecard.
        source: source of counts and sums.
        goods: number of good training rows.
        bads: number of bad training rows.

    Raises:
        DataError: all rows belong to one class, or columns separate the classes perfectly.
    """
    if not goods or not bads:
        raise DataError(
            "all training rows have the same class",
            where="labels",
            got=f"{bads} bad rows of {goods + bads}",
            want="good and bad rows",
        )
    columns = [_merged(mode, one, goods + bads) for one in source.counted()]
    shifts = source.shifts(columns)
    correlation = source.correlation(columns)
    chosen = _candidates(mode, columns, correlation)
    found = _regressed(mode, *source.regression(columns, chosen))
    numbers = np.full((len(columns), 3), math.nan)
    on_card = chosen.copy()
    on_card[chosen] = found.active[1:]
    of_fit = np.stack([found.coefficients, found.standard_errors, found.p_values], axis=1)
    numbers[on_card] = of_fit[found.active][1:]
    coefficients = np.nan_to_num(numbers[:, 0])
    base, points = points_of(
        mode.scale,
        float(found.coefficients[0]),
        [
            coefficient * column.weights
            for coefficient, column in zip(coefficients, columns, strict=True)
        ],
    )
    return Card(
        mode.scale,
        [
            CardColumn(column.groups, column.weights, own, column.counts, shift, *of.tolist())
            for column, own, shift, of in zip(columns, points, shifts, numbers, strict=True)
        ],
        base,
        float(found.coefficients[0]),
        float(found.standard_errors[0]),
        correlation,
    )


def _merged(mode: Scorecard, column: Counted, rows: int) -> MergedColumn:
    """Merge the fine bins of a column, and compute the statistics of the merged bins."""
    groups = merged(
        column.counts,
        categorical=column.categorical,
        most=mode.bins,
        least_rows=max(mode.floor, math.ceil(mode.min_share * rows)),
        monotone=mode.monotone,
        sign=column.sign,
    )
    counts = np.zeros((int(groups[-1]) + 1, 2), np.int64)
    np.add.at(counts, groups, column.counts)
    weights, values = evidence(counts, counts.sum(axis=0), mode.floor)
    return MergedColumn(groups, counts, weights, float(values.sum()))


def _candidates(
    mode: Scorecard, columns: Sequence[MergedColumn], correlation: np.ndarray
) -> np.ndarray:
    """Choose columns for the regression: informative ones that other columns do not determine."""
    values = np.array([column.value for column in columns])
    chosen = (values >= mode.min_iv) & (values > 0)
    while chosen.sum() > 1:
        inflated = variance_inflation(correlation[np.ix_(chosen, chosen)]) > mode.max_vif
        if not inflated.any():
            break
        places = np.flatnonzero(chosen)[inflated]
        chosen[places[values[places].argmin()]] = False
    return chosen


def _regressed(mode: Scorecard, outcome: Outcome, sums: Callable[[np.ndarray], Sums]) -> Fit:
    """Fit the logistic regression of the good class; then remove implausible columns one by one.

    Columns whose coefficient is not positive are removed first, because such a coefficient
    contradicts the column's weights of evidence. Then columns with p-values above the mode's limit
    are removed, the largest p-value first.
    """
    active = np.ones(len(outcome.products), bool)
    start = None
    while True:
        # The sums also cover columns that were removed; the fit ignores the removed columns.
        found = fit(FAMILY, outcome, sums, penalty=Penalty(l2=mode.l2), active=active, start=start)
        slopes = np.where(active, found.coefficients, np.inf)
        slopes[0] = np.inf
        unlikely = np.where(active, found.p_values, 0.0)
        unlikely[0] = 0.0
        if slopes.min() <= 0:
            leaves = int(slopes.argmin())
        elif unlikely.max() > mode.max_p:  # never true with a penalty: p-values are NaN
            leaves = int(unlikely.argmax())
        else:
            return found
        active, start = active.copy(), found.coefficients
        active[leaves] = False
