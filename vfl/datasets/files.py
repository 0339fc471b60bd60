"""Reading tables from files: a small one as a frame, a large one column by column.

A CSV stands by rows, so that its columns cannot be read one after another. A large one is read
once, some rows at a time, and written to a temporary file in pieces of one column each. That file
has no name: it is gone with the process, however that ends.
"""

from __future__ import annotations

import tempfile
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from vfl.core.errors import DataError, MissingDataError, nearest
from vfl.core.storage import is_database, is_object
from vfl.core.text import printable
from vfl.datasets.sniff import sniff
from vfl.datasets.sql import query_blocks
from vfl.datasets.table import (
    BLOCK_ROWS,
    Kind,
    LargeTable,
    Source,
    Table,
    TableFormat,
    check_names,
)


def read_table(
    source: Source,
    form: TableFormat | None = None,
    text_columns: Sequence[str] = (),
    setting: str | None = None,
    columns: Sequence[str] | None = None,
) -> Table:
    """A table from ``.csv``, ``.csv.gz`` or ``.parquet``; a frame passes with its names as text.

    Of an object store, such as ``s3://loans/2026.parquet``, it is a Parquet file; who asks is said
    by the environment, as the store's own tools have it. In place of a Parquet file a folder, or a
    store's prefix, may hold several: their rows follow one another in the order of the names.

    Args:
        source: the file; its first line names the columns.
        form: how it is written; commas and plain ids unless told.
        text_columns: columns of a CSV that stay text, so that an id keeps its leading zeros.
        setting: what names the file, for the message.
        columns: those that are kept, all of them names of the table; None keeps every one.

    Returns:
        A frame; of more than `BLOCK_ROWS` rows of a file something that reads like one, by column.

    Raises:
        MissingDataError: no such file.
        DataError: not a readable table, or a column without a name of its own.
    """
    if isinstance(source, pd.DataFrame):
        return _kept(_uniquely_named(source, "the frame"), columns)
    if is_object(source):
        with _readable(str(source)):
            return ParquetTable(str(source))
    if is_database(source):
        return _spilled(_asked(str(source), form or TableFormat(), columns))
    path = _existing(source, setting)
    with _readable(path):
        if path.is_dir():
            return ParquetTable(path)
        if path.suffix == ".parquet":
            table = ParquetTable(path)
            if len(table) > BLOCK_ROWS:
                return table
            return _kept(_uniquely_named(pd.read_parquet(path), str(path)), columns)
        return _read_csv(path, form or TableFormat(), text_columns, columns)


def column_names(
    source: Source, form: TableFormat | None = None, setting: str | None = None
) -> list[str]:
    """The names of a table's columns, without its rows; see `read_table`.

    Raises:
        MissingDataError, DataError: see `read_table`.
    """
    if isinstance(source, pd.DataFrame):
        return list(_uniquely_named(source, "the frame").columns)
    if is_object(source):
        with _readable(str(source)):
            return list(ParquetTable(str(source)).columns)
    if is_database(source):
        return list(next(_asked(str(source), form or TableFormat(), None)).columns)
    path = _existing(source, setting)
    with _readable(path):
        if path.is_dir() or path.suffix == ".parquet":
            return list(ParquetTable(path).columns)
        return _csv_names(path, form or TableFormat())


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
            want="a .csv, .csv.gz or .parquet file",
            fix=nearest(path.name, beside),
        )
    if not path.stat().st_size:
        raise DataError(
            "this file is empty",
            where=str(path),
            want="a line of column names and one line a row",
            fix="write the table again; was it being written just now?",
        )
    return path


def _kept(frame: pd.DataFrame, columns: Sequence[str] | None) -> pd.DataFrame:
    return frame if columns is None else frame[list(columns)]


@contextmanager
def _readable(path: Path | str) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        if isinstance(path, Path) and not isinstance(error, _UNREADABLE):
            raise
        raise _unreadable(path, type(error).__name__) from None  # its text may quote cells


_UNREADABLE = (ValueError, OSError, EOFError, NotImplementedError, zlib.error)


