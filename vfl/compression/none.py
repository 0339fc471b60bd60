"""No compression: sends every value as float32, in row order."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from vfl.compression.base import INFERENCE, Codec, Decoded, Encoded, StepContext, Symbols
from vfl.core.errors import TruncatedFrameError
from vfl.core.frame import Payload


class Uncompressed(Codec):
    """Sends cuts and gradients as dense float32, 4 bytes per value.

    >>> Uncompressed().formula_ratio(width=128)
    1.0
    """

    on_card: ClassVar[bool] = True

    def encode(self, cut: Tensor, context: StepContext = INFERENCE) -> Encoded:
        return Encoded(dense_bytes(cut), None)

    def decode(
        self, payload: Payload, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Decoded:
        return Decoded(dense_tensor(payload, rows, width).to(self.device), None)

    def encode_grad(self, grad: Tensor, saved: Any, context: StepContext = INFERENCE) -> Payload:
        return dense_bytes(grad)

    def decode_grad(
        self, payload: Payload, saved: Any, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Tensor:
        return dense_tensor(payload, rows, width).to(self.device)

    def formula_ratio(self, width: int) -> float:
        return 1.0

    @property
    def rows_apart(self) -> bool:
        return True

    def symbols(self, cut: Tensor, context: StepContext = INFERENCE) -> Symbols:
        codes = cut.contiguous().numpy().view(np.uint32)
        return Symbols(np.ones(cut.shape, np.bool_), codes.reshape(-1), choices=2**32)


def dense_bytes(values: Tensor) -> Payload:
    """Return a copy of a tensor's values as little-endian float32 bytes, row by row."""
    if values.device.type == "cpu":
        return bytearray(values.contiguous().numpy())
    # The memory is pinned (locked); torch caches it. A GPU copies to pinned memory five times as
    # fast as to other memory.
    copied = torch.empty(values.numel(), pin_memory=True).copy_(values.reshape(-1))
    return copied.numpy().data.cast("B")


def dense_tensor(payload: Payload, rows: int, width: int) -> Tensor:
    """Return a payload as a writable float32 tensor, axes (rows, width); copied only if necessary.

    Raises:
        TruncatedFrameError: the payload's length is not that of rows x width values.
    """
    wanted_bytes = 4 * rows * width
    if len(payload) != wanted_bytes:
        raise TruncatedFrameError(
            "a dense payload has the wrong length",
            got=f"{len(payload)} bytes",
            want=f"{wanted_bytes} bytes for {rows} rows of {width}",
        )
    if wanted_bytes == 0:
        return torch.empty(rows, width)
    view = memoryview(payload)
    writable = bytearray(view) if view.readonly else view
    return torch.frombuffer(writable, dtype=torch.float32).view(rows, width)
