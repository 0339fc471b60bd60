"""Ring elements modulo N = 2^64 as int64 tensors, which wrap around like elements of the ring.

A real number x is represented by the integer round(x 2^bits) (split-learning thesis, 2025, eq 5-3,
which lacks the rounding). Negative numbers are in two's complement; decoding is eq 5-4 of the
thesis, with the sign that the equation lacks.

Products: torch multiplies int64 matrices without an optimised library (BLAS). If torch was compiled
with the right processor instructions, a product takes twice as long as in float64, and otherwise
forty times as long. In the slower case, a ring element is split into three signed limbs of 22, 21
and 21 bits, which begin at the bits 0, 22 and 43. The limbs then need six exact products in
float64; products of limbs whose lowest bit is 64 or above are multiples of 2^64 and are left out.
With an inner size of 512, the largest sum is below 2^53, so float64 is exact. torch has no int64
matrix product for a GPU. A GPU therefore computes large products with limbs, if they are worth the
transfer of the operands (`multiply_on`).

The last functions of this file encode cut-layer activations as masked elements of a smaller ring (8
to 32 bits), and decode sums of such elements (8 to 64 bits). If numba compiles the loops, encoding
and decoding take one pass over the values each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from vfl.core.compiled import COMPILED, compiled
from vfl.core.errors import NonFiniteError, RingRangeError

#: A product of two tensors: `matmul`, `inner`, `torch.mul` or a `Composed` object.
Operation = Callable[[Tensor, Tensor], Tensor]

ELEMENT_BITS = 64
ELEMENT_BYTES = 8
_FIX = "scale the columns or lower the learning rate, or change magnitude_bits or bits"
#: Numbers that define the limbs of a ring element: first bit of the middle limb and of the upper
#: limb, and the sum of half the range of each limb.
_LOW, _MIDDLE = 22, 43
_HALVES = np.uint64((1 << 21) + (1 << 20 + _LOW) + (1 << 20 + _MIDDLE))
#: Largest inner size of one float64 product of limbs, which is then exact, and the number of rows
#: and columns of the product by which the code measures int64's speed.
_TERMS, _PROBE = 512, 128
#: Smallest sizes of a product that is split into limbs: rows and columns, inner size, number of
#: multiplications.
_LEAST_SIDE, _LEAST_INNER, _LEAST_TERMS = 32, 16, 1 << 18
#: Smallest number of multiplications of a product that runs on a GPU; the transfer takes about a
#: millisecond.
_LEAST_TERMS_OF_CARD = 1 << 23
#: Largest number of rows of the left operand for which the compiled loop is faster than torch, by
#: the type of the right operand.
_FEW_ROWS = {torch.int64: 8, torch.int32: 32, torch.int16: 32}
#: If no compiled loop is available: the largest number of elements of the right operand for which a
#: product with a one-row left operand is computed as a sum.
_FEW_TERMS = 1 << 18
#: Number of multiplications below which torch's own loop over batch axes is faster than other ways.
_SMALL_PRODUCT = 1 << 17
#: Number of values that one pass processes, so that they fit into a core's cache.
_BLOCK = 16384


class _Card:
    """The GPU on which this process computes large products; None without a GPU."""

    device: torch.device | None = None


def multiply_on(device: torch.device) -> None:
    """Let this process compute large products on a device; "cpu" ends the use of a GPU."""
    _Card.device = None if device.type == "cpu" else device


def limit_bits(bits: int) -> int:
    """Return how many bits before the binary point the factors of a product may have together.

    >>> limit_bits(23), limit_bits(20)
    (17, 23)
    """
    return ELEMENT_BITS - 1 - 2 * bits


def encode(
    values: Tensor, bits: int, where: str, integer_bits: int | None = None, fix: str = _FIX
) -> Tensor:
    """Encode real numbers as ring elements; int64 of the same shape.

    Args:
        values: a tensor of floats or integers.
        bits: fraction bits; 0 for whole numbers.
        where: name of the layer or tensor, for the error message.
        integer_bits: bits before the binary point that values may have; by default
            `limit_bits(bits)`.
        fix: advice that the error gives for a value that does not fit.

    Raises:
        RingRangeError: a value is too large; the error states how many bits the value needs, never
            the value.
        NonFiniteError: a value is NaN or infinite.
    """
    exact = values.detach().double()
    require_integer_bits(
        exact, limit_bits(bits) if integer_bits is None else integer_bits, bits, where, fix
    )
    return (exact * 2.0**bits).round_().to(torch.int64)


def require_integer_bits(
    values: Tensor, integer_bits: int, bits: int, where: str, fix: str = _FIX
) -> None:
    """Refuse values with more than `integer_bits` bits before the binary point; see `encode`.

    Raises:
        RingRangeError, NonFiniteError: see `encode`.
    """
    ends = torch.aminmax(values) if values.numel() else (0.0, 0.0)
    # `aminmax` returns NaN if any value is NaN; Python's `max` of two numbers could miss a NaN.
    largest = max(abs(float(end)) for end in ends)
    if not math.isfinite(largest):
        raise NonFiniteError(
            "a value to share is not finite",
            where=where,
            fix="look for NaN and infinity in the values",
        )
    needed = math.frexp(largest)[1]
    if needed > integer_bits:
        raise RingRangeError(
            "a value does not fit the ring",
            where=where,
            got=f"{needed} bits before the point",
            want=f"at most {integer_bits}, with {bits} bits after it",
            fix=fix,
        )


def decode(elements: Tensor, bits: int) -> Tensor:
    """Decode ring elements to real numbers; float64 of the same shape."""
    return elements.double().mul_(2.0**-bits)


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices in the ring; axes (rows, inner) and (inner, columns).

    If the right operand has a single column, it is multiplied as a vector, unless the left operand
    is a transposed view, for which a vector is slower. If the left operand has a single row, the
    product is also computed with a vector. The right operand may be int16 or int32: a product of
    one row reads each element of the right operand once, so memory bandwidth determines its time.
    """
    if reads_in_place(len(left), right):
        return torch.from_numpy(_few_rows_by(np.ascontiguousarray(left.numpy()), right.numpy()))
    if right.dtype in (torch.int16, torch.int32):
        right = right.long()
    if _Card.device is not None and _large(left.shape[0], left.shape[1], right.shape[1]):
        return limb_matmul(left.to(_Card.device), right.to(_Card.device)).cpu()
    if right.shape[1] == 1 and left.stride(1) == 1:
        return torch.mv(left, right[:, 0])[:, None]
    if left.shape[0] == 1 and right.stride(1) == 1:
        return torch.mv(right.t(), left[0])[None]
    # The right operand is a transposed view.
    if 0 < len(left) <= _FEW_ROWS[torch.int64] and right.stride(0) == 1:
        return torch.stack([torch.mv(right.t(), row) for row in left])
    if limbs_pay(left.shape[0], left.shape[1], right.shape[1]):
        return limb_matmul(left, right)
    return left @ right


