"""Join of several parties' tables: brings their rows into the order of their ids.

In one process, `align` joins all tables. In a federation, each party sorts its own table with
`sort_by_id`, and the parties compare digests (`PartyData.row_digest`). No id leaves its owner.
`sort_by_id` keeps text ids in Arrow, where an id of 8 characters takes 16 bytes; as a Python
object it takes 65.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import combinations

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pandas.api.extensions import ExtensionArray

from vfl.core.errors import MisalignedError
from vfl.datasets.cells import without_zero_fraction
from vfl.datasets.table import (
    IdType,
    Part,
    Table,
    as_texts,
    check_column,
    column_blocks,
    id_texts,
    kind_of,
    spaced,
)

#: A text without blanks at its ends and without letters that have several spellings.
_PLAIN = r"^[!-~]([ -~]*[!-~])?$|^$"
_POOL = pa.system_memory_pool()  # this memory pool shares freed memory with numpy
Ids = np.ndarray | ExtensionArray  # int64, or text as a pandas array
# Share of common ids in the smaller table; below this share, the ids count as unrelated.
MIN_OVERLAP = 0.05


@dataclass(frozen=True, eq=False)
class Aligned:
    """Tables of several parties with their rows in one order.

    Attributes:
        frames: tables by party, each with equally many rows; a party in `held` has only the rows
            that its mask marks.
        ids: ids in ascending order, text (dtype object) or int64, axes (rows,).
        held: mask of the rows that each party has, bool, axes (rows,); empty if every party has all
            rows.
        others: rows of each party whose ids are not among `ids`.
    """

    frames: dict[str, Part]
    ids: np.ndarray
    held: dict[str, np.ndarray]
    others: dict[str, Part]

    def __repr__(self) -> str:
        return f"Aligned(parties={list(self.frames)}, rows={len(self.ids)})"


def align(
    frames: Mapping[str, Table],
    id_column: str | Mapping[str, str],
    id_type: IdType = "text",
    whole: str | None = None,
) -> Aligned:
    """Select the rows whose ids all parties have, sorted by id.

    Args:
        frames: tables by party.
        id_column: name of the id column; names by party if the tables use different names.
        id_type: type in which the ids are compared; see `TableFormat`.
        whole: name of a party: each of its rows stays if at least one other party has the row; None
            selects only rows that all parties have.

    Raises:
        MissingColumnError: a table lacks the id column.
        MisalignedError: ids are missing or repeated, or the parties have very few common ids.
        DataError: see `id_texts`.
    """
    named = dict.fromkeys(frames, id_column) if isinstance(id_column, str) else id_column
    found = {
        party: sorted_ids(frame, named[party], f"party '{party}'", id_type)
        for party, frame in frames.items()
    }
    ids = {party: np.asarray(own) for party, (_, own) in found.items()}
    groups = [ids]
    if whole is not None:
        groups = [{whole: ids[whole], party: ids[party]} for party in ids if party != whole]
    shared = []
    for group in groups:
        common = reduce(lambda left, right: np.intersect1d(left, right, True), group.values())
        if not len(common) or len(common) < MIN_OVERLAP * min(map(len, group.values())):
            columns = {party: frames[party][named[party]] for party in group}
            raise _mismatch(group, columns, id_type, len(common))
        shared.append(common)
    rows = reduce(np.union1d, shared)
    aligned, held, others = dict[str, Part](), dict[str, np.ndarray](), dict[str, Part]()
    for party, (order, _) in found.items():
        at = np.searchsorted(ids[party], rows)
        held[party] = ids[party].take(at, mode="clip") == rows
        used = at[held[party]]
        aligned[party] = Part.of(frames[party], order[used])
        others[party] = Part.of(frames[party], np.delete(order, used))
    return Aligned(aligned, rows, {} if whole is None else held, others)


def sort_by_id(
    frame: Table, id_column: str, where: str, id_type: IdType = "text"
) -> tuple[Part, Ids]:
    """Sort one party's table in ascending order of its ids; return the rows and the ids.

    Args:
        frame: the party's table.
        id_column: name of the id column.
        where: owner of the table, for the error text ("party 'bank'").
        id_type: type in which the ids are compared; the same at every party.

    Raises:
        MissingColumnError, MisalignedError: see `sorted_ids`.
    """
    order, ids = sorted_ids(frame, id_column, where, id_type)
    return Part.of(frame, order), ids


def sorted_ids(frame: Table, id_column: str, where: str, id_type: IdType) -> tuple[np.ndarray, Ids]:
    """Return the order that sorts a table's rows by id, and the sorted ids; both of axes (rows,).

    Raises:
        MissingColumnError: the table lacks the id column.
        MisalignedError: ids are missing or repeated, or are not whole numbers although `id_type`
            requires it.
        DataError: see `id_texts`.
    """
    check_column(frame.columns, id_column, f"the id column of {where}", "data.id")
    missing = sum(int(block.isna().sum()) for block in column_blocks(frame, id_column))
    if missing:
        raise bad_ids(where, id_column, f"{spaced(missing)} rows without an id")
    blocks = column_blocks(frame, id_column)
    pieces = [typed_ids(block, where, id_column, id_type) for block in blocks]
    order, ids = _sorted(pieces, pa.int64() if id_type == "number" else pa.large_string())
    repeated = pc.sum(pc.equal(ids[1:], ids[:-1])).as_py()
    if repeated:
        raise bad_ids(where, id_column, f"{spaced(repeated)} rows repeat another row's id")
    if id_type == "number":
        return order, ids.to_numpy()
    return order, pd.arrays.ArrowStringArray(pa.chunked_array([ids]))


def _sorted(pieces: list[pa.Array], kind: pa.DataType) -> tuple[np.ndarray, pa.Array]:
    """Sort ids by their bytes in UTF-8, which is also the order of Python's texts."""
    ids = pa.concat_arrays(pieces or [pa.array([], kind)], memory_pool=_POOL)
    pieces.clear()
    order = pc.sort_indices(ids, memory_pool=_POOL)
    return order.to_numpy().view(np.int64), pc.take(ids, order, memory_pool=_POOL)


