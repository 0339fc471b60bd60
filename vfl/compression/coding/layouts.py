"""Layouts that write frequent symbols with fewer bits: they mark zeros, or use range coding.

A payload consists of a tag, the scales of its values, and the codes in the form that the layout
defines. Layouts of fixed length (`bits.IndexSet`) pack bits without gaps; zero bits fill the last
byte. `Range` codes symbols with adaptive counts. The tag of `Range` is a byte that shows which
symbols these counts have counted so far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl.compression.coding.bits import (
    Bits,
    Codes,
    EveryIndex,
    Indices,
    Layout,
    Mask,
    from_bits,
    gather_marked,
    index_set,
    pack,
    pack_codes,
    packed_bytes,
    require_head,
    require_rows,
    spread_marked,
    supports,
    to_bits,
    unpack,
    unpack_codes,
)
from vfl.compression.coding.range_coder import (
    AdaptiveCounts,
    Cells,
    Reader,
    decode_columns,
    encode,
    encode_columns,
    next_symbol,
    symbols_limit_bytes,
)
from vfl.core.compiled import compiled, native
from vfl.core.errors import CorruptFrameError, WidthError

#: Largest number of counts of indices in an adaptive packer; counts and shares then take 16 MB.
COUNTS_LIMIT = 2**21
_BYTE = 8
#: Amount that each occurrence of a symbol adds to its count, and the initial count of a code.
_WEIGHT, _FIRST_COUNT = 24, 4
#: Names under which checkpoints store the content of steps that wait for `commit`.
_CODED = "waiting-indices", "waiting-codes"


def new_layout(packer: str, width: int, k: int | None, code_bits: int) -> Layout:
    """Make a layout with its initial state.

    Args:
        packer: "range", "enumerative" or "bitmap"; also "index" if k values per row are sent, or
            "dense" if all values are sent.
        width: width of the cut.
        k: number of values sent per row; None sends all. With None, "enumerative" and "bitmap"
            write no code for zeros (code 0).
        code_bits: number of bits of a code.

    Raises:
        WidthError: the layout would need a table that is too large.
    """
    if packer == "range":
        return Range(width, k, code_bits)
    if k is not None:
        return index_set(packer, width, k, code_bits)
    if packer == "dense":
        return EveryIndex(width, width, code_bits)
    return (DenseBitmap if packer == "bitmap" else DenseEnumerative)(width, code_bits)


class DenseBitmap(Layout):
    """Layout with one bit per value, which is 1 for codes other than 0; then these codes follow.

    Args:
        width: width of the cut.
        code_bits: number of bits of a code; code 0 must represent the value zero.
    """

    def __init__(self, width: int, code_bits: int) -> None:
        self.k = width
        self.code_bits = code_bits

    def limit_bytes(self, rows: int) -> int:
        return packed_bytes(rows, self.k) + packed_bytes(rows, self.k * self.code_bits)

    def pack(self, indices: Indices, codes: Codes) -> bytes:
        used = codes != 0
        if self.code_bits > _BYTE:
            spelt = pack(to_bits(codes[used][:, None], self.code_bits))
        else:
            kept = torch.from_numpy(gather_marked(_in_bytes(codes), used))
            spelt = pack_codes(kept, self.code_bits).numpy().tobytes()
        return np.packbits(used.reshape(-1)).tobytes() + spelt

    def unpack(self, body: memoryview, rows: int) -> tuple[Indices, Codes]:
        end = packed_bytes(rows, self.k)
        require_head(body, end, "its bitmap")
        used = unpack(body[:end], rows, self.k).astype(np.bool_)
        count = int(np.count_nonzero(used))
        if self.code_bits > _BYTE:
            return _placed(used, unpack(body[end:], count, self.code_bits))
        raw = require_rows(body[end:], count, self.code_bits)
        kept = unpack_codes(torch.from_numpy(raw.copy()), count, self.code_bits).numpy()
        if not kept.all():
            raise _marks_a_zero()
        return np.zeros((rows, 0), np.int64), spread_marked(kept, used)


class DenseEnumerative(DenseBitmap):
    """Layout for mostly zero cuts, for which it needs the fewest bits without adaptive state.

    First, ceil(log2(width + 1)) bits per row state the number n of its non-zero values. Then
    ceil(log2 C(width, n)) bits per row identify which values these are: the rank of their set of
    indices among all sets of n indices. Rows with a smaller n come first. The codes of the non-zero
    values follow row by row. A payload's length discloses the number of non-zero values.
    """

    def __init__(self, width: int, code_bits: int) -> None:
        super().__init__(width, code_bits)
        self._count_bits = width.bit_length()
        self._supports = supports(width)

    def limit_bytes(self, rows: int) -> int:
        row_bits = self._supports.bits + np.arange(self.k + 1) * self.code_bits
        return packed_bytes(rows, self._count_bits + int(row_bits.max()))

    def pack(self, indices: Indices, codes: Codes) -> bytes:
        used = codes > 0
        spelt = (
            to_bits(used.sum(axis=1)[:, None], self._count_bits),
            self._supports.to_bits(used),
            to_bits(codes[used][:, None], self.code_bits),
        )
        return pack(np.concatenate([bits.reshape(-1) for bits in spelt]))

    def unpack(self, body: memoryview, rows: int) -> tuple[Indices, Codes]:
        counts = self._counts(body, rows)
        sizes = rows * self._count_bits, int(self._supports.bits[counts].sum())
        bits = unpack(body, 1, sum(sizes) + int(counts.sum()) * self.code_bits)[0]
        _, sets, spelt = np.split(bits, np.cumsum(sizes))
        used = self._supports.from_bits(sets, counts)
        return _placed(used, spelt.reshape(-1, self.code_bits))

    def _counts(self, body: memoryview, rows: int) -> np.ndarray:
        """Return the number of non-zero values in each row of a payload."""
        bits = rows * self._count_bits
        end = packed_bytes(1, bits)
        require_head(body, end, "its counts")
        spelt = np.unpackbits(np.frombuffer(body[:end], np.uint8))[:bits]
        counts = from_bits(spelt.reshape(rows, self._count_bits), self._count_bits, 1)[:, 0]
        if (counts > self.k).any():
            raise CorruptFrameError("a payload states more values for a row than its width")
        return counts


def _placed(used: Mask, spelt: Bits) -> tuple[Indices, Codes]:
    """Decode the bits of the non-zero codes; return the indices and the codes of all values."""
    codes = np.zeros(used.shape, np.int64)
    codes[used] = from_bits(spelt, spelt.shape[1], 1)[:, 0]
    if (codes[used] == 0).any():
        raise _marks_a_zero()
    return np.zeros((len(used), 0), np.int64), codes


def _marks_a_zero() -> CorruptFrameError:
    return CorruptFrameError("a payload marks a zero as a value")


class Range(Layout):
    """Layout that uses range coding, which writes frequent symbols with fewer bits.

    If k values per row are sent, the layout writes the k indices and then the k codes. The shares
    (probabilities) with which an index is coded depend on the previous index. Otherwise it writes a
    code for every value. Each unit has its own counts, so that a value of a mostly zero unit takes
    only a fraction of a bit.

    Args:
        width: width of the cut.
        k: number of values sent per row; None sends all.
        code_bits: number of bits of a code, at most 8.

    Raises:
        WidthError: the layout would need a table of counts that is too large.
    """

    def __init__(self, width: int, k: int | None, code_bits: int) -> None:
        self.width, self.k = width, width if k is None else k
        self._index_count, contexts = (0, width) if k is None else (k, 1)
        self._codes = AdaptiveCounts(np.full((contexts, 2**code_bits), _FIRST_COUNT), _WEIGHT)
        #: Names of the tables of counts in checkpoints.
        self._sides = {"": self._codes}
        self._waiting: dict[int, tuple[Indices, Codes]] = {}
        if k is not None:
            if k * width * width > COUNTS_LIMIT:
                raise WidthError(
                    f"adaptive counts for {k} of {width} indices need too large a table",
                    got=f"{k * width * width} numbers",
                    want=f"at most {COUNTS_LIMIT}",
                    fix="packer=enumerative",
                )
            indices = AdaptiveCounts(first_index_counts(width, k), _WEIGHT)
            self._sides = {"places-": indices, "codes-": self._codes}

    @property
    def tag(self) -> bytes:
        return next(iter(self._sides.values())).tag

    def limit_bytes(self, rows: int) -> int:
        return symbols_limit_bytes(rows * (self._index_count + self.k))

    def pack(self, indices: Indices, codes: Codes) -> bytes:
        if not self._index_count:
            return encode_columns(self._codes.table, _in_bytes(codes))
        tables = (counts.table.reshape(-1) for counts in self._sides.values())
        cells = self._cells(indices, codes)
        shares = [table[each] for table, each in zip(tables, cells, strict=True)]
        return encode(np.concatenate(shares, axis=1).reshape(-1))

    def unpack(self, body: memoryview, rows: int) -> tuple[Indices, Codes]:
        indices = np.zeros((rows, self._index_count), np.int64)
        if not self._index_count:
            return indices, decode_columns(body, self._codes, rows)
        codes = np.zeros((rows, self.k), np.uint8)
        reader = Reader(body)
        tables = [counts.table.reshape(-1) for counts in self._sides.values()]
        parts: list[Any] = [reader.words, reader.states, reader.taken, indices, codes, *tables]
        if not _decode(self.width, *(native(part) for part in parts)):
            raise CorruptFrameError("a range-coded payload names no symbol")
        reader.finish()
        return indices, codes

    def record(self, step: int, indices: Indices, codes: Codes) -> None:
        self._waiting[step] = indices, codes

    def commit(self, step: int) -> None:
        if (coded := self._waiting.pop(step, None)) is None:
            return
        if not self._index_count:
            self._codes.count_columns(step, _in_bytes(coded[1]))
            return
        for counts, cells in zip(self._sides.values(), self._cells(*coded), strict=True):
            counts.count(step, cells.reshape(-1))

    def state_dict(self) -> dict[str, Tensor]:
        state = {
            prefix + name: value
            for prefix, counts in self._sides.items()
            for name, value in counts.state_dict().items()
        }
        for step, coded in self._waiting.items():
            for name, each in zip(_CODED, coded, strict=True):
                state[f"{name}-{step}"] = torch.tensor(each)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for prefix, counts in self._sides.items():
            own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            counts.load_state_dict(own)
        steps = [int(name.rpartition("-")[2]) for name in state if name.startswith(_CODED[0])]
        self._waiting = {
            step: (
                state[f"{_CODED[0]}-{step}"].numpy().copy(),
                state[f"{_CODED[1]}-{step}"].numpy().copy(),
            )
            for step in steps
        }

    def _cells(self, indices: Indices, codes: Codes) -> list[Cells]:
        """Return a frame's symbols' positions in the tables of counts: indices, then codes."""
        before = np.zeros_like(indices)
        before[:, 1:] = indices[:, :-1] + 1
        contexts = np.arange(self.k) * self.width + before
        return [
            self._sides["places-"].cells(contexts, indices),
            self._codes.cells(np.zeros((), np.int64), codes),
        ]


def _in_bytes(codes: Codes) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(codes, np.uint8)


@lru_cache(maxsize=16)
def first_index_counts(width: int, k: int) -> np.ndarray:
    """Return counts with which every set of k indices is equally likely; axes (k x width, width).

    Row j x width + p + 1 is the context of the j-th index if the previous index is p (-1 if there
    is none). Of the C(width - 1 - p, r) possible continuations, where r = k - j, C(width - 1 - x, r
    - 1) begin with index x.
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
def _decode(
    width: int,
    words: Any,
    states: Any,
    taken: Any,
    indices: Any,
    codes: Any,
    index_table: Any,
    code_table: Any,
) -> bool:
    """Decode indices and codes row by row; return False if a symbol cannot occur."""
    rows, k = codes.shape
    choices = len(code_table)
    for row in range(rows):
        before = -1
        for j in range(k):
            first = (j * width + before + 1) * width
            before = next_symbol(words, states, taken, index_table, first, width)
            if before < 0:
                return False
            indices[row, j] = before
        for j in range(k):
            codes[row, j] = next_symbol(words, states, taken, code_table, 0, choices)
    return True
