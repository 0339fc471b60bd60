"""Columns as numbers: a party's table as float32 inputs, its labels as codes or numbers.

An encoder is fitted on the training rows alone. Numbers are standardised, booleans become 0 and 1,
texts one column a category of the training rows. A column that lacked cells in the training rows
gets one more column, 1 where the cell is missing. Columns that are pixels share one mean and one
spread.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import ClassVar

import numpy as np
import pandas as pd
from pydantic import TypeAdapter

from vfl.core.errors import BadOptionError, DataError, nearest
from vfl.datasets.table import (
    Classes,
    Table,
    as_numbers,
    as_texts,
    check_column,
    column_blocks,
    kind_of,
    mean_and_std,
    number_blocks,
    spaced,
)

MAX_CATEGORIES = 100


class Encoder(ABC):
    """What turns a party's table into inputs, fitted once and stored beside its bottom model."""

    kind: ClassVar[str]
    names: tuple[str, ...]  #: the columns it reads, in order

    @abstractmethod
    def transform(self, frame: Table) -> np.ndarray:
        """Inputs of a table's rows, float32, axes (rows, ...)."""

    def to_json(self) -> str:
        """Everything learnt; it holds categories and means, so it stays with its party."""
        return json.dumps({"encoder": self.kind, **asdict(self)})  # type: ignore[call-overload]


@dataclass(frozen=True)
class NumberColumn:
    """``(value - mean) / scale``; a missing cell is 0, a column without spread (scale 0) too."""

    name: str
    indicator: bool
    mean: float = field(repr=False)
    scale: float = field(repr=False)

    @property
    def width(self) -> int:
        return 1 + self.indicator

    def write(self, blocks: Iterable[pd.Series], out: np.ndarray) -> None:
        """Fill `out`, axes (rows, width), which holds zeros."""
        start = 0
        for values in number_blocks(blocks):
            part = out[start : start + len(values)]
            start += len(values)
            missing = np.isnan(values)
            if self.scale:
                part[:, 0] = (values - self.mean) / self.scale
                part[missing, 0] = 0.0
            if self.indicator:
                part[:, 1] = missing


@dataclass(frozen=True)
class TextColumn:
    """One column a category, in sorted order; an unknown category is all zeros."""

    name: str
    indicator: bool
    categories: tuple[str, ...] = field(repr=False)

    @property
    def width(self) -> int:
        return len(self.categories) + self.indicator

    def write(self, blocks: Iterable[pd.Series], out: np.ndarray) -> None:
        """Fill `out`, axes (rows, width), which holds zeros."""
        position_of = {category: position for position, category in enumerate(self.categories)}
        start = 0
        for block in blocks:
            part = out[start : start + len(block)]
            start += len(block)
            codes, found = pd.factorize(block)  # a missing cell has code -1: the last position
            read = [position_of.get(text, -1) for text in as_texts(pd.Series(found))]
            positions = np.array([*read, -1], dtype=np.int64)[codes]
            known = np.flatnonzero(positions >= 0)
            part[known, positions[known]] = 1.0
            if self.indicator:
                part[:, -1] = block.isna().to_numpy()


Column = NumberColumn | TextColumn


@dataclass(frozen=True)
class TableEncoder(Encoder):
    """The encoders of a party's columns, in their order."""

    kind: ClassVar[str] = "table"
    columns: tuple[Column, ...]

    @classmethod
    def fit(cls, frame: Table, max_categories: int = MAX_CATEGORIES) -> TableEncoder:
        """Learn means, spreads and categories.

        Args:
            frame: the training rows only, and only the party's columns.
            max_categories: most categories one text column may have.

        Raises:
            DataError: a column of dates or mixed things, infinite numbers, too many categories.
        """
        return cls(tuple(_fit_column(frame[name], max_categories) for name in frame.columns))

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(column.name for column in self.columns)

    @property
    def width(self) -> int:
        """How many columns `transform` gives."""
        return sum(column.width for column in self.columns)

    def transform(self, frame: Table) -> np.ndarray:
        """Inputs of any rows of the same columns, float32, axes (rows, columns).

        Raises:
            MissingColumnError: the table lacks a column.
            DataError: text where the training rows had numbers.
        """
        out = np.zeros((len(frame), self.width), dtype=np.float32)
        start = 0
        for column in self.columns:
            check_column(frame.columns, column.name, f"the encoder's '{column.name}'")
            column.write(column_blocks(frame, column.name), out[:, start : start + column.width])
            start += column.width
        return out


def _fit_column(column: pd.Series, max_categories: int) -> Column:
    name, indicator = str(column.name), bool(column.isna().any())
    kind = kind_of(column)
    if kind == "text":
        return TextColumn(name, indicator, _categories(column, max_categories))
    if kind == "boolean":
        return NumberColumn(name, indicator, mean=0.0, scale=1.0)
    mean, scale = mean_and_std(as_numbers(column))
    return NumberColumn(name, indicator, mean, scale)


