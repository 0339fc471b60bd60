"""Names of data sources: files, databases, objects in an object store, data sets and functions.

The packages `vfl.config` and `vfl.datasets` must agree on the kind of a name, and neither imports
the other.
"""

from __future__ import annotations

import re
from pathlib import Path

#: Prefixes of data sources that are databases in a file; `vfl.datasets.sql` reads such databases.
DUCKDB, SQLITE, ADBC = "duckdb:", "sqlite:///", "adbc+"


def is_database(source: object) -> bool:
    """Return whether a data source is a database, an object in an object store, or a function.

    For a file, a folder or the name of a data set, the function returns False.

    >>> is_database("duckdb:loans.db"), is_database("sqlite:///loans.db"), is_database("loans.csv")
    (True, True, False)
    """
    has_scheme = isinstance(source, str) and (source.startswith(DUCKDB) or "://" in source)
    return has_scheme or is_loader(source)


_LOADER = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_loader(source: object) -> bool:
    """Return whether a data source is the path of a function, "package.module:function".

    >>> is_loader("bank.rows:read"), is_loader("duckdb:loans"), is_loader("digits:rows=9")
    (True, False, False)
    """
    if not isinstance(source, str) or source.startswith(DUCKDB):
        return False
    return _LOADER.fullmatch(source) is not None


#: URL schemes of object stores in fsspec; "memory" is a store inside the process, "file" is a
#: folder of this machine.
_STORES = ("s3", "gs", "az", "abfs", "file", "memory")


def is_object(source: object) -> bool:
    """Return whether a data source is a file in an object store.

    >>> is_object("s3://loans/2026.parquet"), is_object("postgresql://host/loans")
    (True, False)
    """
    return isinstance(source, str) and source.partition("://")[0] in _STORES


def may_be_csv(source: str | Path) -> bool:
    """Return whether a data source may be CSV: a file or folder whose name is not that of Parquet.

    >>> may_be_csv("loans.csv.gz"), may_be_csv("loans.parquet"), may_be_csv("duckdb:loans.db")
    (True, False, False)
    """
    return not is_database(source) and Path(source).suffix != ".parquet"


def is_named_set(source: str) -> bool:
    """Return whether a data source is the name of a data set, not a file, folder or database.

    >>> is_named_set("digits"), is_named_set("waves:noise=0.5"), is_named_set("duckdb:loans.db")
    (True, True, False)
    """
    name, _, options = source.partition(":")
    return not (is_database(source) or Path(name).suffix) and (not options or "=" in options)


def database_beside(source: str, folder: Path) -> str:
    """Make the relative path in a database's source start at a folder.

    Other sources are returned unchanged.

    >>> database_beside("duckdb:loans.db", Path("/data"))
    'duckdb:/data/loans.db'
    """
    for scheme in (DUCKDB, SQLITE, ADBC + SQLITE):
        file = source.removeprefix(scheme)
        if file != source and file not in ("", ":memory:") and "$" not in file:
            return f"{scheme}{folder / file}"
    return source