def reads_in_place(rows: int, right: Tensor) -> bool:
    """Return whether `matmul` with this many left rows reads `right` without a copy."""
    return COMPILED and rows <= _FEW_ROWS.get(right.dtype, -1) and right.is_contiguous()


def batched(left: Tensor, right: Tensor) -> Tensor:
    """Multiply pairs of matrices; axes (products, rows, inner) and (products, inner, columns).

    >>> batched(torch.tensor([[[2, 3]]]), torch.tensor([[[1], [-1]]])).tolist()
    [[[-1]]]
    """
    if COMPILED and left.shape[1] == 1 and left.dtype == torch.int64:
        total = np.zeros((left.shape[0], 1, right.shape[2]), np.int64)
        _one_row_each(left.numpy()[:, 0], right.numpy(), total[:, 0])
        return torch.from_numpy(total)
    if left.shape[1] == 1 and right.numel() <= _FEW_TERMS:  # torch multiplies integers slowly
        return (left.transpose(1, 2) * right).sum(1, keepdim=True)
    return left @ right


def inner(left: Tensor, right: Tensor) -> Tensor:
    """Multiply the transposed left matrix by the right one; axes (rows, inner), (rows, columns)."""
    if right.shape[1] == 1:
        return torch.from_numpy(right[:, 0].numpy() @ left.numpy())[:, None]
    return matmul(left.t(), right)


