"""Agreed sizes: lengths that tell an observer of the network little about the values inside.

A payload that may take `limit_bytes` is filled up to the next of a few sizes, each a fourth root of
two below the one before. Behind the payload stand the byte 0x80 and then zeros (ISO/IEC 7816-4), so
no length travels, and the reader accepts this filling alone.
"""

from __future__ import annotations

import math

from vfl.core.errors import CorruptFrameError, TruncatedFrameError
from vfl.core.frame import Payload

#: Sizes within a factor of two.
_SIZES_AN_OCTAVE = 4
_MARK = b"\x80"


def padded_limit(limit_bytes: int) -> int:
    """Most bytes of a padded payload: the largest size there is."""
    return limit_bytes + len(_MARK)


def agreed_size(payload_bytes: int, limit_bytes: int) -> int:
    """The least agreed size that holds a payload and the mark behind it.

    >>> [agreed_size(n, limit_bytes=1023) for n in (1023, 861, 860, 511, 0)]
    [1024, 862, 862, 512, 1]
    """
    most, wanted = padded_limit(limit_bytes), payload_bytes + len(_MARK)
    # Rounding may miss by one size; the next larger one always holds the payload.
    step = max(0, math.floor(_SIZES_AN_OCTAVE * math.log2(most / wanted)) + 1)
    while (size := math.ceil(most * 2 ** (-step / _SIZES_AN_OCTAVE))) < wanted:
        step -= 1
    return size


def pad(payload: Payload, limit_bytes: int) -> bytes:
    """A payload filled up to an agreed size; `limit_bytes` is the most that any may take."""
    return (bytes(payload) + _MARK).ljust(agreed_size(len(payload), limit_bytes), b"\0")


def unpad(padded: Payload, limit_bytes: int) -> memoryview:
    """The payload that `pad` was given.

    Raises:
        FrameError: any bytes that `pad` could not have made.
    """
    if len(padded) > padded_limit(limit_bytes):
        raise CorruptFrameError("a padded payload is longer than any can be")
    marked = bytes(padded).rstrip(b"\0")
    if not marked.endswith(_MARK):
        raise CorruptFrameError("the padding of a payload is not a mark and zeros")
    if len(padded) != (wanted := agreed_size(len(marked) - 1, limit_bytes)):
        raise TruncatedFrameError(
            "a padded payload has no agreed size",
            got=f"{len(padded)} bytes",
            want=f"{wanted} bytes",
        )
    return memoryview(marked)[:-1]