def _unreadable(path: Path | str, got: str) -> DataError:
    if isinstance(path, str):
        return DataError(
            "the object store does not give this table",
            where="data.source",
            got=got,
            want="a Parquet file that this host may read",
            fix="try the store's own client with the same environment",
        )
    return DataError(
        "this file cannot be read as a table",
        where=str(path),
        got=got,
        want="CSV (.csv, .csv.gz) with a line of column names, or Parquet (.parquet)",
        fix=_written_otherwise(path),
    )


def _written_otherwise(path: Path) -> str:
    if path.is_dir():
        return "write the Parquet files of this folder again"
    text = b"\0" not in path.read_bytes()[:4096]
    form, usual = sniff(path) if text else TableFormat(), TableFormat()
    told = [
        f'{name} = "{printable(value)}"'
        for name in ("separator", "encoding", "decimal")
        if (value := getattr(form, name)) != getattr(usual, name)
    ]
    if told:
        return f"this file looks as if written with {', '.join(told)}: set that in [data]"
    return (
        "check the ending of the name, the separator and the encoding; vfl init --from TABLE "
        "finds them"
    )


def _uniquely_named(frame: pd.DataFrame, where: str) -> pd.DataFrame:
    if not all(isinstance(name, str) for name in frame.columns):
        frame = frame.rename(columns=str)
    check_names(frame.columns.to_series(), where)
    return frame


def _csv_names(path: Path, form: TableFormat) -> list[str]:
    # Two lines, because pandas reads a longer second one here as an error, later as an index.
    top = pd.read_csv(
        path,
        sep=form.separator,
        encoding=form.encoding,
        header=None,
        nrows=2,
        dtype=str,
        skipinitialspace=True,
    )
    check_names(top.iloc[0], str(path))
    return [str(name) for name in top.iloc[0]]


def _read_csv(
    path: Path, form: TableFormat, text_columns: Sequence[str], columns: Sequence[str] | None
) -> Table:
    _csv_names(path, form)
    # All columns are parsed even if some are kept: a line of another length must be found.
    with pd.read_csv(
        path,
        sep=form.separator,
        encoding=form.encoding,
        decimal=form.decimal,
        na_values=list(form.missing),
        dtype=dict.fromkeys(text_columns, str),
        skipinitialspace=True,
        low_memory=False,  # one type a column in all of a reading
        chunksize=BLOCK_ROWS,
    ) as readings:
        table = _spilled(_kept(frame, columns) for frame in readings)
    mixed = table.mixed() if isinstance(table, Spill) else []
    # In one reading a single text makes its column text; so read those columns as text throughout.
    return _read_csv(path, form, [*text_columns, *mixed], columns) if mixed else table


def _asked(source: str, form: TableFormat, columns: Sequence[str] | None) -> Iterator[pd.DataFrame]:
    """What a database answers, some rows at a time."""
    for frame in query_blocks(source, form.query, BLOCK_ROWS):
        yield _kept(_uniquely_named(frame, "data.query"), columns)


def _spilled(frames: Iterator[pd.DataFrame]) -> Table:
    """One table of many blocks of rows; a frame if there are few."""
    first = next(frames)
    if len(first) < BLOCK_ROWS:
        return first
    table = Spill(list(first.columns))
    table.add(first)
    del first
    for frame in frames:
        table.add(frame)
    return table


