"""Tables read by columns, so that a large one is never in memory as a whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pandas as pd
import pyarrow as pa

BLOCK_ROWS = 8192  # of a table at a time, with all its columns, or where a cell becomes an object


class Table(Protocol):
    """What a data frame and a large file have in common; every reading of a column is a new one."""

    @property
    def columns(self) -> Iterable[str]:
        """The names, in order."""

    def __len__(self) -> int: ...

    def __getitem__(self, name: str, /) -> pd.Series: ...


class LargeTable(ABC):
    """A table whose cells are in a file."""

    columns: Sequence[str]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def blocks(self, name: str) -> Iterator[pa.Array]:
        """A column, some rows at a time."""

    @abstractmethod
    def type_of(self, name: str) -> pa.DataType:
        """The Arrow type of a column's blocks."""

    def __getitem__(self, name: str, /) -> pd.Series:
        wanted = self.type_of(name)
        if not (pa.types.is_floating(wanted) or pa.types.is_integer(wanted)):
            return self._joined(name)
        # Numbers are most of what there is: here they are never in memory twice.
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
        column: pd.Series = pa.chunked_array(
            list(self.blocks(name)), self.type_of(name)
        ).to_pandas()
        return column.rename(name)


@dataclass(frozen=True, eq=False, repr=False)
class Part:
    """Some columns and rows of a table, in an order of their own; cells are read when asked for.

    Attributes:
        table: where the cells are.
        columns: the names, in order.
        rows: int64 positions in the table, axes (rows of the part,).
    """

    table: Table
    columns: Sequence[str]
    rows: np.ndarray

    @classmethod
    def of(cls, table: Table, rows: np.ndarray, columns: Sequence[str] | None = None) -> Part:
        """A part of a table, or of a part.

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
        # Of the cells alone: a series would take its index along, as large again as a column.
        return pd.Series(self.table[name].array.take(self.rows), name=name, copy=False)


def column_blocks(table: Table, name: str) -> Iterator[pd.Series]:
    """A column, some rows at a time, in the order of the rows."""
    if isinstance(table, LargeTable):
        yield from (block.to_pandas().rename(name) for block in table.blocks(name))
    elif isinstance(table, Part):
        cells = table.table[name].array
        for start in range(0, len(table), BLOCK_ROWS):
            rows = table.rows[start : start + BLOCK_ROWS]
            yield pd.Series(cells.take(rows), name=name, copy=False)
    else:
        column = table[name]
        for start in range(0, len(column), BLOCK_ROWS):
            yield column.iloc[start : start + BLOCK_ROWS]
