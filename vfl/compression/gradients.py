"""Gradients on their way back: the values at the kept places, in the order of the places.

Both ends know which places those are, so none travel. With b bits every row has its own scale and
is rounded at random, so that on average nothing is lost (Alistarh et al. 2017, QSGD).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl.compression.base import Moment
from vfl.compression.bits import from_bits, pack, packed_bytes, require_bytes, to_bits, unpack
from vfl.compression.values import (
    LARGEST_BFLOAT16,
    Values,
    bfloat16_above,
    from_bfloat16,
    nearest_bfloat16,
)
from vfl.errors import CorruptFrameError, NonFiniteError
from vfl.frame import Payload
from vfl.options import require_choice

GRADIENTS = ("fp32", "bf16", "2", "3", "4", "5", "6", "7", "8")

Mask = npt.NDArray[np.bool_]


class GradientCode:
    """The format of gradients that an option names: ``fp32``, ``bf16``, or 2 to 8 bits a value.

    Raises:
        BadOptionError: any other name.
    """

    def __init__(self, grad: str) -> None:
        require_choice("grad", grad, GRADIENTS)
        self._float_bytes = {"fp32": 4, "bf16": 2}.get(grad, 0)
        self.bits = 8 * self._float_bytes or int(grad)
        self._top = 2 ** (self.bits - 1) - 1

    def payload_bytes(self, rows: int, values: int) -> int:
        """Bytes of `values` gradients of `rows` rows."""
        if self._float_bytes:
            return self._float_bytes * values
        return 2 * rows + packed_bytes(values, self.bits)

    def encode(self, grad: Tensor, mask: Mask | None, moment: Moment) -> bytes:
        """The payload of gradients of axes (rows, k); with a mask of those it marks only.

        Raises:
            NonFiniteError: a gradient is NaN or Inf.
        """
        if not torch.isfinite(grad).all():
            raise NonFiniteError("a gradient holds NaN or Inf", fix="lower the learning rate")
        values = grad.contiguous().numpy()
        marked = np.ones(values.shape, np.bool_) if mask is None else mask
        if self._float_bytes:
            flat = values[marked]
            return flat.tobytes() if self.bits == 32 else nearest_bfloat16(flat).tobytes()
        sizes = np.abs(np.where(marked, values, 0)).max(axis=1, initial=0)
        ends = bfloat16_above(sizes / self._top)
        scale = from_bfloat16(ends).astype(np.float64)[:, None]
        steps = values / np.where(scale > 0, scale, 1) + _draws(values.shape, moment)
        codes = np.clip(np.floor(steps), -self._top, self._top).astype(np.int64) + self._top
        return ends.astype("<u2").tobytes() + pack(to_bits(codes[marked][:, None], self.bits))

    def decode(self, payload: Payload, rows: int, width: int, mask: Mask | None) -> Values:
        """The gradients of a payload, axes (rows, width); 0 where the mask does not mark.

        Raises:
            FrameError: what `encode` could not have made.
        """
        marked = np.ones((rows, width), np.bool_) if mask is None else mask
        count = int(np.count_nonzero(marked))
        require_bytes(payload, self.payload_bytes(rows, count), rows)
        found = np.zeros((rows, width), np.float32)
        found[marked] = self._read(memoryview(payload), count, marked)
        if not np.isfinite(found).all():
            raise CorruptFrameError("a payload holds gradients that are not finite")
        return found

    def _read(self, view: memoryview, count: int, marked: Mask) -> Values:
        if self.bits == 32:
            return np.frombuffer(view, "<f4")
        if self.bits == 16:
            return from_bfloat16(np.frombuffer(view, "<u2"))
        head = 2 * len(marked)
        ends = np.frombuffer(view[:head], "<u2")
        codes = from_bits(unpack(view[head:], count, self.bits), self.bits, 1)[:, 0] - self._top
        if (codes > self._top).any() or (ends > LARGEST_BFLOAT16).any():
            raise CorruptFrameError("a payload holds gradients out of their range")
        scale = from_bfloat16(ends).astype(np.float64)
        with np.errstate(over="ignore"):  # what is not finite is refused next
            values: Values = (codes * scale[np.nonzero(marked)[0]]).astype(np.float32)
        return values


def _draws(shape: tuple[int, ...], moment: Moment) -> np.ndarray | float:
    """Uniform draws of the label party's own; half, for the nearest, where nothing is random."""
    if not moment.training or moment.secret is None:
        return 0.5
    return moment.secret.uniform(shape, "gradient", moment.step)
