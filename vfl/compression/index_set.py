"""Which k of the d places of a row are kept, as bits.

`Enumerative` numbers all C(d, k) sets (the combinatorial number system): within one bit of the
least any fixed-length format can take. `PlainIndex` writes each place by itself.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl.compression import compiled, row_loops
from vfl.compression.bits import (
    WORD_BITS,
    Bits,
    from_bits,
    pack,
    packed_bytes,
    require_rows,
    to_bits,
    unpack,
)
from vfl.errors import CorruptFrameError, WidthError
from vfl.frame import Payload

Places = npt.NDArray[np.int64]
Codes = np.ndarray  # whole numbers of any type
TABLE_LIMIT = 2**19  # binomials an enumerative packer may hold; 4 MB of them below 2^63


def place_bits(width: int) -> int:
    """ceil(log2 width): bits that name one place."""
    return (width - 1).bit_length()


class IndexSet(ABC):
    """Sets of `k` places of a row `width` wide, all spelt with the same number of bits.

    Attributes:
        bits: bits a row.
    """

    bits: int

    def __init__(self, width: int, k: int) -> None:
        self.width = width
        self.k = k

    @abstractmethod
    def to_bits(self, places: Places) -> Bits:
        """Axes (rows, bits) from strictly increasing places of axes (rows, k)."""

    @abstractmethod
    def from_bits(self, bits: Bits) -> Places:
        """The places `to_bits` spelt.

        Raises:
            CorruptFrameError: bits that no set of places has.
        """

    def pack_rows(self, places: Places, codes: Codes, code_bits: int) -> bytes:
        """Each row's places and then its codes, back to back.

        Args:
            places: strictly increasing, axes (rows, k).
            codes: numbers below 2^code_bits, axes (rows, k).
            code_bits: bits of a code.
        """
        return pack(np.concatenate([self.to_bits(places), to_bits(codes, code_bits)], axis=1))

    def unpack_rows(self, payload: Payload, rows: int, code_bits: int) -> tuple[Places, Codes]:
        """The places and codes `pack_rows` wrote.

        Raises:
            FrameError: what it could not have written.
        """
        bits = unpack(payload, rows, self.bits + self.k * code_bits)
        places = self.from_bits(bits[:, : self.bits])
        return places, from_bits(bits[:, self.bits :], code_bits, self.k)


class PlainIndex(IndexSet):
    """k places of ceil(log2 width) bits each, in increasing order."""

    def __init__(self, width: int, k: int) -> None:
        super().__init__(width, k)
        self.bits = k * place_bits(width)

    def to_bits(self, places: Places) -> Bits:
        return to_bits(places, place_bits(self.width))

    def from_bits(self, bits: Bits) -> Places:
        places: Places = from_bits(bits, place_bits(self.width), self.k)
        if (places >= self.width).any() or (places[:, 1:] <= places[:, :-1]).any():
            raise CorruptFrameError("a payload's places are not increasing places of its row")
        return places


class Bitmap(IndexSet):
    """A bit for every place of the row."""

    def __init__(self, width: int, k: int) -> None:
        super().__init__(width, k)
        self.bits = width

    def to_bits(self, places: Places) -> Bits:
        bits = np.zeros((len(places), self.width), np.uint8)
        np.put_along_axis(bits, places, 1, axis=1)
        return bits

    def from_bits(self, bits: Bits) -> Places:
        if (bits.sum(axis=1, dtype=np.int64) != self.k).any():
            raise CorruptFrameError("a payload marks another number of places than agreed")
        return bits.nonzero()[1].reshape(-1, self.k)


class Enumerative(IndexSet):
    """One number a row: the sum over j = 1..k of C(c_j, j), where c_1 < ... < c_k are the places.

    Lehmer's combinatorial number system: every rank in [0, C(width, k)) is exactly one set.

    >>> Enumerative(width=128, k=3).bits, PlainIndex(width=128, k=3).bits
    (19, 21)
    """

    def __init__(self, width: int, k: int) -> None:
        super().__init__(width, k)
        self.count = math.comb(width, k)
        self.bits = (self.count - 1).bit_length()
        self._columns = _columns(width, k)
        narrow = [column for column in self._columns if column.dtype == np.int64]
        self._narrow = np.concatenate(narrow)
        self._starts = np.arange(len(narrow)) * (width - k)

    def to_bits(self, places: Places) -> Bits:
        narrow = len(self._starts)
        rank = np.einsum("ij->i", self._narrow[places[:, :narrow] + self._starts])
        for j in range(narrow, self.k):
            rank = rank + self._columns[j][places[:, j] - j]
        return to_bits(rank[:, None], self.bits)

    def from_bits(self, bits: Bits) -> Places:
        rank = from_bits(bits, self.bits, 1)[:, 0]
        if (rank >= self.count).any():
            raise self._unknown()
        places = np.empty((len(rank), self.k), np.int64)
        for j in reversed(range(1, self.k)):
            column = self._columns[j]
            rank = rank.astype(column.dtype, copy=False)
            above = np.searchsorted(column, rank, side="right") - 1
            places[:, j] = above + j
            rank = rank - column[above]
        places[:, 0] = rank  # C(c, 1) is c
        return places

    def pack_rows(self, places: Places, codes: Codes, code_bits: int) -> bytes:
        if not self._is_compiled:
            return super().pack_rows(places, codes, code_bits)
        out = np.zeros(packed_bytes(len(places), self.bits + self.k * code_bits), np.uint8)
        numbers = codes.astype(np.int64, copy=False)
        row_loops.pack_rows(places, numbers, self._table, self.bits, code_bits, out)
        return out.tobytes()

    def unpack_rows(self, payload: Payload, rows: int, code_bits: int) -> tuple[Places, Codes]:
        if not self._is_compiled:
            return super().unpack_rows(payload, rows, code_bits)
        raw = require_rows(payload, rows, self.bits + self.k * code_bits)
        places, codes = np.empty((2, rows, self.k), np.int64)
        tables, sizes = (self._table, self._count_table), (self.bits, code_bits)
        if not row_loops.unpack_rows(raw.copy(), *tables, *sizes, places, codes):
            raise self._unknown()
        return places, codes

    @property
    def _is_compiled(self) -> bool:
        return compiled.COMPILED and self._limb_count <= row_loops.MOST_LIMBS

    @property
    def _limb_count(self) -> int:
        return max(1, -(-self.bits // row_loops.LIMB_BITS))

    @cached_property
    def _table(self) -> np.ndarray:
        """The columns for `row_loops.pack_rows`."""
        return _limbs(self._columns, self._limb_count)

    @cached_property
    def _count_table(self) -> np.ndarray:
        return _limbs([[self.count]], self._limb_count)

    def _unknown(self) -> CorruptFrameError:
        return CorruptFrameError("a payload names a set of places that does not exist")


def _limbs(numbers: Sequence[Any], count: int) -> np.ndarray:
    """Integers in `count` parts of `row_loops.LIMB_BITS` bits each, along a new first axis."""
    whole = np.array(numbers, object)
    parts = [whole >> row_loops.LIMB_BITS * limb for limb in range(count)]
    return np.array([part & 2**row_loops.LIMB_BITS - 1 for part in parts], np.int64)


def _columns(width: int, k: int) -> list[np.ndarray]:
    """For j = 0..k-1 the numbers C(j + i, j + 1), i = 0..width-k: what place j + i adds to a rank.

    Each column is the running sum of the one before. It is int64 as long as every partial rank of
    the columns so far fits, and holds Python integers from there on.
    """
    columns = []
    column: np.ndarray = np.ones(width - k + 1, np.int64)
    column[0] = 0
    for j in range(k):
        if math.comb(width - k + j + 1, j + 1) >= 2**WORD_BITS:
            column = column.astype(object)
        column = np.cumsum(column, dtype=column.dtype)
        columns.append(column)
    return columns


@lru_cache(maxsize=32)
def index_set(packer: str, width: int, k: int) -> IndexSet:
    """The packer of that name (enumerative, index or bitmap) for `k` of `width` places.

    Raises:
        WidthError: the enumerative packer's table would be too large.
    """
    if packer == "index":
        return PlainIndex(width, k)
    if packer == "bitmap":
        return Bitmap(width, k)
    if k * (width - k + 1) > TABLE_LIMIT:
        raise WidthError(
            f"enumerating {k} of {width} places needs too large a table",
            got=f"{k * (width - k + 1)} numbers",
            want=f"at most {TABLE_LIMIT}",
            fix="packer=index",
        )
    return Enumerative(width, k)
