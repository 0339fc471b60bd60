"""Functions of fixed-precision tensors, by polynomials, powers of two and repeated squaring.

Each docstring states the range of arguments for which a result is valid, and the rounds of messages
that two holders of shares without MACs need. docs/results/tensor_operations.csv has the largest
errors for arguments from -4 to 4, or from 0.05 to 20 where they must be positive. No function
discloses a value: an argument beyond the range is not detected, and its result is wrong.

For 1 / x, log, sqrt and similar functions, the argument x is first scaled to [1/2, 1) by the
position of its leading one; on this interval the function is computed as a polynomial. A polynomial
of degree 7 or 15 takes three or four sequential products (Paterson and Stockmeyer 1973); its
variable lies between -1 and 1. The polynomials interpolate the function at Chebyshev points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from vfl.tensors.arithmetic import (
    FP,
    add,
    at_precision,
    clamp,
    detached,
    gathered,
    largest,
    less,
    made,
    mul,
    neg,
    number,
    picked,
    power,
    refuse_options,
    square,
    stack,
    sub,
    summed_to,
    times,
    total,
    unbound,
    whole,
    with_gradient,
)

#: Fraction bits of values inside the evaluation of polynomials; these values are below 8.
_INNER_BITS = 26
#: Largest e for which 2^e may be the leading one of an argument that is scaled to [1/2, 1); such an
#: argument must be from 2^-precision to 2^16.
_MOST_POWER = 15
#: Number of squarings that an exponential takes, and fraction bits of the exponential, whose result
#: is below 2^(62 - 2 bits).
_SQUARINGS, _EXP_BITS = 7, 22
#: For each function (curve), the magnitude of the argument beyond which the function is replaced by
#: its limits 0 and 1.
_ENDS = {"sigmoid": 11.0, "normal": 5.0}
#: Magnitude of the argument beyond which the normal density is replaced by 0.
_FLAT = 8.0
#: Fraction bits of an inverse that is used as a factor, of the product with this inverse, and of
#: powers of two in roots.
_QUOTIENT_BITS, _SCALED_BITS, _ROOT_BITS = 20, 28, 24
#: Largest number of fraction bits of an argument for a search of its leading one. For a root's
#: argument, the leading one must lie above this many of the lowest bits.
_FINEST_BITS, _BELOW_ROOTS = 40, 8


# Polynomials.


@lru_cache(maxsize=32)
def coefficients(name: str, degree: int, low: float, high: float) -> tuple[float, ...]:
    """Return the coefficients of a polynomial that interpolates the function `name`.

    The polynomial's variable t from -1 to 1 stands for x from `low` to `high`. The coefficient of
    the constant term comes first.

    >>> [round(each, 3) for each in coefficients("reciprocal", 3, 0.5, 1.0)]
    [1.331, -0.444, 0.166, -0.055]
    """
    series = np.polynomial.Chebyshev.interpolate(
        np.vectorize(_CURVES[name]), degree, domain=[low, high]
    )
    return tuple(float(each) for each in np.polynomial.chebyshev.cheb2poly(series.coef))


_CURVES: dict[str, Callable[[float], float]] = {
    "reciprocal": lambda x: 1 / x,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "log": math.log,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "normal": lambda x: 0.5 * math.erfc(-x / math.sqrt(2)),
}


def polynomial(t: FP, weights: Sequence[float]) -> FP:
    """Evaluate a polynomial with 8 or 16 coefficients; this takes three or four rounds of messages.

    If a division returned t, one round less suffices.

    Args:
        t: shared values from -1 to 1; the powers of t have the same precision as t.
        weights: coefficients; that of the constant term comes first.
    """
    power = square(t)
    parts = [_line(t, *weights[at : at + 2]) for at in range(0, len(weights), 2)]
    while len(parts) > 1:
        # One division back to the precision serves all powers of t.
        odds = stack([*parts[1::2], power]).divided()
        power = picked(odds, -1)
        found = unbound(mul(odds if len(parts) > 2 else picked(odds, slice(0, -1)), power))
        parts, power = [add(*pair) for pair in zip(parts[::2], found, strict=False)], found[-1]
    return parts[0]


def _line(t: FP, constant: float, slope: float) -> FP:
    """Return constant + slope * t.

    The result has a product's fraction bits, even if the slope is 0.
    """
    bits = t.bits + t.precision
    child = t.child.linear("scale", round(slope * 2.0**t.precision))
    return made(child.plus(torch.tensor(round(constant * 2.0**bits))), bits, t)


# Scaling an argument by its leading one.


@dataclass(frozen=True)
class Octave:
    """An argument of magnitude x' 2^(e + 1) with x' in [1/2, 1), where x' and e are both shared.

    Attributes:
        t: 4 x' - 3, which lies between -1 and 1.
        leading: one-hot vector of e: 1 at the argument's e, else 0; axes (possible e, *axes of the
            argument).
        to_one: factor 2^-(e + 1), with the argument's sign, by which the argument was scaled.
        low: the smallest e that the argument is allowed to have.
    """

    t: FP
    leading: FP
    to_one: FP
    low: int

    def curve(self, name: str, bits: int = _INNER_BITS) -> FP:
        """Return a function of x' (the function's `name`), with an error of about 3e-6 or less.

        The function takes three rounds of messages.
        """
        return polynomial(self.t, coefficients(name, 7, 0.5, 1.0)).divided(bits)

    def weighted(self, weight: Callable[[int], float], bits: int) -> FP:
        """Return weight(e), where e is shared and the function `weight` is public; no message."""
        weights = [round(weight(self.low + at) * 2.0**bits) for at in range(len(self.leading))]
        column = torch.tensor(weights).reshape(-1, *[1] * (self.leading.dim() - 1))
        child = self.leading.child.linear("by", column, "mul", False).linear("sum", [0], False)
        return FP(child, bits, _INNER_BITS)


def octave(x: FP, low: int | None = None, high: int = _MOST_POWER, signed: bool = False) -> Octave:
    """Scale a magnitude to [1/2, 1); takes ten rounds of messages, or eleven with a sign.

    Args:
        x: values with magnitudes from 2^low to 2^(high + 1).
        low: the smallest possible e; by default minus the precision of `x`.
        high: the largest possible e.
        signed: whether elements of `x` may be negative.
    """
    x = x.divided(max(2 * x.precision, _FINEST_BITS))
    low = -min(x.precision, x.bits) if low is None else low
    flags = FP(x.child.leading(x.bits + low, x.bits + high), 0, _INNER_BITS)
    leading = picked(flags, slice(0, -1))
    found = Octave(x, leading, x, low)
    to_one = found.weighted(lambda e: 2.0 ** -(e + 1), high + 1)
    if signed:
        to_one = exact(to_one, sub(whole(torch.ones(()), x), mul(picked(flags, -1), 2)))
    normal = exact(at_precision(x, _INNER_BITS), to_one)
    return Octave(sub(mul(normal, 4.0), 3.0).divided(), leading, to_one, low)


def exact(a: FP, b: FP) -> FP:
    """Multiply two values with any fraction bits; takes one round of messages.

    The caller ensures that the product fits into the ring.
    """
    found = times(FP(a.child, 0, a.precision), FP(b.child, 0, b.precision), "mul", neg, neg)
    return FP(found.child, a.bits + b.bits, a.precision)


# Quotients and roots.


def quotient(a: FP, b: Octave, inverse: FP | None = None) -> FP:
    """Return a / b, for a below 2^24 and a quotient below 2^17.

    The quotient takes five rounds of messages, or two if the inverse of b is given.
    """
    inverse = b.curve("reciprocal", _QUOTIENT_BITS) if inverse is None else inverse
    scaled = exact(a.divided(max(a.precision, _QUOTIENT_BITS)), inverse).divided(_SCALED_BITS)
    return at_precision(exact(scaled, b.to_one), a.precision)


def div(a: Any, b: Any) -> FP:
    """Return a / b; a tensor b must be from 2^-precision to 2^16 in magnitude.

    With a tensor b, the division takes 16 rounds of messages; by a public number, it is a product.

    For b = 0, the result is 0.

    >>> from vfl.tensors import fix_precision
    >>> x, y = fix_precision(torch.tensor([3.0])), fix_precision(torch.tensor([-8.0]))
    >>> (x / y).get().float_precision()
    tensor([-0.3750])
    """
    if not isinstance(b, FP):
        return mul(a, 1 / b)
    with torch.no_grad():
        divisor = octave(b, signed=True)
        inverse = divisor.curve("reciprocal", _QUOTIENT_BITS)
        a = a if isinstance(a, FP) else number(a, b)
        found = quotient(a, divisor, inverse)

    def to_b(g: FP) -> FP:
        return summed_to(neg(quotient(mul(g, found), divisor, inverse)), b.shape)

    return with_gradient(
        found, (a, lambda g: summed_to(quotient(g, divisor, inverse), a.shape)), (b, to_b)
    )


def reciprocal(a: FP) -> FP:
    """Return 1 / a, for a from 2^-precision to 2^16 in magnitude.

    The reciprocal takes 14 rounds of messages. For 0 the result is 0.
    """
    with torch.no_grad():
        divisor = octave(a, signed=True)
        found = at_precision(exact(divisor.curve("reciprocal"), divisor.to_one), a.precision)
    return with_gradient(found, (a, lambda g: neg(mul(g, square(found)))))


def sqrt(a: FP) -> FP:
    """Return the square root, for a from 2^-precision to 2^16.

    The square root takes 14 rounds of messages. For 0 the result is 0. If the tensor has more
    fraction bits than a product has, the smallest valid argument is 2^(8 - bits).
    """
    with torch.no_grad():
        fine = a.bits > 2 * a.precision
        argument = octave(a, low=_BELOW_ROOTS - min(a.bits, _FINEST_BITS) if fine else None)
        found = _root(argument, "sqrt", 0.5, a)
    return with_gradient(found, (a, lambda g: mul(mul(g, _root(argument, "rsqrt", -0.5, a)), 0.5)))


def rsqrt(a: FP) -> FP:
    """Return 1 / sqrt(a), for a from 2^-precision to 2^16.

    The function takes 14 rounds of messages. For 0 the result is 0.
    """
    with torch.no_grad():
        found = _root(octave(a), "rsqrt", -0.5, a)

    def back(g: FP) -> FP:
        return mul(mul(g, found), mul(square(found), -0.5))

    return with_gradient(found, (a, back))


def _root(argument: Octave, name: str, power: float, like: FP) -> FP:
    scale = argument.weighted(lambda e: 2.0 ** (power * (e + 1)), _ROOT_BITS)
    return at_precision(exact(argument.curve(name), scale), like.precision)


# Exponentials and logarithms.


def exp(a: FP) -> FP:
    """Return e^a for a from -115 to 12.

    The result is (1 + t + t^2 / 2)^128 with t = a / 128, and takes 8 rounds of messages. Its
    relative error is about |a|^3 / 98304.

    >>> from vfl.tensors import fix_precision
    >>> torch.exp(fix_precision(torch.tensor([-1.0]))).get().float_precision()
    tensor([0.3679])
    """
    with torch.no_grad():
        found = at_precision(_exponential(detached(a)), a.precision)
    return with_gradient(found, (a, lambda g: mul(g, found)))


def _exponential(a: FP) -> FP:
    a = a.divided()
    t = FP(a.child, a.bits + _SQUARINGS, a.bits + _SQUARINGS)
    found = add(add(mul(square(t), 0.5), t), 1.0)
    for _ in range(_SQUARINGS):
        found = square(at_precision(found, _EXP_BITS).divided())
    return found


def log(a: FP) -> FP:
    """Return the natural logarithm, for a from 2^-precision to 2^16.

    The logarithm takes 13 rounds of messages. For an argument of 0 or less, the result is
    arbitrary.
    """
    with torch.no_grad():
        found = _logarithm(octave(a), a)
    return with_gradient(found, (a, lambda g: div(g, a)))


def _logarithm(argument: Octave, like: FP) -> FP:
    powers = argument.weighted(lambda e: (e + 1) * math.log(2), _INNER_BITS)
    return at_precision(add(argument.curve("log"), powers), like.precision)


def softmax(a: FP, dim: int = -1, dtype: None = None, _stacklevel: int = 0) -> FP:
    """Return exp(a) divided by its sum along an axis.

    An element may be smaller than the largest element by at most 115.

    For n elements, the softmax takes the rounds of messages of log2(n) comparisons and selections,
    and 23 more.
    """
    refuse_options("softmax", dtype=dtype)
    with torch.no_grad():
        found = _shares_of_sum(a, dim)[0]

    def back(g: FP) -> FP:
        return mul(found, sub(g, total(mul(g, found), dim, keepdim=True)))

    return with_gradient(found, (a, back))


def log_softmax(a: FP, dim: int = -1, dtype: None = None, _stacklevel: int = 0) -> FP:
    """Return the logarithm of `softmax`; this takes two rounds of messages less."""
    refuse_options("log_softmax", dtype=dtype)
    with torch.no_grad():
        above, parts, sums = _exponentials(a, dim)
        found = sub(above, _logarithm(sums, a))

    def back(g: FP) -> FP:
        share = at_precision(quotient(parts, sums), a.precision)
        return sub(g, mul(share, total(g, dim, keepdim=True)))

    return with_gradient(found, (a, back))


def _exponentials(a: FP, dim: int) -> tuple[FP, FP, Octave]:
    """Return a minus its largest element, the exponentials of these differences, and the sum."""
    a = detached(a)
    most, _ = largest(a, dim)
    above = sub(a, unsqueezed(most, dim))
    parts = _exponential(above)
    sums = octave(total(parts, dim, keepdim=True), low=-1, high=a.shape[dim].bit_length())
    return above, parts, sums


def _shares_of_sum(a: FP, dim: int) -> tuple[FP, Octave]:
    _, parts, sums = _exponentials(a, dim)
    return at_precision(quotient(parts, sums), a.precision), sums


def unsqueezed(a: FP, dim: int) -> FP:
    """Add an axis of length 1."""
    return gathered(a, lambda at: at.unsqueeze(dim))


# Functions with values from 0 to 1 (curves).


def sigmoid(a: FP) -> FP:
    """Return 1 / (1 + exp(-a)), for any a; takes 11 rounds of messages."""
    with torch.no_grad():
        found = _step(detached(a), "sigmoid")
        slope: list[FP] = []

    def back(g: FP) -> FP:
        if not slope:
            slope.append(sub(found, square(found)))
        return mul(g, slope[0])

    return with_gradient(found, (a, back))


def tanh(a: FP) -> FP:
    """Return 2 sigmoid(2 a) - 1; see `sigmoid`."""
    return sub(mul(sigmoid(mul(a, 2)), 2), whole(torch.ones(()), a))


def silu(a: FP) -> FP:
    """Return a * sigmoid(a); takes one round of messages more than `sigmoid`."""
    return mul(a, sigmoid(a))


def gelu(a: FP, approximate: str = "none") -> FP:
    """Return a * N(a) for any a; takes 12 rounds of messages.

    N is the normal distribution function. With `approximate`, the function uses `sigmoid` instead.
    """
    if approximate != "none":
        return mul(a, sigmoid(mul(add(a, mul(power(a, 3), 0.044715)), math.sqrt(8 / math.pi))))
    with torch.no_grad():
        normal = _step(detached(a), "normal")

    return mul(a, with_gradient(normal, (a, lambda g: _density(g, a))))


def erf(a: FP) -> FP:
    """Return 2 N(a sqrt 2) - 1 for any a; takes 12 rounds of messages.

    N is the normal distribution function.
    """
    with torch.no_grad():
        normal = _step(detached(mul(a, math.sqrt(2))), "normal")
    found = sub(mul(normal, 2), whole(torch.ones(()), a))
    return with_gradient(found, (a, lambda g: mul(_density(g, mul(a, math.sqrt(2))), math.sqrt(8))))


def _density(g: FP, a: FP) -> FP:
    """Return the gradient g times the normal density exp(-a^2 / 2) / sqrt(2 pi)."""
    squares = square(clamp(detached(a), -_FLAT, _FLAT))
    return mul(g, mul(exp(mul(squares, -0.5)), 1 / math.sqrt(2 * math.pi)))


def _step(a: FP, name: str) -> FP:
    """Return a function with f(-x) = 1 - f(x).

    Near 0 it is a polynomial; far from 0 it is replaced by its limits 0 and 1.
    """
    end = _ENDS[name]
    a = a.divided()
    flags = less(stack([a, add(a, end), sub(end, a)]), 0)
    below, left, right = unbound(flags)
    # sign(a) if |a| <= end, otherwise 0
    inside = add(sub(sub(whole(torch.ones(()), a), mul(below, 2)), right), left)
    magnitude = at_precision(mul(a, inside), _INNER_BITS)
    t = sub(mul(magnitude, 2 / end), 1.0).divided()
    curve = polynomial(t, coefficients(name, 15, 0.0, end)).divided(_INNER_BITS)
    found = add(exact(curve, inside), add(below, sub(right, left)))
    return at_precision(found, a.precision)
