"""Arithmetic of fixed-precision tensors: reshaping, sums, products, comparisons, selection.

Every function takes and returns `FixedPrecisionTensor`, supports gradients, and discloses no value.
The list below states rounds of messages for shares of two holders without MACs; a round is one
message in each direction between the holders:

moves, sums            no message.
product                one round to open the factors; a factor that is a product is divided first,
                       in a round of its own, and then needs no opening for products of elements.
product with a number  no round, or one to divide such a factor.
sign, comparison       five rounds.
leading one            eight rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from vfl.core.errors import UserError
from vfl.tensors.base import axes
from vfl.tensors.convolution import Geometry, Kind
from vfl.tensors.fixed import FixedPrecisionTensor, Vjp, public
from vfl.tensors.shares import Here, Ring

FP: TypeAlias = FixedPrecisionTensor
#: Number of fraction bits by which a product may exceed twice the precision before it is divided.
_SLACK = 4
#: Bits before the binary point that values may have, and total number of bits of a ring element.
MOST_BITS, ROOM_BITS = 26, 62
#: Number of leading bits to which `scaled_briefly` rounds its factor, and the largest distance from
#: 1 of a factor for which `scaled` calls `scaled_briefly`.
_SHORT_BITS, _SMALL = 8, 1 / 8


def made(child: Ring, bits: int, like: FP, *tape: tuple[FP, Vjp]) -> FP:
    """Return a tensor of these ring elements; gradients flow to the tape's operands."""
    found = FP(child, bits, like.precision)
    found.record(*tape)
    return found


def with_gradient(value: FP, *tape: tuple[FP, Vjp]) -> FP:
    """Return a tensor of the same ring elements whose gradients flow to the tape's operands."""
    return made(value.child, value.bits, value, *tape)


def mapped(a: FP, vjp: Vjp, name: str, *parameters: Any) -> FP:
    """Apply a linear map to the shares; `name` is a key of `vfl.tensors.shares.LINEAR`."""
    return made(a.child.linear(name, *parameters), a.bits, a, (a, vjp))


def number(value: float, like: FP) -> FP:
    """Encode a public number as a fixed-precision tensor."""
    return public(torch.tensor(value, dtype=torch.float64), like.precision, like.precision)


def whole(values: Tensor, like: FP) -> FP:
    """Encode public integers or booleans as a fixed-precision tensor without fraction bits."""
    return public(values, 0, like.precision)


def both(a: Any, b: Any) -> tuple[FP, FP]:
    """Convert two operands to fixed-precision tensors; one of them may be a number."""
    like = a if isinstance(a, FP) else b
    one, two = (each if isinstance(each, FP) else number(each, like) for each in (a, b))
    return one, two


def refuse_options(what: str, **options: Any) -> None:
    """Refuse an operation with options that shares do not support, unless they are None."""
    if given := [name for name, value in options.items() if value is not None]:
        FP.refuse(f"{what} with {', '.join(given)}")


def at_precision(a: FP, precision: int) -> FP:
    """Return the same ring elements with another target precision for products.

    The result has no gradient.
    """
    return FP(a.child, a.bits, precision)


def detached(a: FP) -> FP:
    """Return the same values without their gradient."""
    found = FP(a.child, a.bits, a.precision)
    found._divided = a._divided
    return found


# Sums.


def finer(a: FP, bits: int) -> FP:
    """Return the same values with more fraction bits."""
    if bits <= a.bits:
        return a
    return made(a.child.linear("scale", 1 << (bits - a.bits)), bits, a, (a, lambda g: g))


def add(a: Any, b: Any, alpha: float = 1) -> FP:
    """Return a + alpha b."""
    a, b = both(a, b)
    if alpha != 1:
        b = mul(b, alpha)
    most = 2 * a.precision + _SLACK
    a, b = a.divided(most), b.divided(most)
    bits = max(a.bits, b.bits)
    a, b = finer(a, bits), finer(b, bits)
    tape = ((a, lambda g: summed_to(g, a.shape)), (b, lambda g: summed_to(g, b.shape)))
    if isinstance(a.child, Here) and not isinstance(b.child, Here):
        child = b.child.plus(a.child.elements)
    elif isinstance(b.child, Here):
        child = a.child.plus(b.child.elements)
    else:
        child = a.child.linear("add", others=[b.child])
    return made(child, bits, a, *tape)


