"""Encoders: turn a party's table into float32 inputs, and labels into class codes or numbers.

An encoder is fitted to the training rows only. Numbers are standardised, or encoded in bins if
`bins` is set. Booleans become 0 and 1; a column of texts becomes one input for each category in the
training rows. A date becomes the number of days since the median date of the training rows, divided
by the standard deviation, and points on two circles for month and weekday. If training rows lack
cells of a column, the column gets an additional input, which is 1 if the cell is missing. All pixel
columns have a common mean and standard deviation.

Rows read after the training may contain values without an example in the training rows. A new
category, or a missing cell in a column without missing cells in training, becomes zeros; for a
number, zero is the mean. In a column in bins, such a missing cell is encoded like the median.
`Unfamiliar` counts new categories and new missing cells.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from pydantic import TypeAdapter

from vfl.core.errors import BadOptionError, DataError, nearest
from vfl.datasets.cells import circles_of, is_open_end
from vfl.datasets.table import (
    Classes,
    Table,
    TableFormat,
    as_days,
    as_numbers,
    as_texts,
    check_encoded,
    column_blocks,
    is_date,
    kind_of,
    misread,
    number_blocks,
    spaced,
)

MAX_CATEGORIES = 100
NO_DATES: Mapping[str, str] = MappingProxyType({})
_ROUNDING = 1e-12  # tolerance, relative to the largest number
SAMPLE_ROWS = 1 << 20  # most sampled rows for medians and bin edges


class Unfamiliar:
    """Counts cells without an example in the training rows, by column and kind.

    Args:
        rows: mask of the rows that count, bool, axes (rows,); None counts all rows.
    """

    def __init__(self, rows: np.ndarray | None = None) -> None:
        self._rows = rows
        self.counts: dict[str, dict[str, int]] = {}

    def note(self, column: str, what: str, start: int, cells: np.ndarray) -> None:
        """Count the marked cells in a block of rows.

        Args:
            column: name of the column.
            what: kind of the cells: "unseen_categories" or "new_missing".
            start: position of the block's first row.
            cells: mask of the cells that count, bool, axes (rows of the block,).
        """
        if self._rows is not None:
            cells = cells & self._rows[start : start + len(cells)]
        if found := int(cells.sum()):
            own = self.counts.setdefault(column, {})
            own[what] = own.get(what, 0) + found

    def join(self, other: Unfamiliar) -> None:
        """Add the counts of another object to these counts."""
        for column, counts in other.counts.items():
            own = self.counts.setdefault(column, {})
            for what, found in counts.items():
                own[what] = own.get(what, 0) + found


class Encoder(ABC):
    """Base class of encoders, which map a party's table to model inputs.

    An encoder is stored together with the party's bottom model.
    """

    kind: ClassVar[str]
    names: tuple[str, ...]  #: names of the encoder's columns, in order

    @abstractmethod
    def transform(self, frame: Table, unfamiliar: Unfamiliar | None = None) -> np.ndarray:
        """Encode a table's rows as inputs, float32, axes (rows, ...).

        Args:
            frame: the table.
            unfamiliar: object that counts cells without an example in the training rows.
        """

    @property
    def widths(self) -> dict[str, int]:
        """Return the number of inputs for each column, by the column's name."""
        return dict.fromkeys(self.names, 1)

    @property
    def tokens(self) -> int:
        """Return the number of inputs that are tokens, which precede all other inputs."""
        return 0

    def to_json(self) -> str:
        """Return the fitted state as JSON, with categories and means; it stays at the party."""
        return json.dumps({"encoder": self.kind, **asdict(self)})  # type: ignore[call-overload]


@dataclass(frozen=True)
class _FittedColumn(ABC):
    """Base class of the encoders of one column.

    Attributes:
        name: name of the column.
        indicator: whether the last input is 1 if the cell is missing, otherwise 0.
    """

    name: str
    indicator: bool

    @property
    @abstractmethod
    def width(self) -> int:
        """Return the number of inputs."""

    @property
    @abstractmethod
    def labels(self) -> list[str]:
        """Return a readable name for each input, which contains no cell."""

    @abstractmethod
    def _fill(self, out: np.ndarray, cells: Any) -> tuple[np.ndarray, np.ndarray | None]:
        """Write all inputs but the last indicator to `out`, which contains zeros.

        Return masks of the missing cells, and of unseen categories if the column has categories.
        """

    def _read(self, blocks: Iterable[pd.Series]) -> Iterable[Any]:
        """Yield each block of cells in the form that `_fill` reads."""
        return blocks

    def write(self, blocks: Iterable[pd.Series], out: np.ndarray, counter: Unfamiliar) -> None:
        """Write the encoded rows to `out`, axes (rows, width), which contains zeros."""
        for start, cells in _placed(self._read(blocks)):
            part = out[start : start + len(cells)]
            missing, unseen = self._fill(part, cells)
            if unseen is not None:
                counter.note(self.name, "unseen_categories", start, unseen)
            if self.indicator:
                part[:, -1] = missing
            else:
                counter.note(self.name, "new_missing", start, missing)


