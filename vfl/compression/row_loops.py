"""Loops that write and read the rows of a sparse cut, for machine code.

Their twins are `IndexSet.pack_rows` and `IndexSet.unpack_rows`. Machine code checks no bounds: a
payload's length is checked before, and each rank before it is looked up.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vfl.compression.compiled import compiled

#: A rank is held as so many numbers at most, of so many bits each, the lowest first.
MOST_LIMBS, LIMB_BITS = 2, 62

#: Places lie close together: long steps down and short ones up beat halving.
_STRIDE = 8
_LIMB = (1 << LIMB_BITS) - 1


@compiled
def pack_rows(
    places: Any, codes: Any, table: Any, rank_bits: int, code_bits: int, out: Any
) -> None:
    """Write the rank of each row's places and then its codes, back to back.

    Args:
        places: increasing, int64, axes (rows, k).
        codes: int64, axes (rows, k).
        table: what a place adds to the rank, int64 of axes (limbs, k, width - k + 1).
        rank_bits: bits of a rank.
        code_bits: bits of a code.
        out: uint8, all zero, long enough.
    """
    limbs, k, _ = table.shape
    rank = np.zeros(limbs, np.int64)
    end = 0
    for row in range(len(places)):
        rank[:] = 0
        for j in range(k):
            carry = 0
            for limb in range(limbs):
                carry += rank[limb] + table[limb, j, places[row, j] - j]
                rank[limb] = carry & _LIMB
                carry >>= LIMB_BITS
        for limb in range(limbs - 1, -1, -1):
            end = _write(out, end, rank[limb], min(rank_bits - limb * LIMB_BITS, LIMB_BITS))
        for j in range(k):
            end = _write(out, end, codes[row, j], code_bits)


@compiled
def unpack_rows(
    raw: Any, table: Any, count: Any, rank_bits: int, code_bits: int, places: Any, codes: Any
) -> bool:
    """Read what `pack_rows` wrote.

    Args:
        raw: uint8, exactly as long as the rows take.
        table: see `pack_rows`.
        count: how many ranks there are, as a table of one number.
        rank_bits: see `pack_rows`.
        code_bits: see `pack_rows`.
        places: int64, axes (rows, k); filled.
        codes: int64, axes (rows, k); filled.

    Returns:
        Whether every rank is below `count`; if not, nothing in `places` counts.
    """
    limbs, k, _ = table.shape
    rank, most, narrow = np.zeros(limbs, np.int64), count[:, 0, 0], table[0]
    end = 0
    for row in range(len(places)):
        for limb in range(limbs - 1, -1, -1):
            bits = min(rank_bits - limb * LIMB_BITS, LIMB_BITS)
            rank[limb] = _read(raw, end, bits)
            end += bits
        if _is_at_most(most, rank):
            return False
        if limbs == 1:
            _unrank(narrow, rank[0], places, row)
        else:
            _unrank_wide(table, rank, places[row])
        for j in range(k):
            codes[row, j] = _read(raw, end, code_bits)
            end += code_bits
    return True


@compiled
def _unrank(table: Any, rank: int, places: Any, row: int) -> None:
    """The places of a rank of one limb: each is the last whose number is at most what is left.

    The numbers of the first place are 0, 1, 2, ..., so that it is what is left.
    """
    last = table.shape[1] - 1
    for j in range(len(table) - 1, 0, -1):
        first = last
        while first > 0 and table[j, first] > rank:
            first -= _STRIDE
        first = max(first, 0)
        more = 0
        for at in range(first + 1, min(first + _STRIDE, last + 1)):  # no branch to guess
            more += table[j, at] <= rank
        last = first + more
        places[row, j] = last + j
        rank -= table[j, last]
    places[row, 0] = rank


@compiled
def _unrank_wide(table: Any, rank: Any, places: Any) -> None:
    """`_unrank` for a rank of several limbs, which is used up."""
    last = table.shape[2] - 1
    for j in range(len(places) - 1, -1, -1):
        first, size = 0, last + 1
        while size > 1:
            half = size >> 1
            if _is_at_most(table[:, j, first + half], rank):
                first += half
            size -= half
        last = first
        places[j] = last + j
        borrow = 0
        for limb in range(len(rank)):
            borrow += rank[limb] - table[limb, j, last]
            rank[limb] = borrow & _LIMB
            borrow >>= LIMB_BITS


@compiled
def _is_at_most(one: Any, other: Any) -> bool:
    for limb in range(len(one) - 1, -1, -1):
        if one[limb] != other[limb]:
            return bool(one[limb] < other[limb])
    return True


@compiled
def _write(out: Any, end: int, number: int, bits: int) -> int:
    """Append a number of so many bits, the most significant first; the new end."""
    while bits > 0:
        room = 8 - (end & 7)
        taken = min(room, bits)
        bits -= taken
        out[end >> 3] |= ((number >> bits) & ((1 << taken) - 1)) << (room - taken)
        end += taken
    return end


@compiled
def _read(raw: Any, start: int, bits: int) -> int:
    """The number in the bits from `start` on."""
    number = 0
    while bits > 0:
        room = 8 - (start & 7)
        taken = min(room, bits)
        byte: Any = np.int64(raw[start >> 3])
        number = (number << taken) | ((byte >> (room - taken)) & ((1 << taken) - 1))
        start += taken
        bits -= taken
    return number
