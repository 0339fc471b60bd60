"""Codecs that change a cut's width: to k numbers per row, or to one bit for each of n units."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from vfl.compression.coding.values import SignValues, value_code
from vfl.compression.packed import DenseCodec, Scale
from vfl.core.errors import WidthError
from vfl.core.registry import require_choice, require_range
from vfl.core.seeds import permutation

#: Largest allowed width of a cut.
_MOST_UNITS = 65536


class FewNumbers(DenseCodec):
    """Sends k numbers per row; a module at each party converts cuts to these numbers, or back.

    Args:
        k: number of values to send per row.
        values: format of a number: 1 to 8 bits, ``bf16`` or ``fp32``.
        scale: see `DenseCodec`.
        grad: see `DenseCodec`.
    """

    def __init__(self, k: int, values: str, scale: Scale, grad: str) -> None:
        require_range("k", k, 1)
        super().__init__(value_code(values), "dense", scale, grad)
        self.k = k

    def check(self, width: int) -> None:
        if self.k > width:
            raise WidthError(
                f"a cut of width {width} cannot be reduced to {self.k} numbers",
                got=f"k = {self.k}",
                want=f"k <= {width}",
            )

    def wire_width(self, width: int) -> int:
        return self.k


class Size(FewNumbers):
    """Sends k numbers per row instead of the whole cut (thesis, table 3.1).

    Args:
        k: number of values to send per row.
        kind: ``narrow``: trained linear layers convert the cut to k numbers at its sender, and back
            at its receiver. ``mask``: k units of the cut, chosen in advance, as in the authors'
            released code.
        values: format of a number: 1 to 8 bits, ``bf16`` or ``fp32``.
        scale: see `DenseCodec`.
        grad: see `DenseCodec`.

    >>> f"{Size(k=4).formula_ratio(width=128):.2%}"
    '3.12%'

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(
        self,
        k: int,
        kind: Literal["narrow", "mask"] = "narrow",
        values: str = "fp32",
        scale: Scale = "batch",
        grad: str = "fp32",
    ) -> None:
        require_choice("kind", kind, ("narrow", "mask"))
        super().__init__(k, values, scale, grad)
        self.kind = kind

    def client_module(self, width: int) -> nn.Module:
        return nn.Linear(width, self.k) if self.kind == "narrow" else Mask(width, self.k)

    def server_module(self, width: int) -> nn.Module:
        return nn.Linear(self.k, width) if self.kind == "narrow" else Unmask(width, self.k)


class Mask(nn.Module):
    """Keeps k of `width` units; the chosen units are the same at every party and in every run."""

    def __init__(self, width: int, k: int) -> None:
        super().__init__()
        kept = permutation(0, width, "size", k)[:k]
        self.register_buffer("units", torch.from_numpy(kept).sort().values, persistent=False)

    def forward(self, cut: Tensor) -> Tensor:
        """Return the kept units, axes (rows, k), of a cut of axes (rows, width)."""
        return cut.index_select(1, self.get_buffer("units"))


class Unmask(Mask):
    """Puts the k kept units back at their positions, with zeros at all other positions."""

    def __init__(self, width: int, k: int) -> None:
        super().__init__(width, k)
        self.width = width

    def forward(self, numbers: Tensor) -> Tensor:
        """Return a cut, axes (rows, width), given its kept units, axes (rows, k)."""
        whole = numbers.new_zeros(len(numbers), self.width)
        return whole.index_copy(1, self.get_buffer("units"), numbers)


class Sign(DenseCodec):
    """Sends the sign of each of n units, after batch normalisation and a hyperbolic tangent.

    In the backward pass, the gradient passes through the sign unchanged (straight-through
    estimator, Bengio et al. 2013), and then through the hyperbolic tangent (Hubara et al. 2016).
    The bottom should not end with a ReLU, whose outputs are never negative.

    Args:
        width: number n of units, and so of bits per row. A linear layer at each party converts the
            cut to these units and back. 0 means that the units are those of the cut itself, without
            a linear layer.
        grad: see `DenseCodec`.

    >>> import torch
    >>> len(Sign(width=117).encode(torch.zeros(256, 117)).payload)  # 256 x 117 bits
    3744

    Raises:
        BadOptionError: an option is out of range.
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
