"""The learning rate on shares: a public whole factor and a division."""

from __future__ import annotations

import math

from vfl.errors import BadOptionError
from vfl.mpc.rules import Rules
from vfl.mpc.truncation import Scaling

#: Bits of the whole number that stands for learning rate over rows.
_RATE_BITS = 10
#: Beyond it a quarter of the ring is no longer room enough to move a share.
_MOST_ZMAX_BITS = 61


def whole_rate(rate: float) -> tuple[int, int]:
    """Factor and shift that stand for a rate: about rate = times / 2^shift.

    >>> whole_rate(0.1 / 128)
    (819, 20)
    """
    shift = max(1, _RATE_BITS - math.frexp(rate)[1])
    return round(rate * 2**shift), shift


def rate_scalings(
    rules: Rules, rows: int, bits: int, rate: float, gradient_bits: int = 0
) -> tuple[Scaling, Scaling]:
    """First the product's own fraction, then rate = times / 2^shift.

    A sum over rows of columns, below 2^magnitude_bits each, times gradients is what is divided.

    Args:
        rules: the same at all parties.
        rows: of the batch.
        bits: of the gradients' fraction.
        rate: learning rate over rows.
        gradient_bits: gradients are below 2 to this; as far as the ring has room.
    """
    times, shift = whole_rate(rate)
    magnitude = rules.magnitude_bits + _sum_bits(rows) + gradient_bits
    first = Scaling(bits, min(rules.bits + bits + magnitude, _MOST_ZMAX_BITS))
    most = min(rules.bits + magnitude + _RATE_BITS, _MOST_ZMAX_BITS)
    return first, Scaling(shift, most, times, rate=True)


def gradient_bits(rules: Rules, *, last: bool, squared: bool) -> int:
    """Gradients before a layer's function are below 2 to this.

    Behind a sigmoid outputs minus targets are below 1; for squared loss both are below
    2^magnitude_bits. Gradients of a hidden layer are sums over weights, and may be as large as
    what they were divided as.

    Args:
        rules: the same at all parties.
        last: whether it is the last layer.
        squared: whether the loss is; else it is cross entropy behind a sigmoid.
    """
    if squared:
        return rules.magnitude_bits + 1
    return 0 if last else rules.magnitude_bits


def require_rows(rules: Rules, rows: int) -> None:
    """Refuse a batch over which even gradients below 1 could add up to more than is divided.

    Raises:
        BadOptionError: there are too many rows for so many bits.
    """
    room = _MOST_ZMAX_BITS - rules.bits - rules.delta_bits - rules.magnitude_bits
    if _sum_bits(rows) > room:
        raise BadOptionError(
            "sums over so many rows do not fit the ring",
            where="rows of a batch",
            got=f"{rows}, with {rules.bits} bits, {rules.delta_bits} delta_bits and "
            f"{rules.magnitude_bits} magnitude_bits",
            want=f"at most {2**room} rows" if room >= 0 else "fewer bits",
            fix="lower magnitude_bits and scale the columns, or lower delta_bits or the rows",
        )


def _sum_bits(rows: int) -> int:
    """Bits that a sum over rows may have more than its largest part.

    >>> _sum_bits(1), _sum_bits(128), _sum_bits(129)
    (0, 7, 8)
    """
    return (rows - 1).bit_length()
