"""What a codec sends of a cut as one payload, and back.

A payload starts with the scales of its values: none for fp32, one for a batch in training, and one
a row at inference, so that a prediction never depends on who shares its batch. Fixed layouts then
pack bits without gaps, and zero bits up to a whole byte; the range layouts code symbols with counts
that adapt, and begin with the byte that says which history those have.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from vfl.compression.coding.bits import (
    Bits,
    IndexSet,
    Indices,
    from_bits,
    pack,
    packed_bytes,
    require_bytes,
    supports,
    to_bits,
    unpack,
)
from vfl.compression.coding.range_coder import (
    AdaptiveCounts,
    Coded,
    Reader,
    Shares,
    encode,
    next_symbol,
    symbols_limit_bytes,
)
from vfl.compression.coding.values import ValueCode, Values
from vfl.core.compiled import compiled, native
from vfl.core.errors import CorruptFrameError, TruncatedFrameError, WidthError
from vfl.core.frame import Payload

#: Counts an adaptive packer may hold; 32 MB with their running sums.
COUNTS_LIMIT = 2**21
#: What a symbol adds to its count, and what a code's count starts with.
_WEIGHT, _FIRST_COUNT = 24, 4


class Layout(ABC):
    """How the rows of one codec become bytes at one end of a link.

    In both kinds below `groups` counts the scales that travel: as many as rows, or 1 for the batch.
    `step` names the training step; it is None for a query, which nothing is learned from.
    """

    @abstractmethod
    def payload_limit(self, rows: int, groups: int) -> int:
        """Most bytes so many rows can take."""

    def commit(self, step: int) -> None:
        """A step is final at this end; see `vfl.compression.Codec.commit`."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Adaptive state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave."""


class SparseLayout(Layout):
    """For k indices and values a row."""

    @abstractmethod
    def pack(self, indices: Indices, values: Values, groups: int, step: int | None) -> bytes:
        """The payload of increasing indices and of their values, both of axes (rows, k)."""

    @abstractmethod
    def unpack(
        self, payload: Payload, rows: int, groups: int, step: int | None
    ) -> tuple[Indices, Values]:
        """The indices and values of a payload.

        Raises:
            FrameError: what `pack` could not have made.
        """


class DenseLayout(Layout):
    """For every value of a row."""

    @abstractmethod
    def pack(self, values: Values, groups: int, step: int | None) -> bytes:
        """The payload of values of axes (rows, width)."""

    @abstractmethod
    def unpack(self, payload: Payload, rows: int, groups: int, step: int | None) -> Values:
        """The values of a payload, axes (rows, width).

        Raises:
            FrameError: what `pack` could not have made.
        """


@dataclass(frozen=True)
class SparseFixed(SparseLayout):
    """k indices and values a row, all rows alike: the set of indices, then the codes in order.

    Attributes:
        sets: spells which indices are kept.
        code: spells their values.
    """

    sets: IndexSet
    code: ValueCode

    @property
    def row_bits(self) -> int:
        """Bits a row takes, scales not counted."""
        return self.sets.bits + self.sets.k * self.code.bits

    def payload_limit(self, rows: int, groups: int) -> int:
        """Bytes of every payload of so many rows."""
        return self.code.scale_bytes(groups) + packed_bytes(rows, self.row_bits)

    def pack(self, indices: Indices, values: Values, groups: int, step: int | None) -> bytes:
        scale, codes = self.code.encode(values, groups)
        return scale + self.sets.pack_rows(indices, codes, self.code.bits)

    def unpack(
        self, payload: Payload, rows: int, groups: int, step: int | None
    ) -> tuple[Indices, Values]:
        require_bytes(payload, self.payload_limit(rows, groups), rows)
        view, head = memoryview(payload), self.code.scale_bytes(groups)
        indices, codes = self.sets.unpack_rows(view[head:], rows, self.code.bits)
        return indices, self.code.decode(view[:head], codes, groups)


