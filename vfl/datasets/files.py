"""Reads tables from files and databases: small ones as a data frame, large ones column by column.

A CSV and a database's answer store a table row by row, so their columns cannot be read one after
another. Therefore a large table of these kinds is read in blocks of rows, and written to a
temporary file, in pieces of one column each. The temporary file has no name, so it always
disappears with the process.
"""

from __future__ import annotations

import csv
import json
import lzma
import tempfile
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vfl.core.errors import DataError, MissingDataError, nearest
from vfl.core.registry import imported
from vfl.core.sources import is_database, is_loader, is_object
from vfl.datasets.cells import plain
from vfl.datasets.csv_file import CsvRows, text_encoding, written_otherwise
from vfl.datasets.repeats import one_row_each
from vfl.datasets.sql import query_blocks
from vfl.datasets.table import (
    BLOCK_ROWS,
    COLUMN_ROWS,
    Kind,
    LargeTable,
    Source,
    Table,
    TableFormat,
    cells_of,
    check_names,
    id_columns,
    name_of,
    series_of,
    texts_of,
)


def read_table(
    source: Source,
    form: TableFormat | None = None,
    text_columns: Sequence[str] = (),
    setting: str | None = None,
    columns: Sequence[str] | None = None,
) -> Table:
    """Read a table from a file, a folder, a store, a database, a function or a frame.

    A file whose name ends in ``.parquet`` is a Parquet file; any other file is a CSV, which may be
    compressed (gzip, bzip2, xz, or zip with one file in it). The source may also be a function,
    "package.module:function", that returns a data frame or an Arrow table. In an object store, such
    as ``s3://loans/2026.parquet``, the table must be a Parquet file. The store's usual environment
    variables give the credentials. Instead of one Parquet file, the source may be a folder, or a
    prefix in a store, with several Parquet files. The rows of these files are joined in the order
    of the files' names. Column names of a frame become texts.

    Args:
        source: the table; a CSV has its column names in the first line below `form.skip_lines`.
        form: format of the table; the default is commas and text ids.
        text_columns: columns whose texts are not parsed, so that an id keeps its leading zeros; a
            frame ignores this argument.
        setting: setting that names the file, for the error text.
        columns: names of the needed columns, which the table must have; None keeps all columns. The
            result may have further columns.

    Returns:
        A data frame; for a folder, a store, and a file or database of more than about `BLOCK_ROWS`
        rows, an object with the same interface, which reads the table column by column.

    Raises:
        MissingDataError: the file does not exist, or a package that reads the source is missing.
        MissingColumnError: the table lacks a column that `form.repeats` reads.
        SpecError: the function does not exist.
        DataError: the table cannot be read, or a column has no unique name.
    """
    form, source = form or TableFormat(), _given(source)
    if form.repeats is None:
        return _read(source, form, text_columns, setting, columns)
    known = column_names(source, form, setting)
    deciding = form.repeats.columns(known)
    ids = id_columns(form.repeats.id_column, known) if form.text_ids else []
    needed = None if columns is None else [*dict.fromkeys([*columns, *deciding])]
    texts = [*dict.fromkeys([*text_columns, *ids])]
    return one_row_each(_read(source, form, texts, setting, needed), form)


def _read(
    source: Source,
    form: TableFormat,
    text_columns: Sequence[str],
    setting: str | None,
    columns: Sequence[str] | None,
) -> Table:
    with _opened(source, form, setting, text_columns) as found:
        if isinstance(found, pd.DataFrame):
            return _frame(found, form, columns)
        if isinstance(found, CsvRows):
            return _read_csv(found, text_columns, columns)
        if isinstance(found, _Answer):
            return _spilled(found.blocks(BLOCK_ROWS, columns, text_columns))
        if found.stays_large or len(found) > BLOCK_ROWS:
            return found
        kept = found.columns if columns is None else list(columns)
        return pd.DataFrame({name: found[name] for name in kept}, index=range(len(found)))


def first_rows(source: Source, form: TableFormat, columns: Sequence[str]) -> Table:
    """Read the first rows of a table; see `read_table`.

    These are all rows of a frame or of an object store, and up to `BLOCK_ROWS` rows of any other
    source.
    """
    source = _given(source)
    if isinstance(source, pd.DataFrame) or is_object(source):
        return read_table(source, form, columns=columns)
    with _opened(source, form) as found:
        if isinstance(found, CsvRows | _Answer):
            return _as_frame(next(found.blocks(BLOCK_ROWS, columns)))
        assert isinstance(found, ParquetTable), "frames are read above"
        return next(found.row_blocks(columns, BLOCK_ROWS), found)


