"""How the two holders hide an array from the party that evaluates a function on it.

Both draw the same order, the same dummies and the same signs from the key they share, and neither
sends anything about them.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from vfl.mpc.functions import Function
from vfl.mpc.permutation import permutation
from vfl.mpc.ring import encode
from vfl.mpc.rules import Rules
from vfl.mpc.stream import PadStream

_DUMMY_SCALE = 2.0
_WORD = 64


class Hiding:
    """The order, dummies and signs of one operation, alike at both holders.

    Args:
        pads: of the two holders.
        rules: how many elements are the least.
        elements: how many are real.
        function: what will be evaluated; signs are laid only where it has a mirror.
        number: of the operation.

    Attributes:
        count: elements that are sent, dummies included.
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
        self._signs = _signs(pads, self.count, number) if self._flipped(rules, function) else None
        self._mirror = function.mirror or 0.0
        self._dummies = self._draw_dummies(pads, function, number)

    def hide(self, words: Tensor, bits: int, first: bool) -> Tensor:
        """This holder's share, dummies added, signs laid, in the secret order; one axis."""
        flat = words.reshape(-1)
        if self._dummies is not None:
            values, mask = self._dummies
            dummies = encode(values, bits, "dummies", _WORD - 1 - bits) - mask if first else mask
            flat = torch.cat([flat, dummies])
        if self._signs is not None:
            flat = flat * self._signs
        return flat.index_select(0, self._order)

    def find(self, words: Tensor, bits: int, first: bool, mirrored: bool) -> Tensor:
        """The share of the results of the real elements, back in their own order; one axis.

        Args:
            words: this holder's share of the results, in the secret order.
            bits: their fraction bits.
            first: whether this is P0.
            mirrored: whether signs change the results; they change no slope.
        """
        found = words.index_select(0, self._back)
        if self._signs is not None and mirrored:
            signs = self._signs[: self._elements]
            found *= signs
            if first:  # f(-x) = mirror - f(x)
                found += (1 - signs) // 2 * round(self._mirror * 2**bits)
        return found

    @staticmethod
    def _flipped(rules: Rules, function: Function) -> bool:
        return bool(rules.flips) and function.mirror is not None

    def _draw_dummies(
        self, pads: PadStream, function: Function, number: int
    ) -> tuple[Tensor, Tensor] | None:
        """Normal values (Box and Muller 1958) and the mask between their shares."""
        dummies = self.count - self._elements
        if not dummies:
            return None
        words = pads.words64(3 * dummies, "dummies", number)
        draws = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
        radius, angle = np.sqrt(-2 * np.log1p(-draws[:dummies])), draws[dummies : 2 * dummies]
        values = torch.from_numpy(_DUMMY_SCALE * radius * np.cos(2 * np.pi * angle))
        if function.positive:
            values = values.abs() + 0.25
        return values, torch.from_numpy(words[2 * dummies :].view(np.int64))


def _signs(pads: PadStream, count: int, number: int) -> Tensor:
    words = pads.words64(math.ceil(count / _WORD), "signs", number)
    coins = np.unpackbits(words.view(np.uint8))[:count].astype(np.int64)
    return torch.from_numpy(1 - 2 * coins)
