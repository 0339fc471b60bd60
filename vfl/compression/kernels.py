"""Loops over the k places of each row, for machine code.

Plain Python would take far too long over them, so each has a twin in numpy that gives the same
results and runs where numba is not installed: `vfl.compression.select` and
`vfl.compression.index_set` ask `USED` which one is meant. Machine code checks no bounds: lengths
are checked before a loop is called, ranks before one looks anything up.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vfl.compression.compiled import COMPILED, compiled

#: Whether these loops run instead of their twins.
USED = COMPILED
#: From so many places a row on, torch finds the largest faster.
MOST_PLACES = 32
#: A rank is held as so many numbers at most, of so many bits each, the lowest first.
MOST_LIMBS, LIMB_BITS = 2, 62

_LIMB = (1 << LIMB_BITS) - 1
_BLOCK = 32
_SIZE = np.int32(0x7FFFFFFF)
_INFINITE = np.int32(0x7F800000)


@compiled
def find_top(bits: Any, places: Any) -> bool:
    """Find the places of the largest magnitudes of each row, the lower place first among equals.

    Without its sign the bit pattern of a float32 sorts as the magnitude does, with infinity and
    what is not a number above all others. A block without anything large is passed over.

    Args:
        bits: float32 values viewed as int32, axes (rows, width).
        places: int64, axes (rows, k) with k at most width; filled, increasing.

    Returns:
        Whether all values are finite.
    """
    width, k = bits.shape[1], places.shape[1]
    best = np.zeros(k, np.int32)  # falling
    finite = True
    for row in range(len(bits)):
        values, found = bits[row], places[row]
        for at in range(k):
            _insert(best, found, at, values[at] & _SIZE, at)
        for start in range(k, width, _BLOCK):
            stop = min(start + _BLOCK, width)
            largest = np.int32(0)
            for place in range(start, stop):
                largest = max(largest, values[place] & _SIZE)
            if largest > best[k - 1]:
                for place in range(start, stop):
                    if values[place] & _SIZE > best[k - 1]:
                        _insert(best, found, k - 1, values[place] & _SIZE, place)
        finite &= best[0] < _INFINITE
        _sort(found)
    return finite


@compiled
def replace(places: Any, drops: Any, draws: Any, others: int) -> None:
    """Give every marked place of a row to one outside the row, all choices equally likely.

    Args:
        places: increasing before and after, int64, axes (rows, k).
        drops: which of them give way, axes (rows, k); at most `others` of a row.
        draws: uniform on [0, 1), axes (rows, k or more); a row uses its first ones.
        others: places outside a row.
    """
    k = places.shape[1]
    slots, numbers = np.empty(k, np.int64), np.empty(k, np.int64)
    for row in range(len(places)):
        count = 0
        for slot in range(k):
            if drops[row, slot]:
                slots[count] = slot
                numbers[count] = int(draws[row, count] * (others - count))
                count += 1
        for t in range(count - 2, -1, -1):  # a Lehmer code becomes distinct numbers
            for later in range(t + 1, count):
                numbers[later] += numbers[later] >= numbers[t]
        for t in range(count):
            for slot in range(k):
                numbers[t] += numbers[t] >= places[row, slot]
        for t in range(count):
            places[row, slots[t]] = numbers[t]
        if count:
            _sort(places[row])


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
        count: how many ranks there are, limbs as in the table.
        rank_bits: see `pack_rows`.
        code_bits: see `pack_rows`.
        places: int64, axes (rows, k); filled.
        codes: int64, axes (rows, k); filled.

    Returns:
        Whether every rank is below `count`; if not, nothing in `places` counts.
    """
    limbs, k, sets = table.shape
    rank = np.zeros(limbs, np.int64)
    end = 0
    for row in range(len(places)):
        for limb in range(limbs - 1, -1, -1):
            bits = min(rank_bits - limb * LIMB_BITS, LIMB_BITS)
            rank[limb] = _read(raw, end, bits)
            end += bits
        if _is_at_most(count, rank):
            return False
        above = sets - 1
        for j in range(k - 1, -1, -1):
            above = _last_at_most(table[:, j], above, rank)
            places[row, j] = above + j
            borrow = 0
            for limb in range(limbs):
                borrow += rank[limb] - table[limb, j, above]
                rank[limb] = borrow & _LIMB
                borrow >>= LIMB_BITS
        for j in range(k):
            codes[row, j] = _read(raw, end, code_bits)
            end += code_bits
    return True


@compiled
def _insert(best: Any, found: Any, at: int, size: int, place: int) -> None:
    """Put a size where it belongs among the falling ones before `at`, behind its equals."""
    while at > 0 and best[at - 1] < size:
        best[at], found[at] = best[at - 1], found[at - 1]
        at -= 1
    best[at], found[at] = size, place


@compiled
def _sort(row: Any) -> None:
    for end in range(1, len(row)):
        place, at = row[end], end
        while at > 0 and row[at - 1] > place:
            row[at] = row[at - 1]
            at -= 1
        row[at] = place


@compiled
def _last_at_most(columns: Any, last: int, rank: Any) -> int:
    """The last of the columns 0 to `last` that is at most `rank`; column 0 is 0."""
    first, size = 0, last + 1
    while size > 1:
        half = size >> 1
        if _is_at_most(columns[:, first + half], rank):
            first += half
        size -= half
    return first


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
        number = (number << taken) | ((raw[start >> 3] >> (room - taken)) & ((1 << taken) - 1))
        start += taken
        bits -= taken
    return number
