"""Rows of two classes by a score, as a phase counts them: what every table of scores is made of.

The score is the probability of the second class, or the points of a scorecard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vfl.core.errors import DataError
from vfl.session.drift import population_stability_index

#: Most groups of rows with neighbouring probabilities; fewer rows are a group each.
GROUPS = 1000
_BANDS = 10


@dataclass(frozen=True)
class Scored:
    """Rows in groups of one score, or of neighbouring ones.

    Attributes:
        values: the score of each group, or its mean, ascending, axes (groups,).
        counts: rows of the first and of the second class, int64, axes (groups, 2).
    """

    values: np.ndarray
    counts: np.ndarray

    @classmethod
    def counted(cls, values: np.ndarray, second: np.ndarray) -> Scored:
        """Count rows; equal scores are a group.

        Args:
            values: the score of each row, axes (rows,).
            second: whether it is of the second class, axes (rows,).
        """
        found, places = np.unique(values, return_inverse=True)
        counts = np.zeros((len(found), 2), np.int64)
        np.add.at(counts, (places, second.astype(np.int64)), 1)
        return cls(found, counts)

    @classmethod
    def of(cls, logits: Tensor, codes: Tensor) -> Scored | None:
        """Count rows by the probability of the second class, in groups of about equal size.

        Equal probabilities share a group. None where an output is not finite.

        Args:
            logits: axes (rows, 2).
            codes: classes 0 and 1, axes (rows,).

        >>> logits = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 9.0]])
        >>> Scored.of(logits, torch.tensor([0, 1, 1])).counts.tolist()
        [[1, 1], [0, 1]]
        """
        if not torch.isfinite(logits).all():
            return None
        chances = torch.softmax(logits.double(), dim=1)[:, 1].numpy()
        _, place, rows = np.unique(chances, return_inverse=True, return_counts=True)
        step = max(1.0, len(chances) / GROUPS)
        groups = ((np.cumsum(rows) - rows) / step).astype(np.int64)[place]
        _, groups = np.unique(groups, return_inverse=True)
        counts = np.zeros((int(groups.max()) + 1, 2), np.int64)
        np.add.at(counts, (groups, codes.numpy()), 1)
        return cls(np.bincount(groups, chances) / counts.sum(axis=1), counts)

    @classmethod
    def read(cls, record: Any) -> Scored:
        """What `record` gave.

        Raises:
            DataError: it is something else.
        """
        try:
            found = cls(np.array(record["probability"], float), np.array(record["counts"], int))
        except (KeyError, TypeError, ValueError):
            raise DataError("this is no record of scored rows") from None
        if found.counts.shape != (len(found.values), 2) or not len(found.values):
            raise DataError("this is no record of scored rows")
        return found

    def record(self) -> Mapping[str, Any]:
        """For JSON."""
        return {"probability": self.values.tolist(), "counts": self.counts.tolist()}

    @property
    def rows(self) -> int:
        """How many there are."""
        return int(self.counts.sum())

    @property
    def positives(self) -> int:
        """How many are of the second class."""
        return int(self.counts[:, 1].sum())

    def __add__(self, other: Scored) -> Scored:
        values, places = np.unique(np.concatenate([self.values, other.values]), return_inverse=True)
        counts = np.zeros((len(values), 2), np.int64)
        np.add.at(counts, places, np.concatenate([self.counts, other.counts]))
        return Scored(values, counts)

    def auc(self, of: int = 1) -> float:
        """How often a row of one class scores above one of the other; NaN where one is missing.

        Equal scores count half.

        Args:
            of: the class whose rows should score higher, 0 or 1.
        """
        above, below = self.counts[:, of], self.counts[:, 1 - of]
        if not above.any() or not below.any():
            return float("nan")
        passed = np.cumsum(below) - below / 2
        return float((passed * above).sum() / (above.sum() * below.sum()))

    def gini(self, of: int = 1) -> float:
        """2 AUC - 1."""
        return 2 * self.auc(of) - 1

    def kolmogorov_smirnov(self) -> float:
        """Largest distance of the classes' distributions; NaN where one is empty.

        >>> Scored.counted(np.array([1, 2, 3, 4]), np.array([1, 1, 0, 1])).kolmogorov_smirnov()
        0.6666666666666666
        """
        totals = self.counts.sum(axis=0)
        if not totals.all():
            return float("nan")
        apart = np.cumsum(self.counts / totals, axis=0)
        return float(np.abs(apart[:, 0] - apart[:, 1]).max())

    def bands(self, most: int = _BANDS, *, highest_first: bool = False) -> list[Scored]:
        """Bands of neighbouring scores with about as many rows each.

        Args:
            most: how many at most.
            highest_first: in that order, a group then being in the band of its first row; else the
                lowest come first, a group being in the band of its middle row.
        """
        rows = self.counts.sum(axis=1)
        if highest_first:
            band = (self.rows - np.cumsum(rows)) * most // max(1, self.rows)
        else:
            band = (most * (np.cumsum(rows) - rows / 2) / max(1, self.rows)).astype(np.int64)
        band = np.minimum(band, most - 1)
        order = np.unique(band)
        return [Scored(self.values[band == one], self.counts[band == one]) for one in order]

    def stability(self, other: Scored, most: int = _BANDS) -> float:
        """The population stability index of other rows over this one's bands of scores."""
        starts = [band.values[0] for band in self.bands(most)][1:]

        def counted(scored: Scored) -> Tensor:
            places = np.searchsorted(starts, scored.values, side="right")
            rows = scored.counts.sum(axis=1)
            found = np.bincount(places, weights=rows, minlength=len(starts) + 1)
            return torch.from_numpy(found.astype(np.int64))

        return float(population_stability_index(counted(self), counted(other)))
