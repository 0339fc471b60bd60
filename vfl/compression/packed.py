"""Codecs that choose the values of a cut to send, and pack the values into bytes by a layout."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from vfl.compression.base import INFERENCE, Codec, Counts, Decoded, Encoded, StepContext, Symbols
from vfl.compression.coding import padding
from vfl.compression.coding.bits import Codes, Indices, Layout, require_head
from vfl.compression.coding.layouts import new_layout
from vfl.compression.coding.values import (
    AffineValues,
    AgreedScale,
    Coded,
    GradientCode,
    ValueCode,
    Values,
    require_finite,
)
from vfl.core.errors import BadOptionError, CorruptFrameError
from vfl.core.frame import Payload
from vfl.core.registry import require_choice

_PROCESSOR = torch.device("cpu")
#: Smallest number of values of a cut for which coding on a GPU is faster than on the CPU, including
#: transfers.
LEAST_ON_CARD = 1 << 17
Scale = Literal["batch", "row", "agreed"]
Packer = Literal["dense", "bitmap", "enumerative", "range"]
#: Values of the option `pad`: frames whose lengths the codec hides if they depend on the values:
#: those of queries ("query"), those of queries and of training ("always"), or none ("no").
Pad = Literal["query", "always", "no"]


class Chosen(NamedTuple):
    """The values of a cut to send, and the state that the encoder saves for the gradient.

    Attributes:
        indices: indices of the values, axes (rows, k), increasing; axes (rows, 0) if all values are
            sent.
        values: the values, axes (rows, k): a tensor if they stay on a GPU, otherwise a numpy array.
        saved: see `Encoded`.
    """

    indices: Indices
    values: Values | Tensor
    saved: Any


class PackedCodec(Codec):
    """Base class of codecs with a value code, a layout and a gradient code.

    Args:
        code: value code.
        packer: name of the layout (how codes are packed into bytes), one of `packers`; "range"
            adapts to the values sent so far.
        scale: ``batch``, ``row`` or ``agreed``, see `DenseCodec`.
        grad: format of a gradient: ``fp32``, ``bf16``, or 2 to 8 bits.
        pad: how to treat packers whose payload lengths depend on the values. With ``query``, all
            queries of one shape have payloads of the same length. With ``always``, training frames
            and gradients are also padded, each to one of a few agreed sizes (`coding.padding`).
            With ``no``, lengths are not hidden, and disclose information about the values to an
            observer of the network.
        kept: number of values sent per row; None sends all.

    Attributes:
        packers: names of the layouts that the codec can use.

    Raises:
        BadOptionError: the packer, scale, gradient format or padding is unknown, or the adaptive
            packer "range" is used with codes of more than 8 bits.
    """

    packers: ClassVar[Sequence[str]]
    on_card: ClassVar[bool] = True

    def __init__(
        self,
        code: ValueCode,
        packer: str,
        scale: Scale,
        grad: str,
        pad: Pad,
        kept: int | None = None,
    ) -> None:
        require_choice("packer", packer, self.packers)
        require_choice("scale", scale, get_args(Scale))
        require_choice("pad", pad, get_args(Pad))
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
        self._agreed = AgreedScale() if scale == "agreed" and code.scale_bytes else None
        self._grad = GradientCode(grad)
        self._pad = pad
        self._kept = kept
        self._layout: Layout | None = None
        self._query_layout: Layout | None = None
        self._width = 0

    @abstractmethod
    def choose(self, cut: Tensor, context: StepContext) -> Chosen:
        """Choose the values of a cut to send.

        Raises:
            NonFiniteError: the cut contains NaN or Inf.
        """

    @abstractmethod
    def place(self, indices: Indices, values: Any, width: int) -> Decoded:
        """Rebuild the cut from indices and values that the other party's `choose` selected."""

    def kept(self, codes: Codes, saved: Any) -> Any:
        """Return the state that encoder and decoder save for coding the gradient of this cut.

        `saved` is the state that `choose` (encoder) or `place` (decoder) returned.
        """
        return saved

    def encode(self, cut: Tensor, context: StepContext = INFERENCE) -> Encoded:
        rows, width = cut.shape
        layout = self._layout_of(width, context)
        indices, values, saved = self.choose(cut.to(self._where(rows, width)), context)
        scale, codes = self.coded(values, context)
        payload = self._tag(layout) + scale + layout.pack(indices, codes)
        if self._fills(layout):
            payload = padding.pad(payload, self._cut_limit(layout, rows))
        if context.training:
            self._record(context.step, layout, scale, indices, codes)
        return Encoded(payload, self.kept(codes, saved))

    def decode(
        self, payload: Payload, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Decoded:
        layout, groups = self._layout_of(width, context), self.groups(rows, context)
        if self._fills(layout):
            payload = padding.unpad(payload, self._cut_limit(layout, rows))
        view, tag = memoryview(payload), self._tag(layout)
        head = len(tag)
        body = head + groups * self._code.scale_bytes
        require_head(view, body, "its scales")
        if view[:head] != tag:
            raise CorruptFrameError(
                "a payload was made with other counts, or with other limits of ranges",
                fix="start the session again from its last checkpoint",
            )
        layout.device = self._where(rows, width) if self._stays else _PROCESSOR
        indices, codes = layout.unpack(view[body:], rows)
        scale = self._known(rows, context) or view[head:body]
        values = self._code.decode(scale, codes, groups or min(rows, 1))
        if context.training:
            self._record(context.step, layout, bytes(scale), indices, codes)
        decoded = self.place(indices, values, width)
        return Decoded(decoded.cut, self.kept(codes, decoded.saved))

    def payload_limit(self, rows: int, width: int) -> int:
        layout = self.layout(width)
        cut_bytes, query_bytes = (
            self._cut_limit(one, rows) for one in (layout, self._layout_of(width, INFERENCE))
        )
        grad_bytes = self._grad.payload_bytes(rows, rows * layout.k)
        limit_bytes = max(cut_bytes, query_bytes, grad_bytes)
        return padding.padded_limit(limit_bytes) if self._pad == "always" else limit_bytes

    def _cut_limit(self, layout: Layout, rows: int) -> int:
        """Return the largest length of a cut's payload in bytes, without padding."""
        return len(self._tag(layout)) + rows * self._code.scale_bytes + layout.limit_bytes(rows)

    def equal_queries(self, width: int) -> bool:
        return self._layout_of(width, INFERENCE).fixed

    @property
    def learns(self) -> bool:
        return self.packer == "range" or self._agreed is not None

    @property
    def rows_apart(self) -> bool:
        one_scale = self._code.scale_bytes > 0 and not self._per_row
        return not (self.learns or one_scale or self._grad.rounds)

    def commit(self, step: int) -> None:
        if self._agreed is not None:
            self._agreed.commit(step)
        if self._layout is not None:
            self._layout.commit(step)

    def state_dict(self) -> Mapping[str, Tensor]:
        scale = {} if self._agreed is None else self._agreed.state_dict()
        if self._layout is None or not (state := self._layout.state_dict()):
            return scale
        return {"width": torch.tensor(self._width), **state, **scale}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if "width" in state:
            self.layout(int(state["width"])).load_state_dict(state)
        if self._agreed is not None and "scale-history" in state:
            self._agreed.load_state_dict(state)

    def layout(self, width: int) -> Layout:
        """Return the layout for a cut of this width; the codec keeps one layout, which may adapt.

        Raises:
            WidthError: no layout fits the width.
        """
        if self._layout is None or self._width != width:
            self._layout = new_layout(self.packer, width, self._kept, self._code.bits)
            self._query_layout = None
            self._width = width
        return self._layout

    def _layout_of(self, width: int, context: StepContext) -> Layout:
        """Return the layout of the frame that the context describes.

        Queries use a layout of fixed length, unless `pad` is "no".
        """
        layout = self.layout(width)
        if context.training or self._pad == "no" or layout.fixed:
            return layout
        if self._query_layout is None:
            packer = "dense" if self._kept is None else "enumerative"
            self._query_layout = new_layout(packer, width, self._kept, self._code.bits)
        return self._query_layout

    def _learned(self, width: int, context: StepContext) -> bool:
        """Return whether a frame's layout adapts to the values sent so far."""
        return self.packer == "range" and not self._layout_of(width, context).fixed

    def _fills(self, layout: Layout) -> bool:
        """Return whether payloads of a layout are padded to an agreed size."""
        return self._pad == "always" and not layout.fixed

    @property
    def _stays(self) -> bool:
        """Return whether encoding and decoding run on the GPU that holds the values."""
        return False

    def _where(self, rows: int, width: int) -> torch.device:
        """Return the device for a cut of this size; small cuts are faster on the CPU."""
        return self.device if rows * width >= LEAST_ON_CARD else _PROCESSOR

    def coded(self, values: Values | Tensor, context: StepContext) -> Coded:
        """Return the scales that the frame contains, and each value's code, axes (rows, k)."""
        if known := self._known(len(values), context):
            return Coded(b"", self._code.encode_within(values, known))
        return self._code.encode(values, self.groups(len(values), context))

    def groups(self, rows: int, context: StepContext) -> int:
        """Return the number of scales in a frame: one per row or batch, 0 if the scale is known."""
        if self._known(rows, context):
            return 0
        return rows if self._per_row or not context.training else min(rows, 1)

    def _known(self, rows: int, context: StepContext) -> bytes:
        """Return a query's scale if both parties have it; else empty bytes (the frame has it)."""
        return b"" if self._agreed is None or context.training or not rows else self._agreed.scale

    def _tag(self, layout: Layout) -> bytes:
        """Return the tag, which shows whether sender and receiver have the same adaptive state."""
        return layout.tag + (b"" if self._agreed is None else self._agreed.tag)

    def _record(
        self, step: int, layout: Layout, scale: bytes, indices: Indices, codes: Codes
    ) -> None:
        layout.record(step, indices, codes)
        if self._agreed is not None:
            self._agreed.record(step, scale)


class DenseCodec(PackedCodec):
    """Base class of codecs that send a code for every value of the cut.

    Args:
        code: value code.
        packer: ``dense``: the same number of bits for each value's code. ``bitmap``: one bit for
            each value shows if it is non-zero; codes of non-zero values follow. ``enumerative``:
            for each row, one number that identifies the positions of the non-zero values, and then
            these values' codes. ``range``: adaptive entropy coding, for codes of at most 8 bits.
        scale: group of values with a common scale in training, ``batch`` or ``row``; a query has
            one scale per row. With ``agreed``, a training batch has one scale. After the first
            training step, a query then has none: the codec clips its values to running means of the
            range limits in training.
        grad: format of a gradient: ``fp32``, ``bf16``, or 2 to 8 bits with one scale per row and
            random rounding without bias.
        pad: ``query``, ``always`` or ``no``, see `PackedCodec`.
        rectified: whether the cut has no negative values and the code represents zeros exactly.
            Then the codec sends the gradients of non-zero values only, because a rectifier (ReLU)
            before the cut sets the gradient of a zero to zero anyway.
    """

    packers = get_args(Packer)

    def __init__(
        self,
        code: ValueCode,
        packer: Packer,
        scale: Scale,
        grad: str,
        pad: Pad = "query",
        *,
        rectified: bool = False,
    ) -> None:
        super().__init__(code, packer, scale, grad, pad)
        self._rectified = rectified

    def choose(self, cut: Tensor, context: StepContext) -> Chosen:
        stays = cut.device.type != "cpu" and self._stays
        if stays or not self._code.checks:
            require_finite(cut)
        indices = np.zeros((len(cut), 0), np.int64)
        return Chosen(indices, cut if stays else cut.cpu().contiguous().numpy(), None)

    def place(self, indices: Indices, values: Values | Tensor, width: int) -> Decoded:
        if isinstance(values, Tensor):
            return Decoded(values.to(self.device), None)
        return Decoded(torch.from_numpy(values).to(self.device), None)

    def kept(self, codes: Codes, saved: Any) -> Any:
        """Return a mask of the values with a gradient: after a rectifier, the positive values."""
        return codes != 0 if self._rectified else None

    @property
    def _fills_grads(self) -> bool:
        """Return whether to pad gradients, whose lengths show how many values are above zero."""
        return self._pad == "always" and self._rectified

    @property
    def _stays(self) -> bool:
        return self.packer == "dense" and isinstance(self._code, AffineValues)

    def symbols(self, cut: Tensor, context: StepContext = INFERENCE) -> Symbols | None:
        _, codes = self.coded(cut.contiguous().numpy(), context)
        counts: Counts = "by unit" if self._learned(cut.shape[1], context) else "none"
        choices = 2**self._code.bits
        if self._rectified:  # code 0 marks a value without a gradient
            return Symbols(codes > 0, codes[codes > 0] - 1, choices - 1, counts)
        return Symbols(np.ones_like(codes, np.bool_), codes.reshape(-1), choices, counts)

    def encode_grad(self, grad: Tensor, saved: Any, context: StepContext = INFERENCE) -> Payload:
        payload = self._grad.encode(grad, saved, context)
        if self._fills_grads:
            return padding.pad(payload, self._grad.payload_bytes(len(grad), grad.numel()))
        return payload

    def decode_grad(
        self, payload: Payload, saved: Any, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Tensor:
        if self._fills_grads:
            payload = padding.unpad(payload, self._grad.payload_bytes(rows, rows * width))
        return torch.from_numpy(self._grad.decode(payload, rows, width, saved)).to(self.device)

    def formula_ratio(self, width: int) -> float:
        """Return the sent part of the values times b/32, for codes of b bits (thesis table 3.1)."""
        return self.wire_width(width) / width * self._code.bits / 32
