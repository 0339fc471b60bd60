"""Tables that a database answers with, some rows at a time.

A source is ``duckdb:FILE`` (``duckdb:`` alone for a query that reads files), or the URL that
SQLAlchemy knows a database by; both are the extra ``vfl[sql]``. A password stands in the
environment, not in a file: ``postgresql://me:${PASSWORD}@host/loans``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd

from vfl.core.errors import DataError, MissingDataError
from vfl.core.storage import DUCKDB, SQLITE


def query_blocks(source: str, query: str | None, rows: int) -> Iterator[pd.DataFrame]:
    """What a database answers, so many rows at a time; a frame without rows if it has none.

    Raises:
        DataError: no query, or the database does not answer; its own words may quote cells.
        MissingDataError: what reads it is not installed.
    """
    if not query:
        raise DataError(
            "a database needs a query",
            where="data.query",
            fix='query = "SELECT ... FROM ..." below source',
        )
    address = os.path.expandvars(source)
    blocks = _duckdb if source.startswith(DUCKDB) else _sqlalchemy
    found = blocks(address.removeprefix(DUCKDB), query, rows)
    while True:
        try:
            block = next(found)
        except StopIteration:
            return
        except DataError:
            raise
        except Exception as error:
            raise DataError(  # neither the address, which may hold a password, nor its words
                "the database does not answer the query",
                where="data.query",
                got=type(error).__name__,
                fix="try the query in the database's own client, with the same address and user",
            ) from None
        yield block


def _duckdb(file: str, query: str, rows: int) -> Iterator[pd.DataFrame]:
    duckdb = _installed("duckdb")
    closed = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
    if file and not Path(file).is_file():
        raise MissingDataError("there is no such database", where="data.source", got=file)
    with duckdb.connect(file or ":memory:", read_only=bool(file), config=closed) as connection:
        reader = connection.sql(query).to_arrow_reader(rows)
        waiting, found = [], 0  # the reader's batches are of any size: blocks are of `rows`
        for batch in reader:
            waiting.append(batch.to_pandas())
            found += len(batch)
            if found >= rows:
                whole = pd.concat(waiting, ignore_index=True)
                yield whole[:rows]
                waiting, found = [whole[rows:].reset_index(drop=True)], found - rows
        if not waiting:
            waiting = [reader.schema.empty_table().to_pandas()]
        yield pd.concat(waiting, ignore_index=True)


def _sqlalchemy(address: str, query: str, rows: int) -> Iterator[pd.DataFrame]:
    alchemy = _installed("sqlalchemy")
    engine = alchemy.create_engine(address, hide_parameters=True)
    file = engine.url.database
    in_file = address.startswith(SQLITE) and file not in (None, "", ":memory:")
    if in_file and not Path(file).is_file():  # it would make an empty one
        raise MissingDataError("there is no such database", where="data.source", got=file)
    try:
        with engine.connect().execution_options(stream_results=True) as connection:
            answer = connection.execute(alchemy.text(query))
            names, found = list(answer.keys()), None
            while found is None or len(found) == rows:
                found = answer.fetchmany(rows)
                frame = pd.DataFrame(found, columns=names)
                yield frame.apply(_plain) if len(frame) else frame
    finally:
        engine.dispose()


def _plain(column: pd.Series) -> pd.Series:
    """Exact decimals as numbers, and nothing where nothing is."""
    if column.dtype == object and pd.api.types.infer_dtype(column, skipna=True) == "decimal":
        return column.astype(float)
    return column


def _installed(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise MissingDataError(
            f"reading this database needs {name}",
            where="data.source",
            fix="pip install 'vfl[sql]'",
        ) from None
