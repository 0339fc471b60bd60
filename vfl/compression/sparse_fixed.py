"""The payload of a sparse cut: which places of each row are kept, and their values.

Layout: the scales (none for fp32; one for the batch in training; one a row at inference, so that
a prediction never depends on who shares its batch), then the rows back to back, each its set of
places and k codes in the order of the places, then zero bits up to a whole byte.
"""

from __future__ import annotations

from dataclasses import dataclass

from vfl.compression.bits import packed_bytes, require_bytes
from vfl.compression.index_set import IndexSet, Places
from vfl.compression.layout import SparseLayout, groups_of
from vfl.compression.values import ValueCode, Values
from vfl.frame import Payload


@dataclass(frozen=True)
class SparseFixed(SparseLayout):
    """Bytes of k places and values a row, all rows alike.

    Attributes:
        sets: spells which places are kept.
        code: spells their values.
    """

    sets: IndexSet
    code: ValueCode

    @property
    def row_bits(self) -> int:
        """Bits a row takes, scales not counted."""
        return self.sets.bits + self.sets.k * self.code.bits

    def payload_limit(self, rows: int, per_row: bool) -> int:
        """Bytes of every payload of so many rows."""
        scale_bytes = self.code.scale_bytes(groups_of(rows, per_row))
        return scale_bytes + packed_bytes(rows, self.row_bits)

    def pack(self, places: Places, values: Values, per_row: bool, step: int | None) -> bytes:
        scale, codes = self.code.encode(values, groups_of(len(places), per_row))
        return scale + self.sets.pack_rows(places, codes, self.code.bits)

    def unpack(
        self, payload: Payload, rows: int, per_row: bool, step: int | None
    ) -> tuple[Places, Values]:
        require_bytes(payload, self.payload_limit(rows, per_row), rows)
        groups = groups_of(rows, per_row)
        view = memoryview(payload)
        body = self.code.scale_bytes(groups)
        places, codes = self.sets.unpack_rows(view[body:], rows, self.code.bits)
        return places, self.code.decode(view[:body], codes, groups)
