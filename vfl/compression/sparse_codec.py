"""What the codecs with k values a row have in common; a member says which places are kept."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from vfl.compression.base import INFERENCE, Decoded, Encoded, Moment
from vfl.compression.bound import Counts, Symbols
from vfl.compression.index_set import Places, index_set, place_bits
from vfl.compression.layout import SparseLayout, groups_of
from vfl.compression.layout_codec import LayoutCodec, step_of
from vfl.compression.options import Scale, require_packable
from vfl.compression.sparse_fixed import SparseFixed
from vfl.compression.values import value_code
from vfl.errors import BadOptionError, WidthError
from vfl.frame import Payload

Packer = Literal["enumerative", "index", "bitmap", "range"]


class SparseCodec(LayoutCodec[SparseLayout]):
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
        super().__init__(value_code(values), packer, get_args(Packer), scale, grad)
        require_packable(packer, values)
        self.k = k

    def check(self, width: int) -> None:
        self.layout(width)

    def encode(self, cut: Tensor, moment: Moment = INFERENCE) -> Encoded:
        layout = self.layout(cut.shape[1])
        places = self.places(cut, moment)
        saved = torch.from_numpy(places)
        kept = cut.gather(1, saved).numpy()
        payload = layout.pack(places, kept, self.is_per_row(moment), step_of(moment))
        return Encoded(payload, saved)

    def decode(
        self, payload: Payload, rows: int, width: int, moment: Moment = INFERENCE
    ) -> Decoded:
        layout = self.layout(width)
        places, kept = layout.unpack(payload, rows, self.is_per_row(moment), step_of(moment))
        saved = torch.from_numpy(places)
        return Decoded(torch.zeros(rows, width).scatter_(1, saved, torch.from_numpy(kept)), saved)

    def symbols(self, cut: Tensor, moment: Moment = INFERENCE) -> Symbols:
        places = self.places(cut, moment)
        kept = np.zeros(cut.shape, np.bool_)
        np.put_along_axis(kept, places, True, axis=1)
        values = cut.gather(1, torch.from_numpy(places)).numpy()
        _, codes = self._code.encode(values, groups_of(len(cut), self.is_per_row(moment)))
        counts: Counts = "pooled" if self.learns else "none"
        return Symbols(kept, codes.reshape(-1), 2**self._code.bits, counts)

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
        cut_bytes = self.layout(width).payload_limit(rows, per_row=True)
        return max(cut_bytes, self._grad.payload_bytes(rows, rows * self.k))

    @abstractmethod
    def places(self, cut: Tensor, moment: Moment) -> Places:
        """The places of `cut` that travel, axes (rows, k), increasing."""

    def new_layout(self, width: int) -> SparseLayout:
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
