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
from vfl.datasets.encode import bin_edges
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
        for place, edges in enumerate(self.edges):
            column = cells[:, place]
            if self.categories[place]:
                own = np.nan_to_num(column).astype(np.int64)
            else:
                own = np.searchsorted(edges, column, side="right")
            found[:, place] = np.where(np.isnan(column), missing, own)
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
    bins of about as many training rows, where a value counts at most as often as a bin has rows.

    Args:
        cells: of the training rows, float32, axes (rows, columns); see `Binning.bins`.
        categories: how many each column has; 0 of one whose values have an order.
        max_bin: most bins of an ordered column, 2 to 32768.
    """
    none = np.empty(0, np.float32)
    edges = [
        none if categories[place] else _edges(cells[:, place], max_bin)
        for place in range(cells.shape[1])
    ]
    return Binning(tuple(edges), categories)


def _edges(column: np.ndarray, max_bin: int) -> np.ndarray:
    values = column[~np.isnan(column)]
    different = np.unique(values)
    if len(different) > max_bin:
        different = np.array(bin_edges(values, max_bin - 1))
    found: np.ndarray = different[1:].astype(np.float32)
    return found


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
