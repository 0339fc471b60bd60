"""Tables: their format, their cells, and the selection and owners of their columns.

A small table is a data frame. A large table is read column by column, and is never in memory as a
whole. Errors in this module and in its callers contain names of columns and counts, but no cell
values.
"""

from __future__ import annotations

import re
import unicodedata
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol
from uuid import UUID

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from vfl.core.errors import (
    DataError,
    LabelLeakError,
    MissingColumnError,
    SharedColumnError,
    nearest,
)
from vfl.datasets.cells import (
    EITHER,
    WORDS,
    date_form,
    days_of_texts,
    days_of_times,
    decimal_of,
    numbers_of,
    plain,
    plain_numbers,
    text_of_decimal,
    texts_of_decimals,
    units_of,
    without,
)

if TYPE_CHECKING:
    from vfl.datasets.repeats import Repeats

BLOCK_ROWS = 8192  # number of rows of a block that has all columns, or of Python objects
COLUMN_ROWS = 1 << 16  # rows of a block of few columns, where the fixed cost of a block matters
ID_UNIT = "\x1f"  # separates the columns of a composite id
LARGEST = 1e150  # largest allowed number; the square of a much larger one overflows float64

Classes = tuple[str | int, ...]  # names of the classes of a label column, by code
IdType = Literal["text", "number"]
Kind = Literal["number", "boolean", "text"]
Missing = tuple[str, ...] | Mapping[str, tuple[str, ...]]
Source = Path | str | pd.DataFrame


@dataclass(frozen=True)
class TableFormat:
    """Format of a party's file, and how its cells become inputs.

    Attributes:
        separator: character between the cells of a CSV line.
        missing: additional texts that mean a missing cell, such as "?"; or such texts by column,
            with "*" for all other columns. In columns of numbers or dates, the words of `WORDS`
            also mean a missing cell, unless the column's list is empty.
        skip_lines: number of lines in a CSV above the line of column names.
        id_type: "text" compares ids letter by letter; "number" reads 007, 7 and 7.0 as the same id.
        encoding, decimal: character encoding of a CSV, and its decimal separator.
        dates: columns of texts, or of numbers such as 20240131, that contain dates, and the form of
            these dates as in `strptime`; several forms are separated by `|`.
        numbers: text columns that contain numbers with a currency sign, grouped digits or a percent
            sign, and their decimal separator.
        query: SQL query, if the source is a database.
        bins: largest number of bins for a column of numbers; 0 standardises the numbers instead.
        cells: whether cells become inputs unchanged, without scaling; `bins` is then 0.
        tokenizer: name of a pretrained model; its tokens replace the party's text columns; see
            `vfl.datasets.encode.token_encoder`.
        length: number of tokens in a row.
        repeats: rule for several rows with the same id; None refuses a table with such rows.
    """

    separator: str = ","
    missing: Missing = ()
    id_type: IdType = "text"
    encoding: str = "utf-8"
    decimal: str = "."
    dates: Mapping[str, str] = field(default_factory=dict)
    query: str | None = None
    bins: int = 0
    cells: bool = False
    skip_lines: int = 0
    numbers: Mapping[str, str] = field(default_factory=dict)
    tokenizer: str | None = None
    length: int | None = None
    repeats: Repeats | None = None

    def words_of(self, column: str) -> tuple[Collection[str], Collection[str]]:
        """Return the words for a missing cell among texts, and those among numbers and dates.

        >>> form = TableFormat(missing={"*": ("?",), "grade": ()})
        >>> form.words_of("town")[0], form.words_of("grade"), "NA" in form.words_of("income")[1]
        (('?',), ((), ()), True)
        """
        if not isinstance(self.missing, Mapping):
            return self.missing, WORDS.union(self.missing)
        own = self.missing.get(column)
        words = self.missing.get("*", ()) if own is None else own
        return words, () if own == () else WORDS.union(words)

    def of_cells(self) -> TableFormat:
        """Return the same format, but with cells as inputs without scaling."""
        return replace(self, bins=0, cells=True)

    @property
    def text_ids(self) -> bool:
        """Return whether ids of a CSV are compared letter by letter."""
        return self.id_type == "text"


