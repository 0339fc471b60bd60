"""A rectified cut: zeros cost little and stay zero, and their gradients do not travel."""

from __future__ import annotations

from torch import nn

from vfl.compression.dense_codec import DenseCodec, Packer
from vfl.compression.options import Scale, require_packable
from vfl.compression.values import RectifiedFloats, RectifiedValues
from vfl.options import require_choice


class Rectified(DenseCodec):
    """Puts a rectifier before the cut and sends what is above zero.

    Behind a rectifier the gradient of a zero is zero, so leaving it out loses nothing; the "1" of
    thesis table 3.1 for the gradients of sparse cuts is pessimistic. How long a frame is tells how
    many values were above zero.

    Args:
        values: the bits of a value from 1 to 8, or ``fp32`` (not with ``packer=range``).
        packer: ``range`` (adaptive), ``enumerative``, ``bitmap`` or ``dense``; see `DenseCodec`.
        scale: see `DenseCodec`.
        grad: see `DenseCodec`.

    >>> import torch
    >>> sent = Rectified(values="4", packer="bitmap").encode(torch.tensor([[0.0, 2.0, 0.0, 1.0]]))
    >>> len(sent.payload)  # a scale, four bits of map, two values of four bits
    4
    """

    def __init__(
        self,
        values: str = "4",
        packer: Packer = "range",
        scale: Scale = "batch",
        grad: str = "fp32",
    ) -> None:
        require_choice("values", values, ("fp32", *"12345678"))
        require_packable(packer, values)
        code = RectifiedFloats() if values == "fp32" else RectifiedValues(int(values))
        super().__init__(code, packer, scale, grad, rectified=True)

    def client_module(self, width: int) -> nn.Module:
        return nn.ReLU()
