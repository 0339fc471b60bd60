"""Loops that are always compiled by numba; for each loop, a numpy function returns the same bits.

`bits.Enumerative.pack` and `unpack` pack the rows of a sparse cut with these loops.
`vfl.compression.topk` finds the largest values with them, and `values` quantises values with them.
Compiled code does not check array bounds. So callers first check the length of a payload, and check
each rank before a loop uses it as an index.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vfl.core.compiled import compiled

#: Largest number of limbs (parts of a rank, one per machine word), and number of bits in a limb;
#: the lowest limb comes first.
MOST_LIMBS, LIMB_BITS = 2, 62

#: Length of the long steps downwards in the search for an index. Long steps downwards and then
#: short steps upwards are faster than binary search, because adjacent indices are close together.
_STRIDE = 8
_LIMB = (1 << LIMB_BITS) - 1


@compiled
def pack_rows(
    indices: Any, codes: Any, table: Any, rank_bits: int, code_bits: int, out: Any
) -> None:
    """Write each row's rank (the number of its index set), then its codes, without gaps.

    Args:
        indices: increasing indices, int64, axes (rows, k).
        codes: codes, int64, axes (rows, k).
        table: number to add to the rank for each index, int64, axes (limbs, k, width - k + 1).
        rank_bits: number of bits of a rank.
        code_bits: number of bits of a code.
        out: output, uint8, all zero, long enough for the rows.
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
    """Read the rows that `pack_rows` wrote.

    Args:
        raw: payload, uint8, exactly as long as the rows.
        table: see `pack_rows`.
        count: the number of possible ranks, in limbs.
        rank_bits: see `pack_rows`.
        code_bits: see `pack_rows`.
        indices: output, int64, axes (rows, k).
        codes: output, int64, axes (rows, k).

    Returns:
        True if every rank is below `count`; otherwise the caller must not use `indices`.
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
    """Find the indices of a one-limb rank, the last index first.

    The last index is the largest one whose term is at most the rank; subtracting this term leaves
    the rank of the other indices. The terms of the first index are 0, 1, 2, ..., so this index
    equals the remaining rank.
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
    """Find the indices of a rank with several limbs, like `_unrank`; overwrites `rank`."""
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
    """Append the bits of a number, highest bit first; return the new length of `out` in bits."""
    while bits > 0:
        room = 8 - (end & 7)
        taken = min(room, bits)
        bits -= taken
        out[end >> 3] |= ((number >> bits) & ((1 << taken) - 1)) << (room - taken)
        end += taken
    return end


@compiled
def _read(raw: Any, start: int, bits: int) -> int:
    """Return the number whose bits begin at `start`."""
    number = 0
    while bits > 0:
        room = 8 - (start & 7)
        taken = min(room, bits)
        byte: Any = np.int64(raw[start >> 3])
        number = (number << taken) | ((byte >> (room - taken)) & ((1 << taken) - 1))
        start += taken
        bits -= taken
    return number


#: Largest number of indices per row for which `find_top` is faster than torch.
MOST_INDICES = 32

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITE = np.int32(0x7F800000)
_SIGN_BIT = np.int32(31)
_BLOCK = 32
_FEW = 32


