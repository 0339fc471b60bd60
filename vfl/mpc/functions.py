"""Element-wise functions that the helper evaluates on permuted values, with their slopes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vfl.errors import UnknownNameError, nearest

_INV_SQRT_2PI = 0.3989422804014327
_SQRT_HALF = 0.7071067811865476


@dataclass(frozen=True, slots=True)
class Function:
    """One function of one variable.

    Attributes:
        name: as users write it.
        value: f, on float64.
        slope: its derivative.
        mirror: c where f(-x) = c - f(x), so that random signs can be laid over the values; None
            where there is no such c.
        whole_slope: whether the slope is 0 or 1 only, which needs no fraction bits.
        positive: whether only values above 0 have one; dummies are then such values too.
    """

    name: str
    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    mirror: float | None = None
    whole_slope: bool = False
    positive: bool = False


def _sigmoid_slope(x: Tensor) -> Tensor:
    y = torch.sigmoid(x)
    return y * (1 - y)


def _gelu_slope(x: Tensor) -> Tensor:
    normal = 0.5 * (1 + torch.erf(x * _SQRT_HALF))
    return normal + x * torch.exp(-x * x / 2) * _INV_SQRT_2PI


def _softplus_slope(x: Tensor) -> Tensor:
    return torch.sigmoid(x)


FUNCTIONS = {
    each.name: each
    for each in (
        Function("relu", torch.relu, lambda x: (x > 0).double(), whole_slope=True),
        Function("sigmoid", torch.sigmoid, _sigmoid_slope, mirror=1.0),
        Function("tanh", torch.tanh, lambda x: 1 - torch.tanh(x) ** 2, mirror=0.0),
        Function("gelu", torch.nn.functional.gelu, _gelu_slope),
        Function("softplus", torch.nn.functional.softplus, _softplus_slope),
        Function("rsqrt", torch.rsqrt, lambda x: -0.5 * x**-1.5, positive=True),
    )
}


def function(name: str) -> Function:
    """The function of a name.

    Raises:
        UnknownNameError: none has it, with the nearest.
    """
    if name not in FUNCTIONS:
        raise UnknownNameError(
            f"no element-wise function is called '{name}'",
            want=", ".join(sorted(FUNCTIONS)),
            fix=nearest(name, FUNCTIONS),
        )
    return FUNCTIONS[name]