@dataclass(frozen=True)
class NumberColumn(_FittedColumn):
    """A column of numbers, encoded as ``(value - mean) / scale``.

    The input is 0 for a missing cell, and for all cells if all training cells are equal (scale 0).
    """

    mean: float = field(repr=False)
    scale: float = field(repr=False)

    @property
    def width(self) -> int:
        return 1 + self.indicator

    @property
    def labels(self) -> list[str]:
        return [self.name, *_missing_label(self)]

    def cells(self, block: pd.Series) -> np.ndarray:
        """Return the numbers without encoding, float64, axes (rows,)."""
        return as_numbers(block)

    def _read(self, blocks: Iterable[pd.Series]) -> Iterable[np.ndarray]:
        return number_blocks(blocks)

    def _fill(self, out: np.ndarray, cells: np.ndarray) -> tuple[np.ndarray, None]:
        missing = np.isnan(cells)
        if self.scale:
            out[:, 0] = (cells - self.mean) / self.scale
            out[missing, 0] = 0.0
        return missing, None


@dataclass(frozen=True)
class BinnedColumn(_FittedColumn):
    """A column of numbers with one input per bin: 0 below the bin, 1 above it, linear within it.

    The encoding is the piecewise-linear encoding of Gorishniy, Rubachev and Babenko (2022),
    equation 1. The inputs of the first and the last bin also stay between 0 and 1. So a number
    outside the range of the training rows is encoded like the nearest end of this range. A missing
    cell is encoded like the median.

    Attributes:
        median: median of the numbers in the training rows.
        edges: edges of the bins, ascending; there is one edge more than bins.
    """

    median: float = field(repr=False)
    edges: tuple[float, ...] = field(repr=False)

    @property
    def width(self) -> int:
        return len(self.edges) - 1 + self.indicator

    @property
    def labels(self) -> list[str]:
        bins = len(self.edges) - 1
        return [*_numbered(self.name, "bin", bins), *_missing_label(self)]

    def _read(self, blocks: Iterable[pd.Series]) -> Iterable[np.ndarray]:
        return number_blocks(blocks)

    def _fill(self, out: np.ndarray, cells: np.ndarray) -> tuple[np.ndarray, None]:
        missing = np.isnan(cells)
        _fill_bins(out, np.where(missing, self.median, cells), self.edges)
        return missing, None


def _fill_bins(out: np.ndarray, values: np.ndarray, edges: Sequence[float]) -> None:
    """Write each number's position in each bin, from 0 to 1, to the first columns of `out`."""
    for place, (low, high) in enumerate(pairwise(edges)):
        out[:, place] = ((values - low) / (high - low)).clip(0, 1)


def bin_edges(values: np.ndarray, bins: int) -> tuple[float, ...]:
    """Return quantiles of numbers as bin edges; repeated values have a limited weight.

    Plain quantiles would use most bins for a value that most rows have, such as a capital gain of
    0. In this function, a value counts at most as many times as a bin has rows. Equal edges become
    one edge.

    Args:
        values: numbers without missing ones, with at least two distinct values.
        bins: largest number of bins.

    >>> bin_edges(np.array([0.0] * 96 + [1.0, 2.0, 3.0, 4.0]), bins=4)
    (0.0, 1.0, 2.0, 3.0, 4.0)
    """
    cells, counts = np.unique(values, return_counts=True)
    counted = np.minimum(counts, len(values) / bins).cumsum()
    wanted = np.linspace(counted[0], counted[-1], bins + 1)
    return tuple(np.unique(cells[np.searchsorted(counted, wanted)]).tolist())


