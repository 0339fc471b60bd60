"""An integer coder of symbols by their shares, and the counts those come from, which adapt.

A symbol is coded with its share of 2^16. Counts are alike at both ends and move only when a step
is committed: a frame that is sent again, or that belongs to an attempt that was given up, was coded
with the counts of its own step. A byte at the head of each frame says which history the counts
have, so that ends that lost step are found out, and ends of which one has another coder.

Source: Duda 2013, rANS (arXiv 1311.2540), with several states that take turns (Giesen 2014, arXiv
1402.3392), so that symbols that follow one another are independent work. Only integers are used,
and a quotient of floats that is exact, so every machine writes the same bytes. The decoder accepts
exactly what the encoder writes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl.core import compiled as loops
from vfl.core.compiled import compiled, native
from vfl.core.errors import CheckpointError, CorruptFrameError
from vfl.core.frame import Payload

#: Shares are of 2^16; a state stays in [2^20, 2^36), and gives and takes words of 16 bits.
TOTAL_BITS, _LOW, _STATE_BYTES = 16, 1 << 20, 5
_MASK = (1 << TOTAL_BITS) - 1
#: A state costs 20 bits: there is one more for each so many bits of symbols.
_BITS_A_STATE, _MOST_STATES = 4096, 256
#: The fewest beside one: passes over so many are faster than a loop of plain Python.
_FEW_STATES = 8
#: A context whose counts exceed this, which is less than 2^16, forgets half of them.
_FORGET_ABOVE = 60_000
#: Of the bytes a coder of this module writes; the first history.
_FORMAT = 2

Cells = npt.NDArray[np.int32]
Table = npt.NDArray[np.uint32]


class Shares(NamedTuple):
    """Symbols, as where they stand in a table of running shares.

    Attributes:
        table: running shares, uint32; a symbol at `cell` has those from table[cell] to
            table[cell + 1], at least 1.
        cells: of the symbols in their order.
    """

    table: Table
    cells: Cells


def state_count(bits: int, rows: int) -> int:
    """How many states code symbols of about so many bits, at most one a row: a power of two."""
    most = min(rows, _MOST_STATES, bits // _BITS_A_STATE)
    return 1 if most < _FEW_STATES else 1 << (most.bit_length() - 1)


def encode(shares: Shares, states: int = 1) -> bytes:
    """Symbols as bytes; no symbols take none.

    A byte says how many states there are, or how many bytes the only one takes; then come the
    states, and then words. A single state starts at 0 and is spelt without leading zeros.

    >>> table = np.array([0, 1 << 14, 1 << 15, 1 << 16], np.uint32)
    >>> encode(Shares(table, np.array([1]))).hex()  # the second quarter of all numbers
    '200040'
    """
    table, cells = shares
    ends = np.full(states, _LOW if states > 1 else 0, np.int64)
    if loops.COMPILED or states < _FEW_STATES:
        out = np.empty(len(cells), np.uint16)
        first = _encode(native(table), native(cells), native(ends), native(out))
        words = out[first:]
    else:
        words = _encode_in_passes(table, cells, ends)
    if states == 1:
        size = (int(ends[0]).bit_length() + 7) // 8
        spelt, head = int(ends[0]).to_bytes(size, "little"), size << 4
    else:
        spelt = ends.astype("<i8").view(np.uint8).reshape(states, 8)[:, :_STATE_BYTES].tobytes()
        head = states.bit_length() - 1
    return bytes([head]) + spelt + words.astype("<u2").tobytes() if head else b""


def symbols_limit_bytes(symbols: int) -> int:
    """Most bytes so many symbols take: a word each, their states, and the first byte."""
    return 2 * symbols + symbols * 17 // _BITS_A_STATE * _STATE_BYTES + _STATE_BYTES + 1


class Reader:
    """Decodes one payload; a decoding loop is handed `words`, `states` and `taken`.

    Args:
        payload: what `encode` gave.
        most: states there may be.

    Attributes:
        words: those of the payload, int64 of at least one.
        states: int64; they move on.
        taken: how many words are read, one int64.

    Raises:
        CorruptFrameError: no encoder makes such states.
    """

    def __init__(self, payload: Payload, most: int = 1) -> None:
        raw = bytes(payload)
        head = raw[0] if raw else 0
        count, size = 1 << (head & 15), (head >> 4) or _STATE_BYTES
        end = 1 + count * size if raw else 0
        single = count == 1
        if (raw and not head) or count > most or (not single and head >> 4):
            raise CorruptFrameError("a range-coded payload has no such states")
        if len(raw) < end or (len(raw) - end) % 2 or size > _STATE_BYTES:
            raise CorruptFrameError("a range-coded payload ends inside its states or a word")
        spelt = np.zeros((count, 8), np.uint8)
        if raw:
            spelt[:, :size] = np.frombuffer(raw[1:end], np.uint8).reshape(count, size)
        self.states = spelt.view("<i8").astype(np.int64).reshape(-1)
        self.words = np.frombuffer(raw[end:], "<u2")
        self.taken = np.zeros(1, np.int64)
        self._start = 0 if single else _LOW
        low = _LOW if len(self.words) or not single else 0
        if (self.states < low).any() or (self.states >= _LOW << TOTAL_BITS).any():
            raise CorruptFrameError("a range-coded payload has a state out of its range")
        if single and raw and not spelt[0, size - 1]:
            raise CorruptFrameError("a range-coded payload spells a state with leading zeros")

    def finish(self) -> None:
        """After the last symbol: nothing may be left.

        Raises:
            CorruptFrameError: it has more bytes, fewer, or others.
        """
        if self.taken[0] != len(self.words) or (self.states != self._start).any():
            raise CorruptFrameError("a range-coded payload does not end where its symbols end")


@compiled
def next_symbol(words: Any, states: Any, taken: Any, table: Any, first: int, count: int) -> int:
    """The next symbol of a context, of the only state; -1 where the context has none.

    Args:
        words: of the `Reader`.
        states: of the `Reader`; they move on.
        taken: of the `Reader`.
        table: running shares of all contexts; this one's are `first` to `first + count`.
        first: where the context starts.
        count: how many symbols it has.
    """
    if table[first + count] <= _MASK:
        return -1
    slot = states[0] & _MASK
    symbol, above = 0, count
    while above - symbol > 1:
        middle = (symbol + above) >> 1
        if table[first + middle] <= slot:
            symbol = middle
        else:
            above = middle
    start, end = int(table[first + symbol]), int(table[first + symbol + 1])
    state = (end - start) * (states[0] >> TOTAL_BITS) + slot - start
    if state < _LOW and taken[0] < len(words):
        state = (state << TOTAL_BITS) | int(words[taken[0]])
        taken[0] += 1
    states[0] = state
    return symbol


def decode_columns(reader: Reader, table: Table, codes: npt.NDArray[np.uint8]) -> None:
    """Fill codes of axes (rows, width), column by column, each column a context of the table."""
    if loops.COMPILED or len(reader.states) < _FEW_STATES:
        parts = reader.words, reader.states, reader.taken, table, codes
        _decode_columns(*(native(part) for part in parts))
    else:
        _decode_in_passes(reader, table, codes)


@compiled
def _encode(table: Any, cells: Any, states: Any, out: Any) -> int:
    """Write words from the end of `out` forwards, last symbol first; where they start."""
    at, count = len(out), len(states)
    turn = len(cells) % count
    for i in range(len(cells) - 1, -1, -1):
        turn = (turn if turn > 0 else count) - 1
        start, end = int(table[cells[i]]), int(table[cells[i] + 1])
        size, state = end - start, states[turn]
        if state >= size << 20:
            at -= 1
            out[at] = state & _MASK
            state >>= TOTAL_BITS
        # Exact: the state is below 2^52, so that no quotient is rounded up to the next number.
        states[turn] = state + start + int(state / size) * ((1 << TOTAL_BITS) - size)
    return at


def _encode_in_passes(table: Table, cells: Cells, states: npt.NDArray[np.int64]) -> np.ndarray:
    starts = table[cells].astype(np.int64)
    sizes = table[cells + 1].astype(np.int64) - starts
    limits, others = sizes << 20, (1 << TOTAL_BITS) - sizes
    low, gives = np.empty(len(cells), np.uint16), np.empty(len(cells), np.bool_)
    count = len(states)
    for first in range((len(cells) - 1) // count * count, -1, -count):
        part = slice(first, min(first + count, len(cells)))
        state = states[: part.stop - first]
        given = np.greater_equal(state, limits[part], out=gives[part])
        low[part] = state & _MASK
        state >>= given * TOTAL_BITS
        state += starts[part] + (state / sizes[part]).astype(np.int64) * others[part]
    words: np.ndarray = low[gives]
    return words


@compiled
def _decode_columns(words: Any, states: Any, taken: Any, table: Any, codes: Any) -> None:
    rows, width = codes.shape
    choices, turn, at, last = table.shape[1] - 1, 0, 0, len(words) - 1
    near = np.zeros(256, np.uint8)  # the first symbol of each 256th of all shares
    for column in range(width):
        begin = 0
        for symbol in range(choices):
            end = (int(table[column, symbol + 1]) + 255) >> 8
            for each in range(begin, end):
                near[each] = symbol
            begin = max(begin, end)
        for row in range(rows):
            state = states[turn]
            slot = state & _MASK
            symbol = int(near[slot >> 8])
            while table[column, symbol + 1] <= slot:
                symbol += 1
            start, end = int(table[column, symbol]), int(table[column, symbol + 1])
            state = (end - start) * (state >> TOTAL_BITS) + slot - start
            takes = int(state < _LOW and at <= last)  # no branch for the processor to guess
            word = int(words[min(at, last)]) if last >= 0 else 0
            states[turn] = (state << (takes << 4)) | (word & -takes)
            at += takes
            codes[row, column] = symbol
            turn = turn + 1 if turn + 1 < len(states) else 0
    taken[0] = at


def _decode_in_passes(reader: Reader, table: Table, codes: npt.NDArray[np.uint8]) -> None:
    rows, width = codes.shape
    columns = np.repeat(np.arange(width), rows)
    # Running shares of all contexts in one increasing line.
    line = (table + (np.arange(width) << 17)[:, None]).reshape(-1).astype(np.int64)
    shares, firsts = table.reshape(-1).astype(np.int64), columns * table.shape[1]
    words, found = reader.words.astype(np.int64), np.empty(rows * width, np.uint8)
    at, count = 0, len(reader.states)
    for first in range(0, rows * width, count):
        part = slice(first, min(first + count, rows * width))
        state = reader.states[: part.stop - first]
        slot = state & _MASK
        cells = line.searchsorted(slot + (columns[part] << 17), side="right") - 1
        starts = shares[cells]
        state >>= TOTAL_BITS
        state *= shares[cells + 1] - starts
        state += slot - starts
        takes = np.flatnonzero(state < _LOW)[: len(words) - at]
        state[takes] = (state[takes] << TOTAL_BITS) | words[at : at + len(takes)]
        at += len(takes)
        found[part] = cells - firsts[part]
    codes[:] = found.reshape(width, rows).T
    reader.taken[0] = at


class AdaptiveCounts:
    """Counts of every symbol in every context.

    Args:
        start: first counts, axes (contexts, symbols); 0 for a symbol that cannot occur.
        weight: what a symbol adds to its count.

    Attributes:
        table: running shares of 2^16, axes (contexts, symbols + 1), uint32; a symbol that can occur
            has 1 at least, and a context without one none.
    """

    def __init__(self, start: np.ndarray, weight: int) -> None:
        self._counts = start.astype(np.int64)
        self._weight = weight
        self._history = _FORMAT
        self.table = np.zeros((len(start), start.shape[1] + 1), np.uint32)
        self._share(slice(None), self._counts)

    @property
    def tag(self) -> bytes:
        """One byte that differs, 255 times in 256, where the counts differ."""
        return bytes([self._history & 0xFF])

    def cells(self, contexts: np.ndarray, symbols: np.ndarray) -> Cells:
        """Where symbols stand in the table."""
        firsts = np.asarray(contexts, np.int32) * np.int32(self.table.shape[1])
        found: Cells = np.add(firsts, symbols, dtype=np.int32)
        return found

    def bits(self, cells: Cells) -> int:
        """About how many bits symbols take."""
        sizes = self.table.reshape(-1)[cells + 1] - self.table.reshape(-1)[cells]
        mantissa, exponent = np.frexp(sizes.astype(np.float64))
        return int(
            (TOTAL_BITS + 2 - exponent - 2 * mantissa).sum()
        )  # exact sums of a chord of log2

    def count(self, step: int, cells: Cells) -> None:
        """Count what a step's frame held."""
        width = self.table.shape[1]
        touched: slice | np.ndarray = slice(None)
        places = cells
        if self.table.size > 8 * len(cells):  # few of many contexts
            touched, which = np.unique(cells // width, return_inverse=True)
            places = which * width + cells % width
        counts = self._counts[touched]
        found = np.bincount(places, minlength=len(counts) * width).reshape(-1, width)
        counts += self._weight * found[:, :-1]
        while (large := counts.sum(axis=1) > _FORGET_ABOVE).any():
            counts[large] = (counts[large] + 1) >> 1
        self._counts[touched] = counts
        self._share(touched, counts)
        committed = cells.astype("<i4", copy=False).tobytes() + step.to_bytes(8, "little")
        self._history = zlib.crc32(committed, self._history)

    def state_dict(self) -> dict[str, Tensor]:
        """Counts and history."""
        history = torch.tensor([_FORMAT, self._history])
        return {"counts": torch.tensor(self._counts), "history": history}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave.

        Raises:
            CheckpointError: these are the counts of another coder.
        """
        history = state["history"].reshape(-1).tolist()
        if len(history) != 2 or history[0] != _FORMAT:
            raise CheckpointError(
                "a checkpoint holds counts of another range coder",
                fix="train again, or packer=dense",
            )
        self._counts = state["counts"].numpy().copy()
        self._history = int(history[1])
        self._share(slice(None), self._counts)

    def _share(self, touched: slice | np.ndarray, counts: np.ndarray) -> None:
        """Running shares of 2^16 of counts: one for each that is not 0, the rest in proportion."""
        sums, used = counts.cumsum(axis=1), (counts > 0).cumsum(axis=1)
        rest = ((1 << TOTAL_BITS) - used[:, -1:]) * sums // np.maximum(sums[:, -1:], 1)
        self.table[touched, 1:] = used + rest
