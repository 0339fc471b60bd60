"""Histograms where all bins lie in one place: the label party's own columns, and bins it was sent.

The loops are compiled where numba is installed; numpy does the same beside them, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vfl.core.compiled import COMPILED, compiled
from vfl.trees.grow import Division, Layout, Split, Tree, values_of


class Local:
    """Sums of gradients over bins that are all here.

    Args:
        bins: number of each cell's bin, uint8 or uint16, axes (rows, columns); a missing cell has
            the last place of its column's histogram, `layout.width - 1`.
        layout: the columns.
    """

    def __init__(self, bins: np.ndarray, layout: Layout) -> None:
        self.layout, self._bins = layout, np.ascontiguousarray(bins)
        self._by_column = np.ascontiguousarray(bins.T)
        self._gradients = np.empty((0, 2))
        self._rows: dict[int, np.ndarray] = {}

    def start(self, gradients: np.ndarray, rows: np.ndarray) -> None:
        """Begin a tree.

        Args:
            gradients: first and second derivatives, float64, axes (rows, 2).
            rows: the rows that grow this tree, int64, increasing.
        """
        self._gradients, self._rows = gradients, {0: rows}

    def total(self) -> np.ndarray:
        sums: np.ndarray = self._gradients[self._rows[0]].sum(axis=0)
        return sums

    def of(self, nodes: Sequence[int]) -> np.ndarray:
        found = np.zeros((len(nodes), len(self.layout.bins), self.layout.width, 2))
        for one, node in zip(found, nodes, strict=True):
            add_up(self._bins, self._rows[node], self._gradients, one)
        return found

    def smaller(self, left: int, right: int) -> int:
        return left if len(self._rows[left]) <= len(self._rows[right]) else right

    def divide(self, divisions: Sequence[Division]) -> None:
        for one in divisions:
            rows, cells = self._rows.pop(one.node), self._by_column[one.split.column]
            found = divided(rows, cells, sides(one.split, self.layout.width))
            self._rows[one.left], self._rows[one.right] = found

    def values(self, tree: Tree) -> np.ndarray:
        values, others = np.empty(len(self._bins)), np.ones(len(self._bins), bool)
        for leaf, rows in self._rows.items():
            values[rows], others[rows] = tree.values[leaf], False
        splits = [split for split in tree.splits if split is not None]
        left = goes_left(splits, self._bins[others], self.layout)
        values[others] = values_of(tree, left)
        return values


def goes_left(splits: Sequence[Split], bins: np.ndarray, layout: Layout) -> np.ndarray:
    """Whether rows go left at splits, bool, axes (rows, splits).

    Args:
        splits: on columns of `bins`.
        bins: axes (rows, columns), as `Binning.bins` makes them.
        layout: of the columns.
    """
    found = np.empty((len(bins), len(splits)), bool)
    for place, split in enumerate(splits):
        found[:, place] = sides(split, layout.width)[bins[:, split.column]]
    return found


def sides(split: Split, width: int) -> np.ndarray:
    """Whether cells of each bin go left, bool, axes (width,)."""
    goes_left = np.zeros(width, bool)
    goes_left[list(split.left)] = True
    goes_left[-1] = split.missing_left
    return goes_left


def add_up(bins: np.ndarray, rows: np.ndarray, gradients: np.ndarray, out: np.ndarray) -> None:
    """Add the gradients of rows to a histogram.

    Args:
        bins: axes (all rows, columns).
        rows: which rows count, int64.
        gradients: axes (all rows, 2).
        out: axes (columns, width, 2).
    """
    if COMPILED:
        _add_up(bins, rows, gradients, out)
        return
    width = out.shape[1]
    for column in range(out.shape[0]):
        cells = bins[rows, column]
        for which in range(2):
            out[column, :, which] += np.bincount(cells, gradients[rows, which], minlength=width)


def divided(
    rows: np.ndarray, cells: np.ndarray, goes_left: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The rows that go left and those that go right, in order.

    Args:
        rows: int64.
        cells: bins of all rows in one column.
        goes_left: of each bin, bool.
    """
    if not COMPILED:
        left = goes_left[cells[rows]]
        return rows[left], rows[~left]
    out = np.empty_like(rows)
    count = _divide(rows, cells, goes_left, out)
    return out[:count].copy(), out[count:][::-1].copy()


@compiled
def _divide(rows: Any, cells: Any, goes_left: Any, out: Any) -> Any:
    """Rows that go left from the first place on, the others from the last place back."""
    low, high = 0, len(rows) - 1
    for row in rows:
        if goes_left[cells[row]]:
            out[low] = row
            low += 1
        else:
            out[high] = row
            high -= 1
    return low


@compiled
def _add_up(bins: Any, rows: Any, gradients: Any, out: Any) -> None:
    for row in rows:
        first, second = gradients[row, 0], gradients[row, 1]
        for column in range(bins.shape[1]):
            place = bins[row, column]
            out[column, place, 0] += first
            out[column, place, 1] += second
