"""SplitFC: a cut's columns with less variation are dropped more often and get fewer bits."""

from __future__ import annotations

import heapq
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl.compression.base import INFERENCE, Codec, Decoded, Encoded, StepContext
from vfl.compression.coding.bits import from_bits, pack, packed_bytes, require_head, to_bits, unpack
from vfl.compression.coding.values import (
    LARGEST_BFLOAT16,
    bfloat16_above,
    bfloat16_below,
    dequantise,
    from_bfloat16,
    nearest_bfloat16,
    quantise,
    require_finite,
)
from vfl.compression.quantise import Quantise
from vfl.core.errors import CorruptFrameError, TruncatedFrameError, UserError
from vfl.core.frame import Payload
from vfl.core.registry import require_range

Floats = npt.NDArray[np.float64]
Bits = npt.NDArray[np.int64]

_MOST_BITS = 8
_ONE_BFLOAT16 = 0x3F80
_COLUMN_BYTES = 2  # bytes of a bfloat16
_LARGEST = float(np.finfo(np.float32).max)


class _Kept(NamedTuple):
    """Mask of the sent columns of a batch, axes (width,), and a factor for each sent column."""

    columns: npt.NDArray[np.bool_]
    factors: Floats


class Columns(Codec):
    """Randomly drops columns of a training batch; columns with more variation are kept more often.

    The codec keeps each column with a probability proportional to the column's standard deviation
    over the batch, at most 1. On average it keeps `keep` x width columns. The codec divides a kept
    column by its probability, so that the expectation of the decoded cut is the cut. Only kept
    columns get gradients. Kept columns share a total of `bits` per value, on average. Each kept
    column gets the integer number of bits that minimises the sum of squared errors of all columns;
    a column with 0 bits is sent as its mean. **A query is sent with all values, in 8 bits each**. A
    column of a single row has no standard deviation, and no row of a query may depend on other
    rows.

    Source: Oh, Lee, Brinton, Jeon 2023, "Communication-efficient split learning via adaptive
    feature-wise compression" (SplitFC), sections on adaptive feature-wise dropout and on adaptive
    feature-wise quantisation. In vfl, a column has an integer number of bits, which marginal gains
    determine exactly; the paper derives numbers of quantisation levels that need not be powers of
    two. vfl leaves out the paper's normalisation of channels, because a cut has only one axis
    besides the rows.

    Args:
        keep: share of the columns that the codec sends, on average (1/R in the paper).
        bits: mean number of bits per value, over the kept columns.
        grad: mean number of bits per value in the gradients of kept columns.

    Raises:
        BadOptionError: a share or a number of bits is out of range.

    >>> f"{Columns(keep=0.25, bits=4).formula_ratio(width=128):.2%}"
    '3.12%'
    """

    draws: ClassVar[bool] = True

    def __init__(self, keep: float = 0.25, bits: float = 4.0, grad: float = 8.0) -> None:
        require_range("keep", keep, 1e-3, 1)
        require_range("bits", bits, 0.1, _MOST_BITS)
        require_range("grad", grad, 0.1, _MOST_BITS)
        self.keep = keep
        self.bits = bits
        self.grad = grad
        self._query = Quantise("8", scale="row")

    def encode(self, cut: Tensor, context: StepContext = INFERENCE) -> Encoded:
        if not context.training:
            return Encoded(self._query.encode(cut, context).payload, None)
        values = _finite(cut, "a cut")
        if not len(values):
            return Encoded(b"", None)
        kept = self._drawn(values, context)
        head = np.packbits(kept.columns).tobytes() + _bfloat16(kept.factors)
        return Encoded(head + pack_columns(values[:, kept.columns], self.bits), kept)

    def decode(
        self, payload: Payload, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Decoded:
        if not context.training:
            return Decoded(self._query.decode(payload, rows, width, context).cut, None)
        if not rows:
            return Decoded(_empty(payload, width), None)
        kept, body = _read_kept(memoryview(payload), width)
        columns = unpack_columns(body, rows, len(kept.factors), self.bits) * kept.factors
        return Decoded(_whole(columns, kept, width), kept)

    def encode_grad(self, grad: Tensor, saved: Any, context: StepContext = INFERENCE) -> Payload:
        if not context.training:
            return self._query.encode_grad(grad, None, context)
        values = _finite(grad, "a gradient")
        return pack_columns(values[:, saved.columns], self.grad) if len(values) else b""

    def decode_grad(
        self, payload: Payload, saved: Any, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Tensor:
        if not context.training:
            return self._query.decode_grad(payload, None, rows, width, context)
        if not rows:
            return _empty(payload, width)
        columns = unpack_columns(memoryview(payload), rows, len(saved.factors), self.grad)
        return _whole(columns * saved.factors, saved, width)

    def formula_ratio(self, width: int) -> float:
        """Return the size of the kept columns' codes relative to float32: keep x bits / 32.

        The formula leaves out the range limits, which all rows of a batch share.
        """
        return self.keep * self.bits / 32

    def payload_limit(self, rows: int, width: int) -> int:
        per_column = 3 * _COLUMN_BYTES * width + width // 8 + 1
        return super().payload_limit(rows, width) + per_column

    def _drawn(self, values: Floats, context: StepContext) -> _Kept:
        """Draw a batch's columns to keep; if none, keep that of the largest standard deviation."""
        if context.secret is None:
            raise UserError(
                "splitfc draws at random in training and received no secret",
                where=f"step {context.step}",
                fix="StepContext(step, training=True, secret=Secret.fresh())",
            )
        deviations = values.std(axis=0)
        chances = keep_chances(deviations, self.keep)
        columns = context.secret.uniform(chances.shape, "splitfc", context.step) < chances
        if not columns.any():
            columns[int(deviations.argmax())] = True
        sent = nearest_bfloat16((1 / np.maximum(chances[columns], 1e-6)).astype(np.float32))
        return _Kept(columns, from_bfloat16(sent).astype(np.float64))


def keep_chances(deviations: Floats, keep: float) -> Floats:
    """Return probabilities proportional to standard deviations, at most 1, with mean `keep`.

    If all columns with a standard deviation above 0 have probability 1, the other columns share the
    remaining probability equally.

    Args:
        deviations: standard deviation of each column, axes (width,), at least 0.
        keep: mean of the probabilities, in (0, 1].

    >>> keep_chances(np.array([8.0, 1.0, 1.0, 0.0]), 0.5).tolist()
    [1.0, 0.5, 0.5, 0.0]
    """
    largest = deviations.max(initial=0)
    spread = deviations / largest if largest > 0 else np.ones_like(deviations)
    wanted, chances = keep * len(spread), np.zeros(len(spread))
    free = spread > 0
    while free.any():
        factor = max(0.0, wanted - (~free & (chances == 1)).sum()) / spread[free].sum()
        chances[free] = np.minimum(1.0, factor * spread[free])
        full = free & (chances == 1)
        if not full.any():
            break
        free &= ~full
    rest = (chances == 0) & (spread == 0)
    if rest.any():
        chances[rest] = min(1.0, max(0.0, wanted - chances.sum()) / rest.sum())
    return chances


def bits_of_columns(ranges: Floats, mean_bits: float) -> Bits:
    """Return integers, on average `mean_bits`, that minimise the sum of (range / 2^bits)^2.

    Each further bit goes to the column whose squared error it reduces most. The greedy choice is
    optimal, because each further bit reduces a column's error by less than the bit before. All
    steps are exact in floating point, so both parties compute the same numbers of bits.

    Args:
        ranges: range of each column's values, axes (columns,), at least 0; a column of range 0 gets
            no bits.
        mean_bits: mean number of bits per column.

    >>> bits_of_columns(np.array([4.0, 1.0, 0.0]), 2).tolist()
    [4, 2, 0]
    """
    found = np.zeros(len(ranges), np.int64)
    waiting = [(-one, column) for column, one in enumerate(ranges.tolist()) if one > 0]
    heapq.heapify(waiting)
    for _ in range(round(mean_bits * len(ranges))):
        if not waiting:
            break
        left, column = heapq.heappop(waiting)
        found[column] += 1
        if found[column] < _MOST_BITS:
            heapq.heappush(waiting, (left / 2, column))
    return found


def pack_columns(values: Floats, mean_bits: float) -> bytes:
    """Pack values of axes (rows, columns), rows >= 1: two range limits per column, then codes."""
    floats = values.astype(np.float32)
    low, high = floats.min(axis=0), floats.max(axis=0)
    ends = np.stack([bfloat16_below(low), bfloat16_above(high)])
    ends = np.where(
        (ends & 0x7FFF) > LARGEST_BFLOAT16, nearest_bfloat16(np.stack([low, high])), ends
    )
    lowest, highest = _from_ends(ends)
    bits = bits_of_columns(highest - lowest, mean_bits)
    means = nearest_bfloat16(values.mean(axis=0).astype(np.float32))
    ends = np.where(bits == 0, means, ends)
    tables = [
        to_bits(quantise(values[:, of], lowest[of], highest[of], count), count)
        for count, of in _by_bits(bits)
    ]
    body = pack(np.concatenate(tables, axis=1)) if tables else b""
    return ends.astype("<u2").tobytes() + body


def unpack_columns(body: memoryview, rows: int, columns: int, mean_bits: float) -> Floats:
    """Unpack the values that `pack_columns` packed, axes (rows, columns).

    Raises:
        FrameError: `pack_columns` could not have made these bytes.
    """
    head = 2 * _COLUMN_BYTES * columns
    require_head(body, head, "the range limits of its columns")
    ends = np.frombuffer(body[:head], "<u2").astype(np.uint16).reshape(2, columns)
    if ((ends & 0x7FFF) > LARGEST_BFLOAT16).any():
        raise CorruptFrameError("a payload's range of values is not finite")
    low, high = _from_ends(ends)
    if (low > high).any():
        raise CorruptFrameError("a payload's range of values ends below its start")
    bits = bits_of_columns(high - low, mean_bits)
    total = int(bits.sum())
    if len(body) - head != packed_bytes(rows, total):
        raise TruncatedFrameError(
            "a payload's columns have the wrong length",
            got=f"{len(body) - head} bytes",
            want=f"{packed_bytes(rows, total)} bytes for {rows} rows of {total} bits",
        )
    found = np.tile(low, (rows, 1))
    if total:
        table, start = unpack(body[head:], rows, total), 0
        for count, of in _by_bits(bits):
            stop = start + count * len(of)
            codes = from_bits(table[:, start:stop], count, len(of))
            found[:, of] = dequantise(codes, low[of], high[of], count)
            start = stop
    return found


def _by_bits(bits: Bits) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """Group the columns that have at least one bit by their number of bits."""
    counts = (int(one) for one in np.unique(bits) if one)
    return [(count, np.nonzero(bits == count)[0]) for count in counts]


def _from_ends(ends: npt.NDArray[np.uint16]) -> tuple[Floats, Floats]:
    low, high = from_bfloat16(ends).astype(np.float64)
    return low, high


def _bfloat16(values: Floats) -> bytes:
    return nearest_bfloat16(values.astype(np.float32)).astype("<u2").tobytes()


def _read_kept(view: memoryview, width: int) -> tuple[_Kept, memoryview]:
    """Read which columns a payload contains; return them, and the rest of the payload."""
    head = -(-width // 8)
    require_head(view, head, "its set of columns")
    marked = np.unpackbits(np.frombuffer(view[:head], np.uint8)).astype(np.bool_)
    columns, count = marked[:width], int(marked[:width].sum())
    if marked[width:].any() or not count:
        raise CorruptFrameError("a payload's set of columns does not fit this cut")
    stop = head + _COLUMN_BYTES * count
    require_head(view, stop, "the factors of its columns")
    sent = np.frombuffer(view[head:stop], "<u2").astype(np.uint16)
    # The check looks at the bits, because the conversion of a signalling NaN would raise a
    # floating-point error.
    if (sent < _ONE_BFLOAT16).any() or (sent > LARGEST_BFLOAT16).any():
        raise CorruptFrameError("a payload's factor of a column is below 1 or not finite")
    return _Kept(columns, from_bfloat16(sent).astype(np.float64)), view[stop:]


def _whole(columns: Floats, kept: _Kept, width: int) -> Tensor:
    """Put sent columns back to their positions, with zeros in others; clip to float32's range."""
    whole = np.zeros((len(columns), width), np.float32)
    whole[:, kept.columns] = np.clip(columns, -_LARGEST, _LARGEST)
    return torch.from_numpy(whole)


def _empty(payload: Payload, width: int) -> Tensor:
    if len(payload):
        raise CorruptFrameError("a payload without rows must be empty")
    return torch.zeros(0, width)


def _finite(values: Tensor, what: str) -> Floats:
    require_finite(values, what)
    return values.numpy().astype(np.float64)
