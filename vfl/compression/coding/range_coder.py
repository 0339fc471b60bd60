"""An integer range coder, and adaptive counts that give the probability shares of symbols.

The coder represents a symbol's probability as a share, a multiple of 1 / 2^15. Encoder and decoder
keep equal counts of the symbols sent so far; the counts change only when both parties commit a
training step. So a frame that is sent again, or belongs to an abandoned attempt of a step, was
always coded with the counts of that step. A tag byte at the start of each frame depends on the
history of the counts. By this byte, the receiver detects a sender that has lost a step, or uses
another version of the coder.

Source: Duda 2013, rANS (arXiv 1311.2540), with several interleaved states (Giesen 2014, arXiv
1402.3392). Several interleaved states make consecutive symbols independent of each other, so that
vector instructions (`vectors`, with numba) or one numpy call (without numba) can code these symbols
together. All quotients are exact integers, so every machine writes the same bytes. The decoder
rejects all bytes that the encoder would not write.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl.core import compiled as loops
from vfl.core.compiled import compiled, native
from vfl.core.errors import CheckpointError, CorruptFrameError
from vfl.core.frame import Payload

#: A share (a symbol's probability) is a multiple of 1 / 2^15. A coder state stays in [2^16, 2^32),
#: and exchanges words of 16 bits with the payload.
TOTAL_BITS, _WORD_BITS, _LOW, _STATE_BYTES = 15, 16, 1 << 16, 4
_MASK = (1 << TOTAL_BITS) - 1
#: Number of coded bits for which one further state is added, and largest number of states; each
#: state adds 24 bits to the payload.
_BITS_A_STATE, _MOST_STATES = 2048, 256
#: Smallest number of states if there are several; also the number of states in a vector register.
LANES = 16
#: Number of symbols that the coder samples to estimate the bits of a whole cut.
_SAMPLED = 2048
#: If the counts of a context add up to more than this number, which is below 2^16, they are halved.
_FORGET_ABOVE = 60_000
_LINE_BYTES = 64
#: Version of the coded format; the history of the counts starts with this number.
_FORMAT = 3

Cells = npt.NDArray[np.int32]
Symbols = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int32]
#: A symbol's share, uint32: the start of its interval in the upper 16 bits, and the interval's size
#: in the lower 16.
Shares: TypeAlias = npt.NDArray[np.uint32]
States = npt.NDArray[np.uint32]


def encode(shares: Shares) -> bytes:
    """Encode symbols with these shares as bytes, using one state; no symbols give no bytes.

    The first byte states the number of bytes of the state; then come the state and the 16-bit
    words. The state starts at 0 and is written without leading zero bytes.

    >>> encode(np.array([1 << 13 << 16 | 1 << 13], np.uint32)).hex()  # the second quarter of all
    '200020'
    """
    words, state = np.empty(len(shares), np.uint16), np.zeros(1, np.int64)
    first = _encode(native(shares), native(state), native(words))
    size = (int(state[0]).bit_length() + 7) // 8
    spelt = int(state[0]).to_bytes(size, "little")
    return bytes([size << 4]) + spelt + words[first:].astype("<u2").tobytes() if size else b""


def encode_columns(table: Shares, codes: Symbols) -> bytes:
    """Encode a cut's codes as bytes; each column uses its own row of the table.

    For a small cut the function uses one state and codes the columns one after another, as `encode`
    does. Otherwise it uses several states: it codes as many columns at once as there are states,
    row by row, and then the next columns. Then the first byte is the binary logarithm of the number
    of states; the states and the 16-bit words follow. Within a row, the word of the last state
    comes first.

    Args:
        table: shares of all symbols in each column, axes (columns, symbols).
        codes: the codes, axes (rows, columns).
    """
    count = state_count(table, codes)
    if count == 1:
        columns = np.arange(len(table), dtype=np.int32)[:, None] * np.int32(table.shape[1])
        return encode(table.reshape(-1)[columns + codes.T].reshape(-1))
    states = np.full(count, _LOW, np.uint32)
    if loops.COMPILED:
        words = _encode_in_vectors(table, codes, states)
    else:
        words = _encode_in_passes(table, codes, states)
    head = bytes([count.bit_length() - 1])
    return b"".join(
        (head, states.astype("<u4").tobytes(), words.astype("<u2", copy=False).tobytes())
    )


def state_count(table: Shares, codes: Symbols) -> int:
    """Return the number of states for a cut, which grows with the cut's bits, up to one per column.

    The function estimates the bits by piecewise linear logarithms between powers of two, which
    follow directly from the bits of a float32.
    """
    rows, columns = codes.shape
    sample = codes[:: max(1, rows * columns // _SAMPLED)]
    firsts = np.arange(columns, dtype=np.int32) * np.int32(table.shape[1])
    sizes = (table.reshape(-1)[firsts + sample] & 0xFFFF).astype(np.float32)
    logarithms = (sizes.view(np.int32).sum(dtype=np.int64) >> 8) - sizes.size * (127 << 15)
    bits = (sizes.size * TOTAL_BITS - (int(logarithms) >> 15)) * rows // max(1, len(sample))
    most = min(columns, _MOST_STATES, bits // _BITS_A_STATE)
    return 1 if most < LANES else 1 << (most.bit_length() - 1)


def symbols_limit_bytes(symbols: int) -> int:
    """Return the most bytes for coded symbols: a word each, the states, and the first byte."""
    states = max(1, min(_MOST_STATES, symbols * TOTAL_BITS // _BITS_A_STATE))
    return 2 * symbols + _STATE_BYTES * states + 1


class Reader:
    """A payload during decoding; the decoding loop uses `words`, `states` and `taken`.

    Args:
        payload: payload that `encode` or `encode_columns` returned.
        most: largest allowed number of states.

    Attributes:
        words: all words of the payload, uint16.
        states: the states, int64; decoding changes them.
        taken: number of words read so far, one int64 in an array.

    Raises:
        CorruptFrameError: no encoder writes the states of this payload.
    """

    def __init__(self, payload: Payload, most: int = 1) -> None:
        raw = bytes(payload)
        head = raw[0] if raw else 0
        count, size = 1 << (head & 15), (head >> 4) or _STATE_BYTES
        end = 1 + count * size if raw else 0
        single = count == 1
        several = LANES <= count <= most and not head >> 4
        if (raw and not head) or not (single or several):
            raise CorruptFrameError("a range-coded payload has invalid states")
        if len(raw) < end or (len(raw) - end) % 2 or size > _STATE_BYTES:
            raise CorruptFrameError("a range-coded payload ends inside its states or a word")
        spelt = np.zeros((count, _STATE_BYTES), np.uint8)
        if raw:
            spelt[:, :size] = np.frombuffer(raw[1:end], np.uint8).reshape(count, size)
        self.states = spelt.view("<u4").astype(np.int64).reshape(-1)
        self.words = np.frombuffer(raw[end:], "<u2").astype(np.uint16, copy=False)
        self.taken = np.zeros(1, np.int64)
        self._start = 0 if single else _LOW
        if (len(self.words) or not single) and (self.states < _LOW).any():
            raise CorruptFrameError("a range-coded payload has a state out of its range")
        if single and raw and not spelt[0, size - 1]:
            raise CorruptFrameError("a range-coded payload spells a state with leading zeros")

    def finish(self) -> None:
        """Check that the payload ends directly after its last symbol.

        Raises:
            CorruptFrameError: the payload has missing bytes, further bytes, or bytes that no
                encoder writes.
        """
        if self.taken[0] != len(self.words) or (self.states != self._start).any():
            raise CorruptFrameError("a range-coded payload is longer or shorter than its symbols")


@compiled
def next_symbol(words: Any, states: Any, taken: Any, table: Any, first: int, count: int) -> int:
    """Decode the next symbol of a context with the only state; -1 if the context has no symbols.

    Args:
        words: `words` of the `Reader`.
        states: `states` of the `Reader`; the function changes them.
        taken: `taken` of the `Reader`.
        table: shares of all contexts in one array; this context has entries `first` to `first +
            count`.
        first: position of this context's first entry.
        count: number of symbols of the context.
    """
    if not table[first + count - 1]:
        return -1
    state = states[0]
    slot = state & _MASK
    most = slot << 16 | 0xFFFF  # intervals that start at or before the slot have entries up to this
    symbol, above = 0, count
    while above - symbol > 1:
        middle = (symbol + above) >> 1
        if table[first + middle] <= most:
            symbol = middle
        else:
            above = middle
    share = int(table[first + symbol])
    state = (share & 0xFFFF) * (state >> TOTAL_BITS) + slot - (share >> 16)
    if state < _LOW and taken[0] < len(words):
        state = (state << _WORD_BITS) | int(words[taken[0]])
        taken[0] += 1
    states[0] = state
    return symbol


def decode_columns(payload: Payload, counts: AdaptiveCounts, rows: int) -> Symbols:
    """Decode the codes that `encode_columns` encoded.

    Args:
        payload: result of `encode_columns`.
        counts: counts of all symbols in each column.
        rows: number of rows of the cut.

    Raises:
        CorruptFrameError: `encode_columns` could not have made this payload.
    """
    table = counts.table
    columns, choices = table.shape
    codes = np.empty((rows, columns), np.uint8)
    reader = Reader(payload, most=min(columns, _MOST_STATES))
    if len(reader.states) == 1:
        parts = reader.words, reader.states, reader.taken, table.reshape(-1), codes
        _decode_columns(choices, *(native(part) for part in parts))
    elif loops.COMPILED:
        codes = _decode_in_vectors(reader, counts, codes)
    else:
        _decode_in_passes(reader, table, codes)
    reader.finish()
    if len(reader.states) != state_count(table, codes):
        raise CorruptFrameError("a range-coded payload has invalid states")
    return codes


@compiled
def _encode(shares: Any, states: Any, words: Any) -> int:
    """Write words backwards from the end of `words`, last symbol first; return their start."""
    at, state = len(words), states[0]
    for i in range(len(shares) - 1, -1, -1):
        share = int(shares[i])
        start, size = share >> 16, share & 0xFFFF
        if state >> (32 - TOTAL_BITS) >= size:
            at -= 1
            words[at] = state & 0xFFFF
            state >>= _WORD_BITS
        # The quotient is exact: the state is below 2^52, so float64 division rounds no quotient up
        # to the next integer.
        state += start + int(state / size) * ((1 << TOTAL_BITS) - size)
    states[0] = state
    return at


@compiled
def _decode_columns(
    choices: int, words: Any, states: Any, taken: Any, table: Any, codes: Any
) -> None:
    rows, columns = codes.shape
    state, at, count = states[0], 0, len(words)
    for column in range(columns):
        first = column * choices
        for row in range(rows):
            slot = state & _MASK
            most = slot << 16 | 0xFFFF  # entries of intervals up to the slot are at most this
            cell, step = first, choices >> 1
            while step > 0:  # no branch, which the processor could mispredict
                cell += step * int(table[cell + step] <= most)
                step >>= 1
            share = int(table[cell])
            state = (share & 0xFFFF) * (state >> TOTAL_BITS) + slot - (share >> 16)
            if state < _LOW and at < count:
                state = (state << _WORD_BITS) | int(words[at])
                at += 1
            codes[row, column] = cell - first
    states[0], taken[0] = state, at


def _encode_in_vectors(table: Shares, codes: Symbols, states: States) -> npt.NDArray[np.uint16]:
    from vfl.compression.coding import vectors

    words = np.empty((2, codes.size + LANES), np.uint16)
    return words[0, : vectors.encode(table, codes, states, words)]


def _decode_in_vectors(reader: Reader, counts: AdaptiveCounts, codes: Symbols) -> Symbols:
    from vfl.compression.coding import vectors

    width = codes.shape[1]
    codes = np.empty((len(codes), width + -width % LANES), np.uint8)
    words = np.zeros(len(reader.words) + len(reader.states) + LANES, np.uint16)
    words[: len(reader.words)] = reader.words
    states = reader.states.astype(np.uint32)
    reader.taken[0] = vectors.decode(*counts.starts, words, states, codes)
    reader.states[:] = states
    return np.ascontiguousarray(codes[:, :width])


def _blocks(columns: int, count: int) -> Iterator[slice]:
    """Yield slices of columns that are coded together."""
    return (slice(first, min(first + count, columns)) for first in range(0, columns, count))


def _encode_in_passes(table: Shares, codes: Symbols, states: States) -> npt.NDArray[np.uint16]:
    shares = np.take_along_axis(table, codes.T.astype(np.intp), axis=1).T
    states_now, given = states.astype(np.int64), [np.zeros(0, np.uint16)]
    for block in reversed([*_blocks(len(table), len(states))]):
        own = shares[:, block].astype(np.int64)
        starts, sizes = own >> 16, own & 0xFFFF
        limits, others = sizes << (32 - TOTAL_BITS), (1 << TOTAL_BITS) - sizes
        low, gives = np.empty(own.shape, np.uint16), np.empty(own.shape, np.bool_)
        state = states_now[: own.shape[1]]
        for row in reversed(range(len(own))):
            gave = np.greater_equal(state, limits[row], out=gives[row])
            low[row] = state & 0xFFFF
            state >>= gave * _WORD_BITS
            state += starts[row] + (state / sizes[row]).astype(np.int64) * others[row]
        given.append(low[::-1][gives[::-1]])
    states[:] = states_now
    return np.concatenate(given)[::-1]


def _decode_in_passes(reader: Reader, table: Shares, codes: Symbols) -> None:
    choices, words, at = table.shape[1], reader.words.astype(np.int64), 0
    for block in _blocks(len(table), len(reader.states)):
        own = table[block].astype(np.int64)
        starts, sizes = (own >> 16).reshape(-1), (own & 0xFFFF).reshape(-1)
        contexts = np.arange(len(own))
        # The starts of all symbols' intervals in all contexts, as one increasing array.
        apart, firsts = contexts << TOTAL_BITS + 1, contexts * choices
        line = starts + np.repeat(apart, choices)
        state = reader.states[: len(own)]
        for row in range(len(codes)):
            slot = state & _MASK
            cells = line.searchsorted(slot + apart, side="right") - 1
            state >>= TOTAL_BITS
            state *= sizes[cells]
            state += slot - starts[cells]
            takes = np.flatnonzero(state < _LOW)[::-1]
            if at + len(takes) > len(words):
                reader.taken[0] = at + len(takes)
                return
            state[takes] = (state[takes] << _WORD_BITS) | words[at : at + len(takes)]
            at += len(takes)
            codes[row, block] = cells - firsts
    reader.taken[0] = at


def _aligned(count: int) -> npt.NDArray[np.uint16]:
    """Return an array that starts with a line of the processor's cache, for faster reading."""
    whole = np.empty(count + _LINE_BYTES // 2, np.uint16)
    first = -whole.ctypes.data % _LINE_BYTES // 2
    return whole[first : first + count]


class AdaptiveCounts:
    """Adaptive counts of all symbols in all contexts, and the shares that follow from them.

    Args:
        start: initial counts, axes (contexts, symbols); 0 for a symbol that cannot occur.
        weight: amount that each occurrence of a symbol adds to its count.

    Attributes:
        table: shares as multiples of 1 / 2^15, axes (contexts, symbols), uint32; see `Shares`.
            Every symbol that can occur has a share of at least 1; a context without symbols has no
            shares.
    """

    def __init__(self, start: npt.NDArray[Any], weight: int) -> None:
        self._counts: Counts = start.astype(np.int32)
        self._weight = weight
        self._history = _FORMAT
        self.table: Shares = np.zeros(start.shape, np.uint32)
        self._starts: tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]] | None = None
        self._stale = True
        self._share(slice(None), self._counts)

    @property
    def tag(self) -> bytes:
        """Return a byte that differs, in 255 of 256 cases, between parties with unequal counts."""
        return bytes([self._history & 0xFF])

    @property
    def starts(self) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
        """Return the starts of all shares as `vectors.find_starts` writes them; requires numba."""
        from vfl.compression.coding import vectors

        if self._starts is None:
            contexts, choices = self.table.shape
            width = contexts + -contexts % LANES
            starts = _aligned(width * (choices + vectors.COMPARED)).reshape(width, -1)
            splits = _aligned(width * vectors.PARTS).reshape(-1, vectors.PARTS, LANES)
            self._starts = starts, splits
        if self._stale:
            vectors.find_starts(self.table, *self._starts)
            self._stale = False
        return self._starts

    def cells(self, contexts: np.ndarray, symbols: np.ndarray) -> Cells:
        """Return the positions, in the flattened table of shares, of a symbol in each context."""
        firsts = np.asarray(contexts, np.int32) * np.int32(self.table.shape[1])
        found: Cells = np.add(firsts, symbols, dtype=np.int32)
        return found

    def count(self, step: int, cells: Cells) -> None:
        """Add a step's symbols to the counts; `cells` are their positions in the table."""
        width = self.table.shape[1]
        touched: slice | np.ndarray = slice(None)
        places = cells
        if self.table.size > 8 * len(cells):  # the step touches few contexts
            touched, which = np.unique(cells // width, return_inverse=True)
            places = which * width + cells % width
        counts = self._counts[touched]
        found = np.bincount(places, minlength=counts.size).reshape(counts.shape)
        self._counts[touched] = self._forget(counts + (self._weight * found).astype(np.int32))
        self._share(touched, self._counts[touched])
        self._commit(step, cells.astype("<i4", copy=False))

    def count_columns(self, step: int, codes: Symbols) -> None:
        """Add the codes of a step's frame, axes (rows, contexts), to the counts."""
        if loops.COMPILED:
            _count_columns(codes, self._counts, self._weight, self.table)
            self._stale = True
        else:
            columns = self.cells(np.arange(len(self.table)), codes)
            found = np.bincount(columns.reshape(-1), minlength=self.table.size)
            more = (self._weight * found).astype(np.int32).reshape(self.table.shape)
            self._counts = self._forget(self._counts + more)
            self._share(slice(None), self._counts)
        self._commit(step, codes)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the counts and their history."""
        history = torch.tensor([_FORMAT, self._history])
        return {"counts": torch.tensor(self._counts), "history": history}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state that `state_dict` returned.

        Raises:
            CheckpointError: another version of the coder made the counts.
        """
        history = state["history"].reshape(-1).tolist()
        if len(history) != 2 or history[0] != _FORMAT:
            raise CheckpointError(
                "a checkpoint holds counts of another range coder",
                fix="train again, or resume with the version of vfl that wrote the checkpoint",
            )
        self._counts = state["counts"].numpy().astype(np.int32)
        self._history = int(history[1])
        self._share(slice(None), self._counts)

    def _commit(self, step: int, coded: Cells | Symbols) -> None:
        history = zlib.crc32(np.ascontiguousarray(coded).data, self._history)
        self._history = zlib.crc32(step.to_bytes(8, "little"), history)

    @staticmethod
    def _forget(counts: Counts) -> Counts:
        while (large := counts.sum(axis=1) > _FORGET_ABOVE).any():
            counts[large] = (counts[large] + 1) >> 1
        return counts

    def _share(self, touched: slice | np.ndarray, counts: np.ndarray) -> None:
        """Compute shares from counts: 1 for each count above 0; the rest is split in proportion."""
        sums, used = counts.cumsum(axis=1, dtype=np.int64), (counts > 0).cumsum(axis=1)
        rest = ((1 << TOTAL_BITS) - used[:, -1:]) * sums // np.maximum(sums[:, -1:], 1)
        ends = (used + rest).astype(np.uint32)
        starts = np.zeros_like(ends)
        starts[:, 1:] = ends[:, :-1]
        self.table[touched] = starts << 16 | ends - starts
        self._stale = True


@compiled
def _count_columns(codes: Any, counts: Any, weight: int, table: Any) -> None:
    """Add codes (rows, contexts) to the counts, halve large counts, and compute the new shares."""
    contexts, choices = counts.shape
    # Arrays of a context: the number of possible symbols up to each one, and their counts.
    before, sums = np.empty(choices, np.int32), np.empty(choices, np.int32)
    ends = np.zeros(choices + 1, np.int32)
    for first in range(0, contexts, LANES):  # counts of few contexts stay in the fastest cache
        block, table_block = counts[first : first + LANES], table[first : first + LANES]
        for row in range(len(codes)):
            symbols = codes[row, first : first + LANES]
            for context in range(len(symbols)):
                block[context, symbols[context]] += weight
        for context in range(len(block)):
            own, shares = block[context], table_block[context]
            total = _FORGET_ABOVE + 1
            while total > _FORGET_ABOVE:
                total = 0
                for symbol in range(choices):
                    total += own[symbol]
                for symbol in range(choices if total > _FORGET_ABOVE else 0):
                    own[symbol] = (own[symbol] + 1) >> 1
            possible, summed = np.int32(0), np.int32(0)
            for symbol in range(choices):
                possible += own[symbol] > 0
                summed += own[symbol]
                before[symbol], sums[symbol] = possible, summed
            rest, whole = float((1 << TOTAL_BITS) - possible), float(total)
            for symbol in range(choices):  # exact, because the product is below 2^52
                ends[symbol + 1] = before[symbol] + np.int32(rest * sums[symbol] / whole)
            for symbol in range(choices):
                shares[symbol] = ends[symbol] << 16 | ends[symbol + 1] - ends[symbol]