@dataclass(frozen=True, eq=False)
class OwnTable:
    """A party's table, with the owner's description of its format.

    Attributes:
        source: the file, data frame or database.
        id_column: column by which the rows are sorted; with a private alignment, also several
            columns joined by plus signs. An empty name keeps the order of the table.
        columns: names and globs of the feature columns; None takes all columns except id and label.
        form: format of the table.
        shape: (channels, height, width), if the columns are pixels of a picture, row after row.
    """

    source: Source
    id_column: str = ""
    columns: Sequence[str] | None = None
    form: TableFormat = field(default_factory=TableFormat)
    shape: Sequence[int] | None = None


def cells_of(
    cells: pa.Array, name: str, form: TableFormat, as_text: bool = False, of_csv: bool = False
) -> pa.Array:
    """Parse a block of cells in a column by the format of its table, from any kind of source.

    Args:
        cells: cells of the block, as the source returns them.
        name: name of the column.
        form: format of the table, which names the texts for a missing cell and the text columns of
            numbers or dates.
        as_text: whether texts stay texts, which columns of ids require.
        of_csv: whether the source is a CSV, which has no types; then plain numbers and booleans are
            parsed, and an empty cell is missing.

    Raises:
        DataError: a column of `form.numbers` has a cell that is not a number, or has several
            currencies.

    >>> form = TableFormat(numbers={"price": ","})
    >>> cells_of(pa.array(["5.000,50 €", "n/a"]), "price", form).to_pylist()
    [5000.5, None]
    """
    if as_text and pa.types.is_decimal(cells.type):
        return texts_of_decimals(cells)
    cells = plain(cells)
    if not (pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type)):
        return cells
    words, others = form.words_of(name)
    if as_text:
        pass
    elif name in form.numbers:
        return _numbers_of_texts(without(cells, ["", *others]), name, form.numbers[name])
    elif name in form.dates:
        return without(cells, ["", *others])
    elif of_csv:
        if pc.all(pc.equal(cells, "")).as_py():
            return pa.nulls(len(cells))
        numbers = plain_numbers(without(cells, ["", *others]), form.decimal)
        if numbers is not None:
            return numbers
    return without(cells, ["", *words] if of_csv else words) if of_csv or words else cells


def _numbers_of_texts(cells: pa.Array, name: str, written: str) -> pa.Array:
    numbers, unread = numbers_of(cells, written)
    if unread:
        unit = written[1:].strip()
        raise DataError(
            f"column '{name}' is not a column of numbers",
            where="data.numbers",
            got=f"{spaced(unread)} cells that are no number{f' in {unit}' if unit else ''}",
            want="numbers in one unit, with or without groups of thousands",
            fix="name the table's own word for a missing cell in the option 'missing', convert "
            "other units, or leave the column out",
        )
    if len(written) == 1 and len(units_of(cells) - {""}) > 1:
        raise DataError(
            f"column '{name}' mixes several currencies or units",
            where="data.numbers",
            want="amounts of one currency",
            fix="convert the amounts into one currency, write a column for each currency, or leave "
            "the column out",
        )
    return numbers


def series_of(cells: pa.Array | pa.ChunkedArray) -> pd.Series:
    """Convert Arrow cells to pandas; a column with no cell present becomes missing numbers."""
    if pa.types.is_null(cells.type):
        return pd.Series(np.full(len(cells), np.nan))
    found: pd.Series = cells.to_pandas()
    return found


class Table(Protocol):
    """Common interface of a data frame and a large table.

    Every access to a column of a large table reads the column again.
    """

    @property
    def columns(self) -> Iterable[str]:
        """Return the names of the columns, in order."""

    def __len__(self) -> int: ...

    def __getitem__(self, name: str, /) -> pd.Series: ...


