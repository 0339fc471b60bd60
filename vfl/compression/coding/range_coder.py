"""An integer range coder, and the counts of symbols it codes with, which adapt to what was sent.

A symbol is coded with its share of a total. Counts are alike at both ends and move only when a step
is committed: a frame that is sent again, or that belongs to an attempt that was given up, was coded
with the counts of its own step. A byte at the head of each frame says which history the counts
have, so that ends that lost step are found out.

Source: Subbotin's carryless coder (1999), on 32-bit numbers; Martin 1979 for the principle. Only
integers are used, so every machine writes the same bytes. The last bytes are as few as name the
interval, and the decoder accepts exactly what the encoder writes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl.core.compiled import compiled, native
from vfl.core.errors import CorruptFrameError
from vfl.core.frame import Payload

#: The largest total of a context: the interval never gets narrower than this.
LARGEST_TOTAL = 2**16 - 1
#: A context whose counts exceed this, which is less, forgets half of them.
_FORGET_ABOVE = 60_000
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


class Coded(NamedTuple):
    """Symbols in the order they are coded, both int64 of the same axes."""

    contexts: Numbers
    symbols: Numbers


class AdaptiveCounts:
    """Counts of every symbol in every context.

    Args:
        start: first counts, axes (contexts, symbols); 0 for a symbol that cannot occur.
        weight: what a symbol adds to its count.

    Attributes:
        cumulative: running counts, axes (contexts, symbols + 1), int64.
    """

    def __init__(self, start: np.ndarray, weight: int) -> None:
        self._counts = start.astype(np.int64)
        self._weight = weight
        self._history = 0
        self._waiting: dict[int, Coded] = {}
        self.cumulative = np.pad(self._counts.cumsum(axis=1), ((0, 0), (1, 0)))

    @property
    def tag(self) -> bytes:
        """One byte that differs, 255 times in 256, where the counts differ."""
        return bytes([self._history & 0xFF])

    def shares(self, coded: Coded) -> Shares:
        """What the range coder needs of symbols."""
        starts = self.cumulative[coded.contexts, coded.symbols]
        ends = self.cumulative[coded.contexts, coded.symbols + 1]
        return Shares(starts, ends - starts, self.cumulative[coded.contexts, -1])

    def record(self, step: int, coded: Coded) -> None:
        """Keep what a frame of a step held until the step is committed."""
        self._waiting[step] = coded

    def commit(self, step: int) -> None:
        """Count what the step's frame held."""
        coded = self._waiting.pop(step, None)
        if coded is None:
            return
        touched = np.bincount(coded.contexts, minlength=len(self._counts)) > 0
        counts = self._counts[touched]
        cells = (touched.cumsum() - 1)[coded.contexts] * counts.shape[1] + coded.symbols
        counts += self._weight * np.bincount(cells, minlength=counts.size).reshape(counts.shape)
        while (large := counts.sum(axis=1) > _FORGET_ABOVE).any():
            counts[large] = (counts[large] + 1) >> 1
        self._counts[touched] = counts
        self.cumulative[touched, 1:] = counts.cumsum(axis=1)
        committed = coded.symbols.astype("<i8").tobytes() + step.to_bytes(8, "little")
        self._history = zlib.crc32(committed, self._history)

    def state_dict(self) -> dict[str, Tensor]:
        """Counts, history, and what waits for its commit."""
        state = {"counts": torch.tensor(self._counts), "history": torch.tensor(self._history)}
        for step, coded in self._waiting.items():
            state[f"step-{step}"] = torch.from_numpy(np.stack(coded))
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave."""
        self._counts = state["counts"].numpy().copy()
        self._history = int(state["history"])
        self._waiting = {
            int(name.removeprefix("step-")): Coded(*coded.numpy().copy())
            for name, coded in state.items()
            if name.startswith("step-")
        }
        self.cumulative[:, 1:] = self._counts.cumsum(axis=1)