@dataclass(frozen=True)
class TextColumn(_FittedColumn):
    """A column of texts with one input per category, in sorted order; unknown texts give zeros."""

    categories: tuple[str, ...] = field(repr=False)

    @property
    def width(self) -> int:
        return len(self.categories) + self.indicator

    @property
    def labels(self) -> list[str]:
        return [*_numbered(self.name, "category", len(self.categories)), *_missing_label(self)]

    def cells(self, block: pd.Series) -> np.ndarray:
        """Return the number of each cell's category, float64, axes (rows,); NaN if unknown."""
        positions, _ = self._positions(block)
        return np.where(positions < 0, np.nan, positions)

    def _fill(self, out: np.ndarray, cells: pd.Series) -> tuple[np.ndarray, np.ndarray]:
        positions, missing = self._positions(cells)
        known = np.flatnonzero(positions >= 0)
        out[known, positions[known]] = 1.0
        return missing, (positions < 0) & ~missing

    def _positions(self, block: pd.Series) -> tuple[np.ndarray, np.ndarray]:
        """Return the index of each cell's category, or -1, and a mask of the missing cells."""
        position_of = {category: position for position, category in enumerate(self.categories)}
        codes, found = pd.factorize(block)  # a missing cell gets -1, which indexes the last entry
        read = [position_of.get(text, -1) for text in as_texts(pd.Series(found))]
        return np.array([*read, -1], dtype=np.int64)[codes], codes < 0


@dataclass(frozen=True)
class DateColumn(_FittedColumn):
    """A column of dates: ``(days - median) / scale``, and sine and cosine of month and weekday.

    All these inputs of a missing date are 0. If numbers are encoded in bins, the days are encoded
    in bins too; then the days of a missing date are encoded like the median. These inputs of a
    placeholder day, such as 9999-12-31 for an open end, equal those of a missing date. If the
    training rows had placeholders, the column has an additional input, which is 1 for a
    placeholder.

    Attributes:
        written: form of dates that are texts; None if the table's cells are dates.
        median, scale: statistics of the days since 1970 in the training rows; scale is 0 if all
            days are equal.
        edges: edges of the bins of the days, see `BinnedColumn`; empty if days are standardised.
        open: whether the training rows had days before `FIRST_DAY`, or from `LAST_DAY` on.
    """

    CIRCLES: ClassVar[int] = 4

    written: str | None
    median: float = field(repr=False)
    scale: float = field(repr=False)
    edges: tuple[float, ...] = field(default=(), repr=False)
    open: bool = False

    @property
    def days(self) -> int:
        """Return the number of inputs for the days."""
        return max(1, len(self.edges) - 1)

    @property
    def width(self) -> int:
        return self.days + self.CIRCLES + self.open + self.indicator

    @property
    def labels(self) -> list[str]:
        circles = [f"{of} {turn}" for of in ("month", "weekday") for turn in ("sine", "cosine")]
        days = (
            _numbered(self.name, "bin of days", self.days) if self.edges else [f"{self.name}: days"]
        )
        others = [*circles, *(["open end"] if self.open else [])]
        return [*days, *(f"{self.name}: {each}" for each in others), *_missing_label(self)]

    def cells(self, block: pd.Series) -> np.ndarray:
        """Return days since 1970, float64, axes (rows,)."""
        return as_days(block, self.written)

    def _fill(self, out: np.ndarray, cells: pd.Series) -> tuple[np.ndarray, None]:
        days = as_days(cells, self.written)
        missing, ends = np.isnan(days), is_open_end(days)
        if self.scale and not self.edges:
            out[:, 0] = (days - self.median) / self.scale
        for first, turn in zip((self.days, self.days + 2), circles_of(days), strict=True):
            out[:, first] = np.sin(2 * math.pi * turn)
            out[:, first + 1] = np.cos(2 * math.pi * turn)
        out[missing | ends] = 0.0
        if self.edges:
            _fill_bins(out, np.where(missing | ends, self.median, days), self.edges)
        if self.open:
            out[:, self.days + self.CIRCLES] = ends
        return missing, None


Column = NumberColumn | BinnedColumn | TextColumn | DateColumn


def _numbered(name: str, what: str, count: int) -> list[str]:
    """Return readable names for several inputs of one column.

    >>> _numbered("contract", "category", 2)
    ['contract: category 1 of 2', 'contract: category 2 of 2']
    """
    return [f"{name}: {what} {number} of {count}" for number in range(1, count + 1)]


