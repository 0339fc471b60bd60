"""The contract of data sets by name: what is asked of one, and the rows that it gives."""

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
    """A data set that a name stands for.

    A member implements `read`. Options are the arguments of its constructor. `pictures.py` has a
    base for sets of pictures, which can be joined.

    Attributes:
        follows: the attributes of a `SetFormat` that it follows.
        own_parts: "validation" and "test", where the set has such rows of its own.
    """

    follows: ClassVar[Sequence[str]] = ()
    own_parts: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def read(self, asked: Request) -> Bundled:
        """Its rows; the network is used only where `asked.download` says so.

        Raises:
            MissingDataError: files that are not there.
            DataError: files that are damaged.
            BadOptionError: a number of the format that the set cannot have.
        """


@dataclass(frozen=True, slots=True)
class SetFormat:
    """What is made of a data set; None leaves it as it is, or takes the set's own default.

    Attributes:
        side: pictures of so many pixels in height and width.
        classes: only rows of the first so many classes of a picture set.
        length: words or items a row; longer rows are cut, shorter ones end in zeros.
        vocabulary: different numbers a word may have, padding and the unknown word included.
        tokenizer: name of a pretrained model whose tokens take the place of words.
    """

    side: int | None = None
    classes: int | None = None
    length: int | None = None
    vocabulary: int | None = None
    tokenizer: str | None = None

    def check(self, source: str, known: Sequence[str]) -> None:
        """Refuse what a data set cannot do.

        Args:
            source: the data set.
            known: names of the attributes that it can follow.

        Raises:
            BadOptionError: another one is given.
        """
        given = [each.name for each in fields(self) if getattr(self, each.name) is not None]
        foreign = [name for name in given if name not in known]
        if foreign:
            options = ", ".join(f"data.{name}" for name in known)
            raise BadOptionError(
                f"data set '{source}' has no use for data.{foreign[0]}",
                where=f"data.{foreign[0]}",
                want=f"of these settings only {options}" if options else "none of these settings",
                fix=f"leave data.{foreign[0]} out",
            )


class Unnumbered(Protocol):
    """Rows that become numbers once it is known which of them are training rows."""

    def rows(self, train: np.ndarray) -> np.ndarray:
        """All rows, axes (rows, steps), by what the training rows hold."""


@dataclass(frozen=True, eq=False)
class Bundled:
    """One data set before it is cut into parties.

    Attributes:
        cells: pictures, axes (rows, channels, height, width); a table of number columns; rows of
            whole numbers, axes (rows, steps); or texts.
        labels: int64 codes, axes (rows,).
        classes: what the codes stand for.
        mean, scale: ``(pixel - mean) / scale`` standardises a picture, one of each a channel;
            unused for anything else.
        train_rows: rows before the set's own validation and test rows; None where it has none.
        validation_rows: rows between those of training and test; 0 where they are yet to be drawn.
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
        """How many rows there are."""
        return len(self.labels)


@dataclass(frozen=True, slots=True)
class Request:
    """What is wanted of a data set.

    Attributes:
        root: folder of files; None is that of the environment, see `files.data_folder`.
        download: fetch files that are not there.
        limit: at most so many rows, the first ones; a set with parts of its own gives rows of each
            in their proportion.
        form: what is made of the set; a member follows what its `follows` names.
        seed: the run's public seed, for what is drawn.
    """

    root: Path | None = None
    download: bool = False
    limit: int | None = None
    form: SetFormat = field(default_factory=SetFormat)
    seed: int = 0


def in_proportion(counts: Sequence[int], limit: int | None) -> list[int]:
    """How many rows of each part a limit on all rows leaves.

    >>> in_proportion([60_000, 10_000], 700), in_proportion([3, 1], None)
    ([600, 100], [3, 1])
    """
    every = sum(counts)
    rows = min(limit or every, every)
    ends = [round(rows * end / max(every, 1)) for end in accumulate(counts, initial=0)]
    return [end - start for start, end in pairwise(ends)]


def first_rows(sizes: Sequence[int], limit: int | None) -> tuple[np.ndarray, list[int]]:
    """The first rows of every part, one part after another, and how many of each."""
    counts = in_proportion(sizes, limit)
    starts = np.cumsum([0, *sizes])[:-1]
    kept = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    return np.concatenate(kept), counts


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
