"""Contract of data sets by name: what a caller requests, and the rows that a data set returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import pandas as pd

from vfl.core.errors import BadOptionError
from vfl.datasets.table import Classes


class DataSource(ABC):
    """A data set that users request by its name.

    A subclass implements `read`. The options of the data set's spec are the arguments of the
    constructor. For picture sets, which can be joined, `pictures.py` has a base class.

    Attributes:
        follows: attributes of `SetFormat` that the data set supports.
        own_parts: "validation" and "test", if the data set fixes the rows of these parts.
    """

    follows: ClassVar[Sequence[str]] = ()
    own_parts: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def read(self, asked: Request) -> Bundled:
        """Read the rows; use the network only if `asked.download` is true.

        Raises:
            MissingDataError: files are missing.
            DataError: files are damaged.
            BadOptionError: the data set does not support a value in the requested form.
        """


@dataclass(frozen=True, slots=True)
class SetFormat:
    """Requested form of a data set; an attribute that is None keeps the data set's default.

    Attributes:
        side: height and width of pictures, in pixels.
        classes: number of classes to keep of a picture set; the first classes are kept.
        length: number of words or items in a row; longer rows are cut, and shorter rows are filled
            with zeros.
        vocabulary: number of different word codes, including the codes for padding and for unknown
            words.
        tokenizer: name of a pretrained model; its tokens then replace words.
    """

    side: int | None = None
    classes: int | None = None
    length: int | None = None
    vocabulary: int | None = None
    tokenizer: str | None = None

    def check(self, source: str, known: Sequence[str]) -> None:
        """Refuse attributes that a data set does not support.

        Args:
            source: name of the data set, for the message.
            known: names of the attributes that it supports.

        Raises:
            BadOptionError: an attribute is set that the data set does not support.
        """
        given = [each.name for each in fields(self) if getattr(self, each.name) is not None]
        foreign = [name for name in given if name not in known]
        if foreign:
            options = ", ".join(f"data.{name}" for name in known)
            raise BadOptionError(
                f"data set '{source}' does not support data.{foreign[0]}",
                where=f"data.{foreign[0]}",
                want=f"of these settings only {options}" if options else "none of these settings",
                fix=f"leave data.{foreign[0]} out",
            )


class Unnumbered(Protocol):
    """Rows of texts; their words get numbers only when the training rows are known."""

    def rows(self, train: np.ndarray) -> np.ndarray:
        """Return all texts as token numbers, axes (rows, positions).

        The vocabulary depends on the training rows.
        """


@dataclass(frozen=True, eq=False)
class Bundled:
    """A data set as it is read, before its columns are assigned to parties.

    Attributes:
        cells: pictures, axes (rows, channels, height, width); or a table with columns of numbers;
            or sequences of whole numbers, axes (rows, positions); or texts.
        labels: class codes, int64, axes (rows,).
        classes: names of the classes, in the order of their codes.
        mean, scale: ``(pixel - mean) / scale`` standardises a picture; each has one number per
            channel. Data other than pictures do not use these numbers.
        train_rows: number of training rows, if the data set fixes its test rows; the training rows
            come first. None if the data set does not fix its test rows.
        validation_rows: number of validation rows, which follow the training rows; 0 if the data
            set does not fix them, so that they are drawn from the training rows.
    """

    cells: np.ndarray | pd.DataFrame | Unnumbered
    labels: np.ndarray
    classes: Classes
    mean: tuple[float, ...] = (0.0,)
    scale: tuple[float, ...] = (1.0,)
    train_rows: int | None = None
    validation_rows: int = 0

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return len(self.labels)


@dataclass(frozen=True, slots=True)
class Request:
    """Request to read the rows of a data set.

    Attributes:
        root: folder of the files; None takes it from the environment, see `files.data_folder`.
        download: whether to download missing files.
        limit: largest number of rows; the first rows are read. A data set with fixed parts reads
            the first rows of each part, in proportion to the sizes of the parts.
        form: requested form of the rows; a data set supports the attributes in
            `DataSource.follows`.
        seed: the run's public seed, for data sets that draw rows at random.
    """

    root: Path | None = None
    download: bool = False
    limit: int | None = None
    form: SetFormat = field(default_factory=SetFormat)
    seed: int = 0


def in_proportion(counts: Sequence[int], limit: int | None) -> list[int]:
    """Divide a limit on the number of rows among parts, in proportion to the parts' sizes.

    >>> in_proportion([60_000, 10_000], 700), in_proportion([3, 1], None)
    ([600, 100], [3, 1])
    """
    every = sum(counts)
    rows = min(limit or every, every)
    ends = [round(rows * end / max(every, 1)) for end in accumulate(counts, initial=0)]
    return [end - start for start, end in pairwise(ends)]


def first_rows(sizes: Sequence[int], limit: int | None) -> tuple[np.ndarray, list[int]]:
    """Return the first rows of every part within a limit, and the number of rows in each part."""
    counts = in_proportion(sizes, limit)
    starts = np.cumsum([0, *sizes])[:-1]
    kept = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    return np.concatenate(kept), counts


def interleaved(labels: np.ndarray) -> np.ndarray:
    """Return an order of rows that alternates between classes, for files sorted by class.

    >>> interleaved(np.array([0, 0, 0, 1, 1, 2])).tolist()
    [0, 3, 5, 1, 4, 2]
    """
    by_class = np.argsort(labels, kind="stable")
    _, starts, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
    rank = np.empty(len(labels), dtype=np.int64)
    rank[by_class] = np.arange(len(labels)) - np.repeat(starts, counts)
    order: np.ndarray = np.lexsort((labels, rank))
    return order
