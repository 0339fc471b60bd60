"""A party's table as float32 columns, by what its training rows alone say.

Numbers are standardised, booleans become 0 and 1, texts one column a category of the training rows.
A column that lacked cells in the training rows gets one more column, 1 where the cell is missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pandas as pd

from vfl.datasets.columns import Table, column_blocks
from vfl.datasets.table import check_column
from vfl.datasets.values import centre, kind_of, number_blocks, numbers, spaced, texts
from vfl.errors import DataError

MAX_CATEGORIES = 100


@runtime_checkable
class Encoder(Protocol):
    """What turns a party's table into inputs, fitted once and stored beside its bottom model."""

    @property
    def names(self) -> tuple[str, ...]:
        """The columns it reads, in order."""

    def transform(self, frame: Table) -> np.ndarray:
        """Inputs of a table's rows, float32, axes (rows, ...)."""

    def to_json(self) -> str:
        """Everything it learnt, for a file of the party's own."""


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
            self._write_block(values, out[start : start + len(values)])
            start += len(values)

    def _write_block(self, values: np.ndarray, out: np.ndarray) -> None:
        missing = np.isnan(values)
        if self.scale:
            out[:, 0] = (values - self.mean) / self.scale
            out[missing, 0] = 0.0
        if self.indicator:
            out[:, 1] = missing


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
        start = 0
        for block in blocks:
            self._write_block(block, out[start : start + len(block)])
            start += len(block)

    def _write_block(self, column: pd.Series, out: np.ndarray) -> None:
        place = {category: position for position, category in enumerate(self.categories)}
        codes, found = pd.factorize(column)  # a missing cell has code -1: the last of the places
        places = [place.get(text, -1) for text in texts(pd.Series(found))]
        positions = np.array([*places, -1], dtype=np.int64)[codes]
        known = np.flatnonzero(positions >= 0)
        out[known, positions[known]] = 1.0
        if self.indicator:
            out[:, -1] = column.isna().to_numpy()


Column = NumberColumn | TextColumn


@dataclass(frozen=True)
class TableEncoder:
    """The encoders of a party's columns, in their order."""

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
    def names(self) -> tuple[str, ...]:
        """The columns it reads, in order."""
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
        for column, part in self._parts(out):
            check_column(frame.columns, column.name, f"the encoder's '{column.name}'")
            column.write(column_blocks(frame, column.name), part)
        return out

    def _parts(self, out: np.ndarray) -> Iterator[tuple[Column, np.ndarray]]:
        start = 0
        for column in self.columns:
            yield column, out[:, start : start + column.width]
            start += column.width

    def to_json(self) -> str:
        """Everything learnt; it holds categories and means, so it stays with its party."""
        return json.dumps({"encoder": "table", "columns": [asdict(c) for c in self.columns]})

    @classmethod
    def from_json(cls, text: str) -> TableEncoder:
        """The encoder `to_json` wrote.

        Raises:
            DataError: the text is something else.
        """
        try:
            record = json.loads(text)
            columns = tuple(_column(entry) for entry in record["columns"])
        except (ValueError, KeyError, TypeError):
            raise DataError(
                "this is not a stored table encoder", want="what TableEncoder.to_json wrote"
            ) from None
        return cls(columns)


def _column(entry: dict[str, Any]) -> Column:
    if "categories" in entry:
        return TextColumn(**{**entry, "categories": tuple(entry["categories"])})
    return NumberColumn(**entry)


def _fit_column(column: pd.Series, max_categories: int) -> Column:
    name, indicator = str(column.name), bool(column.isna().any())
    kind = kind_of(column)
    if kind == "text":
        return TextColumn(name, indicator, _categories(column, max_categories))
    if kind == "boolean":
        return NumberColumn(name, indicator, mean=0.0, scale=1.0)
    mean, scale = centre(numbers(column))
    return NumberColumn(name, indicator, mean, scale)


def _categories(column: pd.Series, limit: int) -> tuple[str, ...]:
    found: Sequence[str] = sorted(set(texts(pd.Series(column.dropna().unique()))))
    if len(found) > limit:
        raise DataError(
            f"column '{column.name}' has too many categories",
            got=f"{spaced(len(found))} different texts in {spaced(len(column))} training rows",
            want=f"at most {spaced(limit)}",
            fix="leave the column out or group its texts; if it holds numbers, name the table's "
            "own sign of a missing cell in the option 'missing'",
        )
    return tuple(found)
