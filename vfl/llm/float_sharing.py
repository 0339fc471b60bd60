"""**Insecure**: shares of floats, as the thesis computes (6.3.5.2), to be measured and broken.

x = D + (x - D) with a normal D of E D^2 = L^2 E x^2 (equations 6-11 and 6-12; L is `SCALE`). Such a
share is not uniform: whoever is sent x - D n times of one x averages, and is left with an error of
L / sqrt(n) times the root mean square of x (equation 6-13, with the factor E x^2 that it leaves
out). Of a product both parties open x - U with U of both, so sqrt(2) as much.

Nobody who deals knows the size of a value: activations are taken to have mean square 1, and weights
one by the number of their inputs. A float travels as 4 bytes, as in Tables 6.1 and 6.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vfl.llm.two_party import Constant, Role, Sent, Shared, Wanted
from vfl.mpc.ring import require_integer_bits
from vfl.mpc.stream import PadStream

#: The L of the thesis' example.
SCALE = 100.0
_FLOAT_BITS = 32
#: Pads of the query by sets, which has no floats (`Role.choose`).
_WHOLE = ("set", "sum")


def normal(pads: PadStream, count: int, *purpose: str | int) -> np.ndarray:
    """Standard normal numbers (Box and Muller 1958) that the other end of a stream has too.

    >>> both = [normal(PadStream(bytes(32)), 3, "D") for _ in range(2)]
    >>> bool((both[0] == both[1]).all()), both[0].shape
    (True, (3,))
    """
    pairs = -(-count // 2)
    drawn = (pads.elements64(2 * pairs, *purpose) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log1p(-drawn[:pairs])), 2 * np.pi * drawn[pairs:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


class FloatRole(Role):
    """A `Role` on floats: float64 here, float32 in messages; of ``Form`` thesis mode alone."""

    def pad(self, peer: int, shape: Sequence[int], *purpose: str | int) -> Tensor:
        """Normal numbers of `SCALE` times the size that a value is taken to have."""
        if purpose[0] in _WHOLE:
            return super().pad(peer, shape, *purpose)
        drawn = normal(self.pads[peer], math.prod(shape), *purpose)
        spread = SCALE / math.sqrt(shape[0]) if purpose[0] == "U" else SCALE
        return torch.from_numpy(spread * drawn).reshape(tuple(shape))

    def encode(self, values: Tensor, bits: int, where: str, integer_bits: int) -> Tensor:
        """The values themselves."""
        require_integer_bits(values.double(), integer_bits, bits, where)
        return values.detach().double()

    def decode(self, elements: Tensor, shared: Shared) -> Tensor:
        """The elements themselves."""
        return elements

    def multiply(self, shared: Shared, constant: Constant) -> Shared:
        """`Role.multiply` on floats."""
        return self._multiply(shared, constant, torch.matmul, constant.shape)

    def _low_bits(self, shared: Shared, shown: int | None) -> tuple[int, int]:
        return 0, 0

    def _as_sent(self, elements: Tensor) -> Tensor:
        return elements.float().double()

    def _send(self, peer: int, number: int, *parts: Sent) -> None:
        super()._send(peer, number, *map(_as_words, parts))

    def _receive(self, peer: int, number: int, *parts: Wanted) -> list[Tensor]:
        found = super()._receive(peer, number, *((shape, _FLOAT_BITS) for shape, *_ in parts))
        if self._phase == "online":
            count = sum(each.numel() for each in found)
            self.leakage.count("values under noise", "float sharing", count, count)
        return [each.int().view(torch.float32).double() for each in found]


def _as_words(part: Sent) -> Sent:
    """A float32 as the 32 bits it is; whole numbers stay."""
    if not part[0].is_floating_point():
        return part
    return part[0].float().contiguous().view(torch.int32).long(), _FLOAT_BITS