def _categories(column: pd.Series, limit: int) -> tuple[str, ...]:
    found: Sequence[str] = sorted(set(as_texts(pd.Series(column.dropna().unique()))))
    if len(found) > limit:
        raise DataError(
            f"column '{column.name}' has too many categories",
            got=f"{spaced(len(found))} different texts in {spaced(len(column))} training rows",
            want=f"at most {spaced(limit)}",
            fix="leave the column out or group its texts; if it holds numbers, name the table's "
            "own sign of a missing cell in the option 'missing'",
        )
    return tuple(found)


@dataclass(frozen=True)
class PictureEncoder(Encoder):
    """Columns in reading order (channel, row, column of the picture) as pictures.

    Attributes:
        names: the pixel columns.
        shape: (channels, height, width) of one party's part of the picture.
        mean, scale: of all training pixels together; scale 0 where all are alike.
    """

    kind: ClassVar[str] = "pictures"
    names: tuple[str, ...]
    shape: tuple[int, ...]
    mean: float = field(repr=False)
    scale: float = field(repr=False)

    @classmethod
    def fit(cls, frame: Table, shape: tuple[int, ...]) -> PictureEncoder:
        """Learn the block's mean and spread.

        Args:
            frame: the training rows only, and only the pixel columns.
            shape: axes of one picture.

        Raises:
            DataError: the shape does not hold the columns, or a cell is no finite number.
        """
        names = tuple(map(str, frame.columns))
        if min(shape) < 1 or math.prod(shape) != len(names):
            raise DataError(
                "the shape of a picture does not hold its columns",
                got=f"shape {list(shape)} for {len(names)} columns",
                want="positive sizes whose product is the number of columns",
            )
        pixels = _pixels(frame, names)
        return cls(names, shape, *mean_and_std(pixels))

    def transform(self, frame: Table) -> np.ndarray:
        """Pictures of any rows, float32, axes (rows, channels, height, width); 0 where missing.

        Raises:
            MissingColumnError: the table lacks a pixel.
            DataError: a cell is no finite number.
        """
        pixels = _pixels(frame, self.names)
        if self.scale == 0:
            return np.zeros((len(frame), *self.shape), dtype=np.float32)
        pixels -= self.mean
        pixels /= self.scale
        np.nan_to_num(pixels, copy=False, nan=0.0)
        return pixels.reshape(len(frame), *self.shape).astype(np.float32)


def _pixels(frame: Table, names: tuple[str, ...]) -> np.ndarray:
    """float64, axes (rows, pixels)."""
    pixels = np.empty((len(frame), len(names)))
    for position, name in enumerate(names):
        check_column(frame.columns, name, f"the encoder's '{name}'")
        pixels[:, position] = as_numbers(frame[name])
    return pixels


def read_encoder(text: str) -> Encoder:
    """The encoder whose `to_json` wrote this text.

    Raises:
        DataError: the text is something else.
    """
    try:
        record = json.loads(text)
        kind = {each.kind: each for each in (TableEncoder, PictureEncoder)}[record.pop("encoder")]
        return TypeAdapter[Encoder](kind).validate_python(record)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError("this is not a stored encoder", want="what to_json wrote") from None


TASKS = ("classification", "regression")


def encode_labels(column: pd.Series, task: str) -> tuple[np.ndarray, Classes | None]:
    """Labels and what they stand for.

    Args:
        column: one label a row.
        task: "classification" or "regression".

    Returns:
        int64 codes 0..C-1 of shape (rows,) and the C classes in sorted order; for a regression the
        numbers themselves as float32, and None.

    >>> encode_labels(pd.Series(["no", "yes", "no"], name="paid"), "classification")
    (array([0, 1, 0]), ('no', 'yes'))

    Raises:
        BadOptionError: an unknown task.
        DataError: a missing label, or labels that do not fit the task.
    """
    if task not in TASKS:
        raise BadOptionError(
            f"no task is called '{task}'", want=", ".join(TASKS), fix=nearest(task, TASKS)
        )
    missing = int(column.isna().sum())
    if missing:
        raise DataError(
            f"the label column '{column.name}' has missing cells",
            got=f"{spaced(missing)} of {spaced(len(column))} rows",
            fix="leave those rows out of the table",
        )
    if task == "regression":
        return as_numbers(column).astype(np.float32), None
    codes, classes = _codes(column)
    if len(classes) < 2:
        raise DataError(
            f"the label column '{column.name}' has nothing to tell apart",
            got=f"{spaced(len(classes))} classes",
            want="at least 2 classes",
        )
    return codes, classes


def _codes(column: pd.Series) -> tuple[np.ndarray, Classes]:
    """Codes of the sorted classes; each different cell is read once."""
    text = kind_of(column) == "text"
    cells, different = pd.factorize(column if text else as_numbers(column))
    name = str(column.name)
    read = as_texts(pd.Series(different)) if text else _whole(np.asarray(different), name)
    found, codes = np.unique(read, return_inverse=True)
    return codes[cells], tuple(found.tolist())


def _whole(values: np.ndarray, name: str) -> np.ndarray:
    """As int64, so that classes are written to JSON and read back unchanged."""
    if (values != np.round(values)).any():
        raise DataError(
            f"the label column '{name}' holds real numbers, not classes",
            fix='set task = "regression"',
        )
    return values.astype(np.int64)
