"""Numbers and sets of indices as bits, in formats whose length is known in advance.

The functions turn a table of fields (numbers of a fixed number of bits) into a table of bits, one
byte per bit. The functions join such tables of bits row by row, and pack the rows without gaps;
zero bits fill the last byte. A field may have any number of bits; its most significant bit comes
first.

The k kept indices of a row of width d form a set. `Enumerative` gives each of the C(d, k) possible
sets a number (the combinatorial number system). No format with a fixed number of bits per set takes
fewer bits than such a number. `PlainIndex` writes each index separately, and `Bitmap` writes one
bit for each possible index. `Supports` numbers sets whose size differs from row to row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl.compression.coding import loops
from vfl.core import compiled
from vfl.core.errors import CorruptFrameError, TruncatedFrameError, WidthError
from vfl.core.frame import Payload

Indices = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
#: Integer codes in an array of any integer type, or in a uint8 tensor, which may stay on a GPU.
Codes: TypeAlias = Any
Bits = npt.NDArray[np.uint8]

_BYTE = 8
WORD_BITS = 63  # widest field that an int64 can hold
TABLE_LIMIT = 2**19  # binomials in an enumerative packer; 4 MB if below 2^63.
#: Largest number of binomials in the table of `Supports`: about 30 MB of Python integers. The table
#: grows only as far as rows need it.
SUPPORT_TABLE_LIMIT = 2**18


def word_bytes(field_bits: int) -> int:
    """Return how many bytes a field takes: a machine word, or a byte string above 64 bits."""
    least = -(-field_bits // 8)
    return least if least > 8 else max(1, 1 << (least - 1).bit_length())


def to_bits(fields: np.ndarray, field_bits: int) -> Bits:
    """Write each field with `field_bits` bits.

    Args:
        fields: the fields, axes (rows, fields), with values in [0, 2^field_bits); Python integers
            (dtype object) if a field has more than 63 bits.
        field_bits: number of bits of every field; may be 0.

    Returns:
        Zeros and ones, uint8, axes (rows, fields x field_bits).
    """
    rows, count = fields.shape
    size = word_bytes(field_bits)
    if fields.dtype == object:
        joined = b"".join(int(field).to_bytes(size, "big") for field in fields.flat)
        raw = np.frombuffer(joined, np.uint8)
    else:
        raw = np.ascontiguousarray(fields, f">u{size}").view(np.uint8).reshape(-1)
    spelt = np.unpackbits(raw).reshape(rows * count, 8 * size)
    return spelt[:, 8 * size - field_bits :].reshape(rows, count * field_bits)


def from_bits(bits: Bits, field_bits: int, count: int) -> np.ndarray:
    """Return the fields that `to_bits` wrote.

    Args:
        bits: zeros and ones, axes (rows, count x field_bits).
        field_bits: number of bits of every field.
        count: number of fields in a row.

    Returns:
        The fields, axes (rows, count): int64, or Python integers (dtype object) above 63 bits.
    """
    rows = len(bits)
    size = word_bytes(field_bits)
    spelt = np.zeros((rows * count, 8 * size), np.uint8)
    spelt[:, 8 * size - field_bits :] = bits.reshape(rows * count, field_bits)
    raw = np.packbits(spelt.reshape(-1))
    if field_bits <= WORD_BITS:
        return raw.view(f">u{size}").astype(np.int64).reshape(rows, count)
    joined = raw.tobytes()
    numbers = np.empty(rows * count, object)
    starts = range(0, len(joined), size)
    numbers[:] = [int.from_bytes(joined[start : start + size], "big") for start in starts]
    return numbers.reshape(rows, count)


def packed_bytes(rows: int, row_bits: int) -> int:
    """Return the number of bytes that `rows` rows of `row_bits` bits take."""
    return -(-rows * row_bits // 8)


def pack(bits: Bits) -> bytes:
    """Pack rows of bits into bytes, without gaps between the rows."""
    return np.packbits(bits.reshape(-1)).tobytes()


def unpack(payload: Payload, rows: int, row_bits: int) -> Bits:
    """Return the rows of bits in a payload, axes (rows, row_bits).

    Raises:
        TruncatedFrameError: the payload is longer or shorter than its rows.
        CorruptFrameError: a bit after the last row is set.
    """
    raw = require_rows(payload, rows, row_bits)
    return np.unpackbits(raw, count=rows * row_bits).reshape(rows, row_bits)


def pack_codes(codes: Tensor, code_bits: int) -> Tensor:
    """Pack codes of at most 8 bits without gaps, like `pack`, on the device of the codes.

    The function divides the codes into the smallest groups that fill whole bytes. The function
    joins the codes of each group to one number, and then splits this number into bytes.

    Args:
        codes: the codes, uint8, axes (codes,).
        code_bits: number of bits of a code.

    Returns:
        The packed bytes, uint8, axes (bytes,).
    """
    each, size = _whole_bytes(code_bits)
    padded = torch.nn.functional.pad(codes, (0, -len(codes) % each)).reshape(-1, each)
    wide = torch.uint8 if size == 1 else torch.int32 if size < 4 else torch.int64
    columns = padded.to(wide).unbind(1)
    joined = columns[0]
    for column in columns[1:]:
        joined = (joined << code_bits) | column
    if size > 1:
        parts = [(joined >> _BYTE * place).to(torch.uint8) for place in reversed(range(size))]
        joined = torch.stack(parts, dim=1).reshape(-1)
    return joined[: packed_bytes(len(codes), code_bits)]


def unpack_codes(packed: Tensor, count: int, code_bits: int) -> Tensor:
    """Return the codes that `pack_codes` packed; uint8, axes (codes,)."""
    each, size = _whole_bytes(code_bits)
    parts = torch.nn.functional.pad(packed, (0, -len(packed) % size)).reshape(-1, size)
    joined = parts[:, 0]
    for place in range(1, size):
        joined = (joined.long() << _BYTE) | parts[:, place]
    most = (1 << code_bits) - 1
    codes = [(joined >> code_bits * place & most).byte() for place in reversed(range(each))]
    return torch.stack(codes, dim=1).reshape(-1)[:count]


def _whole_bytes(code_bits: int) -> tuple[int, int]:
    """Return the smallest number of codes that fill whole bytes, and how many bytes they fill."""
    shared = math.gcd(code_bits, _BYTE)
    return _BYTE // shared, code_bits // shared


def require_rows(payload: Payload, rows: int, row_bits: int) -> npt.NDArray[np.uint8]:
    """Check that a payload has the length of `rows` rows of bits, and return its bytes.

    Raises:
        TruncatedFrameError: the payload is longer or shorter than its rows.
        CorruptFrameError: a bit after the last row is set.
    """
    require_bytes(payload, packed_bytes(rows, row_bits), rows)
    raw = np.frombuffer(payload, np.uint8)
    behind = -rows * row_bits % 8
    if behind and raw[-1] & ((1 << behind) - 1):
        raise CorruptFrameError("a payload has bits after its last row")
    return raw


def require_bytes(payload: Payload, wanted_bytes: int, rows: int) -> None:
    """Refuse a payload with a wrong number of bytes.

    Raises:
        TruncatedFrameError: the payload has a wrong length; the error states the right length.
    """
    if len(payload) != wanted_bytes:
        raise TruncatedFrameError(
            "a payload has the wrong length",
            got=f"{len(payload)} bytes",
            want=f"{wanted_bytes} bytes for {rows} rows",
        )


def require_head(payload: Payload, wanted_bytes: int, what: str) -> None:
    """Refuse a payload that ends before the end of its part `what`.

    Raises:
        TruncatedFrameError: the payload is too short.
    """
    if len(payload) < wanted_bytes:
        raise TruncatedFrameError(
            f"a payload ends inside {what}",
            got=f"{len(payload)} bytes",
            want=f"{wanted_bytes} or more",
        )


def gather_marked(numbers: np.ndarray, mask: Mask) -> np.ndarray:
    """Return the numbers at the positions that a mask marks, as a flat array."""
    if not compiled.COMPILED:
        return numbers[mask]
    found = np.empty(numbers.size + 1, numbers.dtype)
    marks = np.ascontiguousarray(mask).reshape(-1).view(np.uint8)
    return found[: loops.gather_marked(np.ascontiguousarray(numbers).reshape(-1), marks, found)]


def spread_marked(found: np.ndarray, mask: Mask) -> np.ndarray:
    """Return an array, axes as the mask, with numbers at marked positions and 0 at all others.

    Raises:
        ValueError: the number of values differs from the number of marked positions.
    """
    if not compiled.COMPILED:
        numbers = np.zeros(mask.shape, found.dtype)
        numbers[mask] = found
        return numbers
    if len(found) != np.count_nonzero(mask):
        raise ValueError("the number of values differs from the number of marks in the mask")
    patterns = np.append(found, found.dtype.type(0)).view(f"u{found.itemsize}")
    spread = np.empty(mask.shape, patterns.dtype)
    marks = np.ascontiguousarray(mask).reshape(-1).view(np.uint8)
    loops.spread_marked(patterns, marks, spread.reshape(-1))
    return spread.view(found.dtype)


def index_bits(width: int) -> int:
    """Return ceil(log2 width), the number of bits of one index."""
    return (width - 1).bit_length()


class Layout(ABC):
    """Base class of formats for codes and their indices; each party has its own object.

    Attributes:
        k: number of codes in a row.
        fixed: whether payloads with the same number of rows always have the same length.
        device: device for decoded codes, in layouts that can leave codes on a GPU.
    """

    k: int
    fixed: ClassVar[bool] = False
    device: torch.device = torch.device("cpu")

    @property
    def tag(self) -> bytes:
        """Return a prefix of each payload, which shows whether both parties have the same state."""
        return b""

    @abstractmethod
    def limit_bytes(self, rows: int) -> int:
        """Return the largest size in bytes of `rows` rows of codes, without the tag."""

    @abstractmethod
    def pack(self, indices: Indices, codes: Codes) -> bytes:
        """Pack the codes of a cut as bytes.

        Args:
            indices: for each row, the indices of its codes, strictly increasing, axes (rows, k);
                empty, axes (rows, 0), if every value has a code.
            codes: the codes, axes (rows, k).
        """

    @abstractmethod
    def unpack(self, body: memoryview, rows: int) -> tuple[Indices, Codes]:
        """Return the indices and codes that `pack` packed.

        Raises:
            FrameError: `pack` could not have made these bytes.
        """

    def record(self, step: int, indices: Indices, codes: Codes) -> None:
        """Store the content of a training step's frame until `commit` is called for the step."""

    def commit(self, step: int) -> None:
        """Mark a step as final at this party; see `vfl.compression.Codec.commit`."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the adaptive state for checkpoints."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state that `state_dict` returned."""