def column_names(
    source: Source, form: TableFormat | None = None, setting: str | None = None
) -> list[str]:
    """Read the column names of a table without its rows; see `read_table`.

    Raises:
        MissingDataError, SpecError, DataError: see `read_table`.
    """
    with _opened(_given(source), form or TableFormat(), setting) as found:
        return list(found.names if isinstance(found, CsvRows | _Answer) else found.columns)


@contextmanager
def _opened(
    source: Source, form: TableFormat, setting: str | None = None, text_columns: Sequence[str] = ()
) -> Iterator[pd.DataFrame | ParquetTable | CsvRows | _Answer]:
    """Open a source of any kind; errors while its rows are read name the file and its cure."""
    if isinstance(source, pd.DataFrame):
        yield _uniquely_named(source)
    elif is_database(source) and not is_object(source):
        yield _Answer(str(source), form)
    else:
        path = str(source) if is_object(source) else _existing(source, setting)
        with _readable(path, form):
            if isinstance(path, Path) and not path.is_dir() and path.suffix != ".parquet":
                yield CsvRows(path, form)
            else:
                yield ParquetTable(path, form, text_columns)


def _given(source: Source) -> Source:
    """Call the function that the source names; return any other source unchanged.

    Raises:
        SpecError: the function does not exist.
        DataError: the function does not return a table, or raises an error, whose text may quote
            cells.
    """
    if not is_loader(source):
        return source
    load = imported(str(source), "a function that returns a table")
    try:
        found = load()
    except Exception as error:
        raise DataError(
            "the function that returns the table raises an error",
            where=str(source),
            got=type(error).__name__,
            fix="call it in Python, without vfl, to see the error",
        ) from None
    if isinstance(found, pa.Table):
        frame: pd.DataFrame = found.to_pandas(types_mapper=pd.ArrowDtype)
        return frame
    if not isinstance(found, pd.DataFrame):
        raise DataError(
            "the function returns no table",
            where=str(source),
            got=f"a {type(found).__name__}",
            want="a pandas DataFrame or a pyarrow Table, with the id in one of its columns",
        )
    return found


def _existing(source: Path | str, setting: str | None) -> Path:
    path = Path(source)
    if path.is_dir():
        return path
    if not path.is_file():
        beside = [file.name for file in path.parent.glob("*.*") if file.suffix != ".toml"]
        raise MissingDataError(
            "there is no such table",
            where=setting,
            got=str(path),
            want="a .parquet file or a folder of them, or a CSV (also .gz, .bz2, .xz or .zip)",
            fix=nearest(path.name, beside),
        )
    if not path.stat().st_size:
        raise DataError(
            "this file is empty",
            where=str(path),
            want="a line of column names and one line for each row",
            fix="write the table again; was it being written just now?",
        )
    return path


@contextmanager
def _readable(path: Path | str, form: TableFormat | None = None) -> Iterator[None]:
    encoding = None
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        if isinstance(path, Path) and not isinstance(error, _UNREADABLE):
            raise
        if isinstance(error, UnicodeError) and isinstance(path, Path):
            encoding = text_encoding(path)  # raises a clearer error if vfl does not read it
        if isinstance(error, EOFError) and isinstance(path, Path):
            raise _cut_short(path) from None
        fix = None if isinstance(path, str) else _cure(path, form or TableFormat(), encoding)
        # The error's own text may quote cells.
        raise _unreadable(path, type(error).__name__, fix) from None


_UNREADABLE = (
    *(ValueError, OSError, EOFError, NotImplementedError, zlib.error, lzma.LZMAError),
    *(csv.Error, pa.ArrowException),
)


def _unreadable(path: Path | str, got: str, fix: str | None) -> DataError:
    if isinstance(path, str):
        return DataError(
            "the object store does not return this table",
            where="data.source",
            got=got,
            want="a Parquet file that this host may read",
            fix="try the store's own client with the same environment",
        )
    return DataError(
        "this file cannot be read as a table",
        where=str(path),
        got=got,
        want="CSV with a line of column names (also .gz, .bz2, .xz or .zip), or a .parquet file",
        fix=fix,
    )


def _cut_short(path: Path) -> DataError:
    return DataError(
        "this file cannot be read as a table",
        where=str(path),
        got="a packed file that ends too early",
        fix="copy or pack it again; was it being written just now?",
    )


