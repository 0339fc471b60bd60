"""Loops that choose the places of a row, for machine code; their twins are in `select`."""

from __future__ import annotations

from typing import Any

import numpy as np

from vfl.compression.compiled import compiled

#: From so many places a row on, torch finds the largest faster.
MOST_PLACES = 32

_SIZE = np.int32(0x7FFFFFFF)
_INFINITE = np.int32(0x7F800000)
_BLOCK = 32
_FEW = 32


@compiled
def find_top(bits: Any, places: Any, tied: Any) -> bool:
    """Find the places of the largest magnitudes of each row, the lower place first among equals.

    Without its sign the bit pattern of a float32 sorts as the magnitude does, with infinity and
    what is not a number above all others. The k-th largest of the largest sizes of blocks says
    which sizes need not be looked at.

    Args:
        bits: float32 values viewed as int32, axes (rows, width).
        places: int64, axes (rows, k) with k from 1 to the width; filled, increasing.
        tied: one for each row, set where more than k are as large as the least that is found.

    Returns:
        Whether all values are finite.
    """
    width, k = bits.shape[1], places.shape[1]
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
                    size = bits[row, i] & _SIZE
                    sizes[count], candidates[count] = size, i  # written over if too small
                    count += size >= least
        least = _kth_largest(sizes, count, best)
        tied[row] = _keep(sizes, count, candidates, least, places, row)
    return bool(overall < _INFINITE)


@compiled
def replace(places: Any, drops: Any, draws: Any, unit: float, others: int) -> None:
    """Give every marked place of a row to one outside the row, all choices equally likely.

    Args:
        places: increasing before and after, int64, axes (rows, k).
        drops: which of them give way, axes (rows, k); at most `others` of a row.
        draws: uniform on [0, unit) where a place is marked; the first k of each row are used.
        unit: where the draws end.
        others: places outside a row.
    """
    k = places.shape[1]
    slots, numbers = np.empty(k, np.int64), np.empty(k, np.int64)
    for row in range(len(places)):
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
                numbers[t] += numbers[t] >= places[row, slot]
        for t in range(count):
            places[row, slots[t]] = numbers[t]
        if count:
            _sort(places[row])


@compiled
def _largest(part: Any) -> Any:
    largest = np.int32(0)
    for i in range(len(part)):
        largest = max(largest, part[i] & _SIZE)
    return largest


@compiled
def _kth_largest(sizes: Any, count: int, best: Any) -> Any:
    """The k-th largest of at least k sizes, k = len(best); `best` is scratch."""
    k = len(best)
    if count <= _FEW:  # no branch for the processor to guess
        least = _SIZE
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
def _keep(sizes: Any, count: int, candidates: Any, least: Any, places: Any, row: int) -> bool:
    """Keep what is larger than `least`, and the first of what equals it, until `kept` is full.

    Returns:
        Whether something that equals it is left over.
    """
    k = places.shape[1]
    level, enough = k, 0
    for i in range(count):
        level -= sizes[i] > least
        enough += sizes[i] >= least
    kept = 0
    for i in range(count):
        if sizes[i] > least or (sizes[i] == least and level > 0):
            level -= sizes[i] == least
            places[row, kept] = candidates[i]
            kept += 1
    return bool(enough > k)


@compiled
def _sort(row: Any) -> None:
    for end in range(1, len(row)):
        place, at = row[end], end
        while at > 0 and row[at - 1] > place:
            row[at] = row[at - 1]
            at -= 1
        row[at] = place
