"""Sets of pictures with test rows of their own, decoded as far as they are wanted."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from vfl.datasets.party import Classes
from vfl.errors import DataError

ENVIRONMENT = "VFL_DATA"


def data_folder(root: Path | None) -> Path:
    """The folder of data sets: `root`, else the environment's VFL_DATA, else ``~/.cache/vfl``."""
    return root or Path(os.environ.get(ENVIRONMENT) or Path.home() / ".cache" / "vfl")


@dataclass(frozen=True, eq=False)
class Part:
    """The training or the test rows of a set.

    Attributes:
        labels: int64, axes (rows,).
        take: the pictures of some rows, uint8, axes (rows asked for, channels, height, width).
    """

    labels: np.ndarray
    take: Callable[[np.ndarray], np.ndarray]

    @classmethod
    def of(cls, pictures: np.ndarray, labels: np.ndarray) -> Part:
        """A part whose pictures are in memory, axes (rows, channels, height, width)."""
        return cls(labels.astype(np.int64), lambda rows: pictures[rows])


@dataclass(frozen=True, eq=False)
class PictureSet:
    """A whole set; `classes` says what the labels stand for."""

    train: Part
    test: Part
    classes: Classes

    def read(self, limit: int | None = None) -> tuple[np.ndarray, np.ndarray, int]:
        """Pictures and labels, training rows first.

        Args:
            limit: at most so many rows, the first of both parts in their proportion.

        Returns:
            pictures, uint8, axes (rows, channels, height, width); labels, int64, axes (rows,); and
            how many of the rows are training rows.

        Raises:
            DataError: a label without a class, or a picture that cannot be decoded.
        """
        self._check_labels()
        parts = (self.train, self.test)
        counts = in_proportion([len(part.labels) for part in parts], limit)
        chosen = [(part, np.arange(count)) for part, count in zip(parts, counts, strict=True)]
        pictures = np.concatenate([part.take(rows) for part, rows in chosen])
        return pictures, np.concatenate([part.labels[rows] for part, rows in chosen]), counts[0]

    def _check_labels(self) -> None:
        labels = np.concatenate([self.train.labels, self.test.labels])
        if not labels.size or labels.min() < 0 or labels.max() >= len(self.classes):
            raise DataError(
                "the labels of a picture set do not fit its classes",
                got=f"{len(labels)} labels",
                want=f"numbers from 0 to {len(self.classes) - 1}",
            )


def in_proportion(counts: Sequence[int], limit: int | None) -> list[int]:
    """How many rows of each part a limit on all rows leaves.

    >>> in_proportion([60_000, 10_000], 700), in_proportion([3, 1], None)
    ([600, 100], [3, 1])
    """
    every = sum(counts)
    rows = min(limit or every, every)
    ends = [round(rows * end / max(every, 1)) for end in accumulate(counts, initial=0)]
    return [end - start for start, end in pairwise(ends)]


def interleaved(labels: np.ndarray) -> np.ndarray:
    """An order that takes one row of each class in turn, for files that keep classes together.

    >>> interleaved(np.array([0, 0, 0, 1, 1, 2])).tolist()
    [0, 3, 5, 1, 4, 2]
    """
    by_class = np.argsort(labels, kind="stable")
    _, starts, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
    rank = np.empty(len(labels), dtype=np.int64)
    rank[by_class] = np.arange(len(labels)) - np.repeat(starts, counts)
    order: np.ndarray = np.lexsort((labels, rank))
    return order