class IndexSet(Layout):
    """Base class of layouts in which `k` indices of a row always take the same number of bits.

    For each row, its set of indices is written and then its codes, without gaps between rows.

    Args:
        width: number of units in a row of the cut.
        k: number of indices in a row.
        code_bits: number of bits of a code.

    Attributes:
        bits: number of bits that a set of indices takes.
    """

    fixed = True
    bits: int

    def __init__(self, width: int, k: int, code_bits: int = 0) -> None:
        self.width = width
        self.k = k
        self.code_bits = code_bits

    @abstractmethod
    def to_bits(self, indices: Indices) -> Bits:
        """Return each row's set as bits, axes (rows, bits), given increasing indices (rows, k)."""

    @abstractmethod
    def from_bits(self, bits: Bits) -> Indices:
        """Return the indices that `to_bits` wrote.

        Raises:
            CorruptFrameError: these bits do not encode any set of indices.
        """

    @property
    def row_bits(self) -> int:
        """Return the number of bits of a row, with indices and codes."""
        return self.bits + self.k * self.code_bits

    def limit_bytes(self, rows: int) -> int:
        return packed_bytes(rows, self.row_bits)

    def pack(self, indices: Indices, codes: Codes) -> bytes:
        return pack(np.concatenate([self.to_bits(indices), to_bits(codes, self.code_bits)], axis=1))

    def unpack(self, body: memoryview, rows: int) -> tuple[Indices, Codes]:
        bits = unpack(body, rows, self.row_bits)
        return self.from_bits(bits[:, : self.bits]), from_bits(
            bits[:, self.bits :], self.code_bits, self.k
        )


