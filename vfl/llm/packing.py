"""Ring elements in messages and files: each takes a fixed number of bits, without gaps.

If numba is installed, a compiled loop packs the elements. Without numba, numpy packs groups of
eight elements, each of which begins at a whole byte, in eight passes over all groups.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vfl.core.compiled import COMPILED, compiled

#: Number of elements in a group; a group begins at a whole byte for any number of bits per element.
_GROUP = 8


def packed_bytes(count: int, bits: int) -> int:
    """Return the number of bytes that `count` packed elements take.

    >>> packed_bytes(3, 34)
    13
    """
    return -(-count * bits // 8)


def pack_elements(elements: Tensor, bits: int, low: int = 0) -> memoryview:
    """Pack `bits` bits of each element, without its `low` lowest bits; lower bits come first.

    >>> bytes(pack_elements(torch.tensor([0x01020304, 0x0A0B0C0D]), 12, low=8)).hex()
    '03c2b0'
    """
    words = np.ascontiguousarray(elements.reshape(-1).numpy().astype("<i8", copy=False))
    if COMPILED:
        packed = np.zeros(_packed_words(len(words), bits), np.uint64)
        _pack_pass(words.view(np.uint64), bits, low, packed)
        return packed.view(np.uint8)[: packed_bytes(len(words), bits)].data
    return _packed(words.view(np.uint64), bits, low)


def unpack_elements(payload: memoryview, count: int, bits: int, low: int = 0) -> Tensor:
    """Unpack elements of `pack_elements`; omitted low bits become 0.

    The result is int64 of axes (count,).
    """
    packed = np.frombuffer(payload, np.uint8)
    if COMPILED:
        padded = np.zeros(_packed_words(count, bits), np.uint64)
        padded.view(np.uint8)[: len(packed)] = packed
        words = np.empty(count, np.uint64)
        _unpack_pass(padded, bits, low, words)
        return torch.from_numpy(words.view(np.int64))
    return torch.from_numpy(_unpacked(packed, count, bits, low).view(np.int64))


def _packed(elements: np.ndarray, bits: int, low: int) -> memoryview:
    """Pack without a compiled loop: in eight passes, each packs one element of every group."""
    count, size = len(elements), packed_bytes(len(elements), bits)
    values = np.zeros((-(-count // _GROUP), _GROUP), np.uint64)
    values.reshape(-1)[:count] = (elements >> np.uint64(low)) & _mask(bits)
    if bits < _GROUP:  # 64-bit words of neighbouring groups would overlap
        raw = values.view(np.uint8).reshape(-1, 8)
        return np.packbits(np.unpackbits(raw, 1, bits, "little"), bitorder="little").data[:size]
    packed = np.zeros(len(values) * bits + _GROUP, np.uint8)
    for each in range(_GROUP):
        words, above, shift = _words(packed, len(values), each, bits)
        words |= values[:, each] << np.uint64(shift)
        if shift + bits > 64:
            above |= (values[:, each] >> np.uint64(64 - shift)).astype(np.uint8)
    return packed[:size].data


def _unpacked(packed: np.ndarray, count: int, bits: int, low: int) -> np.ndarray:
    groups = -(-count // _GROUP)
    padded = np.zeros(groups * bits + _GROUP, np.uint8)
    padded[: len(packed)] = packed
    values = np.empty((groups, _GROUP), np.uint64)
    for each in range(_GROUP):
        words, above, shift = _words(padded, groups, each, bits)
        found = words >> np.uint64(shift)
        if shift + bits > 64:
            found |= above.astype(np.uint64) << np.uint64(64 - shift)
        values[:, each] = (found & _mask(bits)) << np.uint64(low)
    return values.reshape(-1)[:count]


def _words(
    packed: np.ndarray, groups: int, each: int, bits: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return, for element i of every group, its first word, the next byte, and the bit shift."""
    first, shift = divmod(each * bits, 8)
    words = np.ndarray((groups,), "<u8", packed.data, first, (bits,))
    behind = min(first + 8, len(packed) - 1)
    above = np.ndarray((groups,), np.uint8, packed.data, behind, (bits,)) if shift else words
    return words, above, shift


def _mask(bits: int) -> np.uint64:
    return np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits)


def _packed_words(count: int, bits: int) -> int:
    """Return the number of 64-bit words for packed elements, including one spare word."""
    return count * bits // 64 + 2


@compiled
def _pack_pass(elements: np.ndarray, bits: int, low: int, packed: np.ndarray) -> None:
    """Pack elements into words that are zero before; uint64 of axes (elements,) and (words,)."""
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits)
    for place in range(len(elements)):
        value = (elements[place] >> np.uint64(low)) & mask
        word, shift = place * bits >> 6, place * bits & 63
        packed[word] |= value << np.uint64(shift)
        if shift + bits > 64:
            packed[word + 1] = value >> np.uint64(64 - shift)


@compiled
def _unpack_pass(packed: np.ndarray, bits: int, low: int, elements: np.ndarray) -> None:
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits)
    for place in range(len(elements)):
        word, shift = place * bits >> 6, place * bits & 63
        value = packed[word] >> np.uint64(shift)
        if shift + bits > 64:
            value |= packed[word + 1] << np.uint64(64 - shift)
        elements[place] = (value & mask) << np.uint64(low)
