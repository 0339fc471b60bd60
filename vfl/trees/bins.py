"""A party's columns as bins: the order of values is all that a tree needs.

Edges and categories are learnt from training rows and stay with their party. What another party may
get is the number of each cell's bin and, for each column, how many bins it has and whether they
have an order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from vfl.core.errors import DataError
from vfl.core.seeds import Secret
from vfl.datasets.encode import MAX_CATEGORIES
from vfl.datasets.table import as_numbers, as_texts, kind_of
from vfl.trees.grow import Layout

MAX_BINS = 1 << 15


@dataclass(frozen=True)
class NumberBins:
    """Bins of an ordered column.

    Attributes:
        edges: lower bounds of all bins but the first, rising.
    """

    name: str
    edges: np.ndarray = field(repr=False)

    @property
    def count(self) -> int:
        """How many bins of values there are."""
        return len(self.edges) + 1

    def bins_of(self, cells: pd.Series) -> np.ndarray:
        """Number of each cell's bin, int64; -1 for a missing cell."""
        values = as_numbers(cells)
        bins = np.searchsorted(self.edges, values, side="right")
        return np.where(np.isnan(values), -1, bins)


@dataclass(frozen=True)
class CategoryBins:
    """Bins of a column without order, one a category; others count as missing.

    Attributes:
        categories: sorted.
    """

    name: str
    categories: tuple[str, ...] = field(repr=False)

    @property
    def count(self) -> int:
        """How many categories there are."""
        return len(self.categories)

    def bins_of(self, cells: pd.Series) -> np.ndarray:
        """Number of each cell's category, int64; -1 for a missing cell or another category."""
        found: np.ndarray = pd.Index(self.categories).get_indexer(pd.Index(as_texts(cells)))
        return found


@dataclass(frozen=True)
class Binning:
    """How a party puts its columns into bins; it holds edges and categories."""

    columns: tuple[NumberBins | CategoryBins, ...]

    @property
    def layout(self) -> Layout:
        """What another party may know of these columns."""
        return Layout(
            tuple(max(1, one.count) for one in self.columns),
            tuple(isinstance(one, CategoryBins) for one in self.columns),
        )

    def transform(self, frame: pd.DataFrame) -> np.ndarray:
        """Number of each cell's bin, axes (rows, columns); a missing cell has `layout.width - 1`.

        uint8 where that is enough, else uint16.
        """
        missing = self.layout.width - 1
        kind = np.uint8 if missing < 256 else np.uint16
        bins = np.empty((len(frame), len(self.columns)), kind)
        for place, one in enumerate(self.columns):
            own = one.bins_of(frame[one.name])
            bins[:, place] = np.where(own < 0, missing, own)
        return bins


def fit_bins(frame: pd.DataFrame, names: Sequence[str], max_bin: int) -> Binning:
    """Bins of a party's columns.

    A column of numbers with at most `max_bin` different values gets a bin for each; another gets
    bins of about as many training rows.

    Args:
        frame: the training rows.
        names: the party's columns.
        max_bin: most bins of a column, 2 to 32768.

    Raises:
        DataError: a column has too many categories.
    """
    return Binning(tuple(_fit(frame[name], name, max_bin) for name in names))


def _fit(cells: pd.Series, name: str, max_bin: int) -> NumberBins | CategoryBins:
    if kind_of(cells) == "text":
        categories = sorted(set(as_texts(cells.dropna())))
        if len(categories) > MAX_CATEGORIES:
            raise DataError(
                "a column has too many categories",
                where=f"column '{name}'",
                got=f"{len(categories)} categories",
                want=f"at most {MAX_CATEGORIES}",
                fix="leave the column out, or group its categories",
            )
        return CategoryBins(name, tuple(categories))
    values = as_numbers(cells)
    values = np.sort(values[~np.isnan(values)])
    different = np.unique(values)
    if len(different) > max_bin:
        places = np.arange(1, max_bin) * len(values) // max_bin
        different = np.unique(np.concatenate([different[:1], values[places]]))
    return NumberBins(name, different[1:])


def randomised(bins: np.ndarray, layout: Layout, epsilon: float, secret: Secret) -> np.ndarray:
    """Bins after k-ary randomised response (Kairouz et al. 2016, section 2): local DP of a cell.

    A cell stays where it is with probability e^epsilon / (e^epsilon + k - 1), else it goes to one
    of the other k - 1 bins of its column, the missing one among them, all alike. A row has spent
    `epsilon` a column.

    Args:
        bins: axes (rows, columns).
        layout: of these columns.
        epsilon: of each cell.
        secret: of the party; each call needs another one.
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