class EveryIndex(IndexSet):
    """Layout with a code for every index of a row, so that the indices need no bits."""

    bits = 0

    def to_bits(self, indices: Indices) -> Bits:
        return np.zeros((len(indices), 0), np.uint8)

    def from_bits(self, bits: Bits) -> Indices:
        return np.zeros((len(bits), 0), np.int64)

    def pack(self, indices: Indices, codes: Codes) -> bytes:
        if self.code_bits > _BYTE:
            return super().pack(indices, codes)
        if not isinstance(codes, Tensor):
            codes = torch.from_numpy(codes.astype(np.uint8, copy=False))
        return pack_codes(codes.reshape(-1), self.code_bits).cpu().numpy().tobytes()

    def unpack(self, body: memoryview, rows: int) -> tuple[Indices, Codes]:
        if self.code_bits > _BYTE or not rows:
            return super().unpack(body, rows)
        raw = torch.from_numpy(require_rows(body, rows, self.row_bits).copy()).to(self.device)
        codes = unpack_codes(raw, rows * self.k, self.code_bits).reshape(rows, self.k)
        none = np.zeros((rows, 0), np.int64)
        return none, codes.numpy() if self.device.type == "cpu" else codes


class PlainIndex(IndexSet):
    """Layout with k increasing indices of ceil(log2 width) bits each."""

    def __init__(self, width: int, k: int, code_bits: int = 0) -> None:
        super().__init__(width, k, code_bits)
        self.bits = k * index_bits(width)

    def to_bits(self, indices: Indices) -> Bits:
        return to_bits(indices, index_bits(self.width))

    def from_bits(self, bits: Bits) -> Indices:
        indices: Indices = from_bits(bits, index_bits(self.width), self.k)
        if (indices >= self.width).any() or (indices[:, 1:] <= indices[:, :-1]).any():
            raise CorruptFrameError("a payload's indices are not increasing indices of its row")
        return indices


