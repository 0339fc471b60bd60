"""Facts about the columns of a table, found in one pass over its rows, many columns at once.

Numbers of one type form one array, axes (columns, rows). The different texts of all columns form
one array too. So the code tries each pattern, and each form of dates, once for all columns
together. Memory holds the different cells of only a few columns at a time, and the facts contain no
cell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from vfl.core.errors import DataError
from vfl.datasets.cells import (
    DATE_FORMS,
    DIGITS,
    EITHER,
    OTHER_ORDER,
    WORDS,
    date_form,
    days_of_each,
    days_of_texts,
    decimal_counts,
    decimal_counts_of_each,
    forms_of,
    forms_of_each,
    is_open_end,
    unit_of,
    units_of,
)
from vfl.datasets.table import (
    COLUMN_ROWS,
    LARGEST,
    Table,
    TableFormat,
    as_days,
    as_texts,
    is_date,
    kind_of,
    row_blocks,
    spaced,
    texts_of,
)

Kind = Literal["number", "boolean", "text", "date", "other"]

#: Words for a missing cell in a column of numbers or dates, in addition to `WORDS`.
_SIGNS = frozenset(
    ("?", "-", "--", ".", "n.a.", "k.a.", "n.d.", "*", "unknown", "missing", "\u2013", "\u2014")
)
_MOST = 1000  # largest number of different cells to count
_MOST_COLUMNS = 2000  # number of columns between two progress lines
_GROUP_CELLS = 1 << 21  # number of cells in a group of columns that are read at once
_NO_HASHES = np.empty(0, np.uint64)
_EXACT = 2.0**53  # whole numbers below this limit are exact in float64
_DATED = (
    r"^(\p{L}{2,10}[., ]+)?(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2})"
    r"|\d{1,2}(st|nd|rd|th|er)?[-/. ]+(de |of )?\p{L}{3,10}[-/., ]+(de )?\d{4}"
    r"|\p{L}{3,10}\.? \d{1,2}(st|nd|rd|th)?,? \d{4})([T ,].*)?$"
)
_NUMERIC = r"^[-+]?\d[\d.,]*$"
_WHOLE, _SHORT = r"^\p{Nd}+(\.0*)?$", r"^\p{Nd}{1,18}(\.0*)?$"


@dataclass
class Facts:
    """Facts about a column, found before the use of the column is known.

    Attributes:
        different: number of different cells; None if there are more different cells than the code
            counts.
        unique: whether every row has a cell, and no two rows the same one. If a column of decimals
            or of a date type has too many different cells to count, the attribute is False, unless
            the column is named as the id.
        whole_numbers: whether all cells are whole numbers; `long` states whether some of them
            exceed the exact range of id_type = "number".
        repeated: number of cells that equal an earlier cell; 0 if repeated cells are not counted.
        dates: form of dates that are stored as texts, or as numbers such as 20240131.
        either: whether the order of day and month is ambiguous in the dates.
        decimal: decimal separator, and unit, of numbers that are stored as texts.
        signs: words that mean a missing cell in this column, in addition to those of the format.
        words: number of text cells that are among `WORDS`.
        open: whether some days are placeholders, such as 9999-12-31.
        numeric: number of text cells that are plain numbers.
        infinite: whether some numbers are infinite, or larger than `LARGEST`.
        units: currencies and percent signs of numbers that are stored as texts; "" if some numbers
            have none.
        dated: number of text cells that look like dates.
        rounded: whether some whole numbers exceed the exact range of float64.
    """

    name: str
    rows: int
    missing: int
    different: int | None
    unique: bool
    kind: Kind
    whole_numbers: bool
    repeated: int = 0
    dates: str | None = None
    either: bool = False
    long: bool = False
    decimal: str | None = None
    signs: tuple[str, ...] = ()
    words: int = 0
    open: bool = False
    numeric: int = 0
    infinite: bool = False
    units: frozenset[str] = frozenset()
    dated: int = 0
    rounded: bool = False

    @property
    def mixes_units(self) -> bool:
        """Return whether the numbers are amounts in several currencies, which cannot be added."""
        return len(self.units - {""}) > 1

    @property
    def share_missing(self) -> float:
        """Return the share of rows in which the cell is missing."""
        return self.missing / self.rows

    def changed(self, form: TableFormat) -> bool:
        """Return whether the detected format reads the column differently."""
        named = isinstance(form.missing, Mapping) and self.name in form.missing
        return bool(self.decimal or self.signs or named or self.dates)


def facts_of(
    table: Table,
    names: Sequence[str],
    form: TableFormat,
    ids: str | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, Facts]:
    """Find the facts about some columns of a table.

    Args:
        table: the table.
        names: the columns.
        form: format of the table.
        ids: name of the column in which repeated cells are counted, whatever kind of cells it has.
        say: function that receives a progress line after every few thousand columns.
    """
    found = dict[str, Facts]()
    for some in column_groups(names, len(table), say, "read"):
        columns = [_Column(name, name == ids) for name in some]
        for block in row_blocks(table, some, COLUMN_ROWS):
            _add(columns, block)
        found |= {column.name: column.facts(form) for column in columns}
    return found


def column_groups(
    names: Sequence[str], rows: int, say: Callable[[str], None] | None, done: str
) -> Iterator[Sequence[str]]:
    """Yield groups of columns that fit into memory, and report the progress.

    >>> [len(some) for some in column_groups(["a", "b", "c"], 10**6, None, "read")]
    [2, 1]
    """
    size = max(1, min(_MOST_COLUMNS, _GROUP_CELLS // max(1, rows)))
    for start in range(0, len(names), size):
        yield names[start : start + size]
        before, after = start // _MOST_COLUMNS, (start + size) // _MOST_COLUMNS
        if say is not None and after > before and start + size <= len(names):
            say(f"{done} {spaced(start + size)} of {spaced(len(names))} columns")


@dataclass
class _Column:
    """Facts about a column after some of its blocks.

    Attributes:
        forms: forms of dates that all texts have had so far; None if no form fits.
        mixed: form of texts that are dates in several forms.
        either: whether the order of day and month is ambiguous in one of the forms that `mixed`
            joins.
        dated: number of text cells that look like dates.
        rounded: whether some whole numbers exceed the exact range of float64.
        unit: unit that follows the numbers in all texts.
        hashes: for each block, one hash for each distinct cell.
        hashed: number of present cells so far.
        many: whether more than `_MOST` distinct cells occurred.
    """

    name: str
    is_id: bool
    rows: int = 0
    missing: int = 0
    words: int = 0
    whole: bool = True
    long: bool = False
    open: bool = False
    infinite: bool = False
    many: bool = False
    mixed: str = ""
    either: bool = False
    dated: int = 0
    rounded: bool = False
    unit: str = ""
    units: frozenset[str] = frozenset()
    numeric: int = 0
    hashed: int = 0
    hashes: list[np.ndarray] = field(default_factory=list)
    kinds: set[Kind] = field(default_factory=set)
    signs: dict[str, None] = field(default_factory=dict)
    forms: list[str] | None = field(default_factory=lambda: list(DATE_FORMS))
    decimals: Counter[str] | None = field(default_factory=Counter)

    @property
    def counted(self) -> bool:
        """Return whether to count more distinct cells; beyond `_MOST`, only for possible ids."""
        able = self.is_id or "text" in self.kinds or (self.whole and "number" in self.kinds)
        return able or not self.many

    def add_hashes(self, different: np.ndarray, cells: int) -> None:
        """Add the hashes of a block's distinct cells."""
        self.hashed += cells
        if not self.counted:
            self.hashes.clear()
            return
        self.hashes.append(different)
        if not self.many and (len(different) > _MOST or len(self.hashes) > 1):
            known = _different(np.concatenate(self.hashes))
            self.many = len(known) > _MOST
            if not self.many:
                self.hashes = [known]

    def facts(self, form: TableFormat) -> Facts:
        """Return the facts from all rows."""
        kinds = self.kinds
        kind: Kind = next(iter(kinds)) if len(kinds) == 1 else "text" if kinds else "number"
        number = kind == "number"
        hashes = np.concatenate(self.hashes) if self.hashes else np.empty(0, np.uint64)
        different = len(_different(hashes)) if len(self.hashes) > 1 else len(hashes)
        counted = self.is_id or not self.many or kind == "text" or (number and self.whole)
        repeated = self.hashed - different if counted else 0
        forms, texts, decimal = self.forms or [], kind == "text", None
        dates = forms[0] if len(forms) < len(DATE_FORMS) and forms else self.mixed or None
        said = self.name in form.dates or not self.whole
        dates = dates if number or (texts and said) else None
        if texts and dates is None and self.decimals and not self.whole:
            counts, usual = self.decimals, form.decimal
            decimal = max(counts, key=lambda sign: (counts[sign], sign == usual))
        unique = counted and not repeated and not self.missing and bool(self.rows)
        # A code such as 1000X counts as an id, not as a number with a unit.
        if self.unit and decimal:
            decimal = None if unique else f"{decimal} {self.unit}"
        units = self.units if decimal else frozenset()
        if len(named := units - {""}) > 1:
            decimal = None
        elif named and units != {"", "%"}:
            decimal = f"{decimal} {next(iter(named))}"
        read = dates or decimal
        others = form.words_of(self.name)[1 if read else 0]
        signs = tuple(sign for sign in self.signs if sign not in others and (read or sign == "?"))
        return Facts(
            name=self.name,
            rows=self.rows,
            missing=self.missing,
            different=None if self.many else different,
            unique=unique and kind != "other",
            kind="date" if dates else kind,
            whole_numbers=self.whole,
            repeated=repeated,
            dates=None if kind == "date" else dates,
            either=self.either if self.mixed else OTHER_ORDER.get(dates or "") in forms,
            long=self.long,
            decimal=decimal,
            signs=signs,
            words=self.words,
            open=self.open,
            numeric=self.numeric,
            infinite=self.infinite,
            units=units,
            dated=self.dated,
            rounded=self.rounded or (number and self.long),
        )

    def mix(self, texts: list[str]) -> None:
        """Find forms for texts that no single form reads, after the forms of earlier blocks."""
        fresh = self.mixed or self.forms is None or len(self.forms) == len(DATE_FORMS)
        once = [] if fresh else self.forms or []  # these forms read all texts of earlier blocks
        before = self.mixed or "".join(once[:1])
        self.mixed = date_form(texts, before) or ""
        doubts = False
        for form, other in OTHER_ORDER.items():
            parts = self.mixed.split(EITHER)
            if form not in parts:
                continue
            swapped = EITHER.join(other if part == form else part for part in parts)
            known = form not in before.split(EITHER) or (other in once if once else self.either)
            doubts |= known and not np.isnan(days_of_texts(texts, swapped)).any()
        self.either = doubts

    def add_numbers(self, texts: list[str], counts: Mapping[str, int] | None) -> None:
        """Count, for each decimal separator, the texts that are numbers with one common unit.

        Args:
            texts: the texts.
            counts: for each separator, the number of cells that are numbers without a unit; None if
                some cells are no such numbers.
        """
        if counts is None and (self.unit or not self.decimals):
            unit = unit_of(texts)
            if unit and unit == (self.unit or unit):
                self.unit = unit
                counts = decimal_counts([text.removesuffix(unit) for text in texts])
        elif self.unit:
            counts = None
        elif counts is not None:
            self.units |= units_of(pa.array(texts, pa.string()))
        known = self.decimals
        self.decimals = None if counts is None or known is None else known + Counter(counts)