class LargeTable(ABC):
    """A table whose cells stay in a file."""

    columns: Sequence[str]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def blocks(self, name: str) -> Iterator[pa.Array]:
        """Yield the cells of a column in blocks of rows."""

    @abstractmethod
    def type_of(self, name: str) -> pa.DataType:
        """Return the Arrow type of a column's blocks."""

    def row_blocks(self, names: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
        """Yield some columns in blocks of rows; unless overridden, with the sizes of `blocks`."""
        columns = [map(series_of, self.blocks(name)) for name in names]
        for cells in zip(*columns, strict=True):
            yield pd.DataFrame(dict(zip(names, cells, strict=True)), copy=False)

    def __getitem__(self, name: str, /) -> pd.Series:
        wanted = self.type_of(name)
        if not (pa.types.is_floating(wanted) or pa.types.is_integer(wanted)):
            return self._joined(name)
        # Columns of numbers, which are the most frequent ones, are thus never in memory twice.
        real = pa.types.is_floating(wanted)
        cells = np.empty(len(self), dtype=np.float64 if real else wanted.to_pandas_dtype())
        start = 0
        for block in self.blocks(name):
            if block.null_count and not real:
                return self._joined(name)
            cells[start : start + len(block)] = block.to_numpy(zero_copy_only=False)
            start += len(block)
        return pd.Series(cells, name=name, copy=False)

    def _joined(self, name: str) -> pd.Series:
        blocks = pa.chunked_array(list(self.blocks(name)), self.type_of(name))
        return series_of(blocks).rename(name)


@dataclass(frozen=True, eq=False, repr=False)
class Part:
    """Some columns and rows of a table, in any order; reads the cells when they are needed.

    Attributes:
        table: table that holds the cells.
        columns: names of the columns, in order.
        rows: positions of the rows in the table, int64, axes (rows of the part,).
    """

    table: Table
    columns: Sequence[str]
    rows: np.ndarray

    @classmethod
    def of(cls, table: Table, rows: np.ndarray, columns: Sequence[str] | None = None) -> Part:
        """Make a part of a table, or a part of another part.

        >>> part = Part.of(pd.DataFrame({"age": [31, 47, 25]}), np.array([2, 0]))
        >>> Part.of(part, np.array([1]))["age"].tolist()
        [31]
        """
        names = list(table.columns) if columns is None else columns
        if isinstance(table, Part):
            return cls(table.table, names, table.rows[rows])
        return cls(table, names, rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str, /) -> pd.Series:
        # Take only the cells: a series would copy its index, which is as large as a column.
        return pd.Series(self.table[name].array.take(self.rows), name=name, copy=False)


def row_blocks(table: Table, names: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
    """Yield some columns in blocks of rows, in the order of the table.

    A block has `rows` rows, or for a large table as many as the table's own blocks.
    """
    if isinstance(table, LargeTable):
        yield from table.row_blocks(names, rows)
        return
    if isinstance(table, pd.DataFrame):
        every = list(table.columns) == list(names)
        for start in range(0, len(table), rows):
            some = table.iloc[start : start + rows]  # rows first, so that only a block is copied
            yield (some if every else some[list(names)]).reset_index(drop=True)
        return
    cells = {name: table[name].array for name in names}  # reads each column only once
    for start in range(0, len(table), rows):
        block = {name: own[start : start + rows] for name, own in cells.items()}
        yield pd.DataFrame(block, copy=False)


def column_blocks(table: Table, name: str) -> Iterator[pd.Series]:
    """Yield the cells of a column in blocks of rows, in order."""
    if isinstance(table, LargeTable):
        yield from (
            pd.Series(series_of(block), name=name, copy=False) for block in table.blocks(name)
        )
    elif isinstance(table, Part):
        cells = table.table[name].array
        for start in range(0, len(table), COLUMN_ROWS):
            rows = table.rows[start : start + COLUMN_ROWS]
            yield pd.Series(cells.take(rows), name=name, copy=False)
    else:
        column = table[name]
        for start in range(0, len(column), COLUMN_ROWS):
            yield column.iloc[start : start + COLUMN_ROWS]


_OBJECT_KINDS: dict[str, Kind] = {
    "boolean": "boolean",
    "integer": "number",
    "floating": "number",
    "mixed-integer-float": "number",
    "decimal": "number",
    "empty": "number",
    "string": "text",
    "mixed-integer": "text",
}


def kind_of(column: pd.Series) -> Kind:
    """Return the kind of a column's present cells; if no cell is present, the type's kind.

    A column of objects without a present cell counts as "number".

    Raises:
        DataError: the column has dates, bytes, lists or other values that are no number or text.
    """
    dtype = column.dtype
    if pd.api.types.is_bool_dtype(dtype) and not isinstance(dtype, pd.CategoricalDtype):
        return "boolean"
    if pd.api.types.is_any_real_numeric_dtype(dtype):
        return "number"
    if isinstance(dtype, pd.CategoricalDtype):
        return "text"
    kind = _OBJECT_KINDS.get(pd.api.types.infer_dtype(column, skipna=True))
    if kind is None and all(isinstance(cell, UUID) for cell in column.dropna()):
        return "text"
    if kind is None:
        raise DataError(
            f"column '{column.name}' contains a value that is neither number nor text",
            got=f"type {dtype}",
            want="numbers, booleans or text",
            fix="convert it to a number first (for example a date to days) or leave it out",
        )
    return kind


def is_date(column: pd.Series) -> bool:
    """Return whether the column's type is date or time; texts that contain dates do not count."""
    if column.dtype == object:
        return pd.api.types.infer_dtype(column, skipna=True) in ("date", "datetime", "datetime64")
    dated = pd.api.types.is_datetime64_any_dtype(column.dtype)
    return bool(dated or isinstance(column.dtype, pd.PeriodDtype))


def as_days(column: pd.Series, written: str | None = None) -> np.ndarray:
    """Convert a column to days since 1970 in UTC, float64, axes (rows,); missing cells become NaN.

    Args:
        column: cells, which are dates or texts that contain dates.
        written: form of the dates in texts; see `days_of_texts`.

    >>> as_days(pd.Series(["1970-01-02", None, "0001-01-01"]), "%Y-%m-%d").tolist()
    [1.0, nan, -719162.0]

    Raises:
        DataError: some texts are not dates in this form.
    """
    present = column.notna().to_numpy()
    if is_date(column):
        return days_of_times(column)
    codes, found = pd.factorize(as_texts(column[present]))
    days = np.full(len(column), np.nan)
    if len(found):
        days[present] = days_of_texts(found, written or "ISO8601")[codes]
    if unread := int(np.isnan(days[present]).sum()):
        raise DataError(
            f"column '{column.name}' is not a column of dates",
            where="data.dates",
            got=f"{spaced(unread)} cells that are no date in the form of the setting",
            want="dates in the form of the setting; several forms are joined with |",
            fix="name the table's own word for a missing cell in the option 'missing', or "
            "leave the column out",
        )
    return days


def as_numbers(column: pd.Series) -> np.ndarray:
    """Convert a column to float64, axes (rows,); missing cells become NaN.

    Raises:
        DataError: a cell is not a number, is infinite or beyond `LARGEST`, or the column has values
            of another kind, such as dates.
    """
    (values,) = number_blocks([column])
    return values


def number_blocks(blocks: Iterable[pd.Series]) -> Iterator[np.ndarray]:
    """Yield the result of `as_numbers` for each block; raise bad cells' error after the last."""
    unread = infinite = 0
    for block in blocks:
        values = _numbers(block)
        if missing := int(np.isnan(values).sum()):
            unread += max(0, missing - int(block.isna().sum()))
        infinite += int((np.abs(values) > LARGEST).sum())
        yield values
    if unread or infinite:
        raise DataError(
            f"column '{block.name}' is not a column of finite numbers",
            got=f"{spaced(unread)} cells of another kind, {spaced(infinite)} infinite ones",
            want="numbers",
            fix="name the table's own word for a missing cell in the option 'missing'"
            if unread
            else "replace infinite numbers, and those beyond 1e150, by missing cells, or leave the "
            "column out",
        )


def _numbers(column: pd.Series) -> np.ndarray:
    if column.dtype == np.float64:
        return column.to_numpy()  # returns without the copy that other types need
    kind_of(column)
    plain = column.astype(object) if isinstance(column.dtype, pd.CategoricalDtype) else column
    read = pd.to_numeric(plain, errors="coerce")
    return np.asarray(read.to_numpy(dtype=np.float64, na_value=np.nan))


def as_texts(column: pd.Series) -> np.ndarray:
    """Convert a column to texts, axes (rows,), dtype object; missing cells become None.

    Blanks at both ends of a text are removed, and whole numbers have no decimal point. So 7, 7.0
    and " 7" become equal in any file.
    """
    if isinstance(column.dtype, pd.StringDtype) and (texts := texts_of(column)) is not None:
        return np.asarray(pc.utf8_trim_whitespace(texts).to_numpy(zero_copy_only=False))
    found = np.full(len(column), None, dtype=object)
    if isinstance(column.dtype, np.dtype) and column.dtype.kind in "iu":
        found[:] = [*map(str, column.tolist())]
        return found
    present = column.notna().to_numpy()
    found[present] = [_text(cell) for cell in column.to_numpy(dtype=object)[present]]
    return found


def texts_of(column: pd.Series) -> pa.Array | None:
    """Convert a column of texts to an Arrow array unchanged; return None for other columns.

    >>> texts_of(pd.Series(["a", None])).to_pylist(), texts_of(pd.Series([1, 2]))
    (['a', None], None)
    """
    dtype = column.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        codes = column.cat.codes.to_numpy()
        found = pa.array(as_texts(pd.Series(dtype.categories)), pa.large_string())
        return found.take(pa.array(codes, mask=codes < 0))
    mixed = dtype == np.dtype(object) and pd.api.types.infer_dtype(column) != "string"
    if mixed or not pd.api.types.is_string_dtype(dtype):
        return None
    cells = pa.array(column, pa.large_string(), from_pandas=True)
    return cells.combine_chunks() if isinstance(cells, pa.ChunkedArray) else cells


def id_texts(column: pd.Series) -> np.ndarray:
    """Convert ids as `as_texts` does, in Unicode's normal form C, so that a letter has one code.

    >>> id_texts(pd.Series(["Mu\u0308ller", 7.0])).tolist() == ["Müller", "7"]
    True

    Raises:
        DataError: some ids are bytes, lists or the like, which different parties may write as
            different texts.
    """
    if column.dtype == object and not _UNSPELLED.isdisjoint(map(type, column)):
        raise DataError(
            "the ids of a table are bytes or lists, which have several spellings as text",
            where=f"column '{column.name}'",
            want="texts or whole numbers",
            fix=AS_TEXT,
        )
    texts = as_texts(column)
    for place, text in enumerate(texts):
        if text is not None and not text.isascii():
            texts[place] = unicodedata.normalize("NFC", text)
    return texts


def joined_ids(columns: Sequence[pd.Series]) -> np.ndarray:
    r"""Return ids that one or several columns form, as `id_texts` does; None if a cell is missing.

    >>> joined_ids([pd.Series([7, 8]), pd.Series(["a", None])]).tolist()
    ['7\x1fa', None]
    """
    texts = [id_texts(each) for each in columns]
    if len(texts) == 1:
        return texts[0]
    found = np.empty(len(texts[0]), dtype=object)
    found[:] = [None if None in row else ID_UNIT.join(row) for row in zip(*texts, strict=True)]
    return found


def _text(cell: object) -> str:
    if isinstance(cell, float | np.floating) and float(cell).is_integer():
        return str(int(cell))
    return text_of_decimal(cell) if isinstance(cell, Decimal) else str(cell).strip()


#: Advice in the error for ids that are bytes.
AS_TEXT = (
    "write it as text, in the same way at every party: a UUID as str(uuid.UUID(bytes=cell)), "
    "letters as cell.decode(), other bytes as cell.hex()"
)
_UNSPELLED = frozenset((bytes, bytearray, memoryview, list, tuple, dict, set, np.ndarray))
_FEW_NUMBERS = 5  # fewer different numbers may be categories, such as sizes
_COMMA = re.compile(r"[-+]?\d+(,\d+)?")
_LOOKED_AT = 1000  # largest number of texts of a column that are checked


def misread(name: str, texts: Collection[str]) -> str | None:
    """Return advice if texts, read as categories, are numbers or dates; the advice quotes no text.

    >>> misread("income", ["1,5", "2,25"]), misread("price", ["5 €"])[:47]
    ('they are numbers with a decimal comma; set decimal = "," in [data]', \
'they are numbers; set numbers = { price = "." }')
    """
    some = [*texts][:_LOOKED_AT]
    if some and all(map(_COMMA.fullmatch, some)):
        return 'they are numbers with a decimal comma; set decimal = "," in [data]'
    if (decimal := decimal_of(some, ".")) and not all(map(str.isdigit, some)):
        if len(units_of(pa.array(some, pa.string())) - {""}) > 1:
            return "they are amounts in several currencies or units; convert them into one"
        how = f'numbers = {{ {name} = "{decimal}" }}'
        return f"they are numbers; set {how} in [data], or make them numbers in the frame"
    if form := date_form(some):
        how = f'dates = {{ {name} = "{form}" }}'
        frame = f'pd.to_datetime(frame["{name}"], format="{form}")'
        return f"they are dates; set {how} in [data]" + (
            f", or in a frame {frame}" if EITHER not in form else ""
        )
    unread = numbers_of(pa.array(some, pa.string()), ".")[1] if some else 0
    plain = len(some) - unread
    if _FEW_NUMBERS <= plain < len(some) and 2 * plain >= len(some):
        return (
            f"{spaced(plain)} of {spaced(len(some))} are numbers; if the other {spaced(unread)} "
            'mean a missing cell, name them: missing = ["?"] in [data]'
        )
    return None


def spaced(count: int) -> str:
    """Format a count for users.

    >>> spaced(10000)
    '10 000'
    """
    return f"{count:,}".replace(",", " ")


def name_of(label: object) -> str:
    """Return a frame's column name as text; of several levels, join those that are not empty.

    >>> name_of(2024), name_of(("sum", 2024)), name_of(("id", ""))
    ('2024', 'sum_2024', 'id')
    """
    if label is None or label != label:  # None and NaN stand for a missing name
        return ""
    if isinstance(label, tuple):
        return "_".join(str(level) for level in label if str(level))
    return str(label)


def id_columns(name: str, columns: Sequence[str]) -> list[str]:
    """Return the columns of an id: the column of that name, or the columns joined by plus signs.

    >>> id_columns("last+born", ["last", "born", "age"])
    ['last', 'born']
    """
    return [name] if name in columns else [each.strip() for each in name.split("+")]


def check_names(names: pd.Series, where: str, hint: str = "") -> None:
    """Refuse a table with a column without a name, or with two columns of the same name.

    Args:
        names: the names.
        where: source of the table, for the message.
        hint: likely cause of the problem for this kind of source, for the message.

    Raises:
        DataError: a column has no name, or two columns have the same name; the error quotes no
            name.
    """
    names = names.replace("", None)
    if names.isna().any() or names.duplicated().any():
        raise DataError(  # the first line of a file may be a row of data, so nothing is quoted
            "this table has columns without a name, or of the same name",
            where=where,
            got=f"{len(names)} columns, {names.nunique()} different names",
            want="one name for each column",
            fix=f"give every column a unique name{hint}",
        )


def pick_columns(
    columns: Iterable[str],
    patterns: Sequence[str],
    who: str,
    leave_out: Sequence[str] = (),
    setting: str | None = None,
) -> list[str]:
    """Return the columns that match names and globs such as ``loan_*``, each column once.

    Args:
        columns: names of the table's columns.
        patterns: names or globs; the result follows their order, and within a glob the table's
            order.
        who: owner of the patterns, for the message, such as "party 'bank'".
        leave_out: id and label columns: a glob skips them, and only their full name selects them.
        setting: setting that contains the patterns, for the message.

    >>> pick_columns(["age", "loan_a", "loan_b"], ["loan_*", "age"], "party 'bank'")
    ['loan_a', 'loan_b', 'age']

    Raises:
        MissingColumnError: a pattern matches no column; the error suggests the column with the
            nearest name.
    """
    known = list(columns)
    picked: dict[str, None] = {}
    for pattern in patterns:
        if pattern in known:
            picked[pattern] = None
            continue
        found = [name for name in known if fnmatchcase(name, pattern) and name not in leave_out]
        if not found:
            raise _missing(f"{who} names a column that the table lacks", pattern, known, setting)
        picked.update(dict.fromkeys(found))
    return list(picked)


def check_column(columns: Iterable[str], name: str, what: str, setting: str | None = None) -> None:
    """Refuse a required column, such as the id column, that the table lacks.

    Args:
        columns: names of the table's columns.
        name: name of the required column.
        what: meaning of the column, for the message, such as "the label".
        setting: setting that names the column, for the message.

    Raises:
        MissingColumnError: the table lacks the column; the error suggests the column with the
            nearest name.
    """
    known = list(columns)
    if name not in known:
        raise _missing(f"{what} is not a column of the table", name, known, setting)


def check_encoded(columns: Iterable[str], names: Iterable[str], setting: str | None = None) -> None:
    """Refuse a table without the columns of an encoder; see `check_column`.

    Args:
        columns: the table's column names.
        names: the encoder's columns, of which a table may have tens of thousands.
        setting: setting that names the table, for the message.
    """
    known = {*columns}
    for name in names:
        if name not in known:
            check_column(columns, name, f"the encoder's '{name}'", setting)


def _missing(what: str, name: str, known: list[str], setting: str | None) -> MissingColumnError:
    alone = len(known) == 1  # with a wrong separator, a CSV has only one long column
    return MissingColumnError(
        what,
        where=setting,
        got=name,
        want=f"one of the table's {len(known)} {'column' if alone else 'columns'}",
        fix=nearest(name, known) or ("is the separator right?" if alone else None),
    )


def check_features(
    party: str, columns: Sequence[str], label: str | None, ids: str | None, setting: str
) -> None:
    """Refuse features of a party that contain the label or the row id.

    Args:
        party: name of the party.
        columns: names of the party's feature columns, after globs were resolved.
        label: name of the label column, if known.
        ids: name of the id column, if any.
        setting: setting that names the feature columns, for the message.

    Raises:
        LabelLeakError: the label column is a feature.
        DataError: the id column is a feature.
    """
    if label is not None and label in columns:
        raise LabelLeakError(
            f"the label column '{label}' is also a feature of '{party}'",
            where=setting,
            fix=f"remove it from {setting}; it would make every result perfect and worthless",
        )
    if ids is not None and ids in columns:
        raise DataError(
            f"the id column '{ids}' is also a feature of '{party}'",
            where=setting,
            fix=f"remove it from {setting}; an id does not help to predict a new row",
        )


def check_owners(party_columns: Mapping[str, Sequence[str]]) -> None:
    """Refuse a column of one table that belongs to two parties.

    Args:
        party_columns: names of the feature columns of each party, after globs were resolved.

    Raises:
        SharedColumnError: two parties own the same column; the error names the first such column
            and states the number of further ones.
    """
    owners: dict[str, list[str]] = defaultdict(list)
    for party, columns in party_columns.items():
        for column in columns:
            owners[column].append(party)
    shared = [column for column, parties in owners.items() if len(parties) > 1]
    if shared:
        more = f", and {len(shared) - 1} more such columns" if len(shared) > 1 else ""
        count = {2: "two"}.get(len(owners[shared[0]]), str(len(owners[shared[0]])))
        raise SharedColumnError(
            f"column '{shared[0]}' belongs to {count} parties",
            where=f"parties.{owners[shared[0]][-1]}.columns",
            got=" and ".join(owners[shared[0]]) + more,
            want="one owner per column",
            fix="leave it in the columns of one of them",
        )
