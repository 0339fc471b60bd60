"""Gradient histograms at a party that has the bins of all columns, its own and received ones.

The loops are compiled where numba is installed; without numba, numpy computes the same result, bit
for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from vfl.core.compiled import COMPILED, add_pair, compiled, prefetch
from vfl.trees.grow import Division, Layout, Split, Tree

#: Empty arrays of gradients and rows, which `Local` holds while it grows no tree.
_NOTHING = np.empty((0, 2), np.float32), np.empty(0, np.int64)


class Local:
    """Sums of gradients over the rows of each bin, at a party that has all bins.

    Args:
        bins: bin number of each cell, uint8 or uint16, axes (rows, columns); a missing cell belongs
            to the last position of its column's histogram, `layout.width - 1`.
        layout: number and order of each column's bins.
    """

    def __init__(self, bins: np.ndarray, layout: Layout) -> None:
        self.layout, self._bins = layout, np.ascontiguousarray(bins)
        self.start(*_NOTHING)

    def start(
        self, gradients: np.ndarray, rows: np.ndarray, columns: np.ndarray | None = None
    ) -> None:
        """Begin a tree; see `Source`.

        The sums also cover columns that the tree may not split on.
        """
        self._gradients, self._rows = gradients, Partition(rows)

    def total(self) -> np.ndarray:
        return total_of(self._rows[0], self._gradients)

    def of(self, nodes: Sequence[int]) -> np.ndarray:
        found = np.zeros((len(nodes), len(self.layout.bins), self.layout.width, 2))
        for one, node in zip(found, nodes, strict=True):
            add_up(self._bins, self._rows[node], self._gradients, one)
        return found

    def smaller(self, left: int, right: int) -> int:
        return left if len(self._rows[left]) <= len(self._rows[right]) else right

    def divide(self, divisions: Sequence[Division]) -> None:
        for one in divisions:
            self._divide(self._rows, one)

    def values(self, tree: Tree) -> np.ndarray:
        values = np.full(len(self._bins), np.nan)
        for leaf in self._rows.nodes:
            values[self._rows[leaf]] = tree.values[leaf]
        rest = Partition(np.flatnonzero(np.isnan(values)))  # rows outside this tree's sample
        for node, (split, children) in enumerate(zip(tree.splits, tree.children, strict=True)):
            if split is None:
                values[rest[node]] = tree.values[node]
            else:
                self._divide(rest, Division(node, split, *children))
        self.start(*_NOTHING)  # release the gradients and rows, which a finished tree does not need
        return values

    def _divide(self, rows: Partition, division: Division) -> None:
        goes_left = sides(division.split, self.layout.width)
        rows.divide(division, self._bins, division.split.column, goes_left)


class Partition:
    """The rows of a tree's current leaf nodes, stored in one array.

    Args:
        rows: positions of the rows of the root node, increasing.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows.astype(np.uint32)
        self._spare = np.empty_like(self._rows)
        self._spans = {0: (0, len(rows))}

    @property
    def nodes(self) -> Iterable[int]:
        """Numbers of the nodes that have not been divided."""
        return self._spans.keys()

    def __getitem__(self, node: int) -> np.ndarray:
        """Return the rows of a node in order, uint32, axes (rows of the node,)."""
        begin, end = self._spans[node]
        return self._rows[begin:end]

    def divide(
        self, division: Division, bins: np.ndarray, column: int, goes_left: np.ndarray
    ) -> None:
        """Divide the rows of a node between its two new child nodes.

        Args:
            division: the divided node and its two child nodes.
            bins: bin numbers of all rows, axes (all rows, columns).
            column: number of the column that the node splits on.
            goes_left: for each bin of this column, whether its rows go to the left child.
        """
        begin, end = self._spans.pop(division.node)
        middle = begin + divide(self._rows[begin:end], bins, column, goes_left, self._spare)
        self._spans[division.left] = begin, middle
        self._spans[division.right] = middle, end


#: Up to this number of rows, one indexing operation looks up all splits; for more rows, a loop over
#: splits is faster because it reads memory in order.
_FEW_ROWS = 64


