"""Merge of fine bins into few bins that separate good from bad rows; it needs only counts.

Dynamic programming over adjacent bins finds the merge with the largest information value
(Navas-Palencia 2020 states the same problem for integer programming). For an ordered column, the
bad rate can be restricted so that it only rises, or only falls, from bin to bin. Categories are
first sorted by their bad rate, so that adjacent bins can be merged. Missing cells have a merged bin
of their own; only `with_floor` may join few missing cells to other cells before.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from vfl.trees.scorecard.statistics import evidence

#: Restriction of the bad rate from bin to bin: "none" for no restriction; "auto" for only rising or
#: only falling, whichever is better.
Monotone = Literal["none", "auto"]


def merged(
    counts: np.ndarray,
    *,
    categorical: bool = False,
    most: int = 6,
    least_rows: int = 1,
    monotone: Monotone = "none",
    sign: int = 0,
) -> np.ndarray:
    """Return the number of the merged bin for each fine bin, int64, axes (fine bins,).

    Missing cells have the merged bin with the highest number.

    Args:
        counts: number of good and of bad rows in each fine bin, axes (fine bins, 2); the last bin
            is that of missing cells.
        categorical: whether the fine bins have no order.
        most: largest number of merged bins, without the bin of missing cells.
        least_rows: smallest number of rows in a merged bin, except in the bin of missing cells.
        monotone: "auto" lets the bad rate only rise, or only fall, whichever gives the larger
            information value.
        sign: 1 lets the bad rate only rise, -1 lets it only fall; 0 allows both directions.

    >>> merged(np.array([[90, 10], [80, 20], [10, 90], [20, 80], [5, 5]]), most=2)
    array([0, 0, 1, 1, 2])
    """
    values, totals = counts[:-1], counts.sum(axis=0)
    order = np.arange(len(values))
    if categorical:
        rows = values.sum(axis=1)
        usual = totals[1] / max(1, totals.sum())
        rates = np.where(rows > 0, values[:, 1] / np.maximum(rows, 1), usual)
        order = np.argsort(rates, kind="stable")
        monotone, sign = "none", 0
    table = _Segments(values[order], totals, least_rows)
    signs = [sign] if sign or monotone == "none" else [1, -1]
    ends = max((table.best(most, one) for one in signs), key=lambda found: found[0])[1]
    groups = np.empty(len(counts), np.int64)
    groups[order] = np.searchsorted(ends, np.arange(len(values)), side="right")
    groups[-1] = len(ends)
    return groups


def with_floor(rows: np.ndarray, floor: int, *, categorical: bool) -> tuple[np.ndarray, int]:
    """Join fine bins to cells, until each cell has either at least `floor` rows or no rows.

    In an ordered column, adjacent bins are joined. Categories with fewer rows than the floor share
    one cell; if this cell has fewer rows than the floor, it joins the largest category. The bin of
    missing cells joins the shared cell, or an ordered column's largest cell, if it or all other
    bins together have fewer rows than the floor.

    Args:
        rows: number of rows in each fine bin, int64, axes (fine bins,); the last bin is that of
            missing cells.
        floor: smallest number of rows in a cell that has rows.
        categorical: whether the fine bins have no order.

    Returns:
        For each fine bin, the number of its cell, int64; and the number of cells. The last cell is
        the bin of missing cells; it is empty if that bin was joined to another cell.

    >>> with_floor(np.array([30, 4, 9, 25, 5]), 10, categorical=False)
    (array([0, 1, 1, 2, 0]), 4)
    """
    values, missing, cells = rows[:-1], int(rows[-1]), np.empty(len(rows), np.int64)
    alone = missing >= floor and not 0 < values.sum() < floor
    few = 0 if alone else missing
    if categorical:
        large = values >= floor
        cells[:-1][large] = np.arange(large.sum())
        pooled = int(values[~large].sum()) + few
        count = int(large.sum())
        if pooled >= floor or not count:
            cells[:-1][~large], pool = count, count
            count += 1
        else:
            pool = int(values[large].argmax())
            cells[:-1][~large] = pool
    else:
        count, inside = 0, 0
        for place, own in enumerate(values.tolist()):
            cells[place], inside = count, inside + own
            if inside >= floor:
                count, inside = count + 1, 0
        cells[:-1] = np.minimum(cells[:-1], max(0, count - 1))
        count = max(1, count)
        pool = int(np.bincount(cells[:-1], weights=values).argmax())
    cells[-1] = pool if few else count
    return cells, count + 1


class _Segments:
    """All ranges of adjacent fine bins, with their information-value terms and bad rates.

    Args:
        values: number of good and of bad rows in each fine bin, in order, axes (fine bins, 2).
        totals: number of good and of bad rows in all bins, including the bin of missing cells.
        least_rows: smallest number of rows that a range needs to become a merged bin.
    """

    def __init__(self, values: np.ndarray, totals: np.ndarray, least_rows: int) -> None:
        before = np.concatenate([np.zeros((1, 2), np.int64), values.cumsum(axis=0)])
        inside = before[None, :, :] - before[:, None, :]  # axes (start, end, 2)
        rows = inside.sum(axis=2)
        self._count = len(values)
        places = np.arange(self._count + 1)
        fits = (places[:, None] < places[None, :]) & (rows >= max(1, least_rows))
        _, values_of = evidence(np.maximum(inside, 0).reshape(-1, 2), totals)
        self._gains = np.where(fits, values_of.reshape(rows.shape), -np.inf)
        self._rates = inside[:, :, 1] / np.maximum(rows, 1)

    def best(self, most: int, sign: int) -> tuple[float, np.ndarray]:
        """Return a merge's largest information value, and where its merged bins end, in order.

        An end is a number of fine bins; the last end is the number of all fine bins.

        If there are too few rows for any merge, all fine bins form one merged bin.
        """
        count = self._count
        found = (-math.inf, np.array([count]))
        # For each range (start, end] of fine bins, consider the merges of the fine bins up to `end`
        # whose last merged bin is this range: the largest information value of such a merge, and
        # where its previous merged bin starts.
        value, steps = np.full_like(self._gains, -np.inf), list[np.ndarray]()
        value[0] = self._gains[0]
        for _ in range(max(1, most)):
            last = int(np.argmax(value[:, count]))
            if value[last, count] > found[0]:
                found = float(value[last, count]), self._ends(last, steps)
            value, before = self._longer(value, sign)
            steps.append(before)
        return found

    def _longer(self, value: np.ndarray, sign: int) -> tuple[np.ndarray, np.ndarray]:
        """Extend each merge by one merged bin; return values, and starts of the previous bins."""
        longer, before = np.full_like(value, -np.inf), np.zeros(value.shape, np.int64)
        for start in range(1, self._count):
            ahead = value[:start, start]
            ends = np.arange(start + 1, self._count + 1)
            if not sign:
                chosen = np.full(len(ends), np.argmax(ahead))
                best = ahead[chosen]
            else:
                rates = sign * self._rates[:start, start]
                order = np.argsort(rates, kind="stable")
                highest = np.maximum.accumulate(ahead[order])
                whose = order[_last_records(ahead[order])]
                at = np.searchsorted(rates[order], sign * self._rates[start, ends], side="right")
                best = np.where(at > 0, highest[at - 1], -np.inf)
                chosen = whose[np.maximum(at, 1) - 1]
            longer[start, ends] = best + self._gains[start, ends]
            before[start, ends] = chosen
        return longer, before

    def _ends(self, last: int, steps: list[np.ndarray]) -> np.ndarray:
        """Return where the merged bins of a merge end, given the start of its last merged bin."""
        ends = [self._count]
        for before in reversed(steps):
            ends.append(last)
            last = int(before[last, ends[-2]])
        return np.array(ends[::-1])


def _last_records(values: np.ndarray) -> np.ndarray:
    """Return, for each position, the index of the largest value among those up to this position."""
    highest = np.maximum.accumulate(values)
    new = np.concatenate([[True], highest[1:] > highest[:-1]])
    found: np.ndarray = np.maximum.accumulate(np.where(new, np.arange(len(values)), 0))
    return found
