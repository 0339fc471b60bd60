"""Functions that P2 evaluates on values in an order that P2 does not know (algorithm 5.2).

This file defines the element-wise functions and their derivatives. The file also defines the secret
permutation, the dummies (false values among the real ones) and the random signs. The two holders
draw these from their shared key without a message. In fast mode, the holders send P2 only the upper
40 bits of each share, if the function and the rules permit; this file packs and unpacks these bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vfl.core.errors import UnknownNameError, nearest
from vfl.mpc.ring import ELEMENT_BYTES, encode
from vfl.mpc.rules import Rules
from vfl.mpc.stream import PadStream

_INV_SQRT_2PI = 0.3989422804014327
_SQRT_HALF = 0.7071067811865476
_LEAST_INDEX_BITS = 20
_DUMMY_SCALE = 2.0
_WORD = 64
#: If two shares lose their lower 24 bits, their sum is the value minus the two lost parts, which
#: together are 2^24 on average. The receiver adds 2^24; the remaining error is below 2^24 in
#: magnitude, so below 2^(24 - bits) in units of the value.
UPPER_BYTES = 5
EXPECTED_CARRY = 1 << 24
#: Data types of the two fields by which an element's upper bytes are copied; the key is the number
#: of bytes that are kept.
_FIELDS = {5: ("<u4", "u1"), 6: ("<u4", "<u2")}


@dataclass(frozen=True, slots=True)
class Function:
    """A function of one variable, applied to every element.

    Attributes:
        name: name of the function in users' settings.
        value: the function f itself, on float64 values.
        slope: the derivative of f, on float64 values.
        mirror: number c with f(-x) = c - f(x), a symmetry that lets the holders give values random
            signs. None if the function lacks this symmetry.
        whole_slope: whether the derivative is always 0 or 1, so that it needs no fraction bits.
        positive: whether the function is defined only for positive numbers; dummies are then
            positive too.
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


FUNCTIONS = {
    each.name: each
    for each in (
        Function("relu", torch.relu, lambda x: (x > 0).double(), whole_slope=True),
        Function("sigmoid", torch.sigmoid, _sigmoid_slope, mirror=1.0),
        Function("tanh", torch.tanh, lambda x: 1 - torch.tanh(x) ** 2, mirror=0.0),
        Function("gelu", torch.nn.functional.gelu, _gelu_slope),
        Function("softplus", torch.nn.functional.softplus, torch.sigmoid),
        Function("rsqrt", torch.rsqrt, lambda x: -0.5 * x**-1.5, positive=True),
    )
}


def function(name: str) -> Function:
    """Return the function with this name, and its derivative.

    Raises:
        UnknownNameError: no function has this name; the error suggests the most similar name.
    """
    if name not in FUNCTIONS:
        raise UnknownNameError(
            f"no element-wise function is called '{name}'",
            want=", ".join(sorted(FUNCTIONS)),
            fix=nearest(name, FUNCTIONS),
        )
    return FUNCTIONS[name]


def permutation(pads: PadStream, count: int, *purpose: str | int) -> np.ndarray:
    """Draw a uniform permutation of ``range(count)``; int64 of shape (count,).

    Args:
        pads: key stream of the parties that permute.
        count: number of elements.
        purpose: see `PadStream.elements64`.

    Two elements with equal sort keys stay in the order of their indices. Among 2^20 elements, the
    probability that any two of their 44-bit keys are equal is 0.03; among 2^16 elements it is
    0.0001. If the keys of two neighbours are equal, only the order of this one pair is not random.

    Raises:
        ReusedPadError: the permutation for this purpose and step was drawn before.
    """
    bits = np.uint64(max(_LEAST_INDEX_BITS, (max(count, 1) - 1).bit_length()))
    low = (np.uint64(1) << bits) - np.uint64(1)
    elements = pads.elements64(count, *purpose)
    elements &= ~low
    elements |= np.arange(count, dtype=np.uint64)
    elements.sort()
    elements &= low
    return elements.view(np.int64)


