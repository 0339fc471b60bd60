"""Loops of the range coder that process 16 states at a time, in one vector register.

Numba does not vectorise these loops, because a state reads or writes a word only in some steps. So
`_give`, `_narrow` and `_take` insert LLVM code for 16 states into the code that numba compiles.
LLVM translates this code to the processor's instructions, from AVX-512 down to plain SSE2; the
results are the same. Tables are read symbol by symbol between these steps, because processors need
longer to read 16 entries as one vector. vfl imports this module only if numba is installed.

The code of this module does not check array indices, so callers must pass arrays of the documented
sizes. The code never uses a number from a payload as an index without a check: it masks symbols or
searches them between bounds, and it counts the words of the payload before each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

#: Number of states in a vector, and number of parts into which `_split` divides the symbols.
LANES, PARTS = 16, 16
#: Number of symbols that `_at_most` compares with a slot at once; a part has at most as many.
COMPARED = 16
_TOTAL_BITS, _WORD_BITS = 15, 16

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
        bits = self.builder.bitcast(self.value, ir.IntType(self.value.type.count))
        return self.builder.zext(self.builder.ctpop(bits), _Index)

    def twice(self) -> _Lanes:
        """Return a vector of 32 lanes: these lanes two times."""
        return self._picked([*range(LANES)] * 2)

    def folded(self) -> _Lanes:
        """Add the upper half of the lanes to the lower half."""
        half = self.value.type.count // 2
        return self._picked(range(half)) + self._picked(range(half, 2 * half))

    def _picked(self, lanes: Iterable[int]) -> _Lanes:
        pattern = ir.Constant(ir.VectorType(_Number, len([*lanes])), [*lanes])
        none = ir.Constant(self.value.type, ir.Undefined)
        return _Lanes(self.builder, self.builder.shuffle_vector(self.value, none, pattern))

    def _of(self, operation: Callable[[Any, Any], Any], other: Any) -> _Lanes:
        if isinstance(other, int):
            other = ir.Constant(self.value.type, [other] * self.value.type.count)
        elif isinstance(other, _Lanes):
            other = other.value
        else:  # the same number in all lanes
            kind, number = self.value.type, other
            if number.type != kind.element:
                number = self.builder.trunc(number, kind.element)
            first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), number, _Number(0))
            zeros = ir.Constant(_vector(_Number, kind.count), [0] * kind.count)
            other = self.builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)
        return _Lanes(self.builder, operation(self.value, other))


class _Memory:
    """An array in memory, which is read and written in vectors of 16 numbers."""

    def __init__(self, context: Any, builder: ir.IRBuilder, kind: Any, array: Any) -> None:
        self._builder = builder
        self._data = context.make_array(kind)(context, builder, array).data

    def load(self, first: Any, lanes: int = LANES) -> _Lanes:
        """Load 16 consecutive numbers, or another number of them."""
        kind = self._data.type.pointee
        read = self._builder.load(self._place(first, kind, lanes))
        read.align = kind.width // 8
        return _Lanes(self._builder, read)

    def load_pair(self, first: Any) -> Any:
        """Load two consecutive numbers of 16 bits as one of 32; the first is its lower half."""
        place = self._builder.gep(self._data, [first])
        read = self._builder.load(self._builder.bitcast(place, _Number.as_pointer()))
        read.align = 2
        return read

    def store(self, first: Any, numbers: _Lanes) -> None:
        """Store 16 consecutive numbers."""
        kind = self._data.type.pointee
        written = self._builder.store(numbers.value, self._place(first, kind))
        written.align = kind.width // 8

    def _place(self, first: Any, kind: ir.IntType, lanes: int = LANES) -> Any:
        place = self._builder.gep(self._data, [first])
        return self._builder.bitcast(place, _vector(kind, lanes).as_pointer())


def _vector(kind: Any, lanes: int = LANES) -> ir.VectorType:
    return ir.VectorType(kind, lanes)


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


def _sizes(pairs: _Lanes) -> tuple[_Lanes, _Lanes]:
    """Return the starts and sizes of shares, given each start and the next one in one number."""
    starts = pairs & 0xFFFF
    return starts, (pairs >> 16) - starts


def _giving(typing: Any, shares: Any, states: Any, words: Any, lane: Any, end: Any) -> Any:
    """Encode symbols with 16 states; return the position after the words.

    The word of the first of the 16 states comes first; `encode` reverses this order later.
    """
    arrays = shares, states, words
    signature = types.int64(*arrays, *(types.int64,) * 2)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, parts: Any) -> Any:
        shares, states, words = _arrays(context, builder, signature, parts, len(arrays))
        lane, end = parts[len(arrays) :]
        each, state = shares.load(lane), states.load(lane)
        starts, sizes = each >> 16, each & 0xFFFF
        gives = (state >> (32 - _TOTAL_BITS)) >= sizes
        words.store(end, state.compressed(gives).to(_Word))
        states.store(lane, _move(gives.where(state >> _WORD_BITS, state), starts, sizes))
        return builder.add(end, gives.marked())

    return signature, generate


_give: Any = intrinsic(_giving)


def _narrowing(
    typing: Any,
    splits: Any,
    states: Any,
    slots: Any,
    places: Any,
    column: Any,
    each: Any,
    lane: Any,
) -> Any:
    """Write the slots of 16 states, and the place in `starts` of the part that contains each slot.

    A part has `each` symbols.
    """
    arrays = splits, states, slots, places
    signature = types.void(*arrays, *(types.int64,) * 3)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, parts: Any) -> Any:
        splits, states, slots, places = _arrays(context, builder, signature, parts, len(arrays))
        column, each, lane = parts[len(arrays) :]
        found = (states.load(lane) & ((1 << _TOTAL_BITS) - 1)).to(_Word)
        slots.store(lane, found)
        after, line = (found + 1).twice(), builder.mul(column, _Index(PARTS))
        below = []
        for _ in range(PARTS // 2):  # a negative difference has its upper bit set
            below.append((splits.load(line, 2 * LANES) - after) >> (_WORD_BITS - 1))
            line = builder.add(line, _Index(2 * LANES))
        part = reduce(add, below).folded().to(_Number)
        stride = builder.add(builder.mul(each, _Index(PARTS)), _Index(COMPARED))
        firsts = (_numbered(builder) + column) * stride
        places.store(lane, firsts + part * each)
        return context.get_dummy_value()

    return signature, generate


_narrow: Any = intrinsic(_narrowing)


def _comparing(typing: Any, starts: Any, first: Any, slot: Any) -> Any:
    """Return how many of the next `COMPARED` starts from `first` on are at most `slot`."""
    signature = types.int64(starts, types.int64, types.uint16)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, parts: Any) -> Any:
        (starts,) = _arrays(context, builder, signature, parts, 1)
        return (starts.load(parts[1], COMPARED) <= parts[2]).marked()

    return signature, generate


_at_most: Any = intrinsic(_comparing)


def _sharing(typing: Any, starts: Any, place: Any) -> Any:
    """Return a start and the next one as one number, which `_sizes` reads."""
    signature = types.uint32(starts, types.int64)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, parts: Any) -> Any:
        (starts,) = _arrays(context, builder, signature, parts, 1)
        return starts.load_pair(parts[1])

    return signature, generate


_share: Any = intrinsic(_sharing)


def _taking(typing: Any, shares: Any, words: Any, states: Any, lane: Any, taken: Any) -> Any:
    """Decode symbols whose shares are known with 16 states; return the new number of words read."""
    arrays = shares, words, states
    signature = types.int64(*arrays, *(types.int64,) * 2)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, parts: Any) -> Any:
        shares, words, states = _arrays(context, builder, signature, parts, len(arrays))
        lane, taken = parts[len(arrays) :]
        starts, sizes = _sizes(shares.load(lane))
        return _taken(starts, sizes, words, states, lane, taken)

    return signature, generate


_take: Any = intrinsic(_taking)


def _taking_few(
    typing: Any,
    splits: Any,
    words: Any,
    states: Any,
    codes: Any,
    first: Any,
    fewer: Any,
    at: Any,
    lane: Any,
    taken: Any,
) -> Any:
    """Decode symbols of at most 16 with 16 states; return the new number of words read.

    Each part has one symbol, or the symbol number is the part's number without its `fewer` lowest
    bits.
    """
    arrays = splits, words, states, codes
    signature = types.int64(*arrays, *(types.int64,) * 5)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, parts: Any) -> Any:
        splits, words, states, codes = _arrays(context, builder, signature, parts, len(arrays))
        first, fewer, at, lane, taken = parts[len(arrays) :]
        slots = states.load(lane) & ((1 << _TOTAL_BITS) - 1)
        part, starts, ends = _split(splits, slots.to(_Word), builder.add(first, lane))
        codes.store(builder.add(at, lane), (part >> fewer).to(_Byte))
        return _taken(starts, ends - starts, words, states, lane, taken)

    return signature, generate


_take_few: Any = intrinsic(_taking_few)


def _taken(
    starts: _Lanes, sizes: _Lanes, words: _Memory, states: _Memory, lane: Any, taken: Any
) -> Any:
    """Move 16 states behind symbols with these shares; return the new number of words read."""
    state = states.load(lane)
    slots = state & ((1 << _TOTAL_BITS) - 1)
    state = sizes * (state >> _TOTAL_BITS) + slots - starts
    takes = state < (1 << _WORD_BITS)
    given = words.load(taken).chosen(takes.to(_Byte).sum_of_later().to(_Word)).to(_Number)
    states.store(lane, takes.where((state << _WORD_BITS) | given, state))
    return state.builder.add(taken, takes.marked())


def _split(splits: _Memory, slots: _Lanes, column: Any) -> tuple[_Lanes, ...]:
    """Return which sixteenth of the symbols contains each slot, with its start and end."""
    builder = slots.builder
    line = builder.mul(column, _Index(PARTS))
    lines = [builder.add(line, _Index(LANES * row)) for row in range(PARTS - 1)]
    middles = [splits.load(each) for each in lines]
    part, starts = slots - slots, slots - slots
    ends, step = starts + (1 << _TOTAL_BITS), PARTS
    while len(middles) % 2:  # compare with the middle start; go on with the lower or upper starts
        step >>= 1
        half = len(middles) // 2
        above = middles[half] <= slots
        part = above.where(part + step, part)
        starts, ends = above.where(middles[half], starts), above.where(ends, middles[half])
        pairs = zip(middles[half + 1 :], middles[:half], strict=True)
        middles = [above.where(upper, lower) for upper, lower in pairs]
    return part.to(_Number), starts.to(_Number), ends.to(_Number)


def _arrays(
    context: Any, builder: ir.IRBuilder, signature: Any, parts: Any, count: int
) -> list[_Memory]:
    """Return the first `count` arguments of a function, which are arrays."""
    pairs = zip(signature.args[:count], parts[:count], strict=True)
    return [_Memory(context, builder, kind, array) for kind, array in pairs]


@njit(cache=True, nogil=True)
def find_starts(table: Any, starts: Any, splits: Any) -> None:
    """Write the starts of all shares in the form that `encode` and `decode` read.

    Contexts with only one symbol, which changes no state, fill the last vector.

    Args:
        table: shares, uint32, axes (contexts, symbols); the number of symbols is a power of two.
        starts: output: the starts of each context, and then 2^15; uint16, axes (whole vectors,
            symbols + `COMPARED`).
        splits: output: the starts of the parts of each context except the first, and 2^15; uint16,
            axes (vectors, `PARTS`, `LANES`). With fewer than 16 symbols, some starts occur several
            times.
    """
    contexts, choices = table.shape
    each, copies = max(1, choices // PARTS), max(1, PARTS // choices)
    splits[:] = 1 << _TOTAL_BITS
    for context in range(len(starts)):
        own, vector, lane = starts[context], context // LANES, context % LANES
        own[:] = 1 << _TOTAL_BITS
        own[0] = 0
        if context < contexts:
            for symbol in range(choices):
                own[symbol] = table[context, symbol] >> 16
            for part in range(copies * (min(PARTS, choices) - 1)):
                splits[vector, part, lane] = own[(part // copies + 1) * each]


@njit(cache=True, nogil=True)
def encode(table: Any, codes: Any, states: Any, words: Any) -> int:
    """Encode all symbols from the last to the first; write the words in the decoder's order.

    A last vector that the columns do not fill has certain symbols, which change no state.

    Args:
        table: shares, uint32, axes (columns, symbols); the number of symbols is a power of two.
        codes: codes, uint8, axes (rows, columns).
        states: the states, uint32, a multiple of `LANES`; the function changes them.
        words: output, uint16, axes (2, rows x columns + LANES); the result is in the first row.

    Returns:
        The number of words written.
    """
    rows, width = codes.shape
    count, most, end, given = len(states), table.shape[1] - 1, 0, words[1]
    shares = np.empty(count, np.uint32)
    for first in range((width - 1) // count * count, -1, -count):
        lanes = min(count, width - first)
        shares[lanes:] = 1 << _TOTAL_BITS
        own = table[first : first + lanes]
        for row in range(rows - 1, -1, -1):
            symbols = codes[row, first : first + lanes]
            for lane in range(lanes):
                shares[lane] = own[lane, symbols[lane] & most]
            for lane in range(0, lanes, LANES):
                end = _give(shares, states, given, lane, end)
    ordered = words[0]
    for i in range(end):
        ordered[i] = given[end - 1 - i]
    return end


@njit(cache=True, nogil=True)
def decode(starts: Any, splits: Any, words: Any, states: Any, codes: Any) -> int:
    """Decode the words that `encode` wrote.

    For each row, all vectors first find the parts of their symbols. Then a loop finds each symbol
    in its part.

    Args:
        starts: see `find_starts`.
        splits: see `find_starts`.
        words: the payload's words, uint16, with room for at least len(states) + LANES more words.
        states: see `encode`.
        codes: output, uint8, axes (rows, whole vectors).

    Returns:
        The number of words read; for a payload that is too short, it exceeds the payload's number
        of words.
    """
    (rows, width), stride, choices = codes.shape, starts.shape[1], starts.shape[1] - COMPARED
    lines, flat, found = splits.reshape(-1), starts.reshape(-1), codes.reshape(-1)
    count, taken, each, fewer = len(states), 0, choices // PARTS, 0
    most = len(words) - count - LANES
    while choices << fewer < PARTS:
        fewer += 1
    slots, places = np.empty(count, np.uint16), np.empty(count, np.uint32)
    shares = np.empty(count, np.uint32)
    for first in range(0, width, count):
        lanes = min(count, width - first)
        for row in range(rows):
            if taken > most:
                return taken
            if choices <= PARTS:
                at = row * width + first
                for lane in range(lanes - LANES, -1, -LANES):
                    taken = _take_few(lines, words, states, found, first, fewer, at, lane, taken)
                continue
            for lane in range(0, lanes, LANES):
                _narrow(lines, states, slots, places, first + lane, each, lane)
            own, start = codes[row, first : first + lanes], first * stride
            for lane in range(lanes):
                place = np.int64(places[lane])
                place += _at_most(flat, place, slots[lane]) - 1
                own[lane] = place - start
                shares[lane] = _share(flat, place)
                start += stride
            for lane in range(lanes - LANES, -1, -LANES):
                taken = _take(shares, words, states, lane, taken)
    return taken