def neg(a: FP) -> FP:
    """Return -a."""
    return mapped(a, neg, "scale", -1)


def sub(a: Any, b: Any, alpha: float = 1) -> FP:
    """Return a - alpha b."""
    return add(a, b, -alpha) if isinstance(a, FP) or alpha != 1 else add(neg(b), a)


def summed_to(a: FP, shape: torch.Size) -> FP:
    """Sum over the axes that a broadcast has added, so that the result has the given shape."""
    if a.shape == shape:
        return a
    return mapped(a, lambda g: expand(g, a.shape), "sum_to", shape)


def expand(a: FP, shape: torch.Size) -> FP:
    """Broadcast the tensor to the given shape."""
    if a.shape == shape:
        return a
    return mapped(a, lambda g: summed_to(g, a.shape), "expand", shape)


def total(a: FP, dim: Any = None, keepdim: bool = False, dtype: None = None) -> FP:
    """Return the sum over axes; all axes by default."""
    refuse_options("a sum or mean", dtype=dtype)
    dims = dimensions(a, dim)
    kept = torch.Size(1 if at in dims else size for at, size in enumerate(a.shape))
    return mapped(a, lambda g: expand(reshape(g, kept), a.shape), "sum", dims, keepdim)


def mean(a: FP, dim: Any = None, keepdim: bool = False, dtype: None = None) -> FP:
    """Return the mean over axes; all axes by default."""
    found = total(a, dim, keepdim, dtype)
    return mul(found, found.numel() / a.numel())


def dimensions(a: FP, dim: Any) -> tuple[int, ...]:
    """Return the indices of the axes that `dim` names; None names all axes."""
    if dim is None:
        return tuple(range(a.dim()))
    return tuple(each % a.dim() for each in ((dim,) if isinstance(dim, int) else dim))


# Products.


def mul(a: Any, b: Any) -> FP:
    """Multiply element by element."""
    if not isinstance(a, FP):
        a, b = b, a
    if not isinstance(b, FP):
        return scaled(a, float(b))
    return times(
        a,
        b,
        "mul",
        lambda g: summed_to(mul(g, b), a.shape),
        lambda g: summed_to(mul(g, a), b.shape),
    )


def scaled(a: FP, factor: float) -> FP:
    """Multiply by a public number.

    The number is rounded to as many leading bits as the precision has. A factor near 1 does
    not reduce the fraction bits of a tensor that has more of them than one product gives, such as
    an average of squares: the result is a - a (1 - factor), for elements below 2^18.
    """
    if factor == 0:
        return mapped(a, lambda g: scaled(g, 0), "scale", 0)
    if factor != 1 and abs(1 - factor) <= _SMALL and a.bits > 2 * a.precision:
        return sub(a, scaled_briefly(a, 1 - factor).divided(a.bits))
    ratio, shift = _ratio(factor, a.precision)
    if shift > 0 and abs(ratio) > 1:
        a = a.divided(max(a.precision, ROOM_BITS - MOST_BITS - a.precision))
    return _times_ratio(a, ratio, shift, factor)


def scaled_briefly(a: FP, factor: float) -> FP:
    """Multiply by a small public number, rounded to eight leading bits; this takes no message.

    The result has at least the fraction bits of a product, so the tensor's elements must be below
    2^(54 - bits).
    """
    return _times_ratio(a, *_ratio(factor, _SHORT_BITS), factor)


def _ratio(factor: float, bits: int) -> tuple[int, int]:
    """Return an integer and a shift with factor = integer / 2^shift, rounded to `bits` bits."""
    shift = bits - math.frexp(factor)[1]
    if float(factor).is_integer():
        shift = min(shift, 0) if abs(factor) >= 2.0**bits else 0
    ratio = round(factor * 2.0**shift)
    spare = (ratio & -ratio).bit_length() - 1
    return ratio >> spare, shift - spare


