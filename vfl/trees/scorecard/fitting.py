"""From bins and labels to a card: merge bins, weigh them, regress, give points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vfl.core.errors import DataError
from vfl.trees.grow import Layout
from vfl.trees.newton import Fit, Penalty, family, fit, local_sums, outcome_of
from vfl.trees.scorecard.binning import merged
from vfl.trees.scorecard.card import Card, CardColumn
from vfl.trees.scorecard.points import points_of
from vfl.trees.scorecard.statistics import correlations, evidence, variance_inflation

if TYPE_CHECKING:
    from vfl.trees.scorecard.mode import Scorecard


@dataclass(frozen=True)
class _Binned:
    """A column's merged bins; see `CardColumn`. Its information value is `value`."""

    groups: np.ndarray
    counts: np.ndarray
    later: np.ndarray
    weights: np.ndarray
    value: float


def fit_card(
    mode: Scorecard,
    parts: Mapping[str, tuple[np.ndarray, Layout]],
    signs: Sequence[int],
    bad: np.ndarray,
) -> Card:
    """Fit a card.

    Args:
        mode: how.
        parts: by party, fine bins of training rows and then of validation rows, with their layout.
        signs: of each column, with which the rate of bads changes; 0 for any.
        bad: whether each training row is a bad one.

    Raises:
        DataError: rows of one class alone, or labels that columns tell without an error.
    """
    if not 0 < bad.sum() < len(bad):
        raise DataError(
            "all training rows are of one class",
            where="labels",
            got=f"{int(bad.sum())} bad rows of {len(bad)}",
            want="goods and bads",
        )
    columns = [
        _binned(mode, bins[:, place], layout, place, bad, sign)
        for (bins, layout, place), sign in zip(_cells(parts), signs, strict=True)
    ]
    weights = np.empty((len(bad), len(columns)))
    for place, ((bins, layout, own), column) in enumerate(zip(_cells(parts), columns, strict=True)):
        fine = np.minimum(bins[: len(bad), own], layout.bins[own])
        weights[:, place] = column.weights[column.groups[fine]]
    correlation = correlations(weights)
    candidates = _candidates(mode, columns, correlation)
    found = _regressed(mode, weights, candidates, ~bad)
    on_card = found.active[1:]
    effects = [
        found.coefficients[1 + place] * column.weights for place, column in enumerate(columns)
    ]
    base, points = points_of(mode.scale, float(found.coefficients[0]), effects)
    of_fit = np.stack([found.coefficients, found.standard_errors, found.p_values], axis=1)[1:]
    return Card(
        mode.scale,
        [
            CardColumn(
                column.groups, column.weights, own, column.counts, column.later,
                *(numbers.tolist() if on else [math.nan] * 3),
            )
            for column, own, numbers, on in zip(columns, points, of_fit, on_card, strict=True)
        ],
        base,
        float(found.coefficients[0]),
        float(found.standard_errors[0]),
        correlation,
    )  # fmt: skip


def _cells(
    parts: Mapping[str, tuple[np.ndarray, Layout]],
) -> list[tuple[np.ndarray, Layout, int]]:
    """Every column: its party's bins and layout, and its place there."""
    return [
        (bins, layout, place)
        for bins, layout in parts.values()
        for place in range(len(layout.bins))
    ]


def _binned(
    mode: Scorecard, column: np.ndarray, layout: Layout, place: int, bad: np.ndarray, sign: int
) -> _Binned:
    """Merge the fine bins of a column."""
    fine = np.minimum(column, layout.bins[place]).astype(np.int64)
    count, train = layout.bins[place] + 1, fine[: len(bad)]
    cells = np.bincount(2 * train + bad, minlength=2 * count).reshape(count, 2)
    groups = merged(
        cells,
        categorical=layout.categorical[place],
        most=mode.bins,
        least_rows=max(mode.floor, math.ceil(mode.min_share * len(bad))),
        monotone=mode.monotone,
        sign=sign,
    )
    bins = int(groups[-1]) + 1
    counts = np.zeros((bins, 2), np.int64)
    np.add.at(counts, groups, cells)
    weights, values = evidence(counts, counts.sum(axis=0), mode.floor)
    later = np.bincount(groups[fine[len(bad) :]], minlength=bins)
    return _Binned(groups, counts, later, weights, float(values.sum()))


def _candidates(mode: Scorecard, columns: Sequence[_Binned], correlation: np.ndarray) -> np.ndarray:
    """Columns for the regression: those that tell enough, and that others do not give."""
    values = np.array([column.value for column in columns])
    chosen = (values >= mode.min_iv) & (values > 0)
    while chosen.sum() > 1:
        inflated = variance_inflation(correlation[np.ix_(chosen, chosen)]) > mode.max_vif
        if not inflated.any():
            break
        places = np.flatnonzero(chosen)[inflated]
        chosen[places[values[places].argmin()]] = False
    return chosen


def _regressed(
    mode: Scorecard, weights: np.ndarray, candidates: np.ndarray, good: np.ndarray
) -> Fit:
    """The logistic regression of goods; columns leave it one by one, the least sensible first.

    A coefficient that is not positive turns the evidence round. Then p-values above the mode's
    leave, the largest first.
    """
    inputs = np.concatenate([np.ones((len(weights), 1)), weights], axis=1)
    model, labels = family("binomial"), good.astype(np.float64)
    outcome, sums = outcome_of(model, inputs.T @ labels, labels), local_sums(model, inputs)
    active = np.concatenate([[True], candidates])
    start = None
    while True:
        # Columns that are out have sums too, which the fit leaves aside.
        found = fit(model, outcome, sums, penalty=Penalty(l2=mode.l2), active=active, start=start)
        slopes = np.where(active, found.coefficients, np.inf)
        slopes[0] = np.inf
        unlikely = np.where(active, found.p_values, 0.0)
        unlikely[0] = 0.0
        if slopes.min() <= 0:
            leaves = int(slopes.argmin())
        elif unlikely.max() > mode.max_p:  # never of a penalised fit, whose p-values are not known
            leaves = int(unlikely.argmax())
        else:
            return found
        active, start = active.copy(), found.coefficients
        active[leaves] = False