def _missing_label(column: _FittedColumn) -> list[str]:
    return [f"{column.name}: missing"] if column.indicator else []


def _placed(blocks: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Yield blocks of rows, each with the position of its first row."""
    start = 0
    for block in blocks:
        yield start, block
        start += len(block)


@dataclass(frozen=True)
class TableEncoder(Encoder):
    """The encoders of all of a party's columns, in order."""

    kind: ClassVar[str] = "table"
    columns: tuple[Column, ...]

    @classmethod
    def fit(
        cls,
        frame: Table,
        dates: Mapping[str, str] = NO_DATES,
        bins: int = 0,
    ) -> TableEncoder:
        """Fit an encoder to each column: moments or bins of numbers, categories of texts.

        Args:
            frame: table with the training rows only, and with the party's columns.
            dates: forms of the dates in text columns that contain dates.
            bins: largest number of bins for a column of numbers; 0 standardises numbers instead.

        Raises:
            DataError: a column has values of several kinds, infinite numbers, or too many
                categories.
        """
        found = []
        for name in frame.columns:
            column = _ColumnFit(name, dates.get(name), bins)
            column.add(frame[name])
            found.append(column.fitted())
        return cls(tuple(found))

    @classmethod
    def fit_blocks(
        cls,
        blocks: Iterable[pd.DataFrame],
        names: Sequence[str],
        rows: int,
        dates: Mapping[str, str] = NO_DATES,
        bins: int = 0,
    ) -> TableEncoder:
        """Fit the encoders in one pass over training rows that come in blocks.

        Means and standard deviations are those of all rows, up to rounding. With more than
        `SAMPLE_ROWS` rows, a sample of the rows gives the medians of dates and the edges of bins.

        Args:
            blocks: the training rows, in blocks.
            names: names of the party's columns.
            rows: number of training rows.
            dates: see `fit`.
            bins: see `fit`.

        Raises:
            DataError: see `fit`.
        """
        share = min(1.0, SAMPLE_ROWS / max(1, rows))
        found = [_ColumnFit(name, dates.get(name), bins, share) for name in names]
        for block in blocks:
            for column in found:
                column.add(block[column.name])
        return cls(tuple(column.fitted() for column in found))

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(column.name for column in self.columns)

    @property
    def widths(self) -> dict[str, int]:
        """Return the number of inputs for each column, by the column's name."""
        return {column.name: column.width for column in self.columns}

    @property
    def labels(self) -> list[str]:
        """Return a readable name for each input, which contains no cell."""
        return [label for column in self.columns for label in column.labels]

    @property
    def width(self) -> int:
        """Return the number of inputs."""
        return sum(self.widths.values())

    def transform(self, frame: Table, unfamiliar: Unfamiliar | None = None) -> np.ndarray:
        """Encode rows with the same columns as inputs, float32, axes (rows, inputs).

        Raises:
            MissingColumnError: the table lacks a column.
            DataError: a column has texts where the training rows had numbers.
        """
        out = np.zeros((len(frame), self.width), dtype=np.float32)
        counter, start = unfamiliar or Unfamiliar(), 0
        check_encoded(frame.columns, self.names)
        for column in self.columns:
            own = out[:, start : start + column.width]
            column.write(column_blocks(frame, column.name), own, counter)
            start += column.width
        return out


@dataclass(frozen=True)
class CellEncoder(TableEncoder):
    """Cells without scaling, for models such as trees that use only the order of the values.

    A number stays a number; a date becomes days since 1970; a text becomes the number of its
    category. Missing cells and unseen categories are NaN.
    """

    kind: ClassVar[str] = "cells"

    @property
    def categories(self) -> tuple[int, ...]:
        """Return each column's number of categories; 0 for numbers and dates."""
        return tuple(
            len(one.categories) if isinstance(one, TextColumn) else 0 for one in self.columns
        )

    @property
    def widths(self) -> dict[str, int]:
        return dict.fromkeys(self.names, 1)

    @property
    def labels(self) -> list[str]:
        return list(self.names)

    def transform(self, frame: Table, unfamiliar: Unfamiliar | None = None) -> np.ndarray:
        out = np.empty((len(frame), self.width), dtype=np.float32)
        counter = unfamiliar or Unfamiliar()
        check_encoded(frame.columns, self.names)
        for place, column in enumerate(self.columns):
            assert not isinstance(column, BinnedColumn), "fitted without bins"
            for start, block in _placed(column_blocks(frame, column.name)):
                cells = column.cells(block)
                with np.errstate(over="ignore"):  # numbers beyond float32 become infinite
                    out[start : start + len(block), place] = cells
                known = np.asarray(block.notna())
                if isinstance(column, TextColumn):
                    unseen = np.isnan(cells) & known
                    counter.note(column.name, "unseen_categories", start, unseen)
                if not column.indicator:
                    counter.note(column.name, "new_missing", start, ~known)
        return out


def encoder_of(form: TableFormat) -> type[TableEncoder]:
    """Return the class of the encoder for a table with this format."""
    return CellEncoder if form.cells else TableEncoder


def _check_categories(name: str, found: Collection[str], rows: int) -> None:
    if len(found) > MAX_CATEGORIES:
        raise DataError(
            f"column '{name}' has too many categories",
            got=f"{spaced(len(found))} different texts in {spaced(rows)} training rows",
            want=f"at most {spaced(MAX_CATEGORIES)}",
            fix=misread(name, found)
            or "leave the column out or group its texts; if it contains numbers, name the "
            "table's own word for a missing cell in the option 'missing'",
        )


class _Moments:
    """Mean and standard deviation of numbers in parts (Chan, Golub and LeVeque 1983, eq. 2.1).

    For numbers that come in a single part, the results are exactly those of numpy.
    """

    def __init__(self) -> None:
        self._count, self._mean, self._squares, self._largest = 0, 0.0, 0.0, 0.0
        self._alone: tuple[float, float] | None = None

    def add(self, present: np.ndarray) -> None:
        """Add numbers of any axes, without missing ones."""
        if not present.size:
            return
        mean, count = float(present.mean()), self._count + present.size
        variance = float(present.var())
        self._alone = None if self._count else (mean, math.sqrt(variance))
        apart = mean - self._mean
        self._squares += variance * present.size
        self._squares += apart**2 * self._count * present.size / count
        self._mean += apart * present.size / count
        self._count = count
        self._largest = max(self._largest, float(np.abs(present).max()))

    def mean_and_std(self) -> tuple[float, float]:
        """Return mean and standard deviation of the numbers; both 0 if all are equal.

        The standard deviation divides by the number of values, not by one less. Numbers count as
        equal if they differ only by rounding errors.
        """
        joined = self._mean, math.sqrt(self._squares / self._count) if self._count else 0.0
        mean, spread = self._alone or joined
        return (0.0, 0.0) if spread <= _ROUNDING * self._largest else (mean, spread)


class _ColumnFit:
    """Fits the encoder of one column, block by block.

    Args:
        name, written, bins: name of the column, form of its dates, and number of bins.
        share: share of the rows whose numbers are stored, for medians and edges.
    """

    def __init__(self, name: str, written: str | None, bins: int, share: float = 1.0) -> None:
        self.name, self._written, self._bins = name, written, bins
        self._share, self._draw = (
            share,
            np.random.default_rng(0),
        )  # the generator is seeded, so a resumed run draws the same rows
        self._rows, self._indicator, self._kind = 0, False, ""
        # Kind of a column in which no cell is present, by the column's type.
        self._kind_of_none = ""
        self._moments, self._texts = _Moments(), set[str]()
        self._sample = list[np.ndarray]()
        self._open = False

    def add(self, block: pd.Series) -> None:
        """Add training rows."""
        self._rows += len(block)
        present = block.dropna()
        self._indicator |= len(present) < len(block)
        if not len(present):
            self._kind_of_none = "date" if is_date(block) else kind_of(block)
            return
        dated = self._written is not None or is_date(present)
        kind = "date" if dated else kind_of(present)
        if self._kind not in ("", kind):
            raise DataError(
                f"column '{self.name}' contains values of several kinds", want="one kind"
            )
        self._kind = kind
        if kind == "text":
            self._texts.update(as_texts(pd.Series(present.unique())))
            _check_categories(self.name, self._texts, self._rows)
        elif kind != "boolean":
            numbers = as_days(present, self._written) if dated else as_numbers(present)
            if dated:
                ends = is_open_end(numbers)
                self._open |= bool(ends.any())
                numbers = numbers[~ends]
            self._moments.add(numbers)
            if dated or self._bins:
                kept = self._share >= 1 or self._draw.random(len(numbers)) < self._share
                self._sample.append(numbers[kept] if self._share < 1 else numbers)

    def fitted(self) -> Column:
        """Return the fitted encoder of the column."""
        mean, scale = self._moments.mean_and_std()
        sample = np.concatenate(self._sample) if self._sample else np.empty(0)
        median = float(np.median(sample)) if sample.size else 0.0
        edges = bin_edges(sample, self._bins) if self._bins and scale and sample.size else ()
        own, kind = (self.name, self._indicator), self._kind or self._kind_of_none
        if kind == "date" or self._written is not None:
            return DateColumn(*own, self._written, median, scale, edges, self._open)
        if kind == "text":
            return TextColumn(*own, tuple(sorted(self._texts)))
        if kind == "boolean":
            return NumberColumn(*own, mean=0.0, scale=1.0)
        if edges:
            return BinnedColumn(*own, median, edges)
        return NumberColumn(*own, mean, scale)


@dataclass(frozen=True)
class PictureEncoder(Encoder):
    """Encodes pixel columns in reading order (channel, row, column) as pictures.

    Attributes:
        names: names of the pixel columns.
        shape: (channels, height, width) of one party's part of the picture.
        mean, scale: mean and standard deviation of all training pixels together; scale is 0 if all
            pixels are equal.
    """

    kind: ClassVar[str] = "pictures"
    names: tuple[str, ...]
    shape: tuple[int, ...]
    mean: float = field(repr=False)
    scale: float = field(repr=False)

    @classmethod
    def fit(cls, frame: Table, shape: tuple[int, ...]) -> PictureEncoder:
        """Fit the mean and the standard deviation of the pixels.

        Args:
            frame: table with the training rows only, and with the pixel columns.
            shape: axes of one picture.

        Raises:
            DataError: the shape does not fit the number of columns, or a cell is not a finite
                number.
        """
        return cls.fit_blocks([frame], list(frame.columns), shape)

    @classmethod
    def fit_blocks(
        cls, blocks: Iterable[Table], names: Sequence[str], shape: tuple[int, ...]
    ) -> PictureEncoder:
        """Fit in one pass over training rows that come in blocks.

        Raises:
            DataError: see `fit`.
        """
        own = tuple(map(str, names))
        _check_shape(shape, own)
        moments = _Moments()
        for block in blocks:
            pixels = _pixels(block, own)
            moments.add(pixels[~np.isnan(pixels)])
        return cls(own, shape, *moments.mean_and_std())

    def transform(self, frame: Table, unfamiliar: Unfamiliar | None = None) -> np.ndarray:
        """Encode rows as pictures, float32, (rows, channels, height, width); missing cells are 0.

        Raises:
            MissingColumnError: the table lacks a pixel column.
            DataError: a cell is not a finite number.
        """
        pixels = _pixels(frame, self.names)
        if self.scale == 0:
            return np.zeros((len(frame), *self.shape), dtype=np.float32)
        pixels -= self.mean
        pixels /= self.scale
        np.nan_to_num(pixels, copy=False, nan=0.0)
        return pixels.reshape(len(frame), *self.shape).astype(np.float32)


@dataclass(frozen=True)
class TokenEncoder(Encoder):
    """Encodes texts as token ids of a pretrained model.

    Token n becomes the input n + 1, and 0 is padding. A missing cell becomes a text without tokens.
    If a row has texts in several columns, each of them becomes one line of a common text. This
    encoder does not depend on the training rows.

    Attributes:
        names: names of the text columns.
        tokenizer: name of the pretrained model on this machine.
        length: number of tokens in a row.
        digest: SHA-256 of the tokenizer's file.
    """

    kind: ClassVar[str] = "tokens"
    names: tuple[str, ...]
    tokenizer: str
    length: int
    digest: str

    @classmethod
    def of(cls, columns: Sequence[str], form: TableFormat) -> TokenEncoder:
        """Build the encoder of some columns, for a table whose format names a tokenizer.

        Raises:
            MissingPackageError: the packages of the extra "llm" are not installed.
            MissingDataError: this machine does not have the model, or the model has no tokenizer.
        """
        from vfl.datasets.sources.texts import TEXT_LENGTH, tokenizer_digest

        assert form.tokenizer is not None, "the form of a table with texts"
        digest = tokenizer_digest(form.tokenizer)
        return cls(tuple(columns), form.tokenizer, form.length or TEXT_LENGTH, digest)

    @property
    def tokens(self) -> int:
        return self.length

    @property
    def widths(self) -> dict[str, int]:
        """Return each column's number of inputs; the first column counts all joint inputs."""
        return dict.fromkeys(self.names, 0) | {self.names[0]: self.length}

    @property
    def labels(self) -> list[str]:
        """Return a readable name for each input, which contains no cell."""
        return _numbered(", ".join(self.names), "token", self.length)

    def transform(self, frame: Table, unfamiliar: Unfamiliar | None = None) -> np.ndarray:
        """Return the tokens of some rows, float32, axes (rows, length).

        Raises:
            MissingColumnError: the table lacks a column.
            MissingPackageError, MissingDataError: see `of`.
            DataError: the tokenizer differs from the one used in training.
        """
        from vfl.datasets.sources.texts import Tokens, tokenizer_digest

        check_encoded(frame.columns, self.names)
        if tokenizer_digest(self.tokenizer) != self.digest:
            raise DataError(
                f"the tokenizer '{self.tokenizer}' on this machine is not the one of this run",
                want="the model that the run was trained with, under the same name",
                fix="vfl model list",
            )
        out = np.zeros((len(frame), self.length), dtype=np.float32)
        columns = zip(*(column_blocks(frame, name) for name in self.names), strict=True)
        start = 0
        for blocks in columns:
            cells = zip(*map(as_texts, blocks), strict=True)
            texts = ["\n".join(filter(None, each)) for each in cells]
            rows = Tokens.of(texts, self.length, self.tokenizer).rows(np.empty(0, np.int64))
            out[start : start + len(texts)] = rows
            start += len(texts)
        return out


@dataclass(frozen=True)
class MixedEncoder(Encoder):
    """Encodes text columns as tokens, and the party's other columns as numbers.

    A row begins with the tokens; ``bottom = "pretrained:tokens=..."`` reads tokens and numbers.

    Attributes:
        texts: encoder of the text columns.
        others: encoder of the other columns.
    """

    kind: ClassVar[str] = "mixed"
    texts: TokenEncoder
    others: TableEncoder

    @property
    def tokens(self) -> int:
        return self.texts.length

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self.texts.names, *self.others.names)

    @property
    def widths(self) -> dict[str, int]:
        return self.texts.widths | self.others.widths

    @property
    def labels(self) -> list[str]:
        """Return a readable name for each input, which contains no cell."""
        return [*self.texts.labels, *self.others.labels]

    def transform(self, frame: Table, unfamiliar: Unfamiliar | None = None) -> np.ndarray:
        """Return tokens and then other inputs, float32, axes (rows, length + other inputs)."""
        parts = (self.texts.transform(frame), self.others.transform(frame, unfamiliar))
        return np.concatenate(parts, axis=1)


