"""A learned quantisation: the bottom's loss includes the expected number of bits of the codes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vfl.compression.base import StepContext
from vfl.compression.coding.values import WholeValues
from vfl.compression.packed import DenseCodec, Pad
from vfl.core.registry import MOST_WEIGHT, require_range
from vfl.core.seeds import scoped

_FIRST_SCALE = 0.7


class Rate(DenseCodec):
    """Sends range-coded integers; the loss of the bottom includes their expected number of bits.

    The codec rectifies each unit, multiplies it by a learned scale, and rounds the product y to an
    integer. To estimate the number of bits, the codec learns a logistic distribution for each unit.
    In the estimate, noise u replaces the rounding: y + u, where u is uniform on [-1/2, 1/2] (Balle
    et al. 2017, section 3). The feature party adds `weight` times the bits per row to its loss. The
    label party learns its own inverse scales, so the parties send no parameters.

    Args:
        weight: weight of one bit per row in the feature party's loss.
        bits: largest number of bits of an integer; integers are at most 2^bits - 1.
        grad: see `DenseCodec`.
        pad: see `PackedCodec`.

    >>> from vfl.compression import make
    >>> make("rate:weight=0.01").wire_width(128)
    128

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(
        self, weight: float = 0.01, bits: int = 6, grad: str = "fp32", pad: Pad = "query"
    ) -> None:
        require_range("weight", weight, 0, MOST_WEIGHT)
        require_range("bits", bits, 1, 8)
        super().__init__(WholeValues(bits), "range", "batch", grad, pad)
        self.weight = weight
        self._model: Units | None = None

    def client_module(self, width: int) -> nn.Module:
        self._model = Units(width)
        return self._model

    def server_module(self, width: int) -> nn.Module:
        return Scales(width, -_FIRST_SCALE)

    def local_loss(self, cut: Tensor, context: StepContext) -> Tensor | None:
        if self._model is None or not len(cut):
            return None
        key = 0 if context.secret is None else context.secret.number("rate", context.step)
        with scoped(key):
            noise = torch.rand(cut.shape).to(cut.device) - 0.5
        return self.weight * self._model.bits(cut + noise)


class Scales(nn.Module):
    """Multiplies each unit by a learned positive number.

    Args:
        width: number of units.
        first: initial value of the logarithm of each number.
    """

    def __init__(self, width: int, first: float) -> None:
        super().__init__()
        self.logarithm = nn.Parameter(torch.full((width,), first))

    def forward(self, values: Tensor) -> Tensor:
        """Return scaled values, axes (rows, units)."""
        return values * self.logarithm.exp()


class Units(Scales):
    """The feature party's module: a rectifier, scales, and a distribution of each unit's values."""

    def __init__(self, width: int) -> None:
        super().__init__(width, _FIRST_SCALE)
        self.center = nn.Parameter(torch.zeros(width))
        self.spread = nn.Parameter(torch.zeros(width))

    def forward(self, values: Tensor) -> Tensor:
        """Return the rectified and scaled values, with the same axes (rows, units)."""
        return super().forward(values.relu())

    def bits(self, noisy: Tensor) -> Tensor:
        """Return the expected bits per row: the mean of -log2 of the values' probabilities."""
        spread = self.spread.exp()
        upper = torch.sigmoid((noisy + 0.5 - self.center) / spread)
        lower = torch.sigmoid((noisy - 0.5 - self.center) / spread)
        return -(upper - lower).clamp(min=1e-9).log2().sum(dim=1).mean()
