"""Which units of a row are above zero, however many, as bits: one number for each set of a size.

The combinatorial number system of `index_set`, for rows that differ in their number of places; all
sizes share one table. A row with more places than zeros is known by its zeros.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from vfl.compression.bits import WORD_BITS, Bits, from_bits, to_bits
from vfl.errors import CorruptFrameError

Mask = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]

#: Binomials the table may hold; some 30 MB of Python integers. It grows as rows need it.
TABLE_LIMIT = 2**18


class Supports:
    """Sets of places of a row `width` wide, spelt with ceil(log2 C(width, n)) bits for n places.

    Where that needs more columns than the table may have, a row has a bit for every place instead;
    up to 724 units that is nowhere so.

    Args:
        width: of the cut.

    Attributes:
        bits: bits of a set of n places, for n = 0..width.

    >>> Supports(128).bits[[0, 3, 64, 125, 128]].tolist()
    [0, 19, 125, 19, 0]
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._most = min(width // 2, TABLE_LIMIT // width)
        self._sets = [math.comb(width, size) for size in range(self._most + 1)]
        self._most_in_words = sum(count <= 2**WORD_BITS for count in self._sets) - 1
        self._columns = np.arange(width).astype(object)[None]
        self._words: npt.NDArray[np.int64] = np.minimum(
            self._grown(self._most_in_words)[: self._most_in_words], 2**WORD_BITS - 1
        ).astype(np.int64)
        self.bits = np.full(width + 1, width, np.int64)
        for size, count in enumerate(self._sets):
            self.bits[[size, width - size]] = (count - 1).bit_length()

    def to_bits(self, used: Mask) -> Bits:
        """The sets of all rows, those of fewer places first; no axes but bits.

        Args:
            used: axes (rows, width).
        """
        counts = used.sum(axis=1)
        spelt = [np.zeros(0, np.uint8)]
        for count in np.unique(counts).tolist():
            rows = used[counts == count]
            size = self._size(count)
            if size > self._most:
                spelt.append(rows.astype(np.uint8).reshape(-1))
                continue
            marked = rows if size == count else ~rows
            steps = marked.nonzero()[1].reshape(len(rows), size) - np.arange(size)
            ranks = self._table(size)[np.arange(size), steps].sum(axis=1)
            spelt.append(to_bits(ranks[:, None], int(self.bits[count])).reshape(-1))
        return np.concatenate(spelt)

    def from_bits(self, bits: Bits, counts: Counts) -> Mask:
        """The sets `to_bits` spelt; axes (rows, width).

        Args:
            bits: exactly as many as `self.bits` says for these counts.
            counts: places a row, axes (rows,).

        Raises:
            CorruptFrameError: bits that no set of so many places has.
        """
        used = np.zeros((len(counts), self.width), np.bool_)
        ranks = np.zeros(len(counts), object)
        first = 0
        for count in np.unique(counts).tolist():
            rows = (counts == count).nonzero()[0]
            row_bits = int(self.bits[count])
            own = bits[first : first + len(rows) * row_bits].reshape(len(rows), row_bits)
            first += own.size
            if self._size(count) <= self._most:
                ranks[rows] = self._read_ranks(own, count)
            elif (own.sum(axis=1, dtype=np.int64) != count).any():
                raise CorruptFrameError("a payload marks another number of places than it says")
            else:
                used[rows] = own
        sizes = np.minimum(counts, self.width - counts)
        words = sizes <= self._most_in_words
        self._mark(used, words.nonzero()[0], ranks[words].astype(np.int64), sizes)
        others = (~words & (sizes <= self._most)).nonzero()[0]
        self._mark(used, others, ranks[others], sizes)
        used[(sizes <= self._most) & (counts > sizes)] ^= True
        return used

    def _read_ranks(self, bits: Bits, count: int) -> np.ndarray:
        ranks: np.ndarray = from_bits(bits, int(self.bits[count]), 1)[:, 0]
        if (ranks >= self._sets[self._size(count)]).any():
            raise CorruptFrameError("a payload names a set of places that does not exist")
        return ranks

    def _mark(self, used: Mask, rows: Counts, ranks: np.ndarray, sizes: Counts) -> None:
        """Set the places of these rows' ranks, from the highest place of each to its lowest."""
        sizes = sizes[rows]
        table = self._table(int(sizes.max(initial=0)))
        for j in reversed(range(sizes.max(initial=0))):
            left = (sizes > j).nonzero()[0]
            above = np.searchsorted(table[j], ranks[left], side="right") - 1
            used[rows[left], above + j] = True
            ranks[left] -= table[j][above]

    def _size(self, count: int) -> int:
        return min(count, self.width - count)

    def _table(self, size: int) -> np.ndarray:
        """C(j + i, j + 1), axes (size or more, width): what the place j + i adds as the j-th one.

        Machine words up to the size whose sets they number, else Python integers.
        """
        return self._words if size <= self._most_in_words else self._grown(size)

    def _grown(self, size: int) -> np.ndarray:
        """The table with `size` columns or more; each is the running sum of the one before."""
        if (known := len(self._columns)) < size:
            columns = np.empty((min(max(size, 2 * known), self._most), self.width), object)
            columns[:known] = self._columns
            for j in range(known, len(columns)):
                columns[j] = np.cumsum(columns[j - 1])
            self._columns = columns
        return self._columns


@lru_cache(maxsize=4)
def supports(width: int) -> Supports:
    """The sets of a width; several codecs of one process share their table."""
    return Supports(width)