def _different(numbers: np.ndarray) -> np.ndarray:
    """Return the distinct numbers, ascending; sorting is faster here than numpy's hashing."""
    ordered = np.sort(numbers)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered


def _add(columns: Sequence[_Column], block: pd.DataFrame) -> None:
    """Add the next rows of some columns; the block has the same columns in the same order."""
    by_type, texts = dict[Any, list[int]](), list[_Texts]()
    for at, dtype in enumerate(block.dtypes):
        if isinstance(dtype, np.dtype) and dtype.kind in "iuf":
            by_type.setdefault(dtype, []).append(at)
            continue
        kind, cells = _cells_of(block.iloc[:, at])
        column = columns[at]
        if cells is None:  # the cells are not numbers, texts or dates
            present = int(block.iloc[:, at].notna().sum())
            column.rows, column.missing = (
                column.rows + len(block),
                column.missing + len(block) - present,
            )
            column.kinds |= {kind} if present else set()
        elif isinstance(cells, np.ndarray):
            _add_numbers([column], cells[None], kind)
        else:
            texts.append(_Texts.of(column, cells, kind))
    for places in by_type.values():
        numbers = block if len(places) == block.shape[1] else block.iloc[:, places]
        cells = np.ascontiguousarray(numbers.to_numpy().T)
        _add_numbers([columns[at] for at in places], cells, "number")
    _add_texts([own for own in texts if len(own.different)])


