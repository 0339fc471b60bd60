"""Rows of two classes by the probability of the positive one: what tables of thresholds need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vfl.core.errors import DataError

#: Most groups of rows with neighbouring probabilities; fewer rows are a group each.
GROUPS = 1000


@dataclass(frozen=True)
class Scored:
    """Rows in groups of about equal size, by their probability of the second class.

    Attributes:
        probability: the mean of each group, ascending, float64, axes (groups,).
        counts: rows of the first and of the second class, int64, axes (groups, 2).
    """

    probability: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, logits: Tensor, codes: Tensor) -> Scored | None:
        """Count rows; None where an output is not finite. Equal probabilities share a group.

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
        if found.counts.shape != (len(found.probability), 2) or not len(found.probability):
            raise DataError("this is no record of scored rows")
        return found

    def record(self) -> Mapping[str, Any]:
        """For JSON."""
        return {"probability": self.probability.tolist(), "counts": self.counts.tolist()}

    @property
    def rows(self) -> int:
        """How many there are."""
        return int(self.counts.sum())

    @property
    def positives(self) -> int:
        """How many are of the second class."""
        return int(self.counts[:, 1].sum())