def _cure(path: Path, form: TableFormat, encoding: str | None) -> str:
    if path.is_dir():
        return "write the Parquet files of this folder again"
    if path.suffix == ".parquet":
        with path.open("rb") as file:
            is_parquet = file.read(4) == b"PAR1"
        if not is_parquet:
            return "it is not a Parquet file: give its name the ending of its kind, such as .csv"
        return "write the file again; was it being written just now?"
    return written_otherwise(path, form, encoding) or (
        "check the ending of the name, the separator and the encoding; vfl init --from "
        "TABLE detects them"
    )


def _uniquely_named(frame: pd.DataFrame) -> pd.DataFrame:
    """Convert a frame's column names to text; names of several levels are joined by underscores.

    >>> names = pd.MultiIndex.from_tuples([("id", ""), ("sum", 2024)])
    >>> list(_uniquely_named(pd.DataFrame([[1, 2]], columns=names)).columns)
    ['id', 'sum_2024']
    """
    if not all(isinstance(name, str) for name in frame.columns):
        frame = frame.set_axis([name_of(each) for each in frame.columns], axis=1)
    check_names(frame.columns.to_series(), "the frame")
    return frame


def _frame(frame: pd.DataFrame, form: TableFormat, columns: Sequence[str] | None) -> pd.DataFrame:
    """Parse a frame's text columns that `form` describes; convert durations and Arrow columns."""
    frame = _uniquely_named(frame)
    frame = frame if columns is None else frame[list(columns)]
    parsed = {**form.numbers, **form.dates}
    names = [str(name) for name in frame.columns]
    told = [name for name in names if name in parsed or form.words_of(name)[0]]
    texts = {name: texts_of(frame[name]) for name in told}
    own = {
        name: cells_of(pc.utf8_trim_whitespace(each), name, form)
        for name, each in texts.items()
        if each is not None
    }
    spans = [str(name) for name in frame if frame[name].dtype.kind == "m"]
    own |= {name: plain(pa.array(frame[name])) for name in spans}
    arrow = [str(name) for name in frame if isinstance(frame[name].dtype, pd.ArrowDtype)]
    own |= {name: plain(_whole(pa.array(frame[name]))) for name in arrow}
    series = {name: series_of(cells).set_axis(frame.index) for name, cells in own.items()}
    return frame.assign(**series) if series else frame


