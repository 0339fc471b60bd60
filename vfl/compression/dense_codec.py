"""What the codecs that send every value have in common; a member says in which format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from vfl.compression.base import INFERENCE, Codec, Decoded, Encoded, Moment
from vfl.compression.dense_fixed import DenseBitmap, DenseFixed
from vfl.compression.gradients import GradientCode
from vfl.compression.layout import DenseLayout
from vfl.compression.options import Scale, require_choice
from vfl.compression.values import ValueCode
from vfl.errors import NonFiniteError
from vfl.frame import Payload

Packer = Literal["dense", "bitmap", "range"]


class DenseCodec(Codec):
    """Sends a code for every value of the cut.

    Args:
        code: spells the values.
        packer: ``dense`` (the same bits for each), ``bitmap`` (a bit for each and more for those
            that are not zero) or ``range`` (adaptive; codes of at most 8 bits).
        scale: ``batch`` or ``row``, what shares a scale in training; a query has one a row.
        grad: ``fp32``, ``bf16``, or the bits of a gradient from 2 to 8.
        rectified: no value is negative and zeros stay zero, so that gradients travel for the
            others only: behind a rectifier those of zeros are zero anyway.
    """

    def __init__(
        self, code: ValueCode, packer: Packer, scale: Scale, grad: str, *, rectified: bool = False
    ) -> None:
        require_choice("packer", packer, get_args(Packer))
        require_choice("scale", scale, get_args(Scale))
        self.packer: Packer = packer
        self._code = code
        self._per_row = scale == "row"
        self._grad = GradientCode(grad)
        self._rectified = rectified
        self._layout: DenseLayout | None = None
        self._width = 0

    def encode(self, cut: Tensor, moment: Moment = INFERENCE) -> Encoded:
        if not torch.isfinite(cut).all():
            raise NonFiniteError("a cut holds NaN or Inf", fix="lower the learning rate")
        step = moment.step if moment.training else None
        values = cut.contiguous().numpy()
        payload = self._layout_for(cut.shape[1]).pack(values, self._is_per_row(moment), step)
        return Encoded(payload, values > 0 if self._rectified else None)

    def decode(
        self, payload: Payload, rows: int, width: int, moment: Moment = INFERENCE
    ) -> Decoded:
        step = moment.step if moment.training else None
        values = self._layout_for(width).unpack(payload, rows, self._is_per_row(moment), step)
        return Decoded(torch.from_numpy(values), values > 0 if self._rectified else None)

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
        cut_bytes = self._layout_for(width).payload_limit(rows, per_row=True)
        return max(cut_bytes, self._grad.payload_bytes(rows, rows * width))

    @property
    def learns(self) -> bool:
        return self.packer == "range"

    def commit(self, step: int) -> None:
        if self._layout is not None:
            self._layout.commit(step)

    def state_dict(self) -> Mapping[str, Tensor]:
        if self._layout is None or not (state := self._layout.state_dict()):
            return {}
        return {"width": torch.tensor(self._width), **state}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if "width" in state:
            self._layout_for(int(state["width"])).load_state_dict(state)

    def _is_per_row(self, moment: Moment) -> bool:
        return self._per_row or not moment.training

    def _layout_for(self, width: int) -> DenseLayout:
        if self._layout is None or self._width != width:
            self._layout, self._width = self._new_layout(width), width
        return self._layout

    def _new_layout(self, width: int) -> DenseLayout:
        if self.packer == "range":
            from vfl.compression.dense_range import DenseRange

            return DenseRange(width, self._code)
        kind = DenseFixed if self.packer == "dense" else DenseBitmap
        return kind(width, self._code)
