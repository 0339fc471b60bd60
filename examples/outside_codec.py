"""A codec of your own in one file: half precision in both directions.

This file registers the codec in the process that runs the file. A package instead declares its
member in the package's pyproject.toml:

    [project.entry-points."vfl.codecs"]
    half = "outside_codec:HalfPrecision"

The package tests the codec with `vfl.testing`:

    class TestHalfPrecision(CodecContract):
        specs = ["half"]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vfl.compression import CODECS, INFERENCE, Codec, Decoded, Encoded, StepContext, make
from vfl.core.errors import TruncatedFrameError
from vfl.core.frame import Payload

LARGEST = torch.finfo(torch.float16).max


def half_bytes(values: Tensor) -> bytes:
    """Encode a tensor as float16; values above float16's maximum become this maximum."""
    return values.clamp(-LARGEST, LARGEST).half().numpy().tobytes()


def from_half_bytes(payload: Payload, rows: int, width: int) -> Tensor:
    """Decode the payload of `half_bytes` to a float32 tensor, axes (rows, width)."""
    if len(payload) != 2 * rows * width:
        raise TruncatedFrameError(
            "a half-precision payload has the wrong length",
            got=f"{len(payload)} bytes",
            want=f"{2 * rows * width} bytes",
        )
    if rows == 0:
        return torch.empty(0, width)
    return torch.frombuffer(bytearray(payload), dtype=torch.float16).float().view(rows, width)


class HalfPrecision(Codec):
    """Codec with two bytes for each value of a cut or gradient; it has no options and no state."""

    def encode(self, cut: Tensor, context: StepContext = INFERENCE) -> Encoded:
        return Encoded(half_bytes(cut), None)

    def decode(
        self, payload: Payload, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Decoded:
        return Decoded(from_half_bytes(payload, rows, width), None)

    def encode_grad(self, grad: Tensor, saved: Any, context: StepContext = INFERENCE) -> Payload:
        return half_bytes(grad)

    def decode_grad(
        self, payload: Payload, saved: Any, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Tensor:
        return from_half_bytes(payload, rows, width)

    def formula_ratio(self, width: int) -> float:
        return 0.5


CODECS.register("half", HalfPrecision)

if __name__ == "__main__":
    cut = torch.tensor([[0.1, 2.0, -3.5]])
    payload, _ = make("half").encode(cut)
    print(f"{cut.numel()} values in {len(payload)} bytes")
    print(make("half").decode(payload, *cut.shape).cut)