def _times_ratio(a: FP, ratio: int, shift: int, factor: float) -> FP:
    child = a.child
    if ratio != 1 or shift < 0:
        child = child.linear("scale", ratio << max(-shift, 0))
    return made(child, a.bits + max(shift, 0), a, (a, lambda g: scaled(g, factor)))


def times(a: FP, b: FP, operation: str, to_a: Vjp, to_b: Vjp, numbers: Sequence[Any] = ()) -> FP:
    """Apply a bilinear map; the factors' numbers of fraction bits add up."""
    most, left, right = 2 * a.precision + _SLACK, a, b
    if left.bits + right.bits > most:
        left = left.divided()
    if left.bits + right.bits > most:
        right = right.divided() if b is not a else left
    if isinstance(b.child, Here):
        child = left.child.linear("by", right.child.elements, operation, False, *numbers)
    elif isinstance(a.child, Here):
        child = right.child.linear("by", left.child.elements, operation, True, *numbers)
    else:
        child = left.child.product(right.child, operation, *numbers)
    return made(child, left.bits + right.bits, a, (a, to_a), (b, to_b))


def square(a: FP) -> FP:
    """Return the square of each element; this takes half as many bytes as a product."""
    plain = detached(a if 2 * a.bits <= 2 * a.precision + _SLACK else a.divided())
    found = times(plain, plain, "mul", neg, neg)
    return with_gradient(found, (a, lambda g: mul(mul(a, 2), g)))


