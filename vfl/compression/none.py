"""No compression: every value as float32, in row order."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from vfl.compression.base import INFERENCE, Codec, Decoded, Encoded, Moment
from vfl.compression.bound import Symbols
from vfl.compression.dense import dense_bytes, dense_tensor
from vfl.frame import Payload


class Uncompressed(Codec):
    """Dense float32 both ways, 4 bytes a value.

    >>> Uncompressed().formula_ratio(width=128)
    1.0
    """

    def encode(self, cut: Tensor, moment: Moment = INFERENCE) -> Encoded:
        return Encoded(dense_bytes(cut), None)

    def decode(
        self, payload: Payload, rows: int, width: int, moment: Moment = INFERENCE
    ) -> Decoded:
        return Decoded(dense_tensor(payload, rows, width), None)

    def encode_grad(self, grad: Tensor, saved: Any, moment: Moment = INFERENCE) -> Payload:
        return dense_bytes(grad)

    def decode_grad(
        self, payload: Payload, saved: Any, rows: int, width: int, moment: Moment = INFERENCE
    ) -> Tensor:
        return dense_tensor(payload, rows, width)

    def formula_ratio(self, width: int) -> float:
        return 1.0

    def symbols(self, cut: Tensor, moment: Moment = INFERENCE) -> Symbols:
        codes = cut.contiguous().numpy().view(np.uint32)
        return Symbols(np.ones(cut.shape, np.bool_), codes.reshape(-1), choices=2**32)