def _cells_of(column: pd.Series) -> tuple[Kind, np.ndarray | pa.Array | None]:
    """Return a column's kind and its cells: an array of numbers or days, or Arrow texts."""
    texts = texts_of(column)
    if texts is not None:
        return "text", texts
    present = column[column.notna()]
    kind: Kind = "date"
    if not is_date(present):
        try:
            kind = kind_of(present)
        except DataError:
            return "other", None
    if kind == "date":
        return kind, as_days(column)
    if kind == "number":
        exact = pd.api.types.is_integer_dtype(column.dtype) and len(present) == len(column)
        return kind, column.to_numpy(dtype=np.int64 if exact else float, na_value=np.nan)
    if kind == "boolean":
        cells = pa.array(column, pa.bool_(), from_pandas=True)
        return kind, pc.if_else(cells, "True", "False").cast(pa.large_string())
    return kind, pa.array(as_texts(column), pa.large_string())


def _add_numbers(columns: Sequence[_Column], cells: np.ndarray, kind: Kind) -> None:
    """Add numbers, or days since 1970, axes (columns, rows); missing ones are NaN."""
    exact = cells.dtype.kind in "iu"  # integers may need more digits than float64 has
    numbers = cells.astype(np.float64, copy=False)
    known = ~np.isnan(numbers)
    present = known.sum(1)
    rounded = numbers == np.round(numbers)
    whole = (rounded | ~known).all(1)
    low, high = np.fmin.reduce(numbers, 1), np.fmax.reduce(numbers, 1)
    large = np.maximum(high, -low) >= (2.0**63 if exact else _EXACT)
    opened = np.asarray(is_open_end(numbers).any(1)) & (kind == "date")
    counted = [at for at, column in enumerate(columns) if column.counted]
    own = counted if len(counted) < len(columns) else slice(None)
    hashes = dict(
        zip(
            counted,
            _different_hashes(cells[own], numbers[own], rounded[own], known[own]),
            strict=True,
        )
    )
    for at, column in enumerate(columns):
        column.rows += cells.shape[1]
        column.missing += cells.shape[1] - int(present[at])
        if not present[at]:
            continue
        column.kinds.add(kind)
        column.open |= bool(opened[at])
        column.infinite |= bool(max(high[at], -low[at]) > LARGEST)
        column.whole = column.whole and kind == "number" and bool(whole[at])
        column.long |= column.whole and bool(large[at])
        column.rounded |= exact and bool(max(high[at], -low[at]) >= _EXACT)
        column.add_hashes(hashes.get(at, _NO_HASHES), int(present[at]))
        if kind == "date":
            continue
        column.decimals = None
        if column.forms is not None:
            able = column.whole and low[at] >= 19000101 and high[at] <= 21001231
            able = able and DIGITS in column.forms
            some = as_texts(pd.Series(np.unique(numbers[at][known[at]]))).tolist() if able else []
            column.forms = forms_of(some, [DIGITS]) or None