class SparseRange(SparseLayout):
    """k indices and values a row, range coded: often used indices and values get short.

    A row is its k indices, each coded knowing which one came before, then its k codes.

    Args:
        width, k: of the cut and of a row.
        code: spells the values, in at most 8 bits.

    Raises:
        WidthError: the table of counts would be too large.
    """

    def __init__(self, width: int, k: int, code: ValueCode) -> None:
        if k * width * width > COUNTS_LIMIT:
            raise WidthError(
                f"adaptive counts for {k} of {width} indices need too large a table",
                got=f"{k * width * width} numbers",
                want=f"at most {COUNTS_LIMIT}",
                fix="packer=enumerative",
            )
        self.width, self.k, self.code = width, k, code
        self._indices = AdaptiveCounts(first_index_counts(width, k), _WEIGHT)
        self._codes = AdaptiveCounts(np.full((1, 2**code.bits), _FIRST_COUNT), _WEIGHT)

    def payload_limit(self, rows: int, groups: int) -> int:
        return 1 + self.code.scale_bytes(groups) + symbols_limit_bytes(rows * 2 * self.k)

    def pack(self, indices: Indices, values: Values, groups: int, step: int | None) -> bytes:
        scale, codes = self.code.encode(values, groups)
        sides = [
            [share.reshape(-1, self.k) for share in counts.shares(coded)]
            for counts, coded in self._coded(indices, codes, step)
        ]
        rows = [np.concatenate(both, axis=1).reshape(-1) for both in zip(*sides, strict=True)]
        return self._indices.tag + scale + encode(Shares(*rows))

    def unpack(
        self, payload: Payload, rows: int, groups: int, step: int | None
    ) -> tuple[Indices, Values]:
        scale, body = self._indices.split(payload, self.code.scale_bytes(groups))
        reader = Reader(body)
        found = np.zeros((rows, 2 * self.k), np.int64)
        index_table, code_table, out = (
            native(each.reshape(-1))
            for each in (self._indices.cumulative, self._codes.cumulative, found)
        )
        sizes = rows, self.width, self.k
        if not _decode_sets(reader.raw, reader.state, index_table, code_table, *sizes, out):
            raise CorruptFrameError("a range-coded payload names no symbol")
        reader.finish()
        indices, codes = found[:, : self.k], found[:, self.k :]
        values = self.code.decode(scale, codes, groups)
        if step is not None:
            self._coded(indices, codes, step)
        return indices, values

    def commit(self, step: int) -> None:
        self._indices.commit(step)
        self._codes.commit(step)

    def state_dict(self) -> dict[str, Tensor]:
        return {
            prefix + name: value
            for prefix, counts in self._sides.items()
            for name, value in counts.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for prefix, counts in self._sides.items():
            own = {
                key.removeprefix(prefix): each
                for key, each in state.items()
                if key.startswith(prefix)
            }
            counts.load_state_dict(own)

    @property
    def _sides(self) -> dict[str, AdaptiveCounts]:
        """By the names that checkpoints have for them."""
        return {"places-": self._indices, "codes-": self._codes}

    def _coded(
        self, indices: Indices, codes: np.ndarray, step: int | None
    ) -> list[tuple[AdaptiveCounts, Coded]]:
        """The symbols of both sides, which a step's commit will count."""
        before = np.zeros_like(indices)
        before[:, 1:] = indices[:, :-1] + 1
        contexts = np.arange(self.k) * self.width + before
        flat = codes.astype(np.int64).reshape(-1)
        sides = [
            (self._indices, Coded(contexts.reshape(-1), indices.reshape(-1))),
            (self._codes, Coded(np.zeros_like(flat), flat)),
        ]
        if step is not None:
            for counts, coded in sides:
                counts.record(step, coded)
        return sides


@lru_cache(maxsize=16)
def first_index_counts(width: int, k: int) -> np.ndarray:
    """Counts as if every set of k indices were equally likely; axes (k x width, width).

    Context j x width + p + 1 is that of the index j whose predecessor is p (-1 for none): index x
    leaves C(width - 1 - x, r - 1) of the C(width - 1 - p, r) ways to go on, where r = k - j.
    """
    counts = np.zeros((k, width, width), np.int64)
    for j in range(k):
        left = k - j
        ways = np.array([math.comb(width - 1 - x, left - 1) for x in range(width)], object)
        for before in range(j - 1, width - left) if j else (-1,):
            possible = slice(before + 1, width - left + 1)
            all_ways = math.comb(width - 1 - before, left)
            counts[j, before + 1, possible] = 1 + 64 * ways[possible] // all_ways
    return counts.reshape(k * width, width)


@compiled
def _decode_sets(
    raw: Any, state: Any, indices: Any, codes: Any, rows: int, width: int, k: int, out: Any
) -> bool:
    code_count = len(codes) - 1
    for row in range(rows):
        base, before = row * 2 * k, -1
        for j in range(k):
            first = (j * width + before + 1) * (width + 1)
            before = next_symbol(raw, state, indices, first, width)
            if before < 0:
                return False
            out[base + j] = before
        for j in range(k):
            found = next_symbol(raw, state, codes, 0, code_count)
            if found < 0:
                return False
            out[base + k + j] = found
    return True


@dataclass(frozen=True)
class DenseFixed(DenseLayout):
    """Exactly `code.bits` bits a value, rows back to back.

    Attributes:
        width: of the cut.
        code: spells the values.
    """

    width: int
    code: ValueCode

    def payload_limit(self, rows: int, groups: int) -> int:
        """Bytes of every payload of so many rows."""
        return self.code.scale_bytes(groups) + packed_bytes(rows, self.width * self.code.bits)

    def pack(self, values: Values, groups: int, step: int | None) -> bytes:
        scale, codes = self.code.encode(values, groups)
        return scale + pack(to_bits(codes, self.code.bits))

    def unpack(self, payload: Payload, rows: int, groups: int, step: int | None) -> Values:
        require_bytes(payload, self.payload_limit(rows, groups), rows)
        view, head = memoryview(payload), self.code.scale_bytes(groups)
        bits = unpack(view[head:], rows, self.width * self.code.bits)
        return self.code.decode(view[:head], from_bits(bits, self.code.bits, self.width), groups)


@dataclass(frozen=True)
class DenseBitmap(DenseLayout):
    """One bit a value that says whether its code is not 0, then those codes.

    Attributes:
        width: of the cut.
        code: spells the values; 0 must be its code for zero.
    """

    width: int
    code: ValueCode

    def payload_limit(self, rows: int, groups: int) -> int:
        map_bytes = packed_bytes(rows, self.width)
        code_bytes = packed_bytes(rows, self.width * self.code.bits)
        return self.code.scale_bytes(groups) + map_bytes + code_bytes

    def pack(self, values: Values, groups: int, step: int | None) -> bytes:
        scale, codes = self.code.encode(values, groups)
        used = codes > 0
        spelt = to_bits(codes[used][:, None], self.code.bits)
        return scale + pack(used.astype(np.uint8)) + pack(spelt)

    def unpack(self, payload: Payload, rows: int, groups: int, step: int | None) -> Values:
        head = self.code.scale_bytes(groups)
        body = head + packed_bytes(rows, self.width)
        view = memoryview(payload)
        if len(view) < body:
            raise TruncatedFrameError(
                "a payload ends inside its bitmap", got=f"{len(view)} bytes", want=f"{body} or more"
            )
        used = unpack(view[head:body], rows, self.width).astype(np.bool_)
        codes = np.zeros((rows, self.width), np.int64)
        spelt = unpack(view[body:], int(np.count_nonzero(used)), self.code.bits)
        codes[used] = _nonzero_codes(spelt, self.code.bits)
        return self.code.decode(view[:head], codes, groups)


class DenseEnumerative(DenseLayout):
    """A mostly zero cut with as few bits as a code without memory can have.

    ceil(log2(width + 1)) bits a row say how many values are not zero, then ceil(log2 C(width, n))
    which ones (one number among all sets of that size, rows with fewer of them first), then come
    their codes row by row. How long a payload is tells how many values are not zero.

    Args:
        width: of the cut.
        code: spells the values; 0 must be its code for zero.
    """

    def __init__(self, width: int, code: ValueCode) -> None:
        self.width = width
        self.code = code
        self._count_bits = width.bit_length()
        self._supports = supports(width)

    def payload_limit(self, rows: int, groups: int) -> int:
        row_bits = self._supports.bits + np.arange(self.width + 1) * self.code.bits
        most = self._count_bits + int(row_bits.max())
        return self.code.scale_bytes(groups) + packed_bytes(rows, most)

    def pack(self, values: Values, groups: int, step: int | None) -> bytes:
        scale, codes = self.code.encode(values, groups)
        used = codes > 0
        spelt = (
            to_bits(used.sum(axis=1)[:, None], self._count_bits),
            self._supports.to_bits(used),
            to_bits(codes[used][:, None], self.code.bits),
        )
        return scale + pack(np.concatenate([bits.reshape(-1) for bits in spelt]))

    def unpack(self, payload: Payload, rows: int, groups: int, step: int | None) -> Values:
        view, head = memoryview(payload), self.code.scale_bytes(groups)
        counts = self._counts(view[head:], rows)
        sizes = rows * self._count_bits, int(self._supports.bits[counts].sum())
        total = sum(sizes) + int(counts.sum()) * self.code.bits
        bits = unpack(view[head:], 1, total)[0]
        _, sets, spelt = np.split(bits, np.cumsum(sizes))
        used = self._supports.from_bits(sets, counts)
        codes = np.zeros((rows, self.width), np.int64)
        codes[used] = _nonzero_codes(spelt.reshape(-1, self.code.bits), self.code.bits)
        return self.code.decode(view[:head], codes, groups)

    def _counts(self, body: memoryview, rows: int) -> np.ndarray:
        """How many values of each row are not zero."""
        bits = rows * self._count_bits
        size = packed_bytes(1, bits)
        if len(body) < size:
            raise TruncatedFrameError(
                "a payload ends inside its counts", got=f"{len(body)} bytes", want=f"{size} or more"
            )
        spelt = np.unpackbits(np.frombuffer(body[:size], np.uint8))[:bits]
        counts = from_bits(spelt.reshape(rows, self._count_bits), self._count_bits, 1)[:, 0]
        if (counts > self.width).any():
            raise CorruptFrameError("a payload says that a row has more values than it is wide")
        return counts


def _nonzero_codes(spelt: Bits, code_bits: int) -> np.ndarray:
    codes: np.ndarray = from_bits(spelt, code_bits, 1)[:, 0]
    if (codes == 0).any():
        raise CorruptFrameError("a payload marks a zero as a value")
    return codes


class DenseRange(DenseLayout):
    """Every value, range coded with the counts of its unit.

    A unit that is mostly zero costs a fraction of a bit.

    Args:
        width: of the cut.
        code: spells the values, in at most 8 bits.
    """

    def __init__(self, width: int, code: ValueCode) -> None:
        self.width = width
        self.code = code
        self._counts = AdaptiveCounts(np.full((width, 2**code.bits), _FIRST_COUNT), _WEIGHT)

    def payload_limit(self, rows: int, groups: int) -> int:
        return 1 + self.code.scale_bytes(groups) + symbols_limit_bytes(rows * self.width)

    def pack(self, values: Values, groups: int, step: int | None) -> bytes:
        scale, codes = self.code.encode(values, groups)
        coded = self._coded(codes, step)
        return self._counts.tag + scale + encode(self._counts.shares(coded))

    def unpack(self, payload: Payload, rows: int, groups: int, step: int | None) -> Values:
        scale, body = self._counts.split(payload, self.code.scale_bytes(groups))
        reader = Reader(body)
        codes = np.zeros((rows, self.width), np.int64)
        table, out = (native(each.reshape(-1)) for each in (self._counts.cumulative, codes))
        sizes = 2**self.code.bits, self.width
        if not _decode_units(reader.raw, reader.state, table, *sizes, out):
            raise CorruptFrameError("a range-coded payload names no symbol")
        reader.finish()
        values = self.code.decode(scale, codes, groups)
        if step is not None:
            self._coded(codes, step)
        return values

    def commit(self, step: int) -> None:
        self._counts.commit(step)

    def state_dict(self) -> dict[str, Tensor]:
        return self._counts.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._counts.load_state_dict(state)

    def _coded(self, codes: np.ndarray, step: int | None) -> Coded:
        """The symbols, which a step's commit will count."""
        units = np.broadcast_to(np.arange(self.width), codes.shape)
        coded = Coded(units.reshape(-1), codes.astype(np.int64).reshape(-1))
        if step is not None:
            self._counts.record(step, coded)
        return coded


@compiled
def _decode_units(raw: Any, state: Any, table: Any, count: int, width: int, out: Any) -> bool:
    for i in range(len(out)):
        found = next_symbol(raw, state, table, (i % width) * (count + 1), count)
        if found < 0:
            return False
        out[i] = found
    return True
