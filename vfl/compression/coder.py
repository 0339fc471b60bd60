"""An integer range coder: symbols with their share of a total, as bytes and back.

Source: Subbotin's carryless coder (1999), on 32-bit numbers; Martin 1979 for the principle. Only
integers are used, so every machine writes the same bytes. The last bytes are as few as name the
interval, and the decoder accepts exactly what the encoder writes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vfl.compression.compiled import compiled, native
from vfl.errors import CorruptFrameError
from vfl.frame import Payload

#: The largest total of a context: the interval never gets narrower than this.
LARGEST_TOTAL = 2**16 - 1
_FULL, _TOP, _BOTTOM = 0xFFFFFFFF, 1 << 24, 1 << 16

Numbers = npt.NDArray[np.int64]


class Shares(NamedTuple):
    """What the coder needs of each symbol; all int64 of axes (symbols,).

    Attributes:
        starts: counts of the symbols that come before it in its context.
        sizes: its own count, at least 1.
        totals: count of the whole context, at most `LARGEST_TOTAL`.
    """

    starts: Numbers
    sizes: Numbers
    totals: Numbers


def encode(shares: Shares) -> bytes:
    """Symbols as bytes; no symbols take none.

    >>> one, four = np.array([1]), np.array([4])
    >>> encode(Shares(one, one, four)).hex()  # the second quarter of all numbers
    '40'
    """
    out = np.zeros(4 * len(shares.sizes) + 4, np.uint8)
    starts, sizes, totals = (native(each) for each in shares)
    written = _encode(starts, sizes, totals, out)
    return out[:written].tobytes()


def symbols_limit_bytes(symbols: int) -> int:
    """Most bytes so many symbols take: 16 bits each, one for rounding, and the last four bytes."""
    return -(-17 * symbols // 8) + 4


class Reader:
    """Decodes one payload; a decoding loop is handed `raw` and `state` and calls `next_symbol`.

    Args:
        payload: what `encode` gave.

    Attributes:
        raw: the bytes, for the loop.
        state: low end, width, number read and bytes passed, for the loop.
    """

    def __init__(self, payload: Payload) -> None:
        self.raw = native(np.frombuffer(payload, np.uint8).copy())
        self.state = native(np.array([0, _FULL, _first_number(self.raw), 0], np.int64))

    def finish(self) -> None:
        """After the last symbol: the payload must end exactly as the encoder ends it.

        Raises:
            CorruptFrameError: it has more bytes, fewer, or others.
        """
        low, span, _, taken = (int(each) for each in self.state)
        number, count = last_bytes(low, span)
        if bytes(self.raw[taken:]) != int(number).to_bytes(4, "big")[:count]:
            raise CorruptFrameError("a range-coded payload does not end where its symbols end")


@compiled
def next_symbol(raw: Any, state: Any, cumulative: Any, first: int, count: int) -> int:
    """The next symbol of a context; -1 when no symbol fits, so that the payload is no code.

    Args:
        raw: of the `Reader`.
        state: of the `Reader`; it moves on.
        cumulative: running counts of all contexts; this one's are `first` to `first + count`.
        first: where the context starts.
        count: how many symbols it has.
    """
    low, span, number, taken = state[0], state[1], state[2], state[3]
    total = cumulative[first + count]
    span //= total
    target = ((number - low) & _FULL) // span
    if target >= total:
        return -1
    symbol, above = 0, count
    while above - symbol > 1:
        middle = (symbol + above) >> 1
        if cumulative[first + middle] <= target:
            symbol = middle
        else:
            above = middle
    start = cumulative[first + symbol]
    low = (low + start * span) & _FULL
    span *= cumulative[first + symbol + 1] - start
    while True:
        if (low ^ (low + span)) >= _TOP:
            if span >= _BOTTOM:
                break
            span = -low & (_BOTTOM - 1)
        arriving = raw[taken + 4] if taken + 4 < len(raw) else 0
        number = ((number << 8) & _FULL) | arriving
        taken += 1
        low = (low << 8) & _FULL
        span = (span << 8) & _FULL
    state[0], state[1], state[2], state[3] = low, span, number, taken
    return symbol


@compiled
def last_bytes(low: int, span: int) -> tuple[int, int]:
    """The number in [low, low + span) with the fewest leading bytes, and how many those are."""
    count = 0
    while True:
        rest = (1 << (32 - 8 * count)) - 1
        number = (low + rest) & ~rest
        if number < low + span and number <= _FULL:
            return number, count
        count += 1


@compiled
def _encode(starts: Any, sizes: Any, totals: Any, out: Any) -> int:
    low, span, written = 0, _FULL, 0
    for i in range(len(starts)):
        span //= totals[i]
        low = (low + starts[i] * span) & _FULL
        span *= sizes[i]
        while True:
            # Once the top byte can change no more it leaves; an interval that became too narrow
            # first gives up what reaches beyond the next multiple of 2^16.
            if (low ^ (low + span)) >= _TOP:
                if span >= _BOTTOM:
                    break
                span = -low & (_BOTTOM - 1)
            out[written] = low >> 24
            written += 1
            low = (low << 8) & _FULL
            span = (span << 8) & _FULL
    number, count = last_bytes(low, span)
    for i in range(count):
        out[written + i] = (number >> (24 - 8 * i)) & 0xFF
    return written + count


@compiled
def _first_number(raw: Any) -> int:
    number = 0
    for i in range(4):
        number = (number << 8) | (raw[i] if i < len(raw) else 0)
    return number