def _whole(cells: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Join the chunks of an Arrow column to one array."""
    return cells.combine_chunks() if isinstance(cells, pa.ChunkedArray) else cells


def _read_csv(file: CsvRows, text_columns: Sequence[str], columns: Sequence[str] | None) -> Table:
    table = _spilled(file.blocks(BLOCK_ROWS, columns, text_columns))
    mixed = table.mixed() if isinstance(table, Spill) else []
    # If a whole column were parsed at once, a single text in it would turn all its cells into
    # texts. So a column that has numbers in one block and texts in another is read again as texts.
    return _read_csv(file, [*text_columns, *mixed], columns) if mixed else table


class _Answer:
    """The rows that a database returns, in blocks; each use of the object asks the query again."""

    def __init__(self, source: str, form: TableFormat) -> None:
        self._source, self._form = source, form

    @property
    def names(self) -> list[str]:
        """Return the names of the columns."""
        return list(next(self.blocks(BLOCK_ROWS)).schema.names)

    def blocks(
        self, rows: int, columns: Sequence[str] | None = None, as_text: Sequence[str] = ()
    ) -> Iterator[pa.RecordBatch]:
        """Yield the cells in blocks of rows; see `CsvRows.blocks`."""
        for batch in query_blocks(self._source, self._form.query, rows):
            check_names(pd.Series(batch.schema.names), "data.query", ", as in SELECT a.id AS a_id")
            kept = batch.schema.names if columns is None else list(columns)
            cells = [
                cells_of(batch.column(name), name, self._form, name in as_text) for name in kept
            ]
            yield pa.record_batch(cells, names=kept)


def _spilled(batches: Iterator[pa.RecordBatch]) -> Table:
    """Join blocks of rows to one table: a data frame if there are few rows, otherwise a `Spill`."""
    first = next(batches)
    if len(first) < BLOCK_ROWS:
        return _as_frame(first)
    table = Spill(list(first.schema.names))
    table.add(first)
    del first
    for batch in batches:
        table.add(batch)
    return table


def _as_frame(batch: pa.RecordBatch) -> pd.DataFrame:
    cells = [one.cast(pa.float64()) if one.type == pa.null() else one for one in batch.columns]
    frame: pd.DataFrame = pa.record_batch(cells, names=batch.schema.names).to_pandas()
    return frame


class ParquetTable(LargeTable):
    """A Parquet file, or all Parquet files of a folder, whose columns are read on demand.

    Args:
        path: path of the file or folder, or its name in an object store.
        form, text_columns: see `read_table`.

    Raises:
        MissingDataError: the folder contains no Parquet file, or the store's package is missing.
        DataError: a file has other columns than the first file, or a column has no unique name.

    Attributes:
        stays_large: whether the table is read column by column, however few rows it has.
    """

    def __init__(
        self, path: Path | str, form: TableFormat | None = None, text_columns: Sequence[str] = ()
    ) -> None:
        self._path, self._form, self._texts = path, form or TableFormat(), text_columns
        self.stays_large = isinstance(path, str) or path.is_dir()
        found = _parts(path) if isinstance(path, Path) else _objects(path)
        self._files = {
            name: pq.ParquetFile(
                file, buffer_size=1 << 16, pre_buffer=False, coerce_int96_timestamp_unit="us"
            )
            for name, file in found.items()
        }
        self._schema: pa.Schema = next(iter(self._files.values())).schema_arrow
        for name, file in self._files.items():
            if not file.schema_arrow.equals(self._schema):
                raise DataError(
                    "the Parquet files of this folder have different columns",
                    where=str(path),
                    got=f"'{name}' differs from '{next(iter(self._files))}'",
                    want="the same names and types in all of them",
                    fix="write them again with the names and types of the first",
                )
        kept = [field.name for field in self._schema if not _is_row_order(field)]
        self._stored = {_of_index(name, kept): name for name in kept}
        self._counted = _counted_index(self._schema)
        self.columns = [*self._counted, *self._stored]
        check_names(pd.Series([*self._counted, *self._schema.names]), str(path))

    def __len__(self) -> int:
        return sum(file.metadata.num_rows for file in self._files.values())

    def blocks(self, name: str) -> Iterator[pa.Array]:
        for batch in self._batches([name], COLUMN_ROWS):
            yield self._cells(batch, name)

    def row_blocks(self, names: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
        for batch in self._batches(names, rows):
            cells = {name: series_of(self._cells(batch, name)) for name in names}
            yield pd.DataFrame(cells, copy=False)

    def _cells(self, batch: pa.RecordBatch, name: str) -> pa.Array:
        cells = batch.column(self._stored.get(name, name))
        return cells_of(cells, name, self._form, name in self._texts)

    def _batches(self, names: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        stored = [self._stored[name] for name in names if name not in self._counted]
        stored = stored or self._schema.names[:1]  # any column gives the number of rows
        with _readable(self._path):
            for file in self._files.values():
                counted, row = _counted_index(file.schema_arrow), 0
                for batch in file.iter_batches(rows, columns=stored, use_threads=False):
                    for name, (start, step) in counted.items():
                        cells = start + step * np.arange(row, row + len(batch))
                        batch = batch.append_column(name, pa.array(cells))
                    row += len(batch)
                    yield batch
        pa.default_memory_pool().release_unused()  # frees tens of megabytes that Arrow keeps

    def type_of(self, name: str) -> pa.DataType:
        if name in self._counted:
            return pa.int64()
        empty = pa.array([], self._schema.field(self._stored[name]).type)
        return cells_of(empty, name, self._form, name in self._texts).type


def _counted_index(schema: pa.Schema) -> dict[str, tuple[int, int]]:
    """Return a data frame's numbered index, stored as metadata: name, start and step."""
    try:
        kept = json.loads((schema.metadata or {}).get(b"pandas", b"{}")).get("index_columns", ())
        found = [one for one in kept if isinstance(one, dict) and isinstance(one["name"], str)]
        return {
            one["name"]: (int(one["start"]), int(one["step"]))
            for one in found
            if one["name"] not in schema.names
        }
    # The metadata come from another program and have another form.
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _is_row_order(field: pa.Field) -> bool:
    """Return whether a column is an unnamed index, which numbers the rows of a former frame."""
    return bool(field.name.startswith("__index_level_") and pa.types.is_integer(field.type))


def _of_index(name: str, names: Sequence[str]) -> str:
    """Return a column's name, which is "index" for the unnamed index of a frame."""
    return "index" if name == "__index_level_0__" and "index" not in names else name


def _parts(path: Path) -> dict[str, Path]:
    """Return a Parquet file, or the Parquet files of a folder sorted by name."""
    if not path.is_dir():
        return {path.name: path}
    names = _of_table(each.name for each in path.iterdir() if each.is_file())
    return {name: path / name for name in names} or _no_parts(path)


def _of_table(names: Iterable[str]) -> list[str]:
    """Return the Parquet files among the names in a folder, without metadata files."""
    return sorted(each for each in names if each.endswith(".parquet") and each[0] not in "._")


def _no_parts(path: Path | str) -> NoReturn:
    raise MissingDataError(
        "there is no table in this folder",
        where=str(path),
        want="one or more .parquet files in it, not in folders below it, or the name of a file",
        fix="write all rows to .parquet files directly in this folder, with a value in a folder's "
        "name, such as year=2024, as a column",
    )


def _objects(source: str) -> dict[str, IO[bytes]]:
    """Open a file in an object store, or all files of a folder there, for reading in parts."""
    try:
        fsspec = import_module("fsspec")
        store, path = fsspec.core.url_to_fs(source)
    except ImportError:
        raise MissingDataError(
            "reading this object store needs a package that is not installed",
            where="data.source",
            got=source.partition("://")[0],
            fix="pip install 'vfl[storage]' and the store's package: s3fs, gcsfs or adlfs",
        ) from None
    if not store.isdir(path):
        return {path.rpartition("/")[2]: store.open(path, "rb")}
    there = {each.rpartition("/")[2]: each for each in store.ls(path, detail=False)}
    names = _of_table(filter(None, there))
    return {name: store.open(there[name], "rb") for name in names} or _no_parts(source)


class Piece(NamedTuple):
    """Some consecutive rows of one column in the temporary file.

    Attributes:
        start, size: position and length of their bytes in the file.
        schema: Arrow schema of the rows, with one column.
        kind: kind of the cells; None for Arrow's type null, in which all cells are missing.
    """

    start: int
    size: int
    schema: pa.Schema
    kind: Kind | None


class Spill(LargeTable):
    """A table whose columns are stored in a temporary file without a name.

    Args:
        columns: names of the columns, in order.
    """

    def __init__(self, columns: list[str]) -> None:
        self.columns = columns
        self._rows = 0
        self._pieces: dict[str, list[Piece]] = {name: [] for name in columns}
        # The file has no buffer, because flushing it on close could fail if the disk is full.
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - lives with the table
        weakref.finalize(self, self._file.close)

    def add(self, batch: pa.RecordBatch) -> None:
        """Write the next rows.

        Raises:
            DataError: the disk is full.
        """
        for name in self.columns:
            cells = batch.column(name)
            one = pa.record_batch([cells], names=[""])
            start, size = self._write(one.serialize())
            self._pieces[name].append(Piece(start, size, one.schema, _kind(cells)))
        self._rows += len(batch)

    def _write(self, content: pa.Buffer) -> tuple[int, int]:
        start = self._file.tell()
        try:
            written = self._file.write(content)
        except OSError:
            written = 0
        if written < content.size:
            raise DataError(
                "the disk is too full for the temporary file of a large table",
                where=tempfile.gettempdir(),
                got=f"{start >> 20} MiB written",
                fix="free disk space, or set TMPDIR to a folder on a larger disk",
            )
        return start, written

    def mixed(self) -> list[str]:
        """Return the names of columns whose blocks have cells of different kinds."""
        kinds = {name: {piece.kind for piece in own} for name, own in self._pieces.items()}
        return [name for name, found in kinds.items() if len(found - {None}) > 1]

    def __len__(self) -> int:
        return self._rows

    def blocks(self, name: str) -> Iterator[pa.Array]:
        wanted = self.type_of(name)
        for piece in self._pieces[name]:
            self._file.seek(piece.start)
            found = pa.py_buffer(self._file.read(piece.size))
            yield pa.ipc.read_record_batch(found, piece.schema).column(0).cast(wanted, safe=False)

    def type_of(self, name: str) -> pa.DataType:
        """Return the type of a column; if it has whole and real numbers, the type is float64.

        In a database without types, a column that has some texts becomes a column of texts.
        """
        pieces = self._pieces[name]
        found = {piece.schema.field(0).type for piece in pieces if piece.kind}
        if len(found) == 1:
            return found.pop()
        return pa.large_string() if "text" in {piece.kind for piece in pieces} else pa.float64()


def _kind(cells: pa.Array) -> Kind | None:
    if pa.types.is_null(cells.type):
        return None
    if pa.types.is_boolean(cells.type):
        return "boolean"
    numeric = pa.types.is_integer(cells.type) or pa.types.is_floating(cells.type)
    return "number" if numeric else "text"
