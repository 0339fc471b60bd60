"""The payload of a sparse cut by adaptive range coding: often used places and values get short.

A row is its k places, each coded knowing which one came before, then its k codes. Layout: the byte
that says which history the counts have, the scales, the coded rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from vfl.compression.adaptive import AdaptiveCounts, Coded
from vfl.compression.coder import Reader, Shares, encode, next_symbol, symbols_limit_bytes
from vfl.compression.compiled import compiled, native
from vfl.compression.index_set import Places
from vfl.compression.layout import SparseLayout, groups_of
from vfl.compression.values import ValueCode, Values
from vfl.errors import CorruptFrameError, WidthError
from vfl.frame import Payload

#: Counts an adaptive packer may hold; 32 MB with their running sums.
TABLE_LIMIT = 2**21
_PLACE_WEIGHT, _CODE_WEIGHT, _FIRST_CODE_COUNT = 24, 24, 4


class SparseRange(SparseLayout):
    """k places and values a row, range coded.

    Args:
        width, k: of the cut and of a row.
        code: spells the values, in at most 8 bits.

    Raises:
        WidthError: the table of counts would be too large.
    """

    def __init__(self, width: int, k: int, code: ValueCode) -> None:
        if k * width * width > TABLE_LIMIT:
            raise WidthError(
                f"adaptive counts for {k} of {width} places need too large a table",
                got=f"{k * width * width} numbers",
                want=f"at most {TABLE_LIMIT}",
                fix="packer=enumerative",
            )
        self.width, self.k, self.code = width, k, code
        self._places = AdaptiveCounts(first_place_counts(width, k), _PLACE_WEIGHT)
        start = np.full((1, 2**code.bits), _FIRST_CODE_COUNT)
        self._codes = AdaptiveCounts(start, _CODE_WEIGHT)

    def payload_limit(self, rows: int, per_row: bool) -> int:
        scale_bytes = self.code.scale_bytes(groups_of(rows, per_row))
        return 1 + scale_bytes + symbols_limit_bytes(rows * 2 * self.k)

    def pack(self, places: Places, values: Values, per_row: bool, step: int | None) -> bytes:
        scale, codes = self.code.encode(values, groups_of(len(places), per_row))
        coded = self._coded(places, codes)
        if step is not None:
            self._saw(step, coded)
        sides = [
            [share.reshape(-1, self.k) for share in counts.shares(each)]
            for counts, each in zip((self._places, self._codes), coded, strict=True)
        ]
        rows = [np.concatenate(both, axis=1).reshape(-1) for both in zip(*sides, strict=True)]
        return self._places.tag + scale + encode(Shares(*rows))

    def unpack(
        self, payload: Payload, rows: int, per_row: bool, step: int | None
    ) -> tuple[Places, Values]:
        groups = groups_of(rows, per_row)
        scale, body = self._places.split(payload, self.code.scale_bytes(groups))
        found = self._decode(body, rows)
        places, codes = found[:, : self.k], found[:, self.k :]
        values = self.code.decode(scale, codes, groups)
        if step is not None:
            self._saw(step, self._coded(places, codes))
        return places, values

    def commit(self, step: int) -> None:
        self._places.commit(step)
        self._codes.commit(step)

    def state_dict(self) -> dict[str, Tensor]:
        sides = {"places": self._places, "codes": self._codes}
        return {
            f"{side}-{name}": value
            for side, counts in sides.items()
            for name, value in counts.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for side, counts in {"places-": self._places, "codes-": self._codes}.items():
            own = {key.removeprefix(side): each for key, each in state.items() if side in key}
            counts.load_state_dict(own)

    def _saw(self, step: int, coded: tuple[Coded, Coded]) -> None:
        self._places.saw(step, coded[0])
        self._codes.saw(step, coded[1])

    def _coded(self, places: Places, codes: np.ndarray) -> tuple[Coded, Coded]:
        before = np.zeros_like(places)
        before[:, 1:] = places[:, :-1] + 1
        contexts = np.arange(self.k) * self.width + before
        flat = codes.astype(np.int64).reshape(-1)
        return Coded(contexts.reshape(-1), places.reshape(-1)), Coded(np.zeros_like(flat), flat)

    def _decode(self, coded: memoryview, rows: int) -> np.ndarray:
        """Places and codes, axes (rows, 2 k)."""
        reader = Reader(coded)
        found = np.zeros(rows * 2 * self.k, np.int64)
        places, codes = (
            native(each.cumulative.reshape(-1)) for each in (self._places, self._codes)
        )
        if not _decode_rows(
            reader.raw, reader.state, places, codes, rows, self.width, self.k, native(found)
        ):
            raise CorruptFrameError("a range-coded payload names no symbol")
        reader.finish()
        return found.reshape(rows, 2 * self.k)


@lru_cache(maxsize=16)
def first_place_counts(width: int, k: int) -> np.ndarray:
    """Counts as if every set of k places were equally likely; axes (k x width, width).

    Context j x width + p + 1 is that of the place j whose predecessor is p (-1 for none): place x
    leaves C(width - 1 - x, r - 1) of the C(width - 1 - p, r) ways to go on, where r = k - j.
    """
    counts = np.zeros((k, width, width), np.int64)
    for j in range(k):
        left = k - j
        ways = np.array([math.comb(width - 1 - x, left - 1) for x in range(width)], object)
        for before in range(j - 1, width - left) if j else (-1,):
            possible = slice(before + 1, width - left + 1)
            all_ways = math.comb(width - 1 - before, left)
            counts[j, before + 1, possible] = 1 + 64 * ways[possible] // all_ways
    return counts.reshape(k * width, width)


@compiled
def _decode_rows(
    raw: Any,
    state: Any,
    places: Any,
    codes: Any,
    rows: int,
    width: int,
    k: int,
    out: Any,
) -> bool:
    code_count = len(codes) - 1
    for row in range(rows):
        base, before = row * 2 * k, -1
        for j in range(k):
            first = (j * width + before + 1) * (width + 1)
            before = next_symbol(raw, state, places, first, width)
            if before < 0:
                return False
            out[base + j] = before
        for j in range(k):
            found = next_symbol(raw, state, codes, 0, code_count)
            if found < 0:
                return False
            out[base + k + j] = found
    return True
