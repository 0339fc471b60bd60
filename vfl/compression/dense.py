"""Float32 tensors as bytes and back, one copy each way."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl.errors import TruncatedFrameError
from vfl.frame import Payload


def dense_bytes(values: Tensor) -> bytearray:
    """Little-endian float32 bytes of a tensor in row order, as a copy."""
    return bytearray(values.contiguous().numpy())


def dense_tensor(payload: Payload, rows: int, width: int) -> Tensor:
    """The float32 tensor of axes (rows, width) in a payload; writable, copied only if it must be.

    Raises:
        TruncatedFrameError: the payload is not exactly rows x width values long.
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
