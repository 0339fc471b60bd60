"""A table of many rows by columns, in a temporary file instead of in memory.

A CSV stands by rows, so that its columns cannot be read one after another. It is read once, some
rows at a time, and written here in pieces of one column each. The file has no name: it is gone with
the process, however that ends.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator
from typing import Literal, NamedTuple

import pandas as pd
import pyarrow as pa

from vfl.datasets.columns import LargeTable
from vfl.errors import DataError

Kind = Literal["number", "boolean", "text"]


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
