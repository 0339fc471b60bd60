"""Codecs that pack by a layout, which may learn; a member says what travels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from vfl.compression.base import (
    INFERENCE,
    Codec,
    Counts,
    Decoded,
    Encoded,
    StepContext,
    Symbols,
)
from vfl.compression.coding.layouts import (
    DenseBitmap,
    DenseEnumerative,
    DenseFixed,
    DenseLayout,
    DenseRange,
    Layout,
)
from vfl.compression.coding.values import GradientCode, ValueCode
from vfl.core.errors import BadOptionError, NonFiniteError
from vfl.core.frame import Payload
from vfl.core.registry import require_choice

Scale = Literal["batch", "row"]
Packer = Literal["dense", "bitmap", "enumerative", "range"]

_Layout = TypeVar("_Layout", bound=Layout)


class PackedCodec(Codec, Generic[_Layout]):
    """What codecs with a value code, a layout and a gradient code have in common.

    Args:
        code: spells the values.
        packer: name of the layout, one of `packers`; "range" learns.
        scale: ``batch`` or ``row``, what shares a scale in training; a query has one a row.
        grad: ``fp32``, ``bf16``, or the bits of a gradient from 2 to 8.

    Attributes:
        packers: the layouts there are.

    Raises:
        BadOptionError: an unknown packer, scale or format of gradients, or a packer that adapts to
            codes too long for counts of them.
    """

    packers: ClassVar[Sequence[str]]

    def __init__(self, code: ValueCode, packer: str, scale: Scale, grad: str) -> None:
        require_choice("packer", packer, self.packers)
        require_choice("scale", scale, get_args(Scale))
        if packer == "range" and code.bits > 8:
            raise BadOptionError(
                "the range packer counts how often each code occurs",
                where="option 'values'",
                got="bf16" if code.bits == 16 else "fp32",
                want="1 to 8 bits",
                fix="values=8",
            )
        self.packer = packer
        self._code = code
        self._per_row = scale == "row"
        self._grad = GradientCode(grad)
        self._layout: _Layout | None = None
        self._width = 0

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
            self.layout(int(state["width"])).load_state_dict(state)

    def layout(self, width: int) -> _Layout:
        """The layout for a cut of this width; made once, for it may learn.

        Raises:
            WidthError: there is none.
        """
        if self._layout is None or self._width != width:
            self._layout, self._width = self.new_layout(width), width
        return self._layout

    @abstractmethod
    def new_layout(self, width: int) -> _Layout:
        """A layout that has learned nothing; see `layout`."""

    def groups(self, rows: int, context: StepContext) -> int:
        """Scales that travel: one a row, or one for a batch that is not empty."""
        return rows if self._per_row or not context.training else min(rows, 1)


def step_of(context: StepContext) -> int | None:
    """The training step a layout may learn from; None for a query."""
    return context.step if context.training else None


class DenseCodec(PackedCodec[DenseLayout]):
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

    packers = get_args(Packer)

    def __init__(
        self, code: ValueCode, packer: Packer, scale: Scale, grad: str, *, rectified: bool = False
    ) -> None:
        super().__init__(code, packer, scale, grad)
        self._rectified = rectified

    def encode(self, cut: Tensor, context: StepContext = INFERENCE) -> Encoded:
        if not torch.isfinite(cut).all():
            raise NonFiniteError("a cut holds NaN or Inf", fix="lower the learning rate")
        rows, width = cut.shape
        values = cut.contiguous().numpy()
        payload = self.layout(width).pack(values, self.groups(rows, context), step_of(context))
        return Encoded(payload, values > 0 if self._rectified else None)

    def decode(
        self, payload: Payload, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Decoded:
        groups, step = self.groups(rows, context), step_of(context)
        values = self.layout(width).unpack(payload, rows, groups, step)
        return Decoded(torch.from_numpy(values), values > 0 if self._rectified else None)

    def symbols(self, cut: Tensor, context: StepContext = INFERENCE) -> Symbols:
        _, codes = self._code.encode(cut.contiguous().numpy(), self.groups(len(cut), context))
        counts: Counts = "by unit" if self.learns else "none"
        choices = 2**self._code.bits
        if self._rectified:  # code 0 says that nothing is there
            return Symbols(codes > 0, codes[codes > 0] - 1, choices - 1, counts)
        return Symbols(np.ones_like(codes, np.bool_), codes.reshape(-1), choices, counts)

    def encode_grad(self, grad: Tensor, saved: Any, context: StepContext = INFERENCE) -> Payload:
        return self._grad.encode(grad, saved, context)

    def decode_grad(
        self, payload: Payload, saved: Any, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Tensor:
        return torch.from_numpy(self._grad.decode(payload, rows, width, saved))

    def formula_ratio(self, width: int) -> float:
        """b/32, thesis table 3.1."""
        return self.wire_width(width) / width * self._code.bits / 32

    def payload_limit(self, rows: int, width: int) -> int:
        cut_bytes = self.layout(width).payload_limit(rows, groups=rows)
        return max(cut_bytes, self._grad.payload_bytes(rows, rows * width))

    def new_layout(self, width: int) -> DenseLayout:
        if self.packer == "dense":
            return DenseFixed(width, self._code)
        if self.packer == "bitmap":
            return DenseBitmap(width, self._code)
        if self.packer == "enumerative":
            return DenseEnumerative(width, self._code)
        return DenseRange(width, self._code)
