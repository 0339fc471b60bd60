"""Conversion of a party's cells (values in its columns) to numbers, for attacks and for scoring."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vfl.datasets.encode import bin_edges
from vfl.trees.grow import Layout

_GROUPS = 16
_HUGE = 1e30  # squares of larger numbers would overflow


class Ranks:
    """Encodes cells as ranks, groups of ranks and one-hot categories; decodes them without loss.

    A value of an ordered column becomes its rank among the party's values, and one number for each
    of at most 16 groups of equally many training rows. These numbers are those that `data.bins =
    16` makes of the ranks (Gorishniy, Rubachev and Babenko 2022, equation 1). A category is
    encoded one-hot. A column with missing cells gets one further number, which is 1 where a cell is
    missing.

    Args:
        cells: cells of all aligned rows, float32, axes (rows, columns); missing cells are NaN.
        categories: number of categories of each column; 0 for a column whose values have an order.
        train: positions of the training rows.

    >>> ranks = Ranks(np.float32([[5.0], [7.0], [6.0]]), (0,), np.arange(3))
    >>> ranks.cells(ranks.numbers(np.float32([[6.0]]))).tolist()
    [[6.0]]
    """

    def __init__(self, cells: np.ndarray, categories: tuple[int, ...], train: np.ndarray) -> None:
        self._categories = categories
        self._missing = np.isnan(cells).any(0)
        self._distinct = [np.unique(column[~np.isnan(column)]) for column in cells.T]
        # A power of two, so that the division of a float32 number by it is exact.
        self._scale = 2.0 ** int(np.ceil(np.log2(max(2, len(cells)))))
        self._edges = []
        for place, count in enumerate(categories):
            ranks = self._ranks(cells[train, place], place)
            known = ranks[~np.isnan(ranks)]
            grouped = count == 0 and len(np.unique(known)) > 1
            self._edges.append(np.array(bin_edges(known, _GROUPS)) if grouped else np.zeros(1))

    def numbers(self, cells: np.ndarray) -> Tensor:
        """Encode cells of the party as numbers, float32, axes (rows, numbers)."""
        parts: list[np.ndarray] = []
        for place, count in enumerate(self._categories):
            column = cells[:, place]
            missing = np.isnan(column)
            if count:
                parts.append(np.where(missing, -1, column)[:, None] == np.arange(count))
            else:
                ranks = np.nan_to_num(self._ranks(column, place))
                edges = self._edges[place]
                groups = (ranks[:, None] - edges[:-1]) / np.diff(edges)
                groups = np.where(missing[:, None], 0.0, groups.clip(0, 1))
                parts += [(ranks / self._scale)[:, None], groups]
            if self._missing[place]:
                parts.append(missing[:, None])
        return torch.from_numpy(np.concatenate(parts, axis=1, dtype=np.float32, casting="unsafe"))

    def cells(self, numbers: Tensor) -> np.ndarray:
        """Decode numbers that the method `numbers` returned, into cells of axes (rows, columns)."""
        found, at = [], 0
        for place, count in enumerate(self._categories):
            width = count or len(self._edges[place])
            own = numbers[:, at : at + width].numpy()
            at += width
            if count:
                cell = np.where(own.any(1), own.argmax(1), np.nan)
            else:
                cell = self._distinct[place][(own[:, 0] * self._scale).astype(np.int64)]
            if self._missing[place]:
                cell = np.where(numbers[:, at].numpy() > 0, np.nan, cell)
                at += 1
            found.append(cell)
        return np.stack(found, axis=1).astype(np.float32)

    def _ranks(self, column: np.ndarray, place: int) -> np.ndarray:
        """Return the rank of each cell among the distinct values of its column.

        A missing cell has the rank NaN.
        """
        ranks = np.searchsorted(self._distinct[place], column).astype(np.float64)
        return np.where(np.isnan(column), np.nan, ranks)


def standardised(cells: np.ndarray, categories: tuple[int, ...], train: np.ndarray) -> Tensor:
    """Encode cells as inputs of a neural network: mean 0 and variance 1 over the training rows.

    A missing number becomes 0, a category is one-hot, and a missing category becomes zeros.

    Args:
        cells: cells of all rows, axes (rows, columns); missing cells are NaN.
        categories: number of categories of each column; 0 for a column whose values have an order.
        train: positions of the training rows.

    Returns:
        float32, axes (rows, numbers).
    """
    parts: list[np.ndarray] = []
    for place, count in enumerate(categories):
        column = cells[:, place].astype(np.float64)
        if count:
            parts.append(np.where(np.isnan(column), -1, column)[:, None] == np.arange(count))
            continue
        column = column.clip(-_HUGE, _HUGE)
        known = column[train]
        known = known[~np.isnan(known)]
        mean, spread = (known.mean(), known.std()) if len(known) else (0.0, 0.0)
        scaled = (column - mean) / (spread or 1.0)
        parts.append(np.nan_to_num(scaled)[:, None])
    return torch.from_numpy(np.concatenate(parts, axis=1, dtype=np.float32, casting="unsafe"))


def categories_of(layout: Layout) -> tuple[int, ...]:
    """Return each received column's number of categories, given the bins' layout; 0 if ordered.

    The receiver of bins can compute this number from their layout alone.
    """
    return tuple(
        count if kind else 0 for count, kind in zip(layout.bins, layout.categorical, strict=True)
    )
