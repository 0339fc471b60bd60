"""A table's row ids: read, checked and sorted, and kept in little memory.

A text id of 8 characters takes 65 bytes as a Python object and 16 in Arrow.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pandas.api.extensions import ExtensionArray

from vfl.datasets.columns import Table, column_blocks
from vfl.datasets.table import IdType, check_column
from vfl.datasets.values import spaced, texts
from vfl.errors import MisalignedError

Ids = np.ndarray | ExtensionArray  # int64, or text as a pandas array


def sorted_ids(frame: Table, id_column: str, where: str, id_type: IdType) -> tuple[np.ndarray, Ids]:
    """The order that sorts a table's rows by id, and the ids in it; both of axes (rows,).

    Raises:
        MissingColumnError: the table lacks the id column.
        MisalignedError: missing ids, repeated ids, or no whole numbers where those are wanted.
    """
    check_column(frame.columns, id_column, f"the id column of {where}", "data.id")
    missing = sum(int(block.isna().sum()) for block in column_blocks(frame, id_column))
    if missing:
        raise _bad_ids(where, id_column, f"{spaced(missing)} rows without an id")
    blocks = (texts(block) for block in column_blocks(frame, id_column))
    if id_type == "number":
        blocks = (_as_numbers(block, where, id_column) for block in blocks)
    order, ids = _sorted(blocks, pa.int64() if id_type == "number" else pa.large_string())
    repeated = pc.sum(pc.equal(ids[1:], ids[:-1])).as_py()
    if repeated:
        raise _bad_ids(where, id_column, f"{spaced(repeated)} rows repeat the id of another")
    if id_type == "number":
        return order, ids.to_numpy()
    return order, pd.arrays.ArrowStringArray(pa.chunked_array([ids]))


def _sorted(blocks: Iterable[np.ndarray], kind: pa.DataType) -> tuple[np.ndarray, pa.Array]:
    """By bytes of UTF-8, which is the order of Python's own texts."""
    pool = pa.system_memory_pool()  # Arrow's own keeps what is freed from numpy
    pieces = [pa.array(block, kind, memory_pool=pool) for block in blocks]
    ids = pa.concat_arrays(pieces or [pa.array([], kind)], memory_pool=pool)
    del pieces
    order = pc.sort_indices(ids, memory_pool=pool)
    return order.to_numpy().view(np.int64), pc.take(ids, order, memory_pool=pool)


def _as_numbers(cells: np.ndarray, where: str, id_column: str) -> np.ndarray:
    try:
        return np.array([int(text) for text in cells], dtype=np.int64)
    except (ValueError, OverflowError):  # int() would quote the id
        raise MisalignedError(
            f"the ids of {where} are not all whole numbers of 64 bits",
            where=f"column '{id_column}'",
            fix='set id_type = "text" at every party',
        ) from None


def _bad_ids(where: str, id_column: str, got: str) -> MisalignedError:
    return MisalignedError(
        f"the rows of {where} cannot be told apart by their ids",
        where=f"column '{id_column}'",
        got=f"{got}",
        want="one id a row, none of them twice",
    )