class Bitmap(IndexSet):
    """Layout with one bit for every index of the row."""

    def __init__(self, width: int, k: int, code_bits: int = 0) -> None:
        super().__init__(width, k, code_bits)
        self.bits = width

    def to_bits(self, indices: Indices) -> Bits:
        bits = np.zeros((len(indices), self.width), np.uint8)
        np.put_along_axis(bits, indices, 1, axis=1)
        return bits

    def from_bits(self, bits: Bits) -> Indices:
        if (bits.sum(axis=1, dtype=np.int64) != self.k).any():
            raise CorruptFrameError(
                "a payload marks a number of indices that differs from the agreed number"
            )
        return bits.nonzero()[1].reshape(-1, self.k)


class Enumerative(IndexSet):
    """Layout with one number per row: the sum over j of C(c_j, j), for indices c_1 < ... < c_k.

    In this combinatorial number system (Lehmer), every number in [0, C(width, k)), called a rank,
    stands for exactly one set of k indices.

    >>> Enumerative(width=128, k=3).bits, PlainIndex(width=128, k=3).bits
    (19, 21)
    """

    def __init__(self, width: int, k: int, code_bits: int = 0) -> None:
        super().__init__(width, k, code_bits)
        self.count = math.comb(width, k)
        self.bits = (self.count - 1).bit_length()
        self._limb_count = max(1, -(-self.bits // loops.LIMB_BITS))
        self._columns = _columns(width, k)
        narrow = [column for column in self._columns if column.dtype == np.int64]
        self._narrow = np.concatenate(narrow)
        self._starts = np.arange(len(narrow)) * (width - k)

    def to_bits(self, indices: Indices) -> Bits:
        narrow = len(self._starts)
        rank = np.einsum("ij->i", self._narrow[indices[:, :narrow] + self._starts])
        for j in range(narrow, self.k):
            rank = rank + self._columns[j][indices[:, j] - j]
        return to_bits(rank[:, None], self.bits)

    def from_bits(self, bits: Bits) -> Indices:
        rank = from_bits(bits, self.bits, 1)[:, 0]
        if (rank >= self.count).any():
            raise _no_such_set()
        indices = np.empty((len(rank), self.k), np.int64)
        for j in reversed(range(1, self.k)):
            column = self._columns[j]
            rank = rank.astype(column.dtype, copy=False)
            above = np.searchsorted(column, rank, side="right") - 1
            indices[:, j] = above + j
            rank = rank - column[above]
        indices[:, 0] = rank  # the first term C(c, 1) is the index c itself
        return indices

    def pack(self, indices: Indices, codes: Codes) -> bytes:
        if not self._is_compiled:
            return super().pack(indices, codes)
        out = np.zeros(self.limit_bytes(len(indices)), np.uint8)
        numbers = codes.astype(np.int64, copy=False)
        loops.pack_rows(indices, numbers, self._tables[0], self.bits, self.code_bits, out)
        return out.tobytes()

    def unpack(self, body: memoryview, rows: int) -> tuple[Indices, Codes]:
        if not self._is_compiled:
            return super().unpack(body, rows)
        raw = require_rows(body, rows, self.row_bits)
        indices, codes = np.empty((2, rows, self.k), np.int64)
        sizes = self.bits, self.code_bits
        if not loops.unpack_rows(raw.copy(), *self._tables, *sizes, indices, codes):
            raise _no_such_set()
        return indices, codes

    @property
    def _is_compiled(self) -> bool:
        return compiled.COMPILED and self._limb_count <= loops.MOST_LIMBS

    @cached_property
    def _tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the table of terms and the number of sets, for the functions of `loops`."""
        return _limbs(self._columns, self._limb_count), _limbs([[self.count]], self._limb_count)


def _no_such_set() -> CorruptFrameError:
    return CorruptFrameError("a payload names a set of indices that does not exist")


def _limbs(numbers: Sequence[Any], count: int) -> np.ndarray:
    """Split integers into `count` limbs of `loops.LIMB_BITS` bits each, along a new first axis."""
    whole = np.array(numbers, object)
    parts = [whole >> loops.LIMB_BITS * limb for limb in range(count)]
    return np.array([part & 2**loops.LIMB_BITS - 1 for part in parts], np.int64)


def _columns(width: int, k: int) -> list[np.ndarray]:
    """Return the terms of a rank: for j = 0..k-1, the numbers C(j + i, j + 1) for i = 0..width-k.

    Entry i of column j is the number that index j + i, as the j-th index of a set, adds to a rank.
    Each column is the cumulative sum of the previous column. A column has dtype int64 as long as
    sums of its terms fit; later columns hold Python integers.
    """
    columns = []
    column: np.ndarray = np.ones(width - k + 1, np.int64)
    column[0] = 0
    for j in range(k):
        if math.comb(width - k + j + 1, j + 1) >= 2**WORD_BITS:
            column = column.astype(object)
        column = np.cumsum(column, dtype=column.dtype)
        columns.append(column)
    return columns


@lru_cache(maxsize=32)
def index_set(packer: str, width: int, k: int, code_bits: int = 0) -> IndexSet:
    """Return the layout `packer` (enumerative, index or bitmap) for `k` of `width` indices.

    Raises:
        WidthError: the table of the enumerative layout would be too large.
    """
    if packer != "enumerative":
        return (PlainIndex if packer == "index" else Bitmap)(width, k, code_bits)
    if k * (width - k + 1) > TABLE_LIMIT:
        raise WidthError(
            f"enumerating {k} of {width} indices needs too large a table",
            got=f"{k * (width - k + 1)} numbers",
            want=f"at most {TABLE_LIMIT}",
            fix="packer=index",
        )
    return Enumerative(width, k, code_bits)


class Supports:
    """Encoding of sets with n of `width` indices, in ceil(log2 C(width, n)) bits, for any size n.

    If a set would need a larger table than allowed, its row is written with one bit per index
    instead; up to a width of 724, no set needs one.

    Args:
        width: width of the cut.

    Attributes:
        bits: for n = 0..width, the number of bits that a set with n indices takes.

    >>> Supports(128).bits[[0, 3, 64, 125, 128]].tolist()
    [0, 19, 125, 19, 0]
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._most = min(width // 2, SUPPORT_TABLE_LIMIT // width)
        self._sets = [math.comb(width, size) for size in range(self._most + 1)]
        self._most_in_words = sum(count <= 2**WORD_BITS for count in self._sets) - 1
        self._columns = np.arange(width).astype(object)[None]
        self._words: npt.NDArray[np.int64] = np.minimum(
            self._grown(self._most_in_words)[: self._most_in_words], 2**WORD_BITS - 1
        ).astype(np.int64)
        self.bits = np.full(width + 1, width, np.int64)
        for size, count in enumerate(self._sets):
            self.bits[[size, width - size]] = (count - 1).bit_length()

    def to_bits(self, used: Mask) -> Bits:
        """Write the sets of all rows as a flat array of bits; rows with fewer indices come first.

        Args:
            used: mask of the indices in each row's set, axes (rows, width).
        """
        counts = used.sum(axis=1)
        spelt = [np.zeros(0, np.uint8)]
        for count in np.unique(counts).tolist():
            rows = used[counts == count]
            size = self._size(count)
            if size > self._most:
                spelt.append(rows.astype(np.uint8).reshape(-1))
                continue
            marked = rows if size == count else ~rows
            steps = marked.nonzero()[1].reshape(len(rows), size) - np.arange(size)
            ranks = self._table(size)[np.arange(size), steps].sum(axis=1)
            spelt.append(to_bits(ranks[:, None], int(self.bits[count])).reshape(-1))
        return np.concatenate(spelt)

    def from_bits(self, bits: Bits, counts: Counts) -> Mask:
        """Return the mask of indices that `to_bits` wrote, axes (rows, width).

        Args:
            bits: the bits of all rows' sets, exactly as many as `self.bits` states for `counts`.
            counts: number of indices in each row's set, axes (rows,).

        Raises:
            CorruptFrameError: these bits do not encode any set with this number of indices.
        """
        used = np.zeros((len(counts), self.width), np.bool_)
        ranks = np.zeros(len(counts), object)
        first = 0
        for count in np.unique(counts).tolist():
            rows = (counts == count).nonzero()[0]
            row_bits = int(self.bits[count])
            own = bits[first : first + len(rows) * row_bits].reshape(len(rows), row_bits)
            first += own.size
            if self._size(count) <= self._most:
                ranks[rows] = self._read_ranks(own, count)
            elif (own.sum(axis=1, dtype=np.int64) != count).any():
                raise CorruptFrameError(
                    "a payload marks a number of indices that differs from the number it states"
                )
            else:
                used[rows] = own
        sizes = np.minimum(counts, self.width - counts)
        words = sizes <= self._most_in_words
        self._mark(used, words.nonzero()[0], ranks[words].astype(np.int64), sizes)
        others = (~words & (sizes <= self._most)).nonzero()[0]
        self._mark(used, others, ranks[others], sizes)
        used[(sizes <= self._most) & (counts > sizes)] ^= True
        return used

    def _read_ranks(self, bits: Bits, count: int) -> np.ndarray:
        ranks: np.ndarray = from_bits(bits, int(self.bits[count]), 1)[:, 0]
        if (ranks >= self._sets[self._size(count)]).any():
            raise _no_such_set()
        return ranks

    def _mark(self, used: Mask, rows: Counts, ranks: np.ndarray, sizes: Counts) -> None:
        """Decode some rows' ranks, and mark their indices in `used`, highest index first."""
        sizes = sizes[rows]
        table = self._table(int(sizes.max(initial=0)))
        for j in reversed(range(sizes.max(initial=0))):
            left = (sizes > j).nonzero()[0]
            above = np.searchsorted(table[j], ranks[left], side="right") - 1
            used[rows[left], above + j] = True
            ranks[left] -= table[j][above]

    def _size(self, count: int) -> int:
        return min(count, self.width - count)

    def _table(self, size: int) -> np.ndarray:
        """Return C(j + i, j + 1), axes (size or more, width): the rank's term for the j-th index.

        Entries are machine words as long as these can hold all ranks, and Python integers
        otherwise.
        """
        return self._words if size <= self._most_in_words else self._grown(size)

    def _grown(self, size: int) -> np.ndarray:
        """Return the table for sets of up to `size` indices or more, in Python integers.

        Each row of the table is the cumulative sum of the previous row.
        """
        if (known := len(self._columns)) < size:
            columns = np.empty((min(max(size, 2 * known), self._most), self.width), object)
            columns[:known] = self._columns
            for j in range(known, len(columns)):
                columns[j] = np.cumsum(columns[j - 1])
            self._columns = columns
        return self._columns


@lru_cache(maxsize=4)
def supports(width: int) -> Supports:
    """Return the `Supports` object of a width; all codecs of a process use the same object."""
    return Supports(width)
