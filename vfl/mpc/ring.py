"""Numbers of the ring Z_N, N = 2^64, as int64 tensors: their arithmetic wraps, which is the ring's.

A real x stands as round(x 2^bits) (thesis of split learning, 2025, eq 5-3 with the rounding it
lacks); two's complement gives negative numbers and decoding (eq 5-4, with its sign).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from vfl.errors import NonFiniteError, RingRangeError
from vfl.mpc.limbs import limb_matmul, pays

#: A product of two tensors: `matmul`, `inner` or `torch.mul`.
Operation = Callable[[Tensor, Tensor], Tensor]

WORD_BITS = 64
WORD_BYTES = 8
_FIX = "scale the columns or lower the learning rate, or change magnitude_bits or bits"


def limit_bits(bits: int) -> int:
    """Bits before the point that a value may have and still be multiplied once.

    >>> limit_bits(23), limit_bits(20)
    (17, 23)
    """
    return WORD_BITS - 1 - 2 * bits


def encode(
    values: Tensor, bits: int, where: str, room: int | None = None, fix: str = _FIX
) -> Tensor:
    """Reals as ring numbers; int64 of the same shape.

    Args:
        values: any float or integer tensor.
        bits: of the fraction; 0 for whole numbers.
        where: the layer or tensor, for the message.
        room: bits before the point that values may have; `limit_bits(bits)` if not given.
        fix: what to do about a value that does not fit.

    Raises:
        RingRangeError: a value is too large; it is told how many bits it needs, never the value.
        NonFiniteError: NaN or an infinity.
    """
    exact = values.detach().double()
    require_room(exact, limit_bits(bits) if room is None else room, bits, where, fix)
    return (exact * 2.0**bits).round_().to(torch.int64)


def require_room(values: Tensor, room: int, bits: int, where: str, fix: str = _FIX) -> None:
    """Refuse values of more than `room` bits before the point; see `encode`.

    Raises:
        RingRangeError, NonFiniteError: see `encode`.
    """
    ends = torch.aminmax(values) if values.numel() else (0.0, 0.0)
    # NaN is at both ends, and `max` would drop it from the second place only.
    largest = max(abs(float(end)) for end in ends)
    if not math.isfinite(largest):
        raise NonFiniteError(
            "a value to be shared is not finite", where=where, fix="look for NaN and infinity"
        )
    needed = math.frexp(largest)[1]
    if needed > room:
        raise RingRangeError(
            "a value does not fit the ring",
            where=where,
            got=f"{needed} bits before the point",
            want=f"at most {room}, with {bits} bits after it",
            fix=fix,
        )


def decode(words: Tensor, bits: int) -> Tensor:
    """Ring numbers as reals; float64 of the same shape."""
    return words.double().mul_(2.0**-bits)


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """The product in the ring; axes (rows, inner) and (inner, columns).

    A single column is faster as a vector, but not when the left operand is a transposed view.
    """
    if right.shape[1] == 1 and left.stride(1) == 1:
        return torch.mv(left, right[:, 0])[:, None]
    if pays(left.shape[0], left.shape[1], right.shape[1]):
        return limb_matmul(left, right)
    return left @ right


def inner(left: Tensor, right: Tensor) -> Tensor:
    """The product of the transposed left with the right; axes (rows, inner) and (rows, columns)."""
    if right.shape[1] == 1:
        return torch.from_numpy(right[:, 0].numpy() @ left.numpy())[:, None]
    return matmul(left.t(), right)


def product_shape(operation: Operation, left: Tensor, right: Tensor) -> torch.Size:
    """The axes of a product, without computing it."""
    if operation is matmul:
        return torch.Size((left.shape[0], right.shape[1]))
    return torch.Size((left.shape[1], right.shape[1])) if operation is inner else left.shape
