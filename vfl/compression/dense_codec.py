"""What the codecs that send every value have in common; a member says in which format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from vfl.compression.base import INFERENCE, Decoded, Encoded, Moment
from vfl.compression.bound import Counts, Symbols
from vfl.compression.dense_enumerative import DenseEnumerative
from vfl.compression.dense_fixed import DenseBitmap, DenseFixed
from vfl.compression.layout import DenseLayout, groups_of
from vfl.compression.layout_codec import LayoutCodec, step_of
from vfl.compression.options import Scale
from vfl.compression.values import ValueCode
from vfl.errors import NonFiniteError
from vfl.frame import Payload

Packer = Literal["dense", "bitmap", "enumerative", "range"]


class DenseCodec(LayoutCodec[DenseLayout]):
    """Sends a code for every value of the cut.

    Args:
        code: spells the values.
        packer: ``dense`` (the same bits for each), ``bitmap`` (a bit for each and more for those
            that are not zero), ``enumerative`` (for each row one number that says which are not
            zero, and theirs) or ``range`` (adaptive; codes of at most 8 bits).
        scale: ``batch`` or ``row``, what shares a scale in training; a query has one a row.
        grad: ``fp32``, ``bf16``, or the bits of a gradient from 2 to 8.
        rectified: no value is negative and zeros stay zero, so that gradients travel for the
            others only: behind a rectifier those of zeros are zero anyway.
    """

    def __init__(
        self, code: ValueCode, packer: Packer, scale: Scale, grad: str, *, rectified: bool = False
    ) -> None:
        super().__init__(code, packer, get_args(Packer), scale, grad)
        self._rectified = rectified

    def encode(self, cut: Tensor, moment: Moment = INFERENCE) -> Encoded:
        if not torch.isfinite(cut).all():
            raise NonFiniteError("a cut holds NaN or Inf", fix="lower the learning rate")
        values = cut.contiguous().numpy()
        payload = self.layout(cut.shape[1]).pack(values, self.is_per_row(moment), step_of(moment))
        return Encoded(payload, values > 0 if self._rectified else None)

    def decode(
        self, payload: Payload, rows: int, width: int, moment: Moment = INFERENCE
    ) -> Decoded:
        values = self.layout(width).unpack(payload, rows, self.is_per_row(moment), step_of(moment))
        return Decoded(torch.from_numpy(values), values > 0 if self._rectified else None)

    def symbols(self, cut: Tensor, moment: Moment = INFERENCE) -> Symbols:
        groups = groups_of(len(cut), self.is_per_row(moment))
        _, codes = self._code.encode(cut.contiguous().numpy(), groups)
        counts: Counts = "by unit" if self.learns else "none"
        choices = 2**self._code.bits
        if self._rectified:  # code 0 is a place where nothing stands
            return Symbols(codes > 0, codes[codes > 0] - 1, choices - 1, counts)
        return Symbols(np.ones_like(codes, np.bool_), codes.reshape(-1), choices, counts)

    def encode_grad(self, grad: Tensor, saved: Any, moment: Moment = INFERENCE) -> Payload:
        return self._grad.encode(grad, saved, moment)

    def decode_grad(
        self, payload: Payload, saved: Any, rows: int, width: int, moment: Moment = INFERENCE
    ) -> Tensor:
        return torch.from_numpy(self._grad.decode(payload, rows, width, saved))

    def formula_ratio(self, width: int) -> float:
        """b/32, thesis table 3.1."""
        return self.wire_width(width) / width * self._code.bits / 32

    def payload_limit(self, rows: int, width: int) -> int:
        cut_bytes = self.layout(width).payload_limit(rows, per_row=True)
        return max(cut_bytes, self._grad.payload_bytes(rows, rows * width))

    def new_layout(self, width: int) -> DenseLayout:
        if self.packer == "range":
            from vfl.compression.dense_range import DenseRange

            return DenseRange(width, self._code)
        return _FIXED[self.packer](width, self._code)


_FIXED: dict[str, Callable[[int, ValueCode], DenseLayout]] = {
    "dense": DenseFixed,
    "bitmap": DenseBitmap,
    "enumerative": DenseEnumerative,
}
