"""Top-k: the k values of largest magnitude of each row, and where they stand."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from vfl.compression.base import INFERENCE, Codec, Decoded, Encoded, Moment
from vfl.compression.dense import dense_bytes, dense_tensor
from vfl.compression.index_set import Packer, Places, index_set, place_bits
from vfl.compression.options import require_choice
from vfl.compression.select import top_places
from vfl.compression.sparse import SparseLayout
from vfl.compression.values import value_code
from vfl.errors import BadOptionError, CorruptFrameError, NonFiniteError, WidthError
from vfl.frame import Payload


class TopK(Codec):
    """Keeps k values of a row; their gradients travel back as k float32, without places.

    Source: Zheng, Chen, Lyu, Yao, "Reducing Communication for Split Learning by Randomized
    Top-k Sparsification", IJCAI 2023.

    Args:
        k: values kept of each row; of equal magnitudes the one at the lower place is kept.
        values: ``fp32``, or the bits of a value from 1 to 8.
        packer: ``enumerative`` (fewest bits) or ``index`` (each place by itself).

    Raises:
        BadOptionError: k below 1, or no such format of values or packer.

    >>> f"{TopK(k=3).formula_ratio(width=128):.2%}"
    '2.86%'
    >>> cut = torch.zeros(256, 128)
    >>> len(TopK(k=3, values="8").encode(cut, Moment(training=True)).payload)  # 256 x 43 bits + 4
    1380
    """

    def __init__(self, k: int, values: str = "fp32", packer: Packer = "enumerative") -> None:
        if k < 1:
            raise BadOptionError(
                "top-k keeps at least one value", where="option 'k'", got=str(k), want="k >= 1"
            )
        require_choice("packer", packer, get_args(Packer))
        self.k = k
        self.packer: Packer = packer
        self._code = value_code(values)

    def check(self, width: int) -> None:
        if self.k > width:
            few = max(1, width // 8)
            raise WidthError(
                f"top-k keeps {self.k} values of a cut that is {width} wide",
                got=f"k = {self.k}",
                want=f"k <= {width}",
                fix=f"k={few} keeps one value in {width // few}",
            )
        index_set(self.packer, width, self.k)

    def encode(self, cut: Tensor, moment: Moment = INFERENCE) -> Encoded:
        layout = self._layout(cut.shape[1])
        places = self._places(cut, moment)
        saved = torch.from_numpy(places)
        kept = cut.gather(1, saved).numpy()
        return Encoded(layout.pack(places, kept, per_row=not moment.training), saved)

    def decode(
        self, payload: Payload, rows: int, width: int, moment: Moment = INFERENCE
    ) -> Decoded:
        layout = self._layout(width)
        places, kept = layout.unpack(payload, rows, per_row=not moment.training)
        saved = torch.from_numpy(places)
        return Decoded(torch.zeros(rows, width).scatter_(1, saved, torch.from_numpy(kept)), saved)

    def encode_grad(self, grad: Tensor, saved: Any, moment: Moment = INFERENCE) -> Payload:
        kept = grad.gather(1, saved)
        if not torch.isfinite(kept).all():
            raise NonFiniteError("a gradient holds NaN or Inf", fix="lower the learning rate")
        return dense_bytes(kept)

    def decode_grad(
        self, payload: Payload, saved: Any, rows: int, width: int, moment: Moment = INFERENCE
    ) -> Tensor:
        kept = dense_tensor(payload, rows, self.k)
        if not torch.isfinite(kept).all():
            raise CorruptFrameError("a payload holds gradients that are not finite")
        return torch.zeros(rows, width).scatter_(1, saved, kept)

    def formula_ratio(self, width: int) -> float:
        """k/d (b + ceil(log2 d)) / 32, thesis table 3.1 with b = 32 bits a value."""
        return self.k / width * (self._code.bits + place_bits(width)) / 32

    def payload_limit(self, rows: int, width: int) -> int:
        return max(self._layout(width).payload_bytes(rows, per_row=True), 4 * rows * self.k)

    def _layout(self, width: int) -> SparseLayout:
        self.check(width)
        return SparseLayout(index_set(self.packer, width, self.k), self._code)

    def _places(self, cut: Tensor, moment: Moment) -> Places:
        """The places of `cut` that travel, axes (rows, k), increasing."""
        return top_places(cut, self.k)
