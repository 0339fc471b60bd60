"""The learning rate on shares: a public whole factor and a division."""

from __future__ import annotations

import math

from vfl.mpc.rules import Rules
from vfl.mpc.truncation import Scaling

#: Bits of the whole number that stands for learning rate over rows.
_RATE_BITS = 10
#: A column times a gradient is expected below 2^6, so its sum over rows below rows times that.
_ROW_BITS = 6
#: Beyond it a quarter of the ring is no longer room enough to move a share.
_MOST_ZMAX_BITS = 61


def whole_rate(rate: float) -> tuple[int, int]:
    """Factor and shift that stand for a rate: about rate = times / 2^shift.

    >>> whole_rate(0.1 / 128)
    (819, 20)
    """
    shift = max(1, _RATE_BITS - math.frexp(rate)[1])
    return round(rate * 2**shift), shift


def rate_scalings(rules: Rules, rows: int, bits: int, rate: float) -> tuple[Scaling, Scaling]:
    """First the product's own fraction, then rate = times / 2^shift."""
    times, shift = whole_rate(rate)
    magnitude = max(rules.magnitude_bits, _ROW_BITS + math.ceil(math.log2(rows)))
    first = Scaling(bits, min(rules.bits + bits + magnitude, _MOST_ZMAX_BITS))
    second = Scaling(shift, rules.bits + magnitude + _RATE_BITS, times, rate=True)
    return first, second
