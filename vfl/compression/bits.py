"""Fields of any number of bits, side by side, most significant bit first.

A table of fields becomes a table of bits (one byte a bit), tables of bits are joined row by row,
and the rows are packed back to back; zero bits fill the last byte.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vfl.errors import CorruptFrameError, TruncatedFrameError
from vfl.frame import Payload

Bits = npt.NDArray[np.uint8]

WORD_BITS = 63  # the widest field an int64 holds


def word_bytes(field_bits: int) -> int:
    """Bytes of the smallest machine word (or, above 64 bits, byte string) that holds a field."""
    least = -(-field_bits // 8)
    return least if least > 8 else max(1, 1 << (least - 1).bit_length())


def to_bits(fields: np.ndarray, field_bits: int) -> Bits:
    """Spell each field with `field_bits` bits.

    Args:
        fields: axes (rows, fields), values in [0, 2^field_bits); of Python integers (dtype object)
            where a field is wider than 63 bits.
        field_bits: width of every field, 0 included.

    Returns:
        Zeros and ones, axes (rows, fields x field_bits).
    """
    rows, count = fields.shape
    size = word_bytes(field_bits)
    if fields.dtype == object:
        joined = b"".join(int(field).to_bytes(size, "big") for field in fields.flat)
        raw = np.frombuffer(joined, np.uint8)
    else:
        raw = np.ascontiguousarray(fields, f">u{size}").view(np.uint8).reshape(-1)
    spelt = np.unpackbits(raw).reshape(rows * count, 8 * size)
    return spelt[:, 8 * size - field_bits :].reshape(rows, count * field_bits)


def from_bits(bits: Bits, field_bits: int, count: int) -> np.ndarray:
    """The fields `to_bits` spelt.

    Args:
        bits: zeros and ones, axes (rows, count x field_bits).
        field_bits: width of every field.
        count: fields a row.

    Returns:
        Axes (rows, count): int64, or Python integers (dtype object) above 63 bits.
    """
    rows = len(bits)
    size = word_bytes(field_bits)
    spelt = np.zeros((rows * count, 8 * size), np.uint8)
    spelt[:, 8 * size - field_bits :] = bits.reshape(rows * count, field_bits)
    raw = np.packbits(spelt.reshape(-1))
    if field_bits <= WORD_BITS:
        return raw.view(f">u{size}").astype(np.int64).reshape(rows, count)
    joined = raw.tobytes()
    numbers = np.empty(rows * count, object)
    for place in range(rows * count):
        numbers[place] = int.from_bytes(joined[place * size : (place + 1) * size], "big")
    return numbers.reshape(rows, count)


def packed_bytes(rows: int, row_bits: int) -> int:
    """Bytes that `rows` rows of `row_bits` bits take."""
    return -(-rows * row_bits // 8)


def pack(bits: Bits) -> bytes:
    """Rows of bits back to back as bytes."""
    return np.packbits(bits.reshape(-1)).tobytes()


def unpack(payload: Payload, rows: int, row_bits: int) -> Bits:
    """The rows of bits in a payload, axes (rows, row_bits).

    Raises:
        TruncatedFrameError: the payload is not exactly as long as its rows.
        CorruptFrameError: a bit behind the last row is set.
    """
    raw = require_rows(payload, rows, row_bits)
    return np.unpackbits(raw, count=rows * row_bits).reshape(rows, row_bits)


def require_rows(payload: Payload, rows: int, row_bits: int) -> npt.NDArray[np.uint8]:
    """The bytes of a payload that holds so many rows of bits and zeros behind them.

    Raises:
        TruncatedFrameError: the payload is not exactly as long as its rows.
        CorruptFrameError: a bit behind the last row is set.
    """
    require_bytes(payload, packed_bytes(rows, row_bits), rows)
    raw = np.frombuffer(payload, np.uint8)
    behind = -rows * row_bits % 8
    if behind and raw[-1] & ((1 << behind) - 1):
        raise CorruptFrameError("a payload has bits behind its last row")
    return raw


def require_bytes(payload: Payload, wanted_bytes: int, rows: int) -> None:
    """Refuse a payload of another length.

    Raises:
        TruncatedFrameError: with the length it should have.
    """
    if len(payload) != wanted_bytes:
        raise TruncatedFrameError(
            "a payload has the wrong length",
            got=f"{len(payload)} bytes",
            want=f"{wanted_bytes} bytes for {rows} rows",
        )