def _different_hashes(
    cells: np.ndarray, numbers: np.ndarray, rounded: np.ndarray, known: np.ndarray
) -> Iterator[np.ndarray]:
    """Return each column's distinct hashes; all arguments have axes (columns, rows)."""
    hashes = _hashes(cells, numbers, rounded)
    if not known.all():  # a missing cell is replaced by a present cell, which adds no distinct cell
        first = hashes[np.arange(len(cells)), known.argmax(1)]
        hashes = np.where(known, hashes, first[:, None])
    hashes = np.sort(hashes, 1)
    fresh = np.ones(hashes.shape, bool)
    np.not_equal(hashes[:, 1:], hashes[:, :-1], out=fresh[:, 1:])
    return (own[marks] for own, marks in zip(hashes, fresh, strict=True))


def _hashes(cells: np.ndarray, numbers: np.ndarray, rounded: np.ndarray) -> np.ndarray:
    """Return one hash per cell: a whole number itself, the bits of another one; 7 equals 7.0."""
    if cells.dtype.kind in "iu":
        return cells.astype(np.int64).view(np.uint64)
    short = rounded & (np.abs(numbers) < 2.0**63)
    whole = np.where(short, numbers, 0).astype(np.int64)
    return np.where(short, whole, np.ascontiguousarray(numbers).view(np.int64)).view(np.uint64)


