"""Loops that are always compiled; a numpy function gives the same bits for each.

`bits.Enumerative.pack` and `unpack` pack rows of a sparse cut, `vfl.compression.topk` finds the
largest values, and `values` quantises them. Compiled code does not check bounds, so callers first
check a payload's length, and each rank before its look-up.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vfl.core.compiled import compiled

#: A rank consists of at most this many numbers of this many bits, the lowest first.
MOST_LIMBS, LIMB_BITS = 2, 62

#: Adjacent indices are close together, so long steps down and short ones up are faster than
#: halving.
_STRIDE = 8
_LIMB = (1 << LIMB_BITS) - 1


@compiled
def pack_rows(
    indices: Any, codes: Any, table: Any, rank_bits: int, code_bits: int, out: Any
) -> None:
    """Write the rank of each row's indices, then its codes, without gaps between them.

    Args:
        indices: increasing, int64, axes (rows, k).
        codes: int64, axes (rows, k).
        table: term of each index in a rank, int64 of axes (limbs, k, width - k + 1).
        rank_bits: bits of a rank.
        code_bits: bits of a code.
        out: uint8, all zero, long enough.
    """
    limbs, k, _ = table.shape
    rank = np.zeros(limbs, np.int64)
    end = 0
    for row in range(len(indices)):
        rank[:] = 0
        for j in range(k):
            carry = 0
            for limb in range(limbs):
                carry += rank[limb] + table[limb, j, indices[row, j] - j]
                rank[limb] = carry & _LIMB
                carry >>= LIMB_BITS
        for limb in range(limbs - 1, -1, -1):
            end = _write(out, end, rank[limb], min(rank_bits - limb * LIMB_BITS, LIMB_BITS))
        for j in range(k):
            end = _write(out, end, codes[row, j], code_bits)


@compiled
def unpack_rows(
    raw: Any, table: Any, count: Any, rank_bits: int, code_bits: int, indices: Any, codes: Any
) -> bool:
    """Read rows that `pack_rows` wrote.

    Args:
        raw: uint8, exactly as long as the rows take.
        table: see `pack_rows`.
        count: number of ranks, as a table of one number.
        rank_bits: see `pack_rows`.
        code_bits: see `pack_rows`.
        indices: int64, axes (rows, k); filled.
        codes: int64, axes (rows, k); filled.

    Returns:
        Whether every rank is below `count`; if not, `indices` must not be used.
    """
    limbs, k, _ = table.shape
    rank, most, narrow = np.zeros(limbs, np.int64), count[:, 0, 0], table[0]
    end = 0
    for row in range(len(indices)):
        for limb in range(limbs - 1, -1, -1):
            bits = min(rank_bits - limb * LIMB_BITS, LIMB_BITS)
            rank[limb] = _read(raw, end, bits)
            end += bits
        if _is_at_most(most, rank):
            return False
        if limbs == 1:
            _unrank(narrow, rank[0], indices, row)
        else:
            _unrank_wide(table, rank, indices[row])
        for j in range(k):
            codes[row, j] = _read(raw, end, code_bits)
            end += code_bits
    return True


@compiled
def _unrank(table: Any, rank: int, indices: Any, row: int) -> None:
    """Find the indices from a one-limb rank: each is the last whose term fits the remainder.

    The terms of the first index are 0, 1, 2, ..., so it equals the remainder.
    """
    last = table.shape[1] - 1
    for j in range(len(table) - 1, 0, -1):
        first = last
        while first > 0 and table[j, first] > rank:
            first -= _STRIDE
        first = max(first, 0)
        more = 0
        # the loop has no branch that could be mispredicted
        for at in range(first + 1, min(first + _STRIDE, last + 1)):
            more += table[j, at] <= rank
        last = first + more
        indices[row, j] = last + j
        rank -= table[j, last]
    indices[row, 0] = rank


@compiled
def _unrank_wide(table: Any, rank: Any, indices: Any) -> None:
    """Run `_unrank` for a rank of several limbs, which is reduced in place."""
    last = table.shape[2] - 1
    for j in range(len(indices) - 1, -1, -1):
        first, size = 0, last + 1
        while size > 1:
            half = size >> 1
            if _is_at_most(table[:, j, first + half], rank):
                first += half
            size -= half
        last = first
        indices[j] = last + j
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
    """Append the bits of a number, the most significant first; return the new end."""
    while bits > 0:
        room = 8 - (end & 7)
        taken = min(room, bits)
        bits -= taken
        out[end >> 3] |= ((number >> bits) & ((1 << taken) - 1)) << (room - taken)
        end += taken
    return end


@compiled
def _read(raw: Any, start: int, bits: int) -> int:
    """Return the number in the bits from `start` on."""
    number = 0
    while bits > 0:
        room = 8 - (start & 7)
        taken = min(room, bits)
        byte: Any = np.int64(raw[start >> 3])
        number = (number << taken) | ((byte >> (room - taken)) & ((1 << taken) - 1))
        start += taken
        bits -= taken
    return number


#: Number of indices per row from which torch finds the largest faster.
MOST_INDICES = 32

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITE = np.int32(0x7F800000)
_SIGN_BIT = np.int32(31)
_BLOCK = 32
_FEW = 32


@compiled
def find_top(bits: Any, indices: Any, tied: Any) -> bool:
    """Find the indices of the largest magnitudes of each row, the lower index first among equals.

    Without the sign bit, the bit pattern of a float32 sorts like its magnitude, with infinity and
    NaN above all others. The k-th largest of the blocks' largest magnitudes bounds the values that
    need a look.

    Args:
        bits: float32 values viewed as int32, axes (rows, width).
        indices: int64, axes (rows, k) with k from 1 to the width; filled, increasing.
        tied: one flag per row: set if more than k values are at least as large as the smallest kept
            one.

    Returns:
        Whether all values are finite.
    """
    width, k = bits.shape[1], indices.shape[1]
    block = _BLOCK
    while block > _BLOCK // 4 and width < 2 * k * block:
        block //= 2
    largest = np.empty(-(-width // block), np.int32)
    best = np.empty(k, np.int32)
    sizes, candidates = np.empty(width + 1, np.int32), np.empty(width + 1, np.int64)
    overall = np.int32(0)
    for row in range(len(bits)):
        for at in range(len(largest)):
            largest[at] = _largest(bits[row, at * block : (at + 1) * block])
            overall = max(overall, largest[at])
        least = _kth_largest(largest, len(largest), best) if len(largest) >= k else np.int32(0)
        count = 0
        for at in range(len(largest)):
            if largest[at] >= least:
                for i in range(at * block, min((at + 1) * block, width)):
                    size = bits[row, i] & _MAGNITUDE
                    sizes[count], candidates[count] = size, i  # overwritten if it is too small
                    count += size >= least
        least = _kth_largest(sizes, count, best)
        tied[row] = _keep(sizes, count, candidates, least, indices, row)
    return bool(overall < _INFINITE)


@compiled
def replace(indices: Any, drops: Any, draws: Any, unit: float, others: int) -> None:
    """Replace every marked index of a row by one outside the row, all choices equally likely.

    Args:
        indices: increasing before and after, int64, axes (rows, k).
        drops: marked indices, axes (rows, k); a row has at most `others` marks.
        draws: uniform on [0, unit) where an index is marked; the first k of each row are used.
        unit: upper end of the draws.
        others: number of indices outside a row.
    """
    k = indices.shape[1]
    slots, numbers = np.empty(k, np.int64), np.empty(k, np.int64)
    for row in range(len(indices)):
        count = 0
        for slot in range(k):
            if drops[row, slot]:
                slots[count] = slot
                numbers[count] = int(draws[row, slot] / unit * (others - count))
                count += 1
        for t in range(count - 2, -1, -1):  # a Lehmer code becomes distinct numbers
            for later in range(t + 1, count):
                numbers[later] += numbers[later] >= numbers[t]
        for t in range(count):
            for slot in range(k):
                numbers[t] += numbers[t] >= indices[row, slot]
        for t in range(count):
            indices[row, slots[t]] = numbers[t]
        if count:
            _sort(indices[row])


@compiled
def _largest(part: Any) -> Any:
    largest = np.int32(0)
    for i in range(len(part)):
        largest = max(largest, part[i] & _MAGNITUDE)
    return largest


@compiled
def _kth_largest(sizes: Any, count: int, best: Any) -> Any:
    """Return the k-th largest of at least k sizes, k = len(best); `best` is scratch."""
    k = len(best)
    if count <= _FEW:  # the loop has no branch to mispredict
        least = _MAGNITUDE
        for i in range(count):
            above = np.int32(0)
            for j in range(count):
                above += np.int32(sizes[j] > sizes[i])
            least = min(least, sizes[i]) if above < k else least
        return least
    best[:] = -1
    for i in range(count):
        size = sizes[i]
        if size > best[k - 1]:
            at = k - 1
            while at > 0 and best[at - 1] < size:
                best[at] = best[at - 1]
                at -= 1
            best[at] = size
    return best[k - 1]


@compiled
def _keep(sizes: Any, count: int, candidates: Any, least: Any, indices: Any, row: int) -> bool:
    """Keep values larger than `least`, and the first of those equal to it, until `kept` is full.

    Returns:
        Whether a value equal to `least` is left over.
    """
    k = indices.shape[1]
    level, enough = k, 0
    for i in range(count):
        level -= sizes[i] > least
        enough += sizes[i] >= least
    kept = 0
    for i in range(count):
        if sizes[i] > least or (sizes[i] == least and level > 0):
            level -= sizes[i] == least
            indices[row, kept] = candidates[i]
            kept += 1
    return bool(enough > k)


@compiled
def _sort(row: Any) -> None:
    for end in range(1, len(row)):
        index, at = row[end], end
        while at > 0 and row[at - 1] > index:
            row[at] = row[at - 1]
            at -= 1
        row[at] = index


_SIGN, _LARGEST = 0x8000, 0x7F7F


@compiled
def find_ends(bits: Any, ends: Any) -> None:
    """Find the least and the largest value of each group, as numbers that sort as the values do.

    If the other bits of negative values are inverted, the bit pattern of a float32 sorts like the
    value, with infinities and NaN outside all others.

    Args:
        bits: float32 values viewed as int32, axes (groups, values).
        ends: int32, axes (groups, 2); filled.
    """
    for group in range(len(bits)):
        own, least, largest = bits[group], _MAGNITUDE, -_MAGNITUDE
        for i in range(len(own)):
            number = np.int32(own[i] ^ ((own[i] >> _SIGN_BIT) & _MAGNITUDE))
            least, largest = min(least, number), max(largest, number)
        ends[group, 0], ends[group, 1] = least, largest


@compiled
def quantise(values: Any, outer: Any, bits: int, ends: Any, codes: Any) -> None:
    """Find the ends of each group, and the codes of its values.

    Args:
        values: float32, finite, axes (groups, values).
        outer: the least value of each group and minus the largest, float32, axes (groups, 2).
        bits: bits of a code, at most 8.
        ends: bfloat16 as uint16, axes (groups, 2); filled.
        codes: uint8, axes as `values`; filled.
    """
    cells = np.empty(2, np.float32)
    raw, top = cells.view(np.uint32), 2.0**bits - 1
    for group in range(len(values)):
        cells[0], cells[1] = outer[group, 0], outer[group, 1]
        ends[group, 0], ends[group, 1] = _below(raw[0]), _below(raw[1]) ^ _SIGN
        raw[0], raw[1] = np.uint32(ends[group, 0]) << 16, np.uint32(ends[group, 1]) << 16
        start, span = np.float64(cells[0]), np.float64(cells[1]) - np.float64(cells[0])
        step = (span if span > 0 else 1.0) / 2.0**bits
        own, found = values[group], codes[group]
        for i in range(len(own)):
            code = max((np.float64(own[i]) - start) / step, 0.0)
            found[i] = np.int32(min(code, top))


@compiled
def gather_marked(numbers: Any, marks: Any, found: Any) -> int:
    """Move marked numbers to the front of `found`, which has one extra entry; return their count.

    Args:
        numbers: one-dimensional array of any type.
        marks: 1 where a number is marked, else 0; uint8.
        found: output array of the same type.
    """
    count = 0
    for i in range(len(numbers)):
        found[count] = numbers[i]  # overwritten if the value is not marked
        count += int(marks[i])
    return count


@compiled
def spread_marked(found: Any, marks: Any, numbers: Any) -> None:
    """Move numbers back to their marked positions, with 0 elsewhere.

    Args:
        found: integers, with one more entry than there are marks.
        marks: see `gather_marked`.
        numbers: output array of the same type.
    """
    count = 0
    for i in range(len(numbers)):
        numbers[i] = found[count] * marks[i]  # the loop has no branch to mispredict
        count += int(marks[i])


@compiled
def rectify(values: Any, upper: Any, top: float, codes: Any) -> None:
    """Compute the codes of values of at least 0: ceil(value top / upper), between 0 and top.

    Args:
        values: float32, finite, axes (groups, values).
        upper: above 0, float64, one for each group.
        top: the largest code, at most 255.
        codes: uint8, axes as `values`; filled.
    """
    for group in range(len(values)):
        own, found, end = values[group], codes[group], upper[group]
        for i in range(len(own)):
            share = np.ceil(np.float64(own[i]) * top / end)
            found[i] = np.int32(min(max(share, 0.0), top))


@compiled
def unrectify(codes: Any, step: Any, least: Any, values: Any) -> None:
    """Decode the codes of `rectify`: code times step, at least `least`, and 0 for code 0."""
    for group in range(len(codes)):
        own, found, each = codes[group], values[group], step[group]
        for i in range(len(own)):
            value = max(np.float32(np.float64(own[i]) * each), least)
            found[i] = value if own[i] > 0 else np.float32(0)


@compiled
def dequantise(ends: Any, bits: int, codes: Any, values: Any) -> bool:
    """Decode the codes of `quantise`.

    Args:
        ends: see `quantise`; finite.
        bits: see `quantise`.
        codes: see `quantise`.
        values: float32, axes as `codes`; filled.

    Returns:
        Whether no range ends below its start.
    """
    cells = np.empty(2, np.float32)
    raw = cells.view(np.uint32)
    for group in range(len(values)):
        raw[0], raw[1] = np.uint32(ends[group, 0]) << 16, np.uint32(ends[group, 1]) << 16
        start = np.float64(cells[0])
        step = (np.float64(cells[1]) - start) / 2.0**bits
        if step < 0:
            return False
        own, found = codes[group], values[group]
        for i in range(len(own)):
            found[i] = np.float32(start + (np.float64(own[i]) + 0.5) * step)
    return True


@compiled
def _below(raw: Any) -> Any:
    """Return the bits of the largest finite bfloat16 that is not above a float32 of these bits."""
    number: Any = np.int64(raw)
    rounded = (number + (number >> 31) * 0xFFFF) >> 16
    return (rounded & _SIGN) | min(rounded & ~_SIGN, _LARGEST)
