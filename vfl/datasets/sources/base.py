"""Contract of data sets by name: the request, and the returned rows."""

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
    """A data set that is requested by name.

    A member implements `read`. Options are the arguments of its constructor. `pictures.py` has a
    base for sets of pictures, which can be joined.

    Attributes:
        follows: attributes of a `SetFormat` that it supports.
        own_parts: "validation" and "test", if the set has its own rows for them.
    """

    follows: ClassVar[Sequence[str]] = ()
    own_parts: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def read(self, asked: Request) -> Bundled:
        """Read the rows; the network is used only if `asked.download` is set.

        Raises:
            MissingDataError: files are missing.
            DataError: files are damaged.
            BadOptionError: the set does not support a number of the format.
        """


@dataclass(frozen=True, slots=True)
class SetFormat:
    """Requested form of a data set; None means the set's default form.

    Attributes:
        side: height and width of pictures, in pixels.
        classes: number of classes of a picture set to keep, the first ones.
        length: words or items of a row; longer rows are cut, shorter ones end in zeros.
        vocabulary: number of different word codes, including padding and the unknown word.
        tokenizer: name of a pretrained model whose tokens replace words.
    """

    side: int | None = None
    classes: int | None = None
    length: int | None = None
    vocabulary: int | None = None
    tokenizer: str | None = None

    def check(self, source: str, known: Sequence[str]) -> None:
        """Refuse settings that a data set does not support.

        Args:
            source: the data set.
            known: names of the supported attributes.

        Raises:
            BadOptionError: an attribute is set that the data set does not have.
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
    """Rows that can be converted to numbers only after the training rows are known."""

    def rows(self, train: np.ndarray) -> np.ndarray:
        """All rows, axes (rows, steps), encoded by the training rows."""


@dataclass(frozen=True, eq=False)
class Bundled:
    """One data set before its columns are assigned to parties.

    Attributes:
        cells: pictures, axes (rows, channels, height, width); a table of number columns; rows of
            whole numbers, axes (rows, steps); or texts.
        labels: int64 codes, axes (rows,).
        classes: classes of the codes.
        mean, scale: ``(pixel - mean) / scale`` standardises a picture, with one number for each
            channel; unused for other data.
        train_rows: rows before the set's own validation and test rows; None if it has none.
        validation_rows: rows between training and test rows; 0 if they must still be drawn.
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
        """Number of rows."""
        return len(self.labels)


@dataclass(frozen=True, slots=True)
class Request:
    """Request for the rows of a data set.

    Attributes:
        root: folder of files; None takes that of the environment, see `files.data_folder`.
        download: whether to fetch missing files.
        limit: largest number of rows, the first ones; a set with its own parts returns rows of each
            in proportion.
        form: form of the rows; a member supports the attributes in its `follows`.
        seed: the run's public seed, for random draws.
    """

    root: Path | None = None
    download: bool = False
    limit: int | None = None
    form: SetFormat = field(default_factory=SetFormat)
    seed: int = 0


def in_proportion(counts: Sequence[int], limit: int | None) -> list[int]:
    """Number of rows of each part, under a limit on all rows.

    >>> in_proportion([60_000, 10_000], 700), in_proportion([3, 1], None)
    ([600, 100], [3, 1])
    """
    every = sum(counts)
    rows = min(limit or every, every)
    ends = [round(rows * end / max(every, 1)) for end in accumulate(counts, initial=0)]
    return [end - start for start, end in pairwise(ends)]


def first_rows(sizes: Sequence[int], limit: int | None) -> tuple[np.ndarray, list[int]]:
    """Return the first rows of every part, in the order of the parts, and their numbers."""
    counts = in_proportion(sizes, limit)
    starts = np.cumsum([0, *sizes])[:-1]
    kept = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    return np.concatenate(kept), counts


def interleaved(labels: np.ndarray) -> np.ndarray:
    """Return an order that alternates between classes, for files sorted by class.

    >>> interleaved(np.array([0, 0, 0, 1, 1, 2])).tolist()
    [0, 3, 5, 1, 4, 2]
    """
    by_class = np.argsort(labels, kind="stable")
    _, starts, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
    rank = np.empty(len(labels), dtype=np.int64)
    rank[by_class] = np.arange(len(labels)) - np.repeat(starts, counts)
    order: np.ndarray = np.lexsort((labels, rank))
    return order