class Permutation:
    """Order, dummies and random signs for one operation; both holders draw equal ones.

    Args:
        pads: key stream of the two holders.
        rules: rules, which set the smallest number of elements to send.
        elements: number of real elements.
        function: function that P2 will evaluate. Values get random signs only if the function is
            symmetric (`Function.mirror`).
        number: number of the operation.

    Attributes:
        count: number of elements that are sent; it includes dummies.
    """

    def __init__(
        self, pads: PadStream, rules: Rules, elements: int, function: Function, number: int
    ) -> None:
        self.count = max(elements, rules.least_permuted)
        self._elements = elements
        order = permutation(pads, self.count, "order", number)
        back = np.empty_like(order)
        back[order] = np.arange(self.count)
        self._order, self._back = torch.from_numpy(order), torch.from_numpy(back[:elements])
        flipped = rules.flips and function.mirror is not None
        self._signs = _signs(pads, self.count, number) if flipped else None
        self._mirror = function.mirror or 0.0
        self._dummies = self._draw_dummies(pads, function, number)

    def apply(self, elements: Tensor, bits: int, first: bool) -> Tensor:
        """Return this holder's share of the values in permuted order.

        The share has one axis, and includes dummies and random signs.
        """
        flat = elements.reshape(-1)
        if self._dummies is not None:
            values, mask = self._dummies
            dummies = encode(values, bits, "dummies", _WORD - 1 - bits) - mask if first else mask
            flat = torch.cat([flat, dummies])
        if self._signs is not None:
            flat = flat * self._signs
        return flat.index_select(0, self._order)

    def undo(self, elements: Tensor, bits: int, first: bool, mirrored: bool) -> Tensor:
        """Return this holder's share of the real elements' results in the original order; one axis.

        Args:
            elements: this holder's share of the results, in the secret order.
            bits: fraction bits of the results.
            first: whether this holder is P0.
            mirrored: whether the random signs change the results: they change values f(x), but not
                derivatives.
        """
        found = elements.index_select(0, self._back)
        if self._signs is not None and mirrored:
            signs = self._signs[: self._elements]
            found *= signs
            if first:  # f(-x) = mirror - f(x)
                found += (1 - signs) // 2 * round(self._mirror * 2**bits)
        return found

    def _draw_dummies(
        self, pads: PadStream, function: Function, number: int
    ) -> tuple[Tensor, Tensor] | None:
        """Draw normally distributed dummies (Box and Muller 1958), and the mask of their shares."""
        dummies = self.count - self._elements
        if not dummies:
            return None
        elements = pads.elements64(3 * dummies, "dummies", number)
        draws = (elements >> np.uint64(11)).astype(np.float64) * 2.0**-53
        radius, angle = np.sqrt(-2 * np.log1p(-draws[:dummies])), draws[dummies : 2 * dummies]
        values = torch.from_numpy(_DUMMY_SCALE * radius * np.cos(2 * np.pi * angle))
        if function.positive:
            values = values.abs() + 0.25
        return values, torch.from_numpy(elements[2 * dummies :].view(np.int64))


def _signs(pads: PadStream, count: int, number: int) -> Tensor:
    elements = pads.elements64(math.ceil(count / _WORD), "signs", number)
    coins = np.unpackbits(elements.view(np.uint8))[:count].astype(np.int64)
    return torch.from_numpy(1 - 2 * coins)


def upper_bytes(elements: Tensor, size: int = UPPER_BYTES) -> memoryview:
    """Return the upper five or six bytes of each ring element."""
    in_word, packed_type = _types(size)
    packed = np.empty(elements.numel(), packed_type)
    _copy(elements.numpy().astype("<i8", copy=False).reshape(-1).view(in_word), packed)
    return packed.view(np.uint8).data


def from_upper_bytes(payload: memoryview, size: int = UPPER_BYTES, fill: int = 0) -> Tensor:
    """Rebuild ring elements from their upper bytes; the result is int64 with one axis.

    Args:
        payload: result of `upper_bytes`.
        size: number of bytes per element.
        fill: value that replaces the omitted lower bytes.
    """
    in_word, packed_type = _types(size)
    packed = np.frombuffer(payload, packed_type)
    elements = np.full(len(packed), fill, "<i8")
    _copy(packed, elements.view(in_word))
    return torch.from_numpy(elements.astype(np.int64, copy=False))


@lru_cache
def _types(size: int) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Return two numpy types of the kept bytes: their fields in an element, and a packed record."""
    low, high = _FIELDS[size]
    start = ELEMENT_BYTES - size
    places: Any = {"low": (low, start), "high": (high, start + 4)}
    return np.dtype(places), np.dtype([("low", low), ("high", high)])


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    """Copy field by field.

    numpy copies a field of four bytes at once, but five bytes one by one.
    """
    for name in ("low", "high"):
        target[name] = source[name]