def typed_ids(block: pd.Series, where: str, id_column: str, id_type: IdType) -> pa.Array:
    """Return ids, none missing, as int64 or large_string; integers and plain texts are not parsed.

    Raises:
        MisalignedError: `id_type` is "number", and some ids are not whole numbers.
        DataError: see `id_texts`.
    """
    numbers = id_type == "number"
    if pd.api.types.is_signed_integer_dtype(block.dtype):
        whole = pa.array(block.to_numpy(dtype=np.int64), memory_pool=_POOL)
        return whole if numbers else pc.cast(whole, pa.large_string(), memory_pool=_POOL)
    if not numbers and isinstance(block.dtype, pd.StringDtype):
        cells = pa.array(block, pa.large_string(), memory_pool=_POOL)
        cells = cells.combine_chunks() if isinstance(cells, pa.ChunkedArray) else cells
        if pc.all(pc.match_substring_regex(cells, _PLAIN)).as_py():
            return cells
    texts = id_texts(block)
    if numbers:
        return pa.array(_whole_numbers(texts, where, id_column), memory_pool=_POOL)
    return pa.array(texts, pa.large_string(), memory_pool=_POOL)


def whole_number(text: str) -> int:
    """Read an id as a whole number, which may have leading zeros and a zero fraction.

    >>> whole_number("007"), whole_number("7.0")
    (7, 7)

    Raises:
        ValueError: the text is no whole number.
    """
    return int(text if text.isdigit() else without_zero_fraction(text))


def _whole_numbers(texts: np.ndarray, where: str, id_column: str) -> np.ndarray:
    try:
        return np.array([*map(whole_number, texts)], dtype=np.int64)
    except (ValueError, OverflowError):  # the error of int() would quote the id
        raise MisalignedError(
            f"the ids of {where} are not all whole numbers of 64 bits",
            where=f"column '{id_column}'",
            fix='set id_type = "text" at every party',
        ) from None


def bad_ids(where: str, id_column: str, got: str) -> MisalignedError:
    """Make the error for ids that are missing or repeated."""
    return MisalignedError(
        f"the ids of {where} do not identify its rows uniquely",
        where=f"column '{id_column}'",
        got=got,
        want="one id in each row, and no id twice",
        fix='repeats = "first", "latest:COLUMN" or "mean" in [data] makes one row of each id',
    )


def _mismatch(
    ids: Mapping[str, np.ndarray], columns: Mapping[str, pd.Series], id_type: IdType, common: int
) -> MisalignedError:
    """Make an error about the two parties with the smallest share of common ids, without an id."""
    matches = {
        (left, right): len(np.intersect1d(ids[left], ids[right], True))
        for left, right in combinations(ids, 2)
    } or {(party, party): len(own) for party, own in ids.items()}
    left, right = min(
        matches, key=lambda pair: matches[pair] / max(1, min(len(ids[party]) for party in pair))
    )
    formats = [id_format(columns[party]) for party in (left, right)]
    found = matches[left, right]
    return MisalignedError(
        f"{'only ' if found else ''}{spaced(found) if found else 'none'} of "
        f"{spaced(len(ids[left]))} ids of '{left}' match '{right}'",
        where=f"{len(ids)} parties together have {spaced(common)} ids in common",
        got=f"'{left}': {formats[0]}, '{right}': {formats[1]}",
        want="the same ids, written the same way, at every party",
        fix=_cure(formats, id_type),
    )


def _cure(formats: list[str], id_type: IdType) -> str:
    differ = len(set(formats)) > 1 and not any("characters" in form for form in formats)
    if differ and id_type == "text":  # ids that differ as numbers differ as texts too
        return 'id_type = "number" reads 007, 7 and 7.0 as the same; set it at every party'
    return "check that 'id' is the column by which both parties identify these rows"


def id_format(column: pd.Series) -> str:
    """Describe the format of ids without showing an id.

    >>> id_format(pd.Series(["A0000017", "B0000018"]))
    'text of 8 characters'
    """
    if not len(column):
        return "no rows"
    if kind_of(column) == "number":
        return "whole numbers"
    ids = as_texts(column)
    sizes = sorted({len(text) for text in ids})
    size = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]}"
    if not all(text.isdigit() for text in ids):
        if all(without_zero_fraction(text).isdigit() for text in ids):
            return "whole numbers with a decimal point"
        return f"text of {size} characters"
    padded = any(len(text) > 1 and text[0] == "0" for text in ids)
    return f"text of {size} digits, with leading zeros" if padded else "whole numbers"
