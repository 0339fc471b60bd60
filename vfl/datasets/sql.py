"""Tables that databases return as answers to queries, read in blocks of rows.

A source is ``duckdb:FILE`` (only ``duckdb:`` for a query that reads files itself), or SQLAlchemy's
URL of a database; both need the extra ``vfl[sql]``. With the prefix ``adbc+``, an ADBC driver
returns the rows as Arrow batches; the extra ``vfl[adbc]`` installs such a driver. A password
belongs in an environment variable, not in a file: ``postgresql://me:${PASSWORD}@host/loans``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa

from vfl.core.errors import DataError, MissingDataError
from vfl.core.sources import ADBC, DUCKDB, SQLITE
from vfl.datasets.cells import of_values

#: Databases whose ADBC driver takes an address.
_DRIVERS = ("sqlite", "postgresql", "flightsql", "snowflake")


def query_blocks(source: str, query: str | None, rows: int) -> Iterator[pa.RecordBatch]:
    """Yield a database's answer in blocks of rows; one block without rows if it is empty.

    Raises:
        DataError: there is no query, or the database does not answer it; the error omits the
            database's own message, which may quote cells.
        MissingDataError: the database's file or a package that reads it is missing.
    """
    if not query:
        raise DataError(
            "a database needs a query",
            where="data.query",
            fix='query = "SELECT ... FROM ..." below source',
        )
    address = os.path.expandvars(source)
    if source.startswith(DUCKDB):
        found = _duckdb(address.removeprefix(DUCKDB), query, rows)
    elif source.startswith(ADBC):
        found = _adbc(address.removeprefix(ADBC), query, rows)
    else:
        found = _sqlalchemy(address, query, rows)
    while True:
        try:
            block = next(found)
        except StopIteration:
            return
        except DataError:
            raise
        except Exception as error:
            raise DataError(  # no address, which may contain a password, and no database message
                "the database does not answer the query",
                where="data.query",
                got=type(error).__name__,
                fix="try the query in the database's own client, with the same address and user",
            ) from None
        yield block


def _duckdb(file: str, query: str, rows: int) -> Iterator[pa.RecordBatch]:
    duckdb = _installed("duckdb")
    closed = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
    if file and not Path(file).is_file():
        raise MissingDataError("this database does not exist", where="data.source", got=file)
    with duckdb.connect(file or ":memory:", read_only=bool(file), config=closed) as connection:
        yield from _in_blocks(connection.sql(query).to_arrow_reader(rows), rows)


def _adbc(address: str, query: str, rows: int) -> Iterator[pa.RecordBatch]:
    scheme = address.partition(":")[0]
    if scheme not in _DRIVERS:
        want = ", ".join(f"{ADBC}{name}://" for name in _DRIVERS)
        raise DataError("no ADBC driver exists for this address", where="data.source", want=want)
    driver = _installed(f"adbc_driver_{scheme}.dbapi", f"adbc-driver-{scheme}")
    if address.startswith(SQLITE):
        file = address.removeprefix(SQLITE)
        if not Path(file).is_file():  # connecting to a missing file would create an empty database
            raise MissingDataError("this database does not exist", where="data.source", got=file)
        address = f"{Path(file).absolute().as_uri()}?mode=ro"
    with driver.connect(address) as connection, connection.cursor() as cursor:
        cursor.execute(query)
        with cursor.fetch_record_batch() as reader:
            yield from _in_blocks(reader, rows)


def _in_blocks(reader: Any, rows: int) -> Iterator[pa.RecordBatch]:
    """Regroup Arrow batches of any size into batches of `rows` rows; the last may be smaller."""
    waiting, found = [reader.schema.empty_table()], 0
    for batch in reader:
        waiting.append(pa.Table.from_batches([batch]))
        found += len(batch)
        while found >= rows:
            whole = pa.concat_tables(waiting)
            yield _batch(whole[:rows])
            waiting, found = [whole[rows:]], found - rows
    if found or len(waiting) == 1:
        yield _batch(pa.concat_tables(waiting))


def _batch(table: pa.Table) -> pa.RecordBatch:
    columns = [pa.concat_arrays(column.chunks) for column in table.columns if column.num_chunks]
    if len(columns) < table.num_columns:
        columns = [pa.array([], kind) for kind in table.schema.types]
    return pa.record_batch(columns, names=table.column_names)


def _sqlalchemy(address: str, query: str, rows: int) -> Iterator[pa.RecordBatch]:
    alchemy = _installed("sqlalchemy")
    engine = alchemy.create_engine(address, hide_parameters=True)
    file = engine.url.database
    in_file = address.startswith(SQLITE) and file not in (None, "", ":memory:")
    if in_file and not Path(file).is_file():  # connecting would create an empty file
        raise MissingDataError("this database does not exist", where="data.source", got=file)
    try:
        with engine.connect().execution_options(stream_results=True) as connection:
            answer = connection.execute(alchemy.text(query))
            names, found = list(answer.keys()), None
            while found is None or len(found) == rows:
                found = answer.fetchmany(rows)
                cells = [of_values([row[at] for row in found]) for at in range(len(names))]
                yield pa.record_batch(cells, names=names)
    finally:
        engine.dispose()


def _installed(name: str, package: str = "'vfl[sql]'") -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise MissingDataError(
            f"reading this database needs {name}",
            where="data.source",
            fix=f"pip install {package}",
        ) from None
