"""One codec on one cut: bytes, bound, error and time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from vfl.compression.base import Codec, Moment
from vfl.compression.sparse_codec import SparseCodec
from vfl.frame import HEADER_BYTES
from vfl.seeds import Secret


@dataclass(frozen=True, slots=True)
class CodecMeasure:
    """What a codec does with a cut."""

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
    """Encode and decode a cut in batches and measure it."""
    wire_bytes, error, encoding, decoding = 0, 0.0, [], []
    for step, batch in enumerate(torch.split(cut, batch_rows)):
        moment = Moment(step, training, secret)
        start = time.perf_counter()
        payload = codec.encode(batch, moment).payload
        middle = time.perf_counter()
        decoded = codec.decode(payload, len(batch), batch.shape[1], moment).cut
        encoding.append(middle - start)
        decoding.append(time.perf_counter() - middle)
        codec.commit(step)
        wire_bytes += HEADER_BYTES + len(payload)
        error += float((decoded - batch).square().sum())
    dense_bytes = 4 * len(cut) * width
    bound = float(wire_bytes)
    if isinstance(codec, SparseCodec):
        bits = math.log2(math.comb(cut.shape[1], codec.k)) + codec.k * codec._code.bits
        bound = len(cut) * bits / 8
    return CodecMeasure(
        len(cut),
        width,
        batch_rows,
        wire_bytes,
        dense_bytes,
        codec.formula_ratio(width),
        wire_bytes / dense_bytes,
        bound,
        math.sqrt(error / max(float(cut.square().sum()), 1e-30)),
        1000 * sorted(encoding)[len(encoding) // 2],
        1000 * sorted(decoding)[len(decoding) // 2],
    )
