"""The sign code: one bit a unit."""

from __future__ import annotations

from torch import nn

from vfl.compression.dense_codec import DenseCodec
from vfl.compression.values import SignValues
from vfl.options import require_range

#: As wide as a cut may be.
_MOST_UNITS = 65536


class Sign(DenseCodec):
    """Sends +1 or -1 for each of n units that were normalised over the batch and squashed.

    The gradient of the sign goes through unchanged (straight-through, Bengio et al. 2013), then
    through the hyperbolic tangent before it (Hubara et al. 2016). The bottom should not end in a
    rectifier.

    Args:
        width: units, so bits a row; a linear layer at each end makes them from the cut's and back.
            0 takes the cut as it is.
        grad: see `DenseCodec`.

    >>> import torch
    >>> len(Sign(width=117).encode(torch.zeros(256, 117)).payload)  # 256 x 117 bits
    3744
    """

    def __init__(self, width: int = 0, grad: str = "fp32") -> None:
        require_range("width", width, 0, _MOST_UNITS)
        super().__init__(SignValues(), "dense", "batch", grad)
        self.units = width

    def wire_width(self, width: int) -> int:
        return self.units or width

    def client_module(self, width: int) -> nn.Module:
        units = self.wire_width(width)
        layers = [] if units == width else [nn.Linear(width, units)]
        return nn.Sequential(*layers, nn.BatchNorm1d(units), nn.Tanh())

    def server_module(self, width: int) -> nn.Module | None:
        units = self.wire_width(width)
        return None if units == width else nn.Linear(units, width)
