"""The payload of a mostly zero cut with as few bits as a code without memory can have.

Layout: the scales, then as bits without gaps how many values of each row are not zero, which ones
(one number among all sets of that size, rows with fewer of them first), their codes row by row, and
zero bits up to a whole byte. How long a payload is tells how many values are not zero.
"""

from __future__ import annotations

import numpy as np

from vfl.compression.bits import Bits, from_bits, pack, packed_bytes, to_bits, unpack
from vfl.compression.layout import DenseLayout, groups_of
from vfl.compression.supports import Counts, supports
from vfl.compression.values import ValueCode, Values
from vfl.errors import CorruptFrameError, TruncatedFrameError
from vfl.frame import Payload


class DenseEnumerative(DenseLayout):
    """ceil(log2(width + 1)) bits a row, ceil(log2 C(width, n)) for its n values, and their codes.

    Args:
        width: of the cut.
        code: spells the values; 0 must be its code for zero.
    """

    def __init__(self, width: int, code: ValueCode) -> None:
        self.width = width
        self.code = code
        self._count_bits = width.bit_length()
        self._supports = supports(width)

    def payload_limit(self, rows: int, per_row: bool) -> int:
        row_bits = self._supports.bits + np.arange(self.width + 1) * self.code.bits
        most = self._count_bits + int(row_bits.max())
        return self.code.scale_bytes(groups_of(rows, per_row)) + packed_bytes(rows, most)

    def pack(self, values: Values, per_row: bool, step: int | None) -> bytes:
        scale, codes = self.code.encode(values, groups_of(len(values), per_row))
        used = codes > 0
        spelt = (
            to_bits(used.sum(axis=1)[:, None], self._count_bits),
            self._supports.to_bits(used),
            to_bits(codes[used][:, None], self.code.bits),
        )
        return scale + pack(np.concatenate([bits.reshape(-1) for bits in spelt]))

    def unpack(self, payload: Payload, rows: int, per_row: bool, step: int | None) -> Values:
        groups = groups_of(rows, per_row)
        head = self.code.scale_bytes(groups)
        view = memoryview(payload)
        counts = self._counts(view[head:], rows)
        sizes = rows * self._count_bits, int(self._supports.bits[counts].sum())
        total = sum(sizes) + int(counts.sum()) * self.code.bits
        bits = unpack(view[head:], 1, total)[0]
        _, sets, spelt = np.split(bits, np.cumsum(sizes))
        used = self._supports.from_bits(sets, counts)
        codes = np.zeros((rows, self.width), np.int64)
        codes[used] = self._codes(spelt)
        return self.code.decode(view[:head], codes, groups)

    def _counts(self, body: memoryview, rows: int) -> Counts:
        """How many values of each row are not zero."""
        bits = rows * self._count_bits
        size = packed_bytes(1, bits)
        if len(body) < size:
            raise TruncatedFrameError(
                "a payload ends inside its counts", got=f"{len(body)} bytes", want=f"{size} or more"
            )
        spelt = np.unpackbits(np.frombuffer(body[:size], np.uint8))[:bits]
        counts: Counts = from_bits(spelt.reshape(rows, self._count_bits), self._count_bits, 1)[:, 0]
        if (counts > self.width).any():
            raise CorruptFrameError("a payload says that a row has more values than it is wide")
        return counts

    def _codes(self, spelt: Bits) -> np.ndarray:
        fields = spelt.reshape(len(spelt) // self.code.bits, self.code.bits)
        codes = from_bits(fields, self.code.bits, 1)[:, 0]
        if (codes == 0).any():
            raise CorruptFrameError("a payload marks a zero as a value")
        return codes