def token_encoder(
    blocks: Iterable[Table],
    names: Sequence[str],
    form: TableFormat,
    fit: Callable[[list[str]], TableEncoder],
) -> TokenEncoder | MixedEncoder | None:
    """Build the encoder of a party that has texts, if its format names a tokenizer.

    If a party has a single column, this column contains texts unless its cells are numbers,
    booleans or dates. If a party has several columns, a column contains texts only if most of its
    cells also differ from each other; a column with few distinct values contains categories.

    Args:
        blocks: blocks of rows of the table; the first block with cells of a column shows whether
            they are texts.
        names: names of the party's columns.
        form: format of the table.
        fit: function that builds the encoder for the columns that hold no texts, given their names.
    """
    if form.tokenizer is None or form.cells:
        return None
    found = dict[str, bool]()
    for block in blocks:
        for name in names:
            if name not in found and len(present := block[name].dropna()):
                found[name] = _is_text(name, present, form, len(names) > 1)
        if len(found) == len(names):
            break
    texts = [name for name in names if found.get(name)]
    if not texts:
        return None
    read, others = TokenEncoder.of(texts, form), [name for name in names if name not in texts]
    return MixedEncoder(read, fit(others)) if others else read


def _is_text(name: str, present: pd.Series, form: TableFormat, beside: bool) -> bool:
    if is_date(present) or kind_of(present) != "text":
        return False
    if not beside:
        return True
    return name not in form.dates and 2 * present.nunique() > len(present)


