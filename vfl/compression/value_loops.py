"""Loops that quantise values and read them back, for machine code; their twins are in `values`."""

from __future__ import annotations

from typing import Any

import numpy as np

from vfl.compression.compiled import compiled

_SIGN, _LARGEST = 0x8000, 0x7F7F


@compiled
def quantise(values: Any, bits: int, ends: Any, codes: Any) -> None:
    """Find the ends of each group, and the codes of its values between them.

    Args:
        values: float32, finite, axes (groups, values), at least one of each group.
        bits: bits of a code.
        ends: bfloat16 as uint16, axes (groups, 2); filled.
        codes: int64, axes as `values`; filled.
    """
    cells = np.empty(2, np.float32)
    raw = cells.view(np.uint32)
    for group in range(len(values)):
        low = high = values[group, 0]
        for value in values[group]:
            low, high = min(low, value), max(high, value)
        cells[0], cells[1] = low + np.float32(0), -(high + np.float32(0))
        ends[group, 0], ends[group, 1] = _below(raw[0]), _below(raw[1]) ^ _SIGN
        raw[0], raw[1] = np.uint32(ends[group, 0]) << 16, np.uint32(ends[group, 1]) << 16
        start, span = np.float64(cells[0]), np.float64(cells[1]) - np.float64(cells[0])
        step = (span if span > 0 else 1.0) / 2.0**bits
        for i in range(values.shape[1]):
            code = max((values[group, i] - start) / step, 0.0)
            codes[group, i] = np.int64(min(code, 2.0**bits - 1))


@compiled
def dequantise(ends: Any, bits: int, codes: Any, values: Any) -> bool:
    """Read back what `quantise` wrote.

    Args:
        ends: see `quantise`; finite.
        bits: see `quantise`.
        codes: see `quantise`.
        values: float32, axes as `codes`; filled.

    Returns:
        Whether every range ends where it starts or above.
    """
    cells = np.empty(2, np.float32)
    raw = cells.view(np.uint32)
    for group in range(len(values)):
        raw[0], raw[1] = np.uint32(ends[group, 0]) << 16, np.uint32(ends[group, 1]) << 16
        start = np.float64(cells[0])
        step = (np.float64(cells[1]) - start) / 2.0**bits
        if step < 0:
            return False
        for i in range(values.shape[1]):
            values[group, i] = np.float32(start + (codes[group, i] + 0.5) * step)
    return True


@compiled
def _below(raw: Any) -> Any:
    """The bits of the largest finite bfloat16 that is not above a float32 of these bits."""
    number: Any = np.int64(raw)
    rounded = (number + (number >> 31) * 0xFFFF) >> 16
    return (rounded & _SIGN) | min(rounded & ~_SIGN, _LARGEST)