@dataclass
class _Texts:
    """The different texts of a column in a block, and the count of each text."""

    column: _Column
    kind: Kind
    different: pa.Array
    counts: np.ndarray

    @classmethod
    def of(cls, column: _Column, cells: pa.Array, kind: Kind) -> _Texts:
        """Count the texts; missing ones are null."""
        counted = cells.drop_null().value_counts()
        different = pc.utf8_trim_whitespace(counted.field("values"))
        found = cls(column, kind, different, np.asarray(counted.field("counts")))
        column.rows += len(cells)
        column.missing += cells.null_count
        return found


def _add_texts(own: Sequence[_Texts]) -> None:
    """Add the texts of several columns to their facts."""
    if not own:
        return
    every = pa.concat_arrays([each.different for each in own])
    starts = np.cumsum([0, *(len(each.different) for each in own)])
    whole, short = (
        np.logical_and.reduceat(pc.match_substring_regex(every, form).to_numpy(False), starts[:-1])
        for form in (_WHOLE, _SHORT)
    )
    word = pc.is_in(every, pa.array([*WORDS], every.type)).to_numpy(False)
    sign = pc.is_in(pc.utf8_lower(every), pa.array([*_SIGNS], every.type)).to_numpy(False)
    numeric = pc.match_substring_regex(every, _NUMERIC).to_numpy(False)
    dated = pc.match_substring_regex(every, _DATED).to_numpy(False)
    meant, objects = word | sign, every.to_numpy(False)
    hashes = pd.util.hash_array(objects, categorize=False)
    tried = list[tuple[_Column, list[str]]]()
    for at, each in enumerate(own):
        column, part = each.column, slice(starts[at], starts[at + 1])
        column.kinds.add(each.kind)
        column.whole = column.whole and bool(whole[at])
        column.long |= column.whole and not short[at]
        column.add_hashes(np.unique(hashes[part]), int(each.counts.sum()))
        if each.kind == "text":
            column.numeric += int(each.counts[numeric[part]].sum())
            column.dated += int(each.counts[dated[part]].sum())
            column.words += int(each.counts[word[part]].sum())
            column.signs |= dict.fromkeys(objects[part][meant[part]])
            if not meant[part].all():
                tried.append((column, objects[part][~meant[part]].tolist()))
    _try_dates([(column, texts) for column, texts in tried if column.forms is not None])
    numbers = [(column, texts) for column, texts in tried if column.decimals is not None]
    counts = decimal_counts_of_each([texts for _, texts in numbers])
    for (column, texts), counted in zip(numbers, counts, strict=True):
        column.add_numbers(texts, counted)


def _try_dates(tried: Sequence[tuple[_Column, list[str]]]) -> None:
    """Remove the forms of dates in which one of these texts is not a date."""
    able = forms_of_each([texts for _, texts in tried], [one.forms or [] for one, _ in tried])
    read = list[str]()
    for (column, texts), forms in zip(tried, able, strict=True):
        if not forms:
            column.mix(texts)
        column.forms = forms or ([] if column.mixed else None)
        read.append(forms[0] if forms else column.mixed)
    for (column, _), days in zip(
        tried, days_of_each([each for _, each in tried], read), strict=True
    ):
        column.open |= bool(is_open_end(days).any())