def _check_shape(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    if min(shape) < 1 or math.prod(shape) != len(names):
        raise DataError(
            "the shape of a picture does not fit its columns",
            got=f"shape {list(shape)} for {len(names)} columns",
            want="positive sizes whose product is the number of columns",
        )


def _pixels(frame: Table, names: tuple[str, ...]) -> np.ndarray:
    """Return pixels, float64, axes (rows, pixels)."""
    pixels = np.empty((len(frame), len(names)))
    check_encoded(frame.columns, names)
    for position, name in enumerate(names):
        pixels[:, position] = as_numbers(frame[name])
    return pixels


_ENCODERS: tuple[type[Encoder], ...] = (
    TableEncoder,
    CellEncoder,
    PictureEncoder,
    TokenEncoder,
    MixedEncoder,
)


def read_encoder(text: str) -> Encoder:
    """Read an encoder from the JSON that `to_json` returned.

    Raises:
        DataError: the text is not an encoder's JSON.
    """
    try:
        record = json.loads(text)
        known = {each.kind: each for each in _ENCODERS}
        kind = known[record.pop("encoder")]
        return TypeAdapter[Encoder](kind).validate_python(record)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError("this is not a stored encoder", want="a text written by to_json") from None


TASKS = ("classification", "regression")


def encode_labels(column: pd.Series, task: str) -> tuple[np.ndarray, Classes | None]:
    """Encode labels; return class codes and classes, or numbers.

    Args:
        column: labels of the rows.
        task: "classification" or "regression".

    Returns:
        Codes 0..C-1, int64, axes (rows,), and the C classes in sorted order. For a regression, the
        numbers themselves, float32, and None.

    >>> encode_labels(pd.Series(["no", "yes", "no"], name="paid"), "classification")
    (array([0, 1, 0]), ('no', 'yes'))

    Raises:
        BadOptionError: the task has another name.
        DataError: a label is missing, or the labels do not fit the task.
    """
    if task not in TASKS:
        raise BadOptionError(
            f"no task is called '{task}'", want=", ".join(TASKS), fix=nearest(task, TASKS)
        )
    fit = LabelFit(str(column.name), task)
    fit.add(column)
    classes = fit.classes()
    return fit.encode(column, classes), classes


class LabelFit:
    """Encodes labels as `encode_labels` does, but in blocks and in two passes.

    Args:
        name: name of the label column.
        task: "classification" or "regression".
    """

    def __init__(self, name: str, task: str) -> None:
        self._name, self._task = name, task
        self._found: set[str | int] = set()
        self._missing = self._rows = 0
        self._text = False

    def add(self, block: pd.Series) -> None:
        """Fit to the labels of more rows.

        Raises:
            DataError: cells do not fit the task.
        """
        self._rows += len(block)
        present = block.dropna()
        self._missing += len(block) - len(present)
        if self._task == "classification" and len(present):
            self._text = kind_of(present) == "text"
            self._found.update(self._read(pd.Series(pd.unique(present), name=self._name)).tolist())

    def classes(self) -> Classes | None:
        """Return the classes, after all rows were added; None for a regression.

        Raises:
            DataError: a label is missing, or there are fewer than two classes.
        """
        if self._missing:
            raise DataError(
                f"the label column '{self._name}' has missing cells",
                got=f"{spaced(self._missing)} of {spaced(self._rows)} rows",
                fix="leave these rows out of the table",
            )
        if self._task == "regression":
            return None
        if len(self._found) < 2:
            raise DataError(
                f"the label column '{self._name}' has too few classes",
                got=f"{spaced(len(self._found))} classes",
                want="at least 2 classes",
            )
        return tuple(sorted(self._found))

    def encode(self, block: pd.Series, classes: Classes | None) -> np.ndarray:
        """Encode the labels of some rows, as `encode_labels` does."""
        if classes is None:
            return as_numbers(block).astype(np.float32)
        codes, different = pd.factorize(block)
        read = self._read(pd.Series(different, name=self._name))
        position_of = {name: position for position, name in enumerate(classes)}
        positions = np.array([position_of[name] for name in read.tolist()], dtype=np.int64)
        return positions[codes]

    def _read(self, different: pd.Series) -> np.ndarray:
        if self._text:
            return as_texts(different)
        return _whole(as_numbers(different), self._name)


def _whole(values: np.ndarray, name: str) -> np.ndarray:
    """Convert to int64, which JSON stores exactly."""
    if (values != np.round(values)).any():
        raise DataError(
            f"the label column '{name}' holds real numbers, not classes",
            fix='set task = "regression"',
        )
    return values.astype(np.int64)
