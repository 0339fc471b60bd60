"""Padding of payloads to agreed sizes, so that lengths disclose little about the values.

A payload of at most `limit_bytes` is padded to one of a few agreed sizes. Each agreed size is
smaller than the next larger one by a factor of the fourth root of two. The padding is the byte 0x80
and then zeros (ISO/IEC 7816-4). So a frame need not state the payload's length, and the reader
rejects a payload with any other padding.
"""

from __future__ import annotations

import math

from vfl.core.errors import CorruptFrameError, TruncatedFrameError
from vfl.core.frame import Payload

#: Number of agreed sizes within a factor of two.
_SIZES_AN_OCTAVE = 4
_MARK = b"\x80"


def padded_limit(limit_bytes: int) -> int:
    """Return the largest agreed size, which is the most bytes of a padded payload."""
    return limit_bytes + len(_MARK)


def agreed_size(payload_bytes: int, limit_bytes: int) -> int:
    """Return the smallest agreed size that fits a payload and the byte 0x80.

    >>> [agreed_size(n, limit_bytes=1023) for n in (1023, 861, 860, 511, 0)]
    [1024, 862, 862, 512, 1]
    """
    most, wanted = padded_limit(limit_bytes), payload_bytes + len(_MARK)
    # Rounding may give a size that is one agreed size too small; then the next larger agreed size
    # fits.
    step = max(0, math.floor(_SIZES_AN_OCTAVE * math.log2(most / wanted)) + 1)
    while (size := math.ceil(most * 2 ** (-step / _SIZES_AN_OCTAVE))) < wanted:
        step -= 1
    return size


def pad(payload: Payload, limit_bytes: int) -> bytes:
    """Pad a payload to an agreed size; `limit_bytes` is the largest length of a payload."""
    return (bytes(payload) + _MARK).ljust(agreed_size(len(payload), limit_bytes), b"\0")


def unpad(padded: Payload, limit_bytes: int) -> memoryview:
    """Return the payload without the padding of `pad`.

    Raises:
        FrameError: `pad` could not have made these bytes.
    """
    if len(padded) > padded_limit(limit_bytes):
        raise CorruptFrameError("a padded payload is longer than the largest agreed size")
    marked = bytes(padded).rstrip(b"\0")
    if not marked.endswith(_MARK):
        raise CorruptFrameError("the padding of a payload is not one mark followed by zeros")
    if len(padded) != (wanted := agreed_size(len(marked) - 1, limit_bytes)):
        raise TruncatedFrameError(
            "a padded payload has no agreed size",
            got=f"{len(padded)} bytes",
            want=f"{wanted} bytes",
        )
    return memoryview(marked)[:-1]
