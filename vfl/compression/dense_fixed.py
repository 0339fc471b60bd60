"""The payload of a whole cut with as many bits for every value, or with a bitmap of the zeros.

Layout: the scales, then the codes of all rows back to back, then zero bits up to a whole byte. With
a bitmap: the scales, one bit for each value that says whether its code is not 0, then those codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vfl.compression.bits import from_bits, pack, packed_bytes, require_bytes, to_bits, unpack
from vfl.compression.layout import DenseLayout, groups_of
from vfl.compression.values import ValueCode, Values
from vfl.errors import CorruptFrameError, TruncatedFrameError
from vfl.frame import Payload


@dataclass(frozen=True)
class DenseFixed(DenseLayout):
    """Exactly `code.bits` bits a value.

    Attributes:
        width: of the cut.
        code: spells the values.
    """

    width: int
    code: ValueCode

    def payload_limit(self, rows: int, per_row: bool) -> int:
        """Bytes of every payload of so many rows."""
        scale_bytes = self.code.scale_bytes(groups_of(rows, per_row))
        return scale_bytes + packed_bytes(rows, self.width * self.code.bits)

    def pack(self, values: Values, per_row: bool, step: int | None) -> bytes:
        scale, codes = self.code.encode(values, groups_of(len(values), per_row))
        return scale + pack(to_bits(codes, self.code.bits))

    def unpack(self, payload: Payload, rows: int, per_row: bool, step: int | None) -> Values:
        require_bytes(payload, self.payload_limit(rows, per_row), rows)
        groups = groups_of(rows, per_row)
        view = memoryview(payload)
        body = self.code.scale_bytes(groups)
        bits = unpack(view[body:], rows, self.width * self.code.bits)
        return self.code.decode(view[:body], from_bits(bits, self.code.bits, self.width), groups)


@dataclass(frozen=True)
class DenseBitmap(DenseLayout):
    """One bit a value, and `code.bits` more for each whose code is not 0.

    Attributes:
        width: of the cut.
        code: spells the values; 0 must be its code for zero.
    """

    width: int
    code: ValueCode

    def payload_limit(self, rows: int, per_row: bool) -> int:
        map_bytes = packed_bytes(rows, self.width)
        code_bytes = packed_bytes(rows, self.width * self.code.bits)
        return self.code.scale_bytes(groups_of(rows, per_row)) + map_bytes + code_bytes

    def pack(self, values: Values, per_row: bool, step: int | None) -> bytes:
        scale, codes = self.code.encode(values, groups_of(len(values), per_row))
        used = codes > 0
        spelt = to_bits(codes[used][:, None], self.code.bits)
        return scale + pack(used.astype(np.uint8)) + pack(spelt)

    def unpack(self, payload: Payload, rows: int, per_row: bool, step: int | None) -> Values:
        groups = groups_of(rows, per_row)
        head = self.code.scale_bytes(groups)
        body = head + packed_bytes(rows, self.width)
        view = memoryview(payload)
        if len(view) < body:
            raise TruncatedFrameError(
                "a payload ends inside its bitmap", got=f"{len(view)} bytes", want=f"{body} or more"
            )
        used = unpack(view[head:body], rows, self.width).astype(np.bool_)
        count = int(np.count_nonzero(used))
        spelt = from_bits(unpack(view[body:], count, self.code.bits), self.code.bits, 1)[:, 0]
        if (spelt == 0).any():
            raise CorruptFrameError("a payload marks a zero as a value")
        codes = np.zeros((rows, self.width), np.int64)
        codes[used] = spelt
        return self.code.decode(view[:head], codes, groups)
