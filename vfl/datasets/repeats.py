"""Keep one row of each id, in a table that repeats ids: the first row, the latest, or a mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pyarrow as pa

from vfl.core.errors import DataError
from vfl.datasets.alignment.join import whole_number
from vfl.datasets.table import (
    ID_UNIT,
    LargeTable,
    Table,
    as_days,
    as_numbers,
    check_column,
    column_blocks,
    id_columns,
    is_date,
    joined_ids,
    kind_of,
)

if TYPE_CHECKING:
    from vfl.datasets.table import TableFormat

_LATEST = "latest:"


@dataclass(frozen=True)
class Repeats:
    """Rule for several rows with the same id.

    Attributes:
        id_column: name of the id column, or names of several joined by plus signs.
        how: "first" keeps the first row of each id. "latest:COLUMN" keeps the row with the latest
            day or the largest number in that column; of rows with equal values there, the last row.
            "mean" averages the present numbers of each column over the rows of an id; in a column
            without numbers, this rule takes the first present cell.
    """

    id_column: str
    how: str

    def columns(self, known: Sequence[str]) -> list[str]:
        """Return the columns that the rule reads: the id columns, and COLUMN of "latest:COLUMN".

        Raises:
            MissingColumnError: the table lacks one of these columns.
        """
        ids = id_columns(self.id_column, known)
        for each in ids:
            check_column(known, each, "the id column", "data.id")
        if not self.how.startswith(_LATEST):
            return ids
        latest = self.how.removeprefix(_LATEST)
        check_column(known, latest, "the column of the latest row", "data.repeats")
        return [*ids, latest]


def one_row_each(table: Table, form: TableFormat) -> Table:
    """Reduce a table to one row per id, in the table's order; rows without an id all stay.

    >>> from vfl.datasets.table import TableFormat
    >>> frame = pd.DataFrame({"id": [7, 7, 8], "day": [2, 1, 5], "x": [1.0, 2.0, 3.0]})
    >>> one_row_each(frame, TableFormat(repeats=Repeats("id", "latest:day")))["x"].tolist()
    [1.0, 3.0]
    >>> one_row_each(frame, TableFormat(repeats=Repeats("id", "mean")))["x"].tolist()
    [1.5, 3.0]

    Raises:
        DataError: the column of "latest" holds neither dates nor numbers.
        MissingColumnError: see `Repeats.columns`.
    """
    repeats = form.repeats
    assert repeats is not None, "the caller knows it"
    names = repeats.columns(list(table.columns))
    latest = names.pop() if repeats.how.startswith(_LATEST) else None
    codes = _codes(table, names, form.id_type == "number")
    if not len(codes) or codes.max() + 1 == len(codes):
        return table
    if repeats.how == "mean":
        return _means(table, names, codes)
    order = np.arange(len(codes))
    if latest is None:
        picked = np.unique(codes, return_index=True)[1]
    else:
        order = np.lexsort((order, _moments(table, latest, form), codes))
        last = np.append(codes[order][1:] != codes[order][:-1], True)
        picked = order[last]
    kept = np.zeros(len(codes), bool)
    kept[picked] = True
    return table[kept] if isinstance(table, pd.DataFrame) else _Kept(table, kept)


def _codes(table: Table, names: Sequence[str], as_numbers: bool) -> np.ndarray:
    """Number different ids from 0 in the order of the rows; each missing id gets a new number."""
    blocks = zip(*(column_blocks(table, each) for each in names), strict=True)
    pieces = [pa.array(joined_ids(columns), pa.large_string()) for columns in blocks]
    coded = pa.concat_arrays(pieces or [pa.array([], pa.large_string())]).dictionary_encode()
    if as_numbers:
        alike = [
            ID_UNIT.join(map(_as_number, text.split(ID_UNIT)))
            for text in coded.dictionary.to_pylist()
        ]
        coded = pa.array(alike, pa.large_string()).take(coded.indices).dictionary_encode()
    codes = coded.indices.fill_null(-1).to_numpy(False).astype(np.int64)
    codes[codes < 0] = len(codes) + np.arange((codes < 0).sum())
    found: np.ndarray = pd.factorize(codes)[0]
    return found


def _as_number(text: str) -> str:
    """Write a whole number in one way, as `id_type = "number"` compares ids; keep other texts."""
    try:
        return str(whole_number(text))
    except ValueError:
        return text


def _moments(table: Table, name: str, form: TableFormat) -> np.ndarray:
    """Return a column's days or numbers, float64; a missing value sorts before all others."""
    written, parts = form.dates.get(name), []
    for block in column_blocks(table, name):
        if written is None and not is_date(block) and kind_of(block) == "text":
            raise DataError(
                "the latest row of each id needs a column of dates or numbers",
                where="data.repeats",
                got=f"column '{name}' of texts",
                fix=f'set dates = {{ {name} = "%Y-%m-%d" }} in [data], in the form of its texts',
            )
        dated = written is not None or is_date(block)
        parts.append(as_days(block, written) if dated else as_numbers(block))
    found: np.ndarray = np.nan_to_num(np.concatenate(parts), nan=-np.inf)
    return found


def _means(table: Table, ids: Sequence[str], codes: np.ndarray) -> pd.DataFrame:
    """Return a frame with one row per id: the mean of its numbers, or its first present cell."""
    count, found = int(codes.max()) + 1, dict[str, pd.Series]()
    for name in table.columns:
        cells = table[name]
        known = cells.notna().to_numpy()
        if name not in ids and not is_date(cells) and kind_of(cells) == "number":
            numbers = np.where(known, as_numbers(cells), 0.0)
            present = np.bincount(codes[known], minlength=count)
            with np.errstate(invalid="ignore"):
                found[name] = pd.Series(np.bincount(codes, numbers, count) / present)
        else:
            own, first = np.unique(codes[known], return_index=True)
            rows = np.full(count, -1)
            rows[own] = np.flatnonzero(known)[first]
            found[name] = pd.Series(cells.array.take(rows, allow_fill=True))
    return pd.DataFrame(found)


class _Kept(LargeTable):
    """A selection of the rows of a large table, in the table's order."""

    def __init__(self, table: Table, kept: np.ndarray) -> None:
        assert isinstance(table, LargeTable), "frames are cut at once"
        self._table, self._mask = table, kept
        self.columns = list(table.columns)

    def __len__(self) -> int:
        return int(self._mask.sum())

    def blocks(self, name: str) -> Iterator[pa.Array]:
        start = 0
        for block in self._table.blocks(name):
            yield block.filter(pa.array(self._mask[start : start + len(block)]))
            start += len(block)

    def type_of(self, name: str) -> pa.DataType:
        return self._table.type_of(name)

    def row_blocks(self, names: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
        start = 0
        for block in self._table.row_blocks(names, rows):
            kept = self._mask[start : start + len(block)]
            start += len(block)
            yield block[kept].reset_index(drop=True)
