"""The payload of a whole cut by adaptive range coding, with the counts of each unit by itself.

A unit that is mostly zero costs a fraction of a bit. Layout: the byte that says which history the
counts have, the scales, the coded values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from vfl.compression.adaptive import AdaptiveCounts, Coded
from vfl.compression.coder import Reader, encode, next_symbol, symbols_limit_bytes
from vfl.compression.compiled import compiled, native
from vfl.compression.layout import DenseLayout, groups_of
from vfl.compression.values import ValueCode, Values
from vfl.errors import CorruptFrameError
from vfl.frame import Payload

_WEIGHT, _FIRST_COUNT = 24, 4


class DenseRange(DenseLayout):
    """Every value, range coded.

    Args:
        width: of the cut.
        code: spells the values, in at most 8 bits.
    """

    def __init__(self, width: int, code: ValueCode) -> None:
        self.width = width
        self.code = code
        start = np.full((width, 2**code.bits), _FIRST_COUNT)
        self._counts = AdaptiveCounts(start, _WEIGHT)

    def payload_limit(self, rows: int, per_row: bool) -> int:
        scale_bytes = self.code.scale_bytes(groups_of(rows, per_row))
        return 1 + scale_bytes + symbols_limit_bytes(rows * self.width)

    def pack(self, values: Values, per_row: bool, step: int | None) -> bytes:
        scale, codes = self.code.encode(values, groups_of(len(values), per_row))
        coded = self._coded(codes)
        if step is not None:
            self._counts.saw(step, coded)
        return self._counts.tag + scale + encode(self._counts.shares(coded))

    def unpack(self, payload: Payload, rows: int, per_row: bool, step: int | None) -> Values:
        groups = groups_of(rows, per_row)
        scale, body = self._counts.split(payload, self.code.scale_bytes(groups))
        reader = Reader(body)
        found = np.zeros(rows * self.width, np.int64)
        table = native(self._counts.cumulative.reshape(-1))
        count = 2**self.code.bits
        if not _decode_rows(reader.raw, reader.state, table, count, self.width, native(found)):
            raise CorruptFrameError("a range-coded payload names no symbol")
        reader.finish()
        codes = found.reshape(rows, self.width)
        if step is not None:
            self._counts.saw(step, self._coded(codes))
        return self.code.decode(scale, codes, groups)

    def commit(self, step: int) -> None:
        self._counts.commit(step)

    def state_dict(self) -> dict[str, Tensor]:
        return self._counts.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._counts.load_state_dict(state)

    def _coded(self, codes: np.ndarray) -> Coded:
        units = np.broadcast_to(np.arange(self.width), codes.shape)
        return Coded(units.reshape(-1), codes.astype(np.int64).reshape(-1))


@compiled
def _decode_rows(raw: Any, state: Any, table: Any, count: int, width: int, out: Any) -> bool:
    for i in range(len(out)):
        found = next_symbol(raw, state, table, (i % width) * (count + 1), count)
        if found < 0:
            return False
        out[i] = found
    return True
