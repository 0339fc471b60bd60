"""What one codec makes of one cut: real frames, decoded again, beside formula and entropy bound."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from vfl.compression.base import Codec, Moment
from vfl.compression.bound import entropy_bound_bits
from vfl.errors import SpecError, UserError
from vfl.frame import Frame, Kind, from_bytes, to_bytes
from vfl.seeds import Secret


@dataclass(frozen=True, slots=True)
class CodecMeasure:
    """A codec on a cut.

    Attributes:
        rows: of the cut.
        width: of the original cut, before a module of the codec.
        batch_rows: rows of a frame; the last may have fewer.
        wire_bytes: of all frames, their headers with the length prefix included.
        dense_bytes: 4 bytes for each value of the original cut.
        formula_ratio: size by dense size as the literature counts it.
        wire_ratio: `wire_bytes` by `dense_bytes`.
        entropy_bound_bytes: see `vfl.compression.bound`; NaN where the codec does not tell its
            symbols.
        relative_error: L2 norm of (cut - decoded) by that of the cut, of what `encode` got.
        encode_ms: a frame, median.
        decode_ms: a frame, median.
    """

    rows: int
    width: int
    batch_rows: int
    wire_bytes: int
    dense_bytes: int
    formula_ratio: float
    wire_ratio: float
    entropy_bound_bytes: float
    relative_error: float
    encode_ms: float
    decode_ms: float


def measure_codec(
    codec: Codec,
    cut: Tensor,
    *,
    width: int,
    batch_rows: int = 256,
    training: bool = True,
    secret: Secret | None = None,
) -> CodecMeasure:
    """Send a cut batch after batch between two ends that both start as copies of a codec.

    In training every frame is a step that both ends commit, so a packer that adapts does so as in
    a run with one cut in flight. At inference nothing is learned: a packer knows what `codec` had
    learned before.

    Args:
        codec: both ends are copies of it; it stays as it is.
        cut: float32 of axes (rows, wire width), detached: what `encode` gets, so behind the
            codec's module if it has one.
        width: of the cut in front of that module.
        batch_rows: rows of a frame.
        training: whether the frames are those of training or of inference.
        secret: of the party that encodes; a fixed one if none is given.

    Raises:
        UserError: no rows, or frames without any.
        NonFiniteError: the cut holds NaN or Inf.
        SpecError: the two ends do not decode the same.

    >>> from vfl.compression import make
    >>> measured = measure_codec(make("topk:k=3,values=8"), torch.eye(256, 128), width=128)
    >>> measured.wire_bytes, f"{measured.wire_bytes / measured.entropy_bound_bytes:.3f}"
    (1396, '1.029')
    """
    if not len(cut) or batch_rows < 1:
        got = f"{len(cut)} rows, {batch_rows} a frame"
        raise UserError("there is nothing to measure", got=got, want="at least one of each")
    own = secret or Secret.of_simulation(0, "measure")
    batches = [
        (cut[start : start + batch_rows], Moment(step, training, own if training else None))
        for step, start in enumerate(range(0, len(cut), batch_rows), start=1)
    ]
    crossings = list(_cross_all(codec, batches))
    wire_bytes = sum(crossing.wire_bytes for crossing in crossings)
    dense_bytes = 4 * len(cut) * width
    return CodecMeasure(
        rows=len(cut),
        width=width,
        batch_rows=batch_rows,
        wire_bytes=wire_bytes,
        dense_bytes=dense_bytes,
        formula_ratio=codec.formula_ratio(width),
        wire_ratio=wire_bytes / dense_bytes,
        entropy_bound_bytes=_bound_bytes(codec, batches),
        relative_error=_relative(sum(one.squared_error for one in crossings), cut),
        encode_ms=1000 * median(crossing.encode_s for crossing in crossings),
        decode_ms=1000 * median(crossing.decode_s for crossing in crossings),
    )


_Batches = list[tuple[Tensor, Moment]]


class _Crossing(NamedTuple):
    """One batch that went from one end to the other."""

    wire_bytes: int
    squared_error: float
    encode_s: float
    decode_s: float


def _cross_all(codec: Codec, batches: _Batches) -> Iterator[_Crossing]:
    """Every batch's crossing; the first goes twice, for it builds tables and compiles loops.

    The same cut and moment give the same bytes, so the ends are none the wiser.
    """
    encoder, decoder = deepcopy(codec), deepcopy(codec)
    _cross(encoder, decoder, *batches[0])
    for batch, moment in batches:
        yield _cross(encoder, decoder, batch, moment)
        if moment.training:
            encoder.commit(moment.step)
            decoder.commit(moment.step)


def _cross(encoder: Codec, decoder: Codec, cut: Tensor, moment: Moment) -> _Crossing:
    rows, width = cut.shape
    reading = Moment(moment.step, moment.training)
    start = perf_counter()
    payload = encoder.encode(cut, moment).payload
    encoded = perf_counter()
    raw = to_bytes(Frame(Kind.CUT if moment.training else Kind.QUERY, moment.step, payload))
    arrived = from_bytes(raw, decoder.payload_limit(rows, width)).payload
    framed = perf_counter()
    decoded = decoder.decode(arrived, rows, width, reading).cut
    end = perf_counter()
    if not torch.equal(decoded, encoder.decode(payload, rows, width, reading).cut):
        raise SpecError(
            "the two ends of a codec read a frame differently",
            where=f"step {moment.step}",
            got=type(encoder).__name__,
            fix="test it with vfl.testing.CodecContract",
        )
    error = (cut.double() - decoded.double()).square().sum().item()
    return _Crossing(len(raw), error, encoded - start, end - framed)


def _bound_bytes(codec: Codec, batches: _Batches) -> float:
    told = (codec.symbols(batch, moment) for batch, moment in batches)
    return entropy_bound_bits(symbols for symbols in told if symbols is not None) / 8


def _relative(squared_error: float, cut: Tensor) -> float:
    squared = cut.double().square().sum().item()
    if squared == 0:
        return 0.0 if squared_error == 0 else math.inf
    return math.sqrt(squared_error / squared)
