"""Loops of the range coder that process 16 states at a time, in one vector register.

Numba does not vectorise these loops, because they look up tables, and because a state reads or
writes a word only in some steps. So `_give` and `_take` insert LLVM code for 16 states into the
machine code that numba compiles. LLVM translates this code to the instructions of the processor,
from AVX-512 down to plain SSE2; with all of these, the results are the same. vfl imports this
module only if numba is installed.

The code of this module does not check array indices, so callers must pass arrays of the documented
sizes. The code never uses a number from a payload as an index without a check: it masks symbols or
searches them between bounds, and it counts the words of the payload before each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

#: Number of states in a vector; and how many halvings in `_split` narrow the range of symbols
#: before a search reads the table.
LANES, _SPLITS = 16, 4
_TOTAL_BITS, _WORD_BITS = 15, 16
#: Number of different codes that 8 bits can express.
_BYTES = 256

_Bit, _Byte, _Word, _Number, _Index = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))


class _Lanes:
    """A vector of 16 unsigned numbers (lanes), with the operators of numpy arrays."""

    def __init__(self, builder: ir.IRBuilder, value: Any) -> None:
        self.builder, self.value = builder, value

    def __add__(self, other: Any) -> _Lanes:
        return self._of(self.builder.add, other)

    def __sub__(self, other: Any) -> _Lanes:
        return self._of(self.builder.sub, other)

    def __mul__(self, other: Any) -> _Lanes:
        return self._of(self.builder.mul, other)

    def __and__(self, other: Any) -> _Lanes:
        return self._of(self.builder.and_, other)

    def __or__(self, other: Any) -> _Lanes:
        return self._of(self.builder.or_, other)

    def __lshift__(self, other: Any) -> _Lanes:
        return self._of(self.builder.shl, other)

    def __rshift__(self, other: Any) -> _Lanes:
        return self._of(self.builder.lshr, other)

    def __lt__(self, other: Any) -> _Lanes:
        return self._of(lambda one, two: self.builder.icmp_unsigned("<", one, two), other)

    def __le__(self, other: Any) -> _Lanes:
        return self._of(lambda one, two: self.builder.icmp_unsigned("<=", one, two), other)

    def __ge__(self, other: Any) -> _Lanes:
        return self._of(lambda one, two: self.builder.icmp_unsigned(">=", one, two), other)

    def where(self, yes: _Lanes, no: _Lanes) -> _Lanes:
        """Return `yes` in the lanes where the condition is true, and `no` in all other lanes."""
        return _Lanes(self.builder, self.builder.select(self.value, yes.value, no.value))

    def to(self, kind: ir.IntType) -> _Lanes:
        """Convert to integers of another size; numbers that are too large lose their upper bits."""
        narrower = kind.width < self.value.type.element.width
        convert = self.builder.trunc if narrower else self.builder.zext
        return _Lanes(self.builder, convert(self.value, _vector(kind)))

    def quotient(self, other: _Lanes) -> _Lanes:
        """Divide, by rounded float32 division; for quotients below 2^22, the error is at most 1."""
        floats = _vector(ir.FloatType())
        one, two = (self.builder.uitofp(each.value, floats) for each in (self, other))
        quotient = self.builder.fdiv(one, two)
        return _Lanes(self.builder, self.builder.fptoui(quotient, _vector(_Number)))

    def compressed(self, mask: _Lanes) -> _Lanes:
        """Move the marked lanes to the front, in their order.

        The lanes of the result after them have arbitrary values.
        """
        kinds = [self.value.type, mask.value.type, self.value.type]
        function = _llvm(self.builder, "llvm.experimental.vector.compress.v16i32", kinds[0], kinds)
        parts = [self.value, mask.value, ir.Constant(kinds[0], ir.Undefined)]
        return _Lanes(self.builder, self.builder.call(function, parts))

    def chosen(self, lanes: _Lanes) -> _Lanes:
        """Return, for each lane, the value of the lane whose number (0 to 15) is in `lanes`."""
        found = ir.Constant(self.value.type, ir.Undefined)
        for lane in range(LANES):
            which = self.builder.extract_element(lanes.value, _Number(lane))
            one = self.builder.extract_element(self.value, which)
            found = self.builder.insert_element(found, one, _Number(lane))
        return _Lanes(self.builder, found)

    def sum_of_later(self) -> _Lanes:
        """Return, for each lane, the sum of the lanes with higher numbers."""
        zeros = ir.Constant(self.value.type, [0] * LANES)
        found: _Lanes | None = None
        for step in (1, 1, 2, 4, 8):
            each = self if found is None else found
            moved = [_Number(min(lane + step, LANES)) for lane in range(LANES)]
            pattern = ir.Constant(_vector(_Number), moved)
            shifted = _Lanes(self.builder, self.builder.shuffle_vector(each.value, zeros, pattern))
            found = shifted if found is None else found + shifted
        assert found is not None
        return found

    def marked(self) -> Any:
        """Return the number of true lanes, as a 64-bit integer."""
        bits = self.builder.bitcast(self.value, ir.IntType(LANES))
        return self.builder.zext(self.builder.ctpop(bits), _Index)

    def _of(self, operation: Callable[[Any, Any], Any], other: Any) -> _Lanes:
        if isinstance(other, int):
            other = ir.Constant(self.value.type, [other] * LANES)
        elif isinstance(other, _Lanes):
            other = other.value
        else:  # the same number in every lane
            kind = self.value.type
            number = self.builder.trunc(other, kind.element)
            first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), number, _Number(0))
            zeros = ir.Constant(_vector(_Number), [0] * LANES)
            other = self.builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)
        return _Lanes(self.builder, operation(self.value, other))


class _Memory:
    """An array in memory, which is read and written in vectors of 16 numbers."""

    def __init__(self, context: Any, builder: ir.IRBuilder, kind: Any, array: Any) -> None:
        self._builder = builder
        self._data = context.make_array(kind)(context, builder, array).data

    def load(self, first: Any) -> _Lanes:
        """Load 16 consecutive numbers."""
        kind = self._data.type.pointee
        read = self._builder.load(self._place(first, kind))
        read.align = kind.width // 8
        return _Lanes(self._builder, read)

    def store(self, first: Any, numbers: _Lanes) -> None:
        """Store 16 consecutive numbers."""
        kind = self._data.type.pointee
        written = self._builder.store(numbers.value, self._place(first, kind))
        written.align = kind.width // 8

    def gather(self, places: _Lanes) -> _Lanes:
        """Load the 32-bit numbers at the 16 positions in `places`."""
        numbers, mask = _vector(_Number), _vector(_Bit)
        pointers = self._builder.gep(self._data, [places.value], source_etype=_Number)
        pointers.type = ir.VectorType(self._data.type, LANES)
        kinds = [pointers.type, _Number, mask, numbers]
        function = _llvm(self._builder, "llvm.masked.gather.v16i32.v16p0", numbers, kinds)
        every, none = ir.Constant(mask, [1] * LANES), ir.Constant(numbers, ir.Undefined)
        parts = [pointers, _Number(4), every, none]
        return _Lanes(self._builder, self._builder.call(function, parts))

    def last_at_most(self, limits: _Lanes, firsts: _Lanes) -> tuple[_Lanes, _Lanes]:
        """For each lane, search 16 increasing numbers for its limit; the first is at most it.

        Returns how many of the 16 numbers are at most the limit, and the last one of these.
        """
        counts = lasts = ir.Constant(_vector(_Number), ir.Undefined)
        for lane in map(_Number, range(LANES)):
            first, limit = (
                self._builder.zext(self._builder.extract_element(each.value, lane), _Index)
                for each in (firsts, limits)
            )
            count = (self.load(first) <= limit).marked()
            last = self._builder.sub(self._builder.add(first, count), _Index(1))
            number = self._builder.load(self._builder.gep(self._data, [last]))
            lasts = self._builder.insert_element(lasts, number, lane)
            count = self._builder.trunc(count, _Number)
            counts = self._builder.insert_element(counts, count, lane)
        return _Lanes(self._builder, counts), _Lanes(self._builder, lasts)

    def _place(self, first: Any, kind: ir.IntType) -> Any:
        place = self._builder.gep(self._data, [first])
        return self._builder.bitcast(place, _vector(kind).as_pointer())


def _vector(kind: Any) -> ir.VectorType:
    return ir.VectorType(kind, LANES)


def _llvm(builder: ir.IRBuilder, name: str, result: Any, kinds: Sequence[Any]) -> Any:
    known = builder.module.globals.get(name)
    return known or ir.Function(builder.module, ir.FunctionType(result, kinds), name)


def _numbered(builder: ir.IRBuilder) -> _Lanes:
    return _Lanes(builder, ir.Constant(_vector(_Number), list(range(LANES))))


def _move(state: _Lanes, start: _Lanes, size: _Lanes) -> _Lanes:
    """Return a state after coding a symbol with this share; the state must be below size x 2^17."""
    quotient = state.quotient(size)
    rest = state - quotient * size
    short = rest >= (1 << 31)  # a quotient that is 1 too large gives a negative remainder
    quotient, rest = short.where(quotient - 1, quotient), short.where(rest + size, rest)
    long = rest >= size
    quotient, rest = long.where(quotient + 1, quotient), long.where(rest - size, rest)
    return (quotient << _TOTAL_BITS) + rest + start


def _giving(
    typing: Any,
    table: Any,
    codes: Any,
    states: Any,
    words: Any,
    column: Any,
    choices: Any,
    row: Any,
    lane: Any,
    end: Any,
) -> Any:
    """Encode the symbols of 16 columns in one row; return the position after the written words.

    The word of the first of the 16 states comes first; `encode` reverses this order later.
    """
    arrays = table, codes, states, words
    signature = types.int64(*arrays, *(types.int64,) * 5)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, parts: Any) -> Any:
        column, choices, row, lane, end = parts[len(arrays) :]
        table, codes, states, words = (
            _Memory(context, builder, kind, array)
            for kind, array in zip(signature.args, parts[: len(arrays)], strict=False)
        )
        one = builder.sub(choices, _Index(1))
        symbols = codes.load(builder.add(row, column)).to(_Number) & one
        firsts = _numbered(builder) * choices + builder.mul(column, choices)
        shares = table.gather(firsts + symbols)
        sizes, starts = shares & 0xFFFF, shares >> 16
        state = states.load(lane)
        gives = (state >> (32 - _TOTAL_BITS)) >= sizes
        words.store(end, state.compressed(gives).to(_Word))
        states.store(lane, _move(gives.where(state >> _WORD_BITS, state), starts, sizes))
        return builder.add(end, gives.marked())

    return signature, generate


_give: Any = intrinsic(_giving)


def _taking(
    typing: Any,
    table: Any,
    splits: Any,
    words: Any,
    states: Any,
    codes: Any,
    column: Any,
    width: Any,
    levels: Any,
    row: Any,
    lane: Any,
    taken: Any,
) -> Any:
    """Decode the symbols of 16 columns in one row; return how many words have been read.

    Binary search finds each symbol: four steps in the splits, which are stored side by side for all
    columns, and then `levels` steps in the table, which has 16 x 2^levels symbols per column. With
    fewer than 16 symbols, `levels` is negative.
    """
    arrays = table, splits, words, states, codes
    signature = types.int64(*arrays, *(types.int64,) * 6)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, parts: Any) -> Any:
        column, width, levels, row, lane, taken = parts[len(arrays) :]
        table, splits, words, states, codes = (
            _Memory(context, builder, kind, array)
            for kind, array in zip(signature.args, parts[: len(arrays)], strict=False)
        )
        state = states.load(lane)
        slots = state & ((1 << _TOTAL_BITS) - 1)
        symbols, starts, ends = _split(splits, slots.to(_Word), column, width)
        deeper = builder.icmp_signed(">", levels, _Index(0))
        fewer = builder.select(deeper, _Index(0), builder.sub(_Index(0), levels))
        levels = builder.select(deeper, levels, _Index(0))
        firsts = _numbered(builder) * builder.shl(_Index(1 << _SPLITS), levels)
        firsts += builder.mul(column, builder.shl(_Index(1 << _SPLITS), levels))
        held = [
            cgutils.alloca_once_value(builder, each.value)  # type: ignore[no-untyped-call, unused-ignore]
            for each in ((symbols << levels) >> fewer, starts, ends)
        ]
        with cgutils.for_range(builder, levels) as loop:
            symbols, starts, ends = (_Lanes(builder, builder.load(each)) for each in held)
            step = builder.lshr(builder.shl(_Index(1), levels), builder.add(loop.index, _Index(1)))
            middles = table.gather(firsts + symbols + step) >> 16
            above = middles <= slots
            halved = (
                above.where(symbols + step, symbols),
                above.where(middles, starts),
                above.where(ends, middles),
            )
            for each, place in zip(halved, held, strict=True):
                builder.store(each.value, place)
        symbols, starts, ends = (_Lanes(builder, builder.load(each)) for each in held)
        codes.store(builder.add(row, column), symbols.to(_Byte))
        state = (ends - starts) * (state >> _TOTAL_BITS) + slots - starts
        return _refilled(state, words, states, lane, taken)

    return signature, generate


_take: Any = intrinsic(_taking)


def _taking_bytes(
    typing: Any,
    table: Any,
    splits: Any,
    words: Any,
    states: Any,
    codes: Any,
    column: Any,
    width: Any,
    row: Any,
    lane: Any,
    taken: Any,
) -> Any:
    """Do the same as `_taking` for 256 symbols, and compare the 16 shares of a part at once."""
    arrays = table, splits, words, states, codes
    signature = types.int64(*arrays, *(types.int64,) * 5)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, parts: Any) -> Any:
        column, width, row, lane, taken = parts[len(arrays) :]
        table, splits, words, states, codes = (
            _Memory(context, builder, kind, array)
            for kind, array in zip(signature.args, parts[: len(arrays)], strict=False)
        )
        state = states.load(lane)
        slots = state & ((1 << _TOTAL_BITS) - 1)
        part, _, _ = _split(splits, slots.to(_Word), column, width)
        firsts = (_numbered(builder) << 8) + builder.shl(column, _Index(8)) + (part << _SPLITS)
        counts, shares = table.last_at_most((slots << 16) | 0xFFFF, firsts)
        codes.store(builder.add(row, column), ((part << _SPLITS) + counts - 1).to(_Byte))
        state = (shares & 0xFFFF) * (state >> _TOTAL_BITS) + slots - (shares >> 16)
        return _refilled(state, words, states, lane, taken)

    return signature, generate


_take_bytes: Any = intrinsic(_taking_bytes)


def _refilled(state: _Lanes, words: _Memory, states: _Memory, lane: Any, taken: Any) -> Any:
    """Store the states; add a word to each state that needs one; return how many were read."""
    takes = state < (1 << _WORD_BITS)
    given = words.load(taken).chosen(takes.to(_Word).sum_of_later()).to(_Number)
    states.store(lane, takes.where((state << _WORD_BITS) | given, state))
    return state.builder.add(taken, takes.marked())


def _split(splits: _Memory, slots: _Lanes, column: Any, width: Any) -> tuple[_Lanes, ...]:
    """Return in which sixteenth of the symbols each slot lies, and where it starts and ends."""
    builder = slots.builder
    lines = [column]
    for _ in range(1, (1 << _SPLITS) - 1):
        lines.append(builder.add(lines[-1], width))
    middles = [splits.load(line) for line in lines]
    part, starts = slots - slots, slots - slots
    ends, step = starts + (1 << _TOTAL_BITS), 1 << _SPLITS
    while len(middles) % 2:  # compare with the middle start; go on with the lower or upper starts
        step >>= 1
        half = len(middles) // 2
        above = middles[half] <= slots
        part = above.where(part + step, part)
        starts, ends = above.where(middles[half], starts), above.where(ends, middles[half])
        pairs = zip(middles[half + 1 :], middles[:half], strict=True)
        middles = [above.where(upper, lower) for upper, lower in pairs]
    return part.to(_Number), starts.to(_Number), ends.to(_Number)


@njit(cache=True, nogil=True)
def encode(
    table: Any, choices: int, codes: Any, rows: int, width: int, states: Any, words: Any
) -> int:
    """Encode all symbols, the last one first; write the words in the order of the decoder.

    Args:
        table: shares, uint32, width x choices entries.
        choices: number of symbols that each context (column) can have, a power of two.
        codes: codes, uint8, rows x width entries.
        rows: number of rows of the cut.
        width: width of the cut, a multiple of `LANES`.
        states: the coder's states, uint32, a multiple of `LANES`; the function changes them.
        words: output, uint16, axes (2, rows x width + LANES); the first row contains the result.

    Returns:
        The number of words written.
    """
    count, end, given = len(states), 0, words[1]
    for first in range((width - 1) // count * count, -1, -count):
        lanes = min(count, width - first)
        for row in range(rows - 1, -1, -1):
            for lane in range(0, lanes, LANES):
                column = first + lane
                end = _give(table, codes, states, given, column, choices, row * width, lane, end)
    ordered = words[0]
    for i in range(end):
        ordered[i] = given[end - 1 - i]
    return end


@njit(cache=True, nogil=True)
def decode(
    table: Any,
    splits: Any,
    choices: int,
    words: Any,
    states: Any,
    codes: Any,
    rows: int,
    width: int,
) -> int:
    """Decode the words that `encode` wrote.

    Args:
        table: see `encode`.
        splits: for each column, where each sixteenth part of the symbols starts, uint16, axes (15,
            width). If there are fewer than 16 symbols, some starts occur several times.
        choices: number of symbols that each context (column) can have, a power of two from 2 to
            256.
        words: the words of the payload, uint16; the array has at least len(states) + LANES unused
            entries after them.
        states: see `encode`.
        codes: output, uint8, rows x width entries.
        rows: see `encode`.
        width: see `encode`.

    Returns:
        The number of words read; for a payload that is too short, it exceeds the payload's number
        of words.
    """
    count, taken = len(states), 0
    most = len(words) - count - LANES
    flat, levels = splits.reshape(-1), -_SPLITS
    while (1 << (levels + _SPLITS)) < choices:
        levels += 1
    for first in range(0, width, count):
        lanes = min(count, width - first)
        for row in range(rows):
            if taken > most:
                return taken
            for lane in range(lanes - LANES, -1, -LANES):
                column, at = first + lane, row * width
                if choices == _BYTES:
                    taken = _take_bytes(
                        table, flat, words, states, codes, column, width, at, lane, taken
                    )
                else:
                    taken = _take(
                        table, flat, words, states, codes, column, width, levels, at, lane, taken
                    )
    return taken