class ParquetTable(LargeTable):
    """The columns of a Parquet file, or of all in a folder, each read when asked for.

    Args:
        path: the file or folder, or what names it in an object store.

    Raises:
        MissingDataError: a folder without a Parquet file.
        DataError: files of other columns than the first, or columns without a name of their own.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = path
        found = _parts(path) if isinstance(path, Path) else _opened(path)
        self._files = {
            name: pq.ParquetFile(file, buffer_size=1 << 16, pre_buffer=False)
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
                )
        empty = self._schema.empty_table().to_pandas()  # without what pandas calls index
        self.columns = [str(name) for name in empty.columns]
        check_names(pd.Series(self.columns), str(path))

    def __len__(self) -> int:
        return sum(file.metadata.num_rows for file in self._files.values())

    def blocks(self, name: str) -> Iterator[pa.Array]:
        for batch in self._batches([name], BLOCK_ROWS):
            yield batch.column(0)

    def row_blocks(self, names: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
        for batch in self._batches(names, rows):
            cells = {name: batch.column(name).to_pandas() for name in names}
            yield pd.DataFrame(cells, copy=False)

    def _batches(self, names: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        with _readable(self._path):
            for file in self._files.values():
                yield from file.iter_batches(rows, columns=list(names), use_threads=False)
        pa.default_memory_pool().release_unused()  # else Arrow keeps tens of megabytes for later

    def type_of(self, name: str) -> pa.DataType:
        return self._schema.field(name).type


def _parts(path: Path) -> dict[str, Path]:
    """A Parquet file, or those of a folder in the order of their names."""
    if not path.is_dir():
        return {path.name: path}
    names = _of_table(each.name for each in path.iterdir() if each.is_file())
    return {name: path / name for name in names} or _no_parts(path)


def _of_table(names: Iterable[str]) -> list[str]:
    """Parquet files among the names of a folder, but for those that others keep notes in."""
    return sorted(each for each in names if each.endswith(".parquet") and each[0] not in "._")


def _no_parts(path: Path | str) -> NoReturn:
    raise MissingDataError(
        "there is no table in this folder",
        where=str(path),
        want="one or more .parquet files, or the name of a file",
    )


def _opened(source: str) -> dict[str, IO[bytes]]:
    """A file in an object store, or all of a folder there, each read some bytes at a time."""
    try:
        fsspec = import_module("fsspec")
        store, path = fsspec.core.url_to_fs(source)
    except ImportError:
        raise MissingDataError(
            "reading this object store needs a package that is not here",
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
    """Some rows of one column.

    Attributes:
        start, size: bytes of the file.
        schema: their Arrow type.
        kind: what the cells are; None where all are missing.
    """

    start: int
    size: int
    schema: pa.Schema
    kind: Kind | None


class Spill(LargeTable):
    """Columns in a file without a name.

    Args:
        columns: the names, in order.
    """

    def __init__(self, columns: list[str]) -> None:
        self.columns = columns
        self._rows = 0
        self._pieces: dict[str, list[Piece]] = {name: [] for name in columns}
        # Without a buffer, which a full disk would leave to be written when the file is closed.
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - lives with the table
        weakref.finalize(self, self._file.close)

    def add(self, frame: pd.DataFrame) -> None:
        """Write the next rows.

        Raises:
            DataError: the disk is full.
        """
        for name in self.columns:
            cells = pa.array(frame[name], from_pandas=True)
            if isinstance(cells, pa.ChunkedArray):  # of texts that were joined from several parts
                cells = pa.concat_arrays(cells.chunks)
            batch = pa.record_batch([cells], names=[""])
            start, size = self._write(batch.serialize())
            self._pieces[name].append(Piece(start, size, batch.schema, _kind(cells)))
        self._rows += len(frame)

    def _write(self, content: pa.Buffer) -> tuple[int, int]:
        start = self._file.tell()
        try:
            written = self._file.write(content)
        except OSError:
            written = 0
        if written < content.size:
            raise DataError(
                "there is no room for the temporary file of a large table",
                where=tempfile.gettempdir(),
                got=f"{start >> 20} MiB written",
                fix="free some room, or set TMPDIR to a folder on a larger disk",
            )
        return start, written

    def mixed(self) -> list[str]:
        """Columns whose pieces were read as different things: numbers here and texts there."""
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
        """Of one kind of cells: whole numbers join with real ones as float64, as in one reading."""
        found = {piece.schema.field(0).type for piece in self._pieces[name] if piece.kind}
        return found.pop() if len(found) == 1 else pa.float64()


def _kind(cells: pa.Array) -> Kind | None:
    if cells.null_count == len(cells):
        return None
    if pa.types.is_boolean(cells.type):
        return "boolean"
    numeric = pa.types.is_integer(cells.type) or pa.types.is_floating(cells.type)
    return "number" if numeric else "text"