class Sides:
    """Computes whether rows go left at fixed splits; built once and used for many rows.

    Args:
        splits: splits, in the order in which `of` returns them.
        layout: layout of the columns of these splits.
    """

    def __init__(self, splits: Sequence[Split], layout: Layout) -> None:
        self._columns = np.array([one.column for one in splits], np.int64)
        self._sides = np.zeros((len(splits), layout.width), bool)
        for own, split in zip(self._sides, splits, strict=True):
            own[:] = sides(split, layout.width)

    def of(self, bins: np.ndarray) -> np.ndarray:
        """Return whether each row goes left at each split, bool, axes (rows, splits).

        Args:
            bins: bin numbers of the rows, axes (rows, columns), as `Binning.bins` returns them.
        """
        if len(bins) <= _FEW_ROWS:
            found: np.ndarray = self._sides[np.arange(len(self._sides)), bins[:, self._columns]]
            return found
        found = np.empty((len(bins), len(self._sides)), bool)
        for place, (column, own) in enumerate(zip(self._columns, self._sides, strict=True)):
            found[:, place] = own[bins[:, column]]
        return found

    def of_nodes(self, nodes: np.ndarray, places: np.ndarray, bins: np.ndarray) -> np.ndarray:
        """Return, for rows at a node with a split, whether they go left, bool, axes (those rows,).

        Args:
            nodes: number of the node of each row, axes (rows,).
            places: for each node, the position of its split among the splits, or -1 if it has no
                split; int64, axes (nodes,).
            bins: bins of all rows, as in `of`.
        """
        if COMPILED:
            out = np.empty(len(nodes), bool)
            return out[: _sides_of_nodes(nodes, places, bins, self._columns, self._sides, out)]
        of_rows = places[nodes]
        rows = np.flatnonzero(of_rows >= 0)
        split = of_rows[rows]
        found: np.ndarray = self._sides[split, bins[rows, self._columns[split]]]
        return found


def goes_left(splits: Sequence[Split], bins: np.ndarray, layout: Layout) -> np.ndarray:
    """Return whether each row goes left at each split, bool, axes (rows, splits)."""
    return Sides(splits, layout).of(bins)


def sides(split: Split, width: int) -> np.ndarray:
    """Return whether the cells of each bin go left at a split, bool, axes (width,)."""
    goes_left = np.zeros(width, bool)
    if isinstance(split.left, range):
        goes_left[split.left.start : split.left.stop] = True
    else:
        goes_left[list(split.left)] = True
    goes_left[-1] = split.missing_left
    return goes_left