@compiled
def find_top(bits: Any, indices: Any, tied: Any) -> bool:
    """Find the indices of each row's largest magnitudes; the lower index wins a tie.

    Without its sign bit, the bit pattern of a float32 sorts like the magnitude; infinity and NaN
    sort above all others. The function divides a row into blocks. The k-th largest of the blocks'
    maxima is a lower bound for the row's k largest magnitudes.

    Args:
        bits: float32 values viewed as int32, axes (rows, width).
        indices: output, int64, axes (rows, k), increasing; k is from 1 to the width.
        tied: output, one flag per row: true if more than k values are at least as large as the
            smallest kept value.

    Returns:
        True if all values are finite.
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
                    sizes[count], candidates[count] = size, i  # overwritten next if size < least
                    count += size >= least
        least = _kth_largest(sizes, count, best)
        tied[row] = _keep(sizes, count, candidates, least, indices, row)
    return bool(overall < _INFINITE)


@compiled
def replace(indices: Any, drops: Any, draws: Any, unit: float, others: int) -> None:
    """Replace every marked index of a row by a random other index, all choices equally likely.

    Args:
        indices: indices, increasing before and after the call, int64, axes (rows, k).
        drops: marks of the indices to replace, axes (rows, k); at most `others` marks per row.
        draws: random numbers, uniform on [0, unit) at each marked index; axes (rows, k or more).
        unit: upper limit of the random numbers.
        others: number of indices that are not in `indices`, for each row.
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
        for t in range(count - 2, -1, -1):  # makes numbers distinct
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
    """Return the k-th largest of the first `count` sizes, k = len(best); overwrites `best`."""
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
    """Keep values above `least`, then the first ones equal to it, until a row has k indices.

    Returns:
        True if a value equal to `least` was left out.
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
    """Find each group's smallest and largest value, as integers in the same order as the values.

    If all bits except the sign are inverted in negative values, the bit patterns of float32
    numbers, read as integers, are ordered like the numbers. Infinities and NaN lie outside all
    finite numbers.

    Args:
        bits: float32 values viewed as int32, axes (groups, values).
        ends: output, int32, axes (groups, 2).
    """
    for group in range(len(bits)):
        own, least, largest = bits[group], _MAGNITUDE, -_MAGNITUDE
        for i in range(len(own)):
            number = np.int32(own[i] ^ ((own[i] >> _SIGN_BIT) & _MAGNITUDE))
            least, largest = min(least, number), max(largest, number)
        ends[group, 0], ends[group, 1] = least, largest


@compiled
def quantise(values: Any, outer: Any, bits: int, ends: Any, codes: Any) -> None:
    """Compute the range limits of each group, and the codes of its values.

    Args:
        values: finite values, float32, axes (groups, values).
        outer: the smallest value of each group, and minus the largest value, float32, axes (groups,
            2).
        bits: number of bits of a code, at most 8.
        ends: output: range limits as bits of bfloat16, uint16, axes (groups, 2).
        codes: output, uint8, axes as `values`.
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
    """Copy marked numbers to the front of `found`, and return their count.

    Args:
        numbers: numbers from which to copy, a one-dimensional array of any type.
        marks: marks, uint8: 1 for a number to copy, otherwise 0.
        found: output, of the same type, with at least one more entry than there are marks of 1.
    """
    count = 0
    for i in range(len(numbers)):
        found[count] = numbers[i]  # the next number overwrites it if marks[i] is 0
        count += int(marks[i])
    return count


@compiled
def spread_marked(found: Any, marks: Any, numbers: Any) -> None:
    """Copy numbers back to their marked positions, and write 0 at the other positions.

    Args:
        found: the numbers, with one more entry than there are marks.
        marks: see `gather_marked`.
        numbers: output, an array of the same type.
    """
    count = 0
    for i in range(len(numbers)):
        numbers[i] = found[count] * marks[i]  # the loop has no branch to mispredict
        count += int(marks[i])


@compiled
def rectify(values: Any, upper: Any, top: float, codes: Any) -> None:
    """Compute the codes ceil(value top / upper), from 0 to top, of values that are at least 0.

    Args:
        values: finite values, float32, axes (groups, values).
        upper: largest value of each group, float64, above 0.
        top: largest code, at most 255.
        codes: output, uint8, axes as `values`.
    """
    for group in range(len(values)):
        own, found, end = values[group], codes[group], upper[group]
        for i in range(len(own)):
            share = np.ceil(np.float64(own[i]) * top / end)
            found[i] = np.int32(min(max(share, 0.0), top))


@compiled
def unrectify(codes: Any, step: Any, least: Any, values: Any) -> None:
    """Decode the codes of `rectify`: 0 for code 0, otherwise code x step, but at least `least`."""
    for group in range(len(codes)):
        own, found, each = codes[group], values[group], step[group]
        for i in range(len(own)):
            value = max(np.float32(np.float64(own[i]) * each), least)
            found[i] = value if own[i] > 0 else np.float32(0)


@compiled
def dequantise(ends: Any, bits: int, codes: Any, values: Any) -> bool:
    """Decode the codes of `quantise`.

    Args:
        ends: range limits of each group, finite; see `quantise`.
        bits: see `quantise`.
        codes: see `quantise`.
        values: output, float32, axes as `codes`.

    Returns:
        True if every group's lower limit is at most its upper limit.
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
    """Return the largest finite bfloat16, as bits, that is at most the float32 with these bits."""
    number: Any = np.int64(raw)
    rounded = (number + (number >> 31) * 0xFFFF) >> 16
    return (rounded & _SIGN) | min(rounded & ~_SIGN, _LARGEST)