def power(a: FP, exponent: Any) -> FP:
    """Return a tensor to the power of a positive public integer."""
    if exponent == 1:
        return a
    if not float(exponent).is_integer() or exponent < 1:
        FP.refuse("a power that is not a positive whole number")
    exponent = int(exponent)
    half = square(power(a, exponent // 2)) if exponent > 2 else a
    return square(a) if exponent == 2 else mul(half, a) if exponent % 2 else half


def matmul(a: FP, b: FP) -> FP:
    """Multiply matrices; all axes but the last two are batch axes, as in torch."""
    if a.dim() == 1:
        found = matmul(reshape(a, 1, -1), b)
        return reshape(found, *found.shape[:-2], found.shape[-1])
    if b.dim() == 1:
        return reshape(matmul(a, reshape(b, -1, 1)), *a.shape[:-1])
    if b.dim() == 2 and a.dim() > 2:
        rows = matmul(reshape(a, -1, a.shape[-1]), b)
        return reshape(rows, *a.shape[:-1], b.shape[-1])
    if a.shape[-1] != b.shape[-2]:
        _unfit("two tensors cannot be multiplied", a, b)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    a, b = expand(a, batch + a.shape[-2:]), expand(b, batch + b.shape[-2:])
    return times(
        a, b, "matmul", lambda g: matmul(g, transposed(b)), lambda g: matmul(transposed(a), g)
    )


def transposed(a: FP) -> FP:
    """Exchange the last two axes.

    If the tensor was already opened under a mask for products, the result counts as opened too.
    """
    found = made(a.child.transposed(), a.bits, a, (a, transposed))
    if a._divided is not None:
        found._divided = FP(a._divided.child.transposed(), a._divided.bits, a.precision)
    return found


def convolved(a: FP, b: FP, kind: Kind, geometry: Geometry) -> FP:
    """Apply one of the three bilinear maps of a convolution; see `vfl.tensors.convolution`."""

    def to_images(g: FP) -> FP:
        return convolved(g, b, "conv2d_input", geometry)

    def to_filters(g: FP) -> FP:
        return convolved(a, g, "conv2d_weight", geometry)

    if kind != "conv2d":
        to_images = to_filters = _once
    return times(a, b, kind, to_images, to_filters, [geometry.numbers()])


def _once(g: FP) -> FP:
    FP.refuse("a second derivative of a convolution")


# Operations that only move or copy elements; they need no message.


def reshape(a: FP, *shape: Any) -> FP:
    """Reshape."""
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    return mapped(a, lambda g: reshape(g, a.shape), "reshape", _resolved(a.shape, sizes))


def _resolved(shape: torch.Size, sizes: Sequence[int]) -> tuple[int, ...]:
    """Replace -1 in a shape by the length that the other axes leave for it."""
    if -1 not in sizes:
        return tuple(sizes)
    rest = -math.prod(sizes)
    return tuple(shape.numel() // max(rest, 1) if size == -1 else size for size in sizes)


def gathered(a: FP, pick: Callable[[Tensor], Tensor]) -> FP:
    """Return selected elements in an order that `pick` defines; it may repeat elements."""
    indices = pick(torch.arange(a.numel()).reshape(a.shape))

    def back(g: FP) -> FP:
        return mapped(g, lambda h: gathered(h, pick), "spread", indices, a.shape)

    return mapped(a, back, "gather", indices)


def picked(a: FP, index: Any) -> FP:
    """Return ``a[index]`` for slices, lists, and public tensors of indices or booleans."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(each, FP) for each in parts):
        FP.refuse("a shared index, whose values the axes of the result would reveal")
    return gathered(a, lambda indices: indices[index])


def stack(parts: Sequence[FP], dim: int = 0) -> FP:
    """Stack tensors of the same shape along a new axis."""
    return _joined(parts, dim, "stack", lambda at: lambda indices: indices.select(dim, at))


def cat(parts: Sequence[FP], dim: int = 0) -> FP:
    """Concatenate tensors along an axis."""
    starts = [sum(each.shape[dim] for each in parts[:at]) for at in range(len(parts))]

    def of(at: int) -> Callable[[Tensor], Tensor]:
        return lambda indices: indices.narrow(dim, starts[at], parts[at].shape[dim])

    return _joined(parts, dim, "cat", of)


def _joined(
    parts: Sequence[FP], dim: int, name: str, of: Callable[[int], Callable[[Tensor], Tensor]]
) -> FP:
    shared = next((each.child for each in parts if not isinstance(each.child, Here)), None)
    bits = max(each.bits for each in parts)
    parts = [finer(each, bits) for each in parts]
    children = [each.child for each in parts]
    # Public tensors become shares without a message: the share is a share of zero plus the public
    # tensor.
    if shared is not None:
        children = [
            _blank(shared, each.shape).plus(each.elements) if isinstance(each, Here) else each
            for each in children
        ]

    def at(index: int) -> Vjp:
        return lambda g: gathered(g, of(index))

    first, *others = children
    child = first.linear(name, dim, others=others)
    return made(child, bits, parts[0], *((each, at(index)) for index, each in enumerate(parts)))


def _blank(shared: Any, shape: torch.Size) -> Any:
    nothing = shared.linear("scale", 0).linear("sum", list(range(len(shared.shape))), False)
    return nothing.linear("expand", tuple(shape))


def unbound(a: FP, dim: int = 0) -> list[FP]:
    """Return all slices along an axis."""
    return [
        gathered(a, lambda indices, at=at: indices.select(dim, at))  # type: ignore[misc]
        for at in range(a.shape[dim])
    ]


def padded(a: FP, around: Sequence[int], mode: str = "constant", value: Any = None) -> FP:
    """Pad a tensor with public values, as `torch.nn.functional.pad` does."""
    around = [int(each) for each in around]
    if mode != "constant" or min(around) < 0:
        FP.refuse("pad by another mode than constant, or to fewer elements")
    places = torch.nn.functional.pad(torch.arange(a.numel()).reshape(a.shape) + 1, around) - 1

    def back(g: FP) -> FP:
        return gathered(g, lambda at: at.reshape(-1)[(places.reshape(-1) >= 0)].reshape(a.shape))

    found = mapped(a, back, "pad", around)
    if not value:
        return found
    return add(found, public((places < 0).double() * value, a.precision, a.precision))


# Comparisons, and selection of elements by the results of comparisons.


def less(a: Any, b: Any) -> FP:
    """Return 1 where a < b, else 0."""
    apart = sub(a, b)
    return made(apart.child.negative(), 0, apart)


def negated(a: FP) -> FP:
    """Return 1 - a, where a is the result (0 or 1) of a comparison."""
    return sub(whole(torch.ones(()), a), a)


def different(a: Any, b: Any) -> FP:
    """Return 1 where the two operands differ, else 0."""
    apart = sub(a, b)
    below, above = unbound(less(stack([apart, neg(apart)]), 0))
    return add(below, above)


def chosen(condition: FP, a: Any, b: Any) -> FP:
    """Return a where the condition is 1, and b where it is 0; this takes one round of messages."""
    apart = sub(a, b) if isinstance(a, FP) or isinstance(b, FP) else number(a - b, condition)
    return add(mul(apart, condition), b)


def relu(a: FP) -> FP:
    """Return max(a, 0)."""
    positive = less(0, a)
    return times(a, positive, "mul", lambda g: mul(g, positive), lambda g: g)


def sign(a: FP) -> FP:
    """Return the sign of each element: 1, 0 or -1."""
    below, above = unbound(less(stack([a, neg(a)]), 0))
    return sub(above, below)


def absolute(a: FP) -> FP:
    """Return the absolute value of each element; the derivative at 0 is taken as 1."""
    return mul(a, sub(1.0, mul(less(a, 0), 2)))


def clamp(a: FP, min: Any = None, max: Any = None) -> FP:
    """Clamp to bounds; at a bound the derivative is 1.

    The comparisons with both bounds share their rounds of messages.
    """
    bounds = [(each, low) for each, low in ((min, True), (max, False)) if each is not None]
    apart = [sub(a, each) if low else sub(each, a) for each, low in bounds]
    beyond = unbound(less(stack([expand(each, a.shape) for each in apart]), 0))
    found = a
    for (bound, _), out in zip(bounds, beyond, strict=True):
        found = chosen(out, bound, found)
    return found


def largest(
    a: FP, dim: int, *, smallest: bool = False, places: bool = False
) -> tuple[FP, FP | None]:
    """Return the largest elements along an axis, and their indices.

    If several elements are largest, the index is that of the first. For n elements, there are
    log2(n) stages. Each stage takes the rounds of messages of one comparison and one selection, and
    with indices those of a second selection.

    Args:
        a: tensor with at least one element along the axis.
        dim: the axis to reduce; the result lacks this axis.
        smallest: whether to return the smallest elements instead of the largest.
        places: whether to return the indices of these elements too.
    """
    value = gathered(a, lambda at: at.movedim(dim, 0))
    found: FP | None = None
    if places:
        indices = torch.arange(value.shape[0]).reshape(-1, *[1] * (a.dim() - 1))
        found = whole(indices.expand(value.shape), a)
    while (count := value.shape[0]) > 1:
        one, two = _pairs(value)
        second = less(two, one) if smallest else less(one, two)
        rest = slice(count - count % 2, None)
        value = _with_rest(chosen(second, two, one), picked(value, rest))
        if found is not None:
            one, two = _pairs(found)
            found = _with_rest(chosen(second, two, one), picked(found, rest))
    return picked(value, 0), None if found is None else picked(found, 0)


def _pairs(a: FP) -> tuple[FP, FP]:
    end = a.shape[0] // 2 * 2
    return picked(a, slice(0, end, 2)), picked(a, slice(1, end, 2))


def _with_rest(a: FP, rest: FP) -> FP:
    return cat([a, rest]) if len(rest) else a


def maximum(a: Any, b: Any) -> FP:
    """Return the larger of each pair of elements."""
    return chosen(less(a, b), b, a)


def minimum(a: Any, b: Any) -> FP:
    """Return the smaller of each pair of elements."""
    return chosen(less(a, b), a, b)


def _unfit(what: str, a: FP, b: FP) -> None:
    got = f"{axes(a.shape)} and {axes(b.shape)}"
    raise UserError(what, got=got, fix="compare their shapes")
