"""Conversion of a party's columns to bins (intervals of values); a tree needs only their order.

A party computes bin edges from its training rows and never sends the edges. Other parties may
receive the bin number of each cell, the number of bins of each column, and whether these bins have
an order. They may also receive sums over the rows in a bin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vfl.core.seeds import Secret
from vfl.datasets.table import BLOCK_ROWS
from vfl.trees.grow import Layout
from vfl.trees.histograms import bin_kind

MAX_BINS = 1 << 15


@dataclass(frozen=True)
class Binning:
    """A party's rule that maps the cells (values) of its columns to bin numbers.

    Attributes:
        edges: for each column, the lower bounds of all bins except the first, in increasing order;
            empty for a column of categories.
        categories: number of categories of each column; 0 for a column whose values have an order.
    """

    edges: tuple[np.ndarray, ...] = field(repr=False)
    categories: tuple[int, ...]

    @property
    def layout(self) -> Layout:
        """Number and order of each column's bins; other parties may receive this."""
        counts = [
            count or len(edges) + 1
            for edges, count in zip(self.edges, self.categories, strict=True)
        ]
        return Layout(tuple(counts), tuple(count > 0 for count in self.categories))

    def bins(self, cells: np.ndarray) -> np.ndarray:
        """Return the bin number of each cell, axes (rows, columns).

        A missing cell has the bin number `layout.width - 1`.

        The type is uint8 if it can represent all bin numbers, else uint16.

        Args:
            cells: cells from `CellEncoder`: numbers, or codes of categories; missing cells are NaN.
        """
        missing = self.layout.width - 1
        found = np.empty(cells.shape, bin_kind(missing + 1))
        for start in range(0, len(cells), BLOCK_ROWS):
            for place, edges in enumerate(self.edges):
                column = cells[start : start + BLOCK_ROWS, place]
                if self.categories[place]:
                    own = np.nan_to_num(column).astype(np.int64)
                else:
                    own = np.searchsorted(edges, column, side="right")
                own[np.isnan(column)] = missing
                found[start : start + BLOCK_ROWS, place] = own
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """Return the bin edges as tensors, from which `of_state` restores the binning."""
        counts = torch.tensor([len(edges) for edges in self.edges], dtype=torch.int64)
        edges = np.concatenate([*self.edges, np.empty(0, np.float32)])
        return {"edges": torch.from_numpy(edges), "edge_counts": counts}

    @classmethod
    def of_state(cls, state: Mapping[str, Tensor], categories: tuple[int, ...]) -> Binning:
        """Restore a binning from the result of `state_dict`."""
        ends = np.cumsum(state["edge_counts"].numpy())[:-1]
        return cls(tuple(np.split(state["edges"].numpy(), ends)), categories)


def fit_bins(cells: np.ndarray, categories: tuple[int, ...], max_bin: int) -> Binning:
    """Compute the bins of a party's columns from its training rows.

    A column of numbers with at most `max_bin` different values gets a bin for each value. A column
    with more values gets edges like those of XGBoost's `hist` method for the same cells; see
    `quantile_edges`.

    Args:
        cells: cells of the training rows, float32, axes (rows, columns); see `Binning.bins`.
        categories: number of categories of each column; 0 for a column whose values have an order.
        max_bin: largest number of bins of an ordered column, 2 to 32768.
    """
    none = np.empty(0, np.float32)
    edges = [
        none if categories[place] else quantile_edges(cells[:, place], max_bin)
        for place in range(cells.shape[1])
    ]
    return Binning(tuple(edges), categories)


#: Number of ranks per bin in the pruned summary, as in XGBoost.
_RANKS_PER_BIN = 8


def quantile_edges(column: np.ndarray, max_bin: int) -> np.ndarray:
    """Return the lower bounds of a column's bins except the first bin, float32, increasing.

    The bounds are values of the column at evenly spaced ranks. A quantile summary of all values
    (Chen and Guestrin 2016, appendix A) returns the same bounds. The summary is pruned first to
    eight values per bin, then to one value per bin. A value that occurs in many rows covers the
    ranks of all these rows. XGBoost before 3.3 chooses the same edges for columns of up to eight
    distinct values per bin. For columns of more values, XGBoost's edges are approximate, because it
    merges summaries of blocks of rows. Since version 3.3, its summaries keep fewer values, so
    XGBoost's edges of columns with more than `max_bin` distinct values may differ.

    Args:
        column: cells of the column, axes (rows,); NaN is a missing cell.
        max_bin: most bins.

    >>> quantile_edges(np.arange(100, dtype=np.float32), 4).tolist()
    [26.0, 51.0, 73.0]
    """
    values, counts = np.unique(column[~np.isnan(column)], return_counts=True)
    ends = counts.cumsum()
    for most in (_RANKS_PER_BIN * max_bin, max_bin + 1):
        kept = _pruned(ends - counts, ends, most)
        values, counts, ends = values[kept], counts[kept], ends[kept]
    edges: np.ndarray = values[1:max_bin].astype(np.float32)
    return edges


def _pruned(begins: np.ndarray, ends: np.ndarray, most: int) -> np.ndarray:
    """Return the positions of `most` values at evenly spaced ranks, including the first and last.

    Args:
        begins: for each value, the number of rows with a smaller value.
        ends: for each value, the number of rows with a smaller or equal value.
        most: number of values to keep.
    """
    last = len(ends) - 1
    if last < most:
        return np.arange(len(ends))
    inner = np.arange(1, most - 1)
    doubled = 2 * (inner * (begins[last] - ends[0]) / (most - 1) + ends[0])
    before = np.maximum(1, np.searchsorted(begins + ends, doubled, side="right") - 1)
    before, doubled = before[before < last], doubled[before < last]
    nearest = before + (doubled >= ends[before] + begins[before + 1])
    return np.unique([0, *nearest, last])


def randomised(bins: np.ndarray, layout: Layout, epsilon: float, secret: Secret) -> np.ndarray:
    """Return bins after k-ary randomised response, a local differential privacy mechanism per cell.

    Source: Kairouz et al. 2016, section 2.

    A cell keeps its bin with probability e^epsilon / (e^epsilon + k - 1). Otherwise the cell moves,
    with equal probability, to one of the other k - 1 bins of its column; the bin of missing cells
    is one of the k bins. For the whole row, the epsilons of its columns add up.

    Args:
        bins: bin numbers of the cells, axes (rows, columns).
        layout: number and order of each column's bins.
        epsilon: privacy parameter epsilon of the response for one cell.
        secret: secret from which the party draws the noise of this training; the same secret always
            draws the same bins.
    """
    drawn = bins.copy()
    missing = layout.width - 1
    for column, values in enumerate(layout.bins):
        count, cells = values + 1, bins[:, column].astype(np.int64)
        cells = np.where(cells == missing, values, cells)
        draws = secret.uniform((2, len(cells)), "bins", column)
        stays = draws[0] < 1 / (1 + (count - 1) * np.exp(-epsilon))
        steps = 1 + np.floor(draws[1] * (count - 1)).astype(np.int64)
        moved = np.where(stays, cells, (cells + steps) % count)
        drawn[:, column] = np.where(moved == values, missing, moved)
    return drawn