@dataclass(frozen=True, slots=True)
class Composed:
    """A bilinear map that consists of a matrix product and other steps, such as a convolution.

    Attributes:
        left: map of the left factor before the product; it only moves and adds elements.
        right: map of the right factor before the product; it only moves and adds elements.
        after: map of the product's result; it only moves and adds elements. All three maps accept a
            tensor with additional leading axes.
    """

    left: Callable[[Tensor], Tensor]
    right: Callable[[Tensor], Tensor]
    after: Callable[[Tensor], Tensor]

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        """Apply the map to ring elements."""
        return self.after(matmul_each(self.left(left), self.right(right)))


def matmul_each(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices; axes (*batch, rows, inner) and (*batch, inner, columns) broadcast.

    >>> matmul_each(torch.ones(2, 1, 3).long(), torch.ones(3, 1).long()).tolist()
    [[[3]], [[3]]]
    """
    if left.dim() == right.dim() == 2:
        return matmul(left, right)
    if left.shape[-2] * left.shape[-1] * right.shape[-1] < _SMALL_PRODUCT:
        return left @ right
    if right.dim() == 2:
        rows = matmul(left.reshape(-1, left.shape[-1]), right)
        return rows.reshape(*left.shape[:-1], right.shape[-1])
    front = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])  # type: ignore[no-untyped-call]
    lefts = left.expand(*front, *left.shape[-2:]).reshape(-1, *left.shape[-2:])
    rights = right.expand(*front, *right.shape[-2:]).reshape(-1, *right.shape[-2:])
    found = torch.stack([matmul(*pair) for pair in zip(lefts, rights, strict=True)])
    return found.reshape(*front, *found.shape[1:])


def product_shape(operation: Operation, left: Tensor, right: Tensor) -> torch.Size:
    """Return the axes of a product's result without computing it; `Composed` is not supported."""
    if operation is matmul:
        return torch.Size((left.shape[0], right.shape[1]))
    return torch.Size((left.shape[1], right.shape[1])) if operation is inner else left.shape


def _large(rows: int, inner: int, columns: int) -> bool:
    """Return whether a GPU computes (rows, inner) @ (inner, columns) faster, with transfers."""
    return min(rows, columns) >= _LEAST_SIDE and rows * inner * columns >= _LEAST_TERMS_OF_CARD


def limbs_pay(rows: int, inner: int, columns: int) -> bool:
    """Return whether `limb_matmul` is faster than torch for (rows, inner) @ (inner, columns)."""
    wide = min(rows, columns) >= _LEAST_SIDE and inner >= _LEAST_INNER
    return wide and rows * inner * columns >= _LEAST_TERMS and _int64_is_slow()


def limb_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Compute ``left @ right`` in wrapping int64; axes (rows, inner), (inner, columns).

    The product is computed on the device that has both operands.

    >>> limb_matmul(torch.tensor([[2**40, -3]]), torch.tensor([[2**30], [5]])).tolist()
    [[-15]]
    """
    total = torch.zeros(left.shape[0], right.shape[1], dtype=torch.int64, device=left.device)
    for start in range(0, left.shape[1], _TERMS):
        low, middle, high = _limbs(left[:, start : start + _TERMS])
        across = torch.cat([high, middle, low], 1)
        down = torch.cat(_limbs(right[start : start + _TERMS]))
        width = low.shape[1]
        total += (across[:, 2 * width :] @ down[:width]).long()
        total += (across[:, width:] @ down[: 2 * width]).long() << _LOW
        across[:, width : 2 * width] *= 2  # the product of two middle limbs begins at bit 44
        total += (across @ down).long() << _MIDDLE
    return total


def _limbs(elements: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split elements into signed limbs of 22, 21 and 21 bits, as float64.

    To get signed limbs, the function first adds half of every limb's range, takes unsigned limbs,
    and subtracts the halves again. Unsigned shifts are vectorised on every processor.
    """
    if elements.device.type != "cpu":
        return _limbs_there(elements)
    raised = elements.numpy().view(np.uint64) + _HALVES
    low = raised & np.uint64((1 << _LOW) - 1)
    middle = raised >> np.uint64(_LOW) & np.uint64((1 << _MIDDLE - _LOW) - 1)
    high = raised >> np.uint64(_MIDDLE)
    return _signed(low, _LOW), _signed(middle, _MIDDLE - _LOW), _signed(high, 64 - _MIDDLE)


def _limbs_there(elements: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `_limbs` by arithmetic shifts, after which bit masks remove the copied sign bits."""
    raised = elements + int(_HALVES.astype(np.int64))
    low = raised & ((1 << _LOW) - 1)
    middle = (raised >> _LOW) & ((1 << _MIDDLE - _LOW) - 1)
    high = (raised >> _MIDDLE) & ((1 << 64 - _MIDDLE) - 1)
    limbs = (low, _LOW), (middle, _MIDDLE - _LOW), (high, 64 - _MIDDLE)
    one, two, three = (digits.double().sub_(1 << bits - 1) for digits, bits in limbs)
    return one, two, three


def _signed(digits: np.ndarray, bits: int) -> Tensor:
    return torch.from_numpy(digits.view(np.int64)).double().sub_(1 << bits - 1)


@lru_cache(maxsize=1)
def _int64_is_slow() -> bool:
    """Measure once per process whether products by limbs are faster than int64 products.

    Products by limbs and int64 products have the same result.
    """
    square = torch.arange(_PROBE * _PROBE).reshape(_PROBE, _PROBE) * 0x1E3779B97F4A7C15 // 3
    return _fastest(limb_matmul, square) < _fastest(torch.matmul, square)


def _fastest(product: Callable[[Tensor, Tensor], Tensor], square: Tensor) -> float:
    def once() -> float:
        began = time.perf_counter()
        product(square, square)
        return time.perf_counter() - began

    return min(once() for _ in range(4))


def _few_rows_by(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Compute a product with few rows in `left` by compiled loops.

    A product of 32-bit numbers takes one processor instruction, and a product of 64-bit numbers
    takes three. The left numbers are therefore split into halves if the right numbers are narrow.
    """
    axes = left.shape[0], right.shape[1]
    if right.dtype == np.int64:
        total = np.zeros(axes, np.int64)
        _few_rows(left, right, total)
        return total
    low = left.astype(np.int32)
    high = (left - low >> 32).astype(np.int32)
    below, above = np.zeros(axes, np.int64), np.zeros(axes, np.int64)
    _few_rows_narrow(low, high, right, below, above)
    above <<= 32
    below += above
    return below


@compiled
def _few_rows_narrow(
    low: np.ndarray, high: np.ndarray, right: np.ndarray, below: np.ndarray, above: np.ndarray
) -> None:
    """Add the products of both halves of the left numbers; `right` is read eight rows at a time."""
    rows, columns, eights = low.shape[0], right.shape[1], right.shape[0] // 8 * 8
    for i in range(0, eights, 8):
        for row in range(rows):
            a, b, c, d = low[row, i], low[row, i + 1], low[row, i + 2], low[row, i + 3]
            e, f, g, h = low[row, i + 4], low[row, i + 5], low[row, i + 6], low[row, i + 7]
            p, q, r, s = high[row, i], high[row, i + 1], high[row, i + 2], high[row, i + 3]
            t, u, v, w = high[row, i + 4], high[row, i + 5], high[row, i + 6], high[row, i + 7]
            for j in range(columns):
                i0, i1 = np.int64(right[i, j]), np.int64(right[i + 1, j])
                i2, i3 = np.int64(right[i + 2, j]), np.int64(right[i + 3, j])
                i4, i5 = np.int64(right[i + 4, j]), np.int64(right[i + 5, j])
                i6, i7 = np.int64(right[i + 6, j]), np.int64(right[i + 7, j])
                below[row, j] += (
                    a * i0 + b * i1 + c * i2 + d * i3 + e * i4 + f * i5 + g * i6 + h * i7
                )
                above[row, j] += (
                    p * i0 + q * i1 + r * i2 + s * i3 + t * i4 + u * i5 + v * i6 + w * i7
                )
    for i in range(eights, right.shape[0]):
        for row in range(rows):
            for j in range(columns):
                below[row, j] += low[row, i] * np.int64(right[i, j])
                above[row, j] += high[row, i] * np.int64(right[i, j])


@compiled
def _few_rows(left: np.ndarray, right: np.ndarray, total: np.ndarray) -> None:
    """Add the product to `total`; `right` is read four rows at a time, to write `total` rarely."""
    rows, columns, fours = left.shape[0], right.shape[1], right.shape[0] // 4 * 4
    for i in range(0, fours, 4):
        for row in range(rows):
            a, b, c, d = left[row, i], left[row, i + 1], left[row, i + 2], left[row, i + 3]
            for j in range(columns):
                total[row, j] += (
                    a * np.int64(right[i, j])
                    + b * np.int64(right[i + 1, j])
                    + c * np.int64(right[i + 2, j])
                    + d * np.int64(right[i + 3, j])
                )
    for i in range(fours, right.shape[0]):
        for row in range(rows):
            for j in range(columns):
                total[row, j] += left[row, i] * np.int64(right[i, j])


@compiled
def _one_row_each(left: np.ndarray, right: np.ndarray, total: np.ndarray) -> None:
    """Add products of one-row matrices to `total`.

    The axes are (products, inner) and (products, inner, columns).
    """
    for product in range(right.shape[0]):
        for i in range(right.shape[1]):
            factor = left[product, i]
            for j in range(right.shape[2]):
                total[product, j] += factor * right[product, i, j]


def encode_onto(values: np.ndarray, scale: float, most: int, elements: np.ndarray) -> bool:
    """Add values times `scale`, rounded to whole numbers, to ring elements, which wrap around.

    Args:
        values: float32 values, axes (values,).
        scale: a power of two.
        most: the largest allowed magnitude of a rounded number.
        elements: ring elements such as a mask, signed and of the same axes; the function changes
            them in place.

    Returns:
        True if all values fit. If the function returns False, the elements must not be used,
        because some of them are changed.

    >>> elements = np.int8([0, 100, 100])
    >>> encode_onto(np.float32([0.25, -1.5, 7]), 4.0, 28, elements), elements.tolist()
    (True, [1, 94, -128])
    """
    end = np.float32(most)
    if float(end) > most:  # float32 cannot represent every integer of this size
        end = np.nextafter(end, np.float32(0))
    loop = _encode_pass if COMPILED else _encode_passes
    return bool(loop(values, np.float32(scale), end, elements))


def decode_sum(first: np.ndarray, second: np.ndarray, scale: float) -> np.ndarray:
    """Return the wrapping sum of two tensors of elements, times `scale`; float32 of the same axes.

    The compiled version makes both arrays read-only.

    Args:
        first: summands, signed integers of axes (elements,).
        second: summands of the same axes and type.
        scale: a power of two.

    >>> decode_sum(np.int8([100, -3]), np.int8([100, 2]), 0.25).tolist()
    [-14.0, -0.25]
    """
    values = np.empty(len(first), np.float32)
    if COMPILED:
        # The arrays always have one type, so that numba compiles the loop once.
        first.flags.writeable = second.flags.writeable = False
        _decode_pass(first, second, 64 - 8 * first.itemsize, np.float32(scale), values)
    else:
        np.copyto(values, first + second, casting="same_kind")
        values *= np.float32(scale)
    return values


@compiled
def _decode_pass(
    first: np.ndarray, second: np.ndarray, above: int, scale: np.float32, values: np.ndarray
) -> None:
    for place in range(len(first)):
        total = ((np.int64(first[place]) + np.int64(second[place])) << above) >> above
        values[place] = np.float32(total) * scale


@compiled
def _encode_pass(
    values: np.ndarray, scale: np.float32, end: np.float32, elements: np.ndarray
) -> bool:
    fit = True
    for place in range(len(values)):
        number = np.rint(values[place] * scale)
        if not abs(number) <= end:
            fit = False
        elements[place] += np.int32(number)
    return fit


def _encode_passes(
    values: np.ndarray, scale: np.float32, end: np.float32, elements: np.ndarray
) -> bool:
    fit = True
    # an infinite value is out of the ring's range too
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(values), _BLOCK):
            numbers = values[start : start + _BLOCK] * scale
            np.rint(numbers, out=numbers)
            elements[start : start + _BLOCK] += numbers.astype(elements.dtype)
            # The root of the sum of squares is an upper bound of every magnitude, and takes one
            # pass less than the maximum.
            fit = fit and bool(
                float(numbers @ numbers) < 0.99 * float(end) ** 2
                or (-end <= numbers.min() and numbers.max() <= end)
            )
    return fit
