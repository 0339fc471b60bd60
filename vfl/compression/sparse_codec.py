"""What the codecs with k values a row have in common; a member says which places are kept."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from vfl.compression.base import INFERENCE, Codec, Decoded, Encoded, Moment
from vfl.compression.gradients import GradientCode
from vfl.compression.index_set import Places, index_set, place_bits
from vfl.compression.layout import SparseLayout
from vfl.compression.options import Scale, require_choice, require_packable
from vfl.compression.sparse_fixed import SparseFixed
from vfl.compression.values import value_code
from vfl.errors import BadOptionError, WidthError
from vfl.frame import Payload

Packer = Literal["enumerative", "index", "bitmap", "range"]


class SparseCodec(Codec):
    """Keeps k values of a row; their gradients travel back without places.

    Args:
        k: values kept of each row.
        values: ``fp32``, ``bf16``, or the bits of a value from 1 to 8.
        packer: ``enumerative`` (fewest bits of a fixed number), ``index`` (each place by itself),
            ``bitmap`` (a bit for every place) or ``range`` (adaptive; needs values of 1 to 8 bits).
        scale: ``batch`` or ``row``, what shares the ends of b-bit values in training; a query
            always has one a row.
        grad: ``fp32``, ``bf16``, or the bits of a gradient from 2 to 8.

    Raises:
        BadOptionError: k below 1, or an unknown format.
    """

    def __init__(self, k: int, values: str, packer: Packer, scale: Scale, grad: str) -> None:
        if k < 1:
            raise BadOptionError(
                "top-k keeps at least one value", where="option 'k'", got=str(k), want="k >= 1"
            )
        require_choice("packer", packer, get_args(Packer))
        require_choice("scale", scale, get_args(Scale))
        self.k = k
        self.packer: Packer = packer
        self._code = value_code(values)
        require_packable(packer, values)
        self._per_row = scale == "row"
        self._grad = GradientCode(grad)
        self._layout: SparseLayout | None = None
        self._width = 0

    def check(self, width: int) -> None:
        self._layout_for(width)

    def encode(self, cut: Tensor, moment: Moment = INFERENCE) -> Encoded:
        layout = self._layout_for(cut.shape[1])
        places = self.places(cut, moment)
        saved = torch.from_numpy(places)
        kept = cut.gather(1, saved).numpy()
        payload = layout.pack(places, kept, self._per_row or not moment.training, _step(moment))
        return Encoded(payload, saved)

    def decode(
        self, payload: Payload, rows: int, width: int, moment: Moment = INFERENCE
    ) -> Decoded:
        layout = self._layout_for(width)
        per_row = self._per_row or not moment.training
        places, kept = layout.unpack(payload, rows, per_row, _step(moment))
        saved = torch.from_numpy(places)
        return Decoded(torch.zeros(rows, width).scatter_(1, saved, torch.from_numpy(kept)), saved)

    def encode_grad(self, grad: Tensor, saved: Any, moment: Moment = INFERENCE) -> Payload:
        return self._grad.encode(grad.gather(1, saved), None, moment)

    def decode_grad(
        self, payload: Payload, saved: Any, rows: int, width: int, moment: Moment = INFERENCE
    ) -> Tensor:
        kept = torch.from_numpy(self._grad.decode(payload, rows, self.k, None))
        return torch.zeros(rows, width).scatter_(1, saved, kept)

    def formula_ratio(self, width: int) -> float:
        """k/d (b + ceil(log2 d)) / 32, thesis table 3.1 with b = 32 bits a value."""
        return self.k / width * (self._code.bits + place_bits(width)) / 32

    def payload_limit(self, rows: int, width: int) -> int:
        cut_bytes = self._layout_for(width).payload_limit(rows, per_row=True)
        return max(cut_bytes, self._grad.payload_bytes(rows, rows * self.k))

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
        if state:
            self._layout_for(int(state["width"])).load_state_dict(state)

    @abstractmethod
    def places(self, cut: Tensor, moment: Moment) -> Places:
        """The places of `cut` that travel, axes (rows, k), increasing."""

    def _layout_for(self, width: int) -> SparseLayout:
        if self._layout is None or self._width != width:
            self._layout, self._width = self._new_layout(width), width
        return self._layout

    def _new_layout(self, width: int) -> SparseLayout:
        if self.k > width:
            few = max(1, width // 8)
            raise WidthError(
                f"top-k keeps {self.k} values of a cut that is {width} wide",
                got=f"k = {self.k}",
                want=f"k <= {width}",
                fix=f"k={few} keeps one value in {width // few}",
            )
        if self.packer == "range":
            from vfl.compression.sparse_range import SparseRange

            return SparseRange(width, self.k, self._code)
        return SparseFixed(index_set(self.packer, width, self.k), self._code)


def _step(moment: Moment) -> int | None:
    return moment.step if moment.training else None
