"""A party's columns as bins: the order of values is all that a tree needs.

Edges are learned from training rows and stay with their party. What another party may get is the
number of each cell's bin and, for each column, how many bins it has and whether they have an order.
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

MAX_BINS = 1 << 15


@dataclass(frozen=True)
class Binning:
    """How a party puts its cells into bins.

    Attributes:
        edges: each column's lower bounds of all bins but the first, rising; of categories none.
        categories: how many each column has; 0 of one whose values have an order.
    """

    edges: tuple[np.ndarray, ...] = field(repr=False)
    categories: tuple[int, ...]

    @property
    def layout(self) -> Layout:
        """The part that another party may know."""
        counts = [
            count or len(edges) + 1
            for edges, count in zip(self.edges, self.categories, strict=True)
        ]
        return Layout(tuple(counts), tuple(count > 0 for count in self.categories))

    def bins(self, cells: np.ndarray) -> np.ndarray:
        """Number of each cell's bin, axes (rows, columns); a missing cell has `layout.width - 1`.

        uint8 where that is enough, else uint16.

        Args:
            cells: of `CellEncoder`: numbers, or numbers of categories; missing ones are NaN.
        """
        missing = self.layout.width - 1
        found = np.empty(cells.shape, np.uint8 if missing < 256 else np.uint16)
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
        """The edges as tensors, for `of_state`."""
        counts = torch.tensor([len(edges) for edges in self.edges], dtype=torch.int64)
        edges = np.concatenate([*self.edges, np.empty(0, np.float32)])
        return {"edges": torch.from_numpy(edges), "edge_counts": counts}

    @classmethod
    def of_state(cls, state: Mapping[str, Tensor], categories: tuple[int, ...]) -> Binning:
        """A binning that `state_dict` was taken of."""
        ends = np.cumsum(state["edge_counts"].numpy())[:-1]
        return cls(tuple(np.split(state["edges"].numpy(), ends)), categories)


def fit_bins(cells: np.ndarray, categories: tuple[int, ...], max_bin: int) -> Binning:
    """Bins of a party's columns.

    A column of numbers with at most `max_bin` different values gets a bin for each; another gets
    edges that XGBoost's `hist` chooses for the same cells, see `quantile_edges`.

    Args:
        cells: of the training rows, float32, axes (rows, columns); see `Binning.bins`.
        categories: how many each column has; 0 of one whose values have an order.
        max_bin: most bins of an ordered column, 2 to 32768.
    """
    none = np.empty(0, np.float32)
    edges = [
        none if categories[place] else quantile_edges(cells[:, place], max_bin)
        for place in range(cells.shape[1])
    ]
    return Binning(tuple(edges), categories)


#: So many ranks a bin are looked at, as in XGBoost.
_RANKS_PER_BIN = 8


def quantile_edges(column: np.ndarray, max_bin: int) -> np.ndarray:
    """Lower bounds of all bins of a column but the first, float32, rising.

    Values at evenly spaced ranks, as the quantile summary of Chen and Guestrin 2016 (appendix A)
    gives them where it holds all values: it is pruned to eight values a bin, and then to one. A
    value that many rows have takes the ranks of all of them. XGBoost has the same edges for columns
    of up to eight different values a bin, approximate ones for more: its summary is of blocks.

    Args:
        column: cells, axes (rows,); NaN is missing.
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
    """Positions of the values next to `most` evenly spaced ranks, the first and the last included.

    Args:
        begins: how many rows have a smaller value, of each value.
        ends: how many have no larger one.
        most: of the values are kept.
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
    """Bins after k-ary randomised response (Kairouz et al. 2016, section 2): local DP of a cell.

    A cell stays where it is with probability e^epsilon / (e^epsilon + k - 1), else it goes to one
    of the other k - 1 bins of its column, the missing one among them, all alike. A row has spent
    `epsilon` a column.

    Args:
        bins: axes (rows, columns).
        layout: of these columns.
        epsilon: of each cell.
        secret: of the party and this training alone; the same one draws the same again.
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