def total_of(rows: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    """Return the sum of the gradients of some rows, float64, axes (2,).

    Args:
        rows: positions of the rows to sum, uint32.
        gradients: first and second derivatives of the loss for all rows, float32, axes (all rows,
            2).
    """
    if COMPILED:
        return np.array(_total_of(rows, gradients))
    sums: np.ndarray = gradients[rows].sum(axis=0, dtype=np.float64)
    return sums


def add_up(bins: np.ndarray, rows: np.ndarray, gradients: np.ndarray, out: np.ndarray) -> None:
    """Add the gradients of some rows to a histogram.

    Args:
        bins: bins of all rows, axes (all rows, columns).
        rows: positions of the rows to add, uint32.
        gradients: first and second derivatives of the loss for all rows, float32, axes (all rows,
            2).
        out: the histogram to add to, float64, axes (columns, width, 2).
    """
    if COMPILED:
        _add_up(bins, rows, gradients, out)
        return
    width = out.shape[1]
    for column in range(out.shape[0]):
        cells = bins[rows, column]
        for which in range(2):
            out[column, :, which] += np.bincount(cells, gradients[rows, which], minlength=width)


def divide(
    rows: np.ndarray, bins: np.ndarray, column: int, goes_left: np.ndarray, spare: np.ndarray
) -> int:
    """Reorder rows: those that go left come first; each group of rows keeps its order.

    Return the number of rows that go left.

    Args:
        rows: positions of the rows, uint32; reordered in place.
        bins: bins of all rows, axes (all rows, columns).
        column: number of the column that is split.
        goes_left: for each bin of this column, whether its rows go left.
        spare: buffer with at least as many rows as `rows`; it is overwritten.
    """
    if COMPILED:
        return int(_divide(rows, bins, column, goes_left, spare))
    left = goes_left[bins[rows, column]]
    rows[:] = np.concatenate([rows[left], rows[~left]])
    return int(left.sum())


#: Number of rows by which the loops prefetch ahead; the cells of a small node's rows are scattered
#: in memory.
_AHEAD, _FAR_AHEAD = 16, 64
_CACHE_LINE = 64


@compiled
def _total_of(rows: Any, gradients: Any) -> Any:
    first = second = 0.0
    for row in rows:
        first += gradients[row, 0]
        second += gradients[row, 1]
    return first, second


@compiled
def _sides_of_nodes(
    nodes: Any, places: Any, bins: Any, columns: Any, goes_left: Any, out: Any
) -> Any:
    count = 0
    for row, node in enumerate(nodes):
        place = places[node]
        if place >= 0:
            out[count] = goes_left[place, bins[row, columns[place]]]
            count += 1
    return count


@compiled
def _divide(rows: Any, bins: Any, column: int, goes_left: Any, spare: Any) -> Any:
    """The loop has no branch on left or right: the processor could not predict it."""
    cells, columns, last = bins.reshape(-1), bins.shape[1], len(rows) - 1
    low = high = 0
    for number, row in enumerate(rows):
        prefetch(cells, np.int64(rows[min(number + _FAR_AHEAD, last)]) * columns + column)
        left = int(goes_left[bins[row, column]])
        rows[low] = spare[high] = row
        low += left
        high += 1 - left
    rows[low:] = spare[:high]
    return low


@compiled
def _add_up(bins: Any, rows: Any, gradients: Any, out: Any) -> None:
    """Handles two rows per iteration, so that more additions run in parallel."""
    columns, width, count = bins.shape[1], out.shape[1], len(rows)
    cells, pairs, sums = bins.reshape(-1), gradients.reshape(-1), out.reshape(-1)
    per_line = _CACHE_LINE // bins.itemsize
    for number in range(0, count - 1, 2):
        for soon in rows[number + _AHEAD : number + _AHEAD + 2]:
            begin = np.int64(soon) * columns
            prefetch(pairs, np.int64(soon) * 2)
            for place in range(0, columns, per_line):
                prefetch(cells, begin + place)
            prefetch(cells, begin + columns - 1)
        one, two = rows[number], rows[number + 1]
        ones, twos = gradients[one], gradients[two]
        first, second, third, fourth = ones[0], ones[1], twos[0], twos[1]
        for column in range(columns):
            begin = column * width
            add_pair(sums, 2 * (begin + np.int64(bins[one, column])), first, second)
            add_pair(sums, 2 * (begin + np.int64(bins[two, column])), third, fourth)
    for row in rows[count - count % 2 :]:
        for column in range(columns):
            place = 2 * (column * width + np.int64(bins[row, column]))
            add_pair(sums, place, gradients[row, 0], gradients[row, 1])


def sums_of(
    bins: np.ndarray, nodes: np.ndarray, count: int, elements: np.ndarray, width: int
) -> np.ndarray:
    """Return sums of ring elements over the rows of each bin; uint64, axes (count, columns, width).

    Args:
        bins: bins of the rows, axes (rows, columns).
        nodes: number of each row's node; rows whose node number is `count` or more are ignored.
        count: number of nodes for which sums are requested; their numbers are 0 to count - 1.
        elements: ring element of each row, uint64, axes (rows,).
        width: number of histogram positions of a column.
    """
    found = np.zeros((count, bins.shape[1], width), np.uint64)
    if COMPILED:
        _add_elements(bins, nodes, elements, found)
        return found
    rows = np.flatnonzero(nodes < count)
    for column in range(bins.shape[1]):
        np.add.at(found[:, column], (nodes[rows], bins[rows, column]), elements[rows])
    return found


@compiled
def _add_elements(bins: Any, nodes: Any, elements: Any, out: Any) -> None:
    for row in range(bins.shape[0]):
        node = nodes[row]
        if node < out.shape[0]:
            for column in range(bins.shape[1]):
                out[node, column, bins[row, column]] += elements[row]


def bin_kind(width: int) -> np.dtype[Any]:
    """Return the smallest integer type for numbers of so many bins."""
    return np.dtype(np.uint8 if width <= 256 else "<u2")
