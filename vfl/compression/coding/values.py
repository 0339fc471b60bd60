"""Formats of values and gradients that take a fixed number of bits per value.

`Float32Values` keeps values exactly; `BFloat16Values` keeps their upper 16 bits. `AffineValues`
writes a code of b bits per value; the codes divide the range between two limits evenly. The payload
contains the limits as two bfloat16 numbers; the lower one is rounded down and the upper one up, so
that no value is outside of the range. `RectifiedValues` does the same for cuts without negative
values, and represents zeros exactly.

A gradient contains entries only for those values that the payload of the cut contained, in the same
order. Both parties know which values the payload contained, so `GradientCode` sends no indices.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl.compression.base import StepContext
from vfl.compression.coding import loops
from vfl.compression.coding.bits import (
    Mask,
    from_bits,
    gather_marked,
    pack,
    packed_bytes,
    require_bytes,
    spread_marked,
    to_bits,
    unpack,
)
from vfl.core import compiled
from vfl.core.errors import CorruptFrameError, NonFiniteError
from vfl.core.frame import Payload
from vfl.core.registry import require_choice

Values = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int64]

VALUES = ("fp32", "bf16", "1", "2", "3", "4", "5", "6", "7", "8")
GRADIENTS = ("fp32", "bf16", "2", "3", "4", "5", "6", "7", "8")

_SIGN = np.uint16(0x8000)
_UPPER_SIGN = np.array([0, 0x8000], np.uint16)
_UPPER_MINUS = np.array([1, -1], np.float32)
LARGEST_BFLOAT16 = np.uint16(0x7F7F)  # bits of the largest finite bfloat16
_LOWEST = np.array(0xFF7F0000, np.uint32).view(np.float32)  # bits of the smallest finite bfloat16
_SMALLEST = np.float32(2**-149)


class Coded(NamedTuple):
    """Encoded values: the bytes of the scales, and one code per value, axes (rows, k)."""

    scale: bytes
    codes: Any


class ValueCode(ABC):
    """Base class of value codes, which convert values to codes and back.

    Attributes:
        bits: number of bits per value.
        scale_bytes: number of bytes of each scale, which come before the codes.
        checks: whether `encode` itself refuses NaN and Inf, so that callers need no separate check.
    """

    bits: int
    scale_bytes: ClassVar[int] = 0
    checks: ClassVar[bool] = False

    @abstractmethod
    def encode(self, values: Any, groups: int) -> Coded:
        """Encode values of axes (rows, k); `groups` is the number of scales: one per row, or 1.

        The values are a numpy array; `AffineValues` also accepts a GPU tensor.
        """

    def encode_within(self, values: Any, scale: bytes) -> Any:
        """Encode values with a scale that both parties have, clipped to the scale's range."""
        return self.encode(values, 1).codes

    @abstractmethod
    def decode(self, scale: Payload, codes: Any, groups: int) -> Any:
        """Decode codes of axes (rows, k) to float32 values.

        Raises:
            FrameError: `encode` could not have made these bytes.
        """


class Float32Values(ValueCode):
    """Keeps all 32 bits of each value."""

    bits = 32

    def encode(self, values: Values, groups: int) -> Coded:
        return Coded(b"", np.ascontiguousarray(values).view(np.uint32))

    def decode(self, scale: Payload, codes: Codes, groups: int) -> Values:
        values = codes.astype(np.uint32).view(np.float32)
        if not np.isfinite(values).all():
            raise CorruptFrameError("a payload holds values that are not finite")
        return values


class BFloat16Values(ValueCode):
    """Keeps 16 bits of each value: the nearest finite bfloat16."""

    bits = 16

    def encode(self, values: Values, groups: int) -> Coded:
        return Coded(b"", nearest_bfloat16(values))

    def decode(self, scale: Payload, codes: Codes, groups: int) -> Values:
        if ((codes & 0x7FFF) > LARGEST_BFLOAT16).any():
            raise CorruptFrameError("a payload holds values that are not finite")
        return from_bfloat16(codes.astype(np.uint16))


class RectifiedValues(ValueCode):
    """Writes b bits for a value that is at least 0; code 0 means exactly zero.

    The scale of a group is its largest value `upper`, as a bfloat16. With top = 2^b - 1, a value v
    has the code ceil(v top / upper), and the decoder reads code upper / top.
    """

    scale_bytes = 2
    checks = True

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self._top = 2**bits - 1

    def encode(self, values: Values, groups: int) -> Coded:
        grouped = _in_groups(values, groups)
        largest = np.maximum(_outer(grouped)[:, 1:], np.float32(0))
        ends = bfloat16_above(largest) & ~_SIGN
        return Coded(ends.astype("<u2").tobytes(), self._below(grouped, ends).reshape(values.shape))

    def encode_within(self, values: Values, scale: bytes) -> np.ndarray:
        ends = np.frombuffer(scale, "<u2").astype(np.uint16).reshape(1, 1)
        grouped = _in_groups(values, 1)
        _outer(grouped)
        return self._below(grouped, ends).reshape(values.shape)

    def _below(self, grouped: Values, ends: np.ndarray) -> np.ndarray:
        upper = from_bfloat16(ends).astype(np.float64)
        upper = np.where(upper > 0, upper, 1.0)
        codes = np.empty(grouped.shape, np.uint8)
        if compiled.COMPILED:
            loops.rectify(grouped, upper[:, 0], float(self._top), codes)
        else:
            codes[:] = np.clip(np.ceil(grouped * np.float64(self._top) / upper), 0, self._top)
        return codes

    def decode(self, scale: Payload, codes: Codes, groups: int) -> Values:
        ends = np.frombuffer(scale, "<u2").reshape(groups, 1)
        if (ends > LARGEST_BFLOAT16).any():
            raise CorruptFrameError("a payload's largest value is negative or not finite")
        step = from_bfloat16(ends).astype(np.float64) / self._top
        grouped = _in_groups(codes, groups)
        if compiled.COMPILED:
            values = np.empty(grouped.shape, np.float32)
            loops.unrectify(grouped, step[:, 0], _SMALLEST, values)
        else:
            values = np.maximum((grouped * step).astype(np.float32), _SMALLEST)
            values[grouped == 0] = 0
        return values.reshape(codes.shape)


class RectifiedFloats(Float32Values):
    """Keeps all 32 bits of values that are at least 0, so that code 0 means exactly zero."""

    def encode(self, values: Values, groups: int) -> Coded:
        return super().encode(np.maximum(values, np.float32(0)) + np.float32(0), groups)

    def decode(self, scale: Payload, codes: Codes, groups: int) -> Values:
        values = super().decode(scale, codes, groups)
        if np.signbit(values).any():
            raise CorruptFrameError("a payload holds negative values of a rectified cut")
        return values


class SignValues(ValueCode):
    """Writes one bit per value, decoded as +1 for values of at least 0, otherwise as -1."""

    bits = 1

    def encode(self, values: Values, groups: int) -> Coded:
        return Coded(b"", (values >= 0).astype(np.int64))

    def decode(self, scale: Payload, codes: Codes, groups: int) -> Values:
        return 2 * codes.astype(np.float32) - 1


class WholeValues(ValueCode):
    """Writes integers from 0 to 2^bits - 1; other values are first rounded and clipped to these."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def encode(self, values: Values, groups: int) -> Coded:
        return Coded(b"", np.clip(np.rint(values), 0, 2**self.bits - 1).astype(np.int64))

    def decode(self, scale: Payload, codes: Codes, groups: int) -> Values:
        return codes.astype(np.float32)


class AffineValues(ValueCode):
    """Writes b bits per value; codes divide the range evenly (thesis, equations 3-1 and 3-2).

    The class encodes a tensor on the tensor's device; it can also decode on a GPU.
    """

    scale_bytes = 4
    checks = True

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def encode(self, values: Values | Tensor, groups: int) -> Coded:
        if isinstance(values, Tensor):
            return self._encode_there(values, groups)
        grouped = _in_groups(values, groups)
        outer = _outer(grouped) + np.float32(0)  # turns -0 into 0
        outer[:, 1] *= -1
        ends, codes = self._between(grouped, outer)
        return Coded(ends.astype("<u2").tobytes(), codes.reshape(values.shape))

    def encode_within(self, values: Values | Tensor, scale: bytes) -> Any:
        low, high = from_bfloat16(np.frombuffer(scale, "<u2"))
        if isinstance(values, Tensor):
            ends = torch.tensor([[low, high]], dtype=torch.float64, device=values.device)
            within = values.clamp(float(low), float(high)).reshape(1, -1)
            return self._codes_there(within, ends).reshape(values.shape)
        _outer(_in_groups(values, 1))
        clipped = _in_groups(np.clip(values, low, high), 1)
        codes = self._between(clipped, np.array([[low, -high]], np.float32))[1]
        return codes.reshape(values.shape)

    def _encode_there(self, values: Tensor, groups: int) -> Coded:
        grouped = values.reshape(groups, -1)
        outer = (torch.stack([grouped.amin(dim=1), grouped.amax(dim=1)], dim=1) + 0).cpu()
        ends = bfloat16_below(outer.numpy() * _UPPER_MINUS) ^ _UPPER_SIGN
        exact = torch.from_numpy(from_bfloat16(ends).astype(np.float64)).to(values.device)
        codes = self._codes_there(grouped, exact).reshape(values.shape)
        return Coded(ends.astype("<u2").tobytes(), codes)

    def _codes_there(self, grouped: Tensor, ends: Tensor) -> Tensor:
        """Compute the codes of `quantise` on the tensor's device; `ends` are range limits."""
        low, span = ends[:, :1], ends[:, 1:] - ends[:, :1]
        steps = (grouped.double() - low) / (torch.where(span > 0, span, 1.0) / 2.0**self.bits)
        return steps.clamp_(0, 2**self.bits - 1).to(torch.uint8)

    def _between(self, grouped: Values, outer: Values) -> tuple[np.ndarray, np.ndarray]:
        """Return range limits and codes, given each group's minimum, and its maximum times -1."""
        codes: np.ndarray
        if compiled.COMPILED:
            ends, codes = np.empty(outer.shape, np.uint16), np.empty(grouped.shape, np.uint8)
            loops.quantise(grouped, outer, self.bits, ends, codes)
        else:
            ends = bfloat16_below(outer) ^ _UPPER_SIGN
            codes = quantise(grouped, *_ends(ends), self.bits)
        return ends, codes

    def decode(self, scale: Payload, codes: Codes | Tensor, groups: int) -> Values | Tensor:
        ends = np.frombuffer(scale, "<u2").astype(np.uint16).reshape(groups, 2)
        if ((ends & ~_SIGN) > LARGEST_BFLOAT16).any():
            raise CorruptFrameError("a payload's range of values is not finite")
        if isinstance(codes, Tensor):
            return self._decode_there(ends, codes)
        grouped = _in_groups(codes, groups)
        if compiled.COMPILED:
            values = np.empty(grouped.shape, np.float32)
            ordered = loops.dequantise(ends, self.bits, grouped, values)
        else:
            low, high = _ends(ends)
            ordered = bool((low <= high).all())
            values = dequantise(grouped, low, high, self.bits)
        if not ordered:
            raise _out_of_order()
        return values.reshape(codes.shape)

    def _decode_there(self, ends: np.ndarray, codes: Tensor) -> Tensor:
        low, high = _ends(ends)
        if not (low <= high).all():
            raise _out_of_order()
        step = np.subtract(high, low, dtype=np.float64) / 2.0**self.bits
        start, width = (torch.from_numpy(one).to(codes.device) for one in (low, step))
        middles = start + (codes.reshape(len(ends), -1).double() + 0.5) * width
        return middles.float().reshape(codes.shape)


def _out_of_order() -> CorruptFrameError:
    return CorruptFrameError("a payload's range of values ends below its start")


def quantise(
    values: np.ndarray, low: np.ndarray | float, high: np.ndarray | float, bits: int
) -> Codes:
    """Return codes min(floor((v - low) 2^bits / (high - low)), 2^bits - 1); 0 if high equals low.

    The formula is equation (3-1), except that the value `high` gets the largest code, because the
    equation gives it a code that needs one more bit.
    """
    span = np.subtract(high, low, dtype=np.float64)
    steps: npt.NDArray[np.float64] = np.subtract(values, low, dtype=np.float64)
    steps /= np.where(span > 0, span, 1.0) / 2.0**bits
    np.minimum(np.maximum(steps, 0, out=steps), 2**bits - 1, out=steps)
    return steps.astype(np.int64)


def dequantise(
    codes: Codes, low: np.ndarray | float, high: np.ndarray | float, bits: int
) -> Values:
    """Return the middle of each code's interval: low + (code + 1/2)(high - low) / 2^bits, eq (3-2).

    >>> dequantise(quantise(np.array([0.0, 0.3, 1.0]), 0, 1, bits=1), 0, 1, bits=1).tolist()
    [0.25, 0.25, 0.75]
    """
    span = np.subtract(high, low, dtype=np.float64)
    middles = np.float64(low) + (codes + 0.5) * (span / 2.0**bits)
    return middles.astype(np.float32)


class AgreedScale:
    """The scale of values in predictions, which both parties have: running means over training.

    Both parties update the means with the scale of a training frame when they commit the step of
    the frame. So the payload of a prediction needs no scale, and a row of a prediction does not
    depend on other rows.

    Attributes:
        scale: the means, in the bytes that a `ValueCode` reads as a scale; empty before the first
            commit.
    """

    #: Weight of a new frame's scale in the running means.
    _RATE = 0.1

    def __init__(self) -> None:
        self.scale = b""
        self._means = np.zeros(0)
        self._history = 0
        self._waiting: dict[int, bytes] = {}

    @property
    def tag(self) -> bytes:
        """Return a byte that differs in 255 of 256 cases between parties with unequal means."""
        return bytes([self._history & 0xFF])

    def record(self, step: int, scale: Payload) -> None:
        """Store the scale of a training frame until `commit` is called for the step."""
        self._waiting[step] = bytes(scale)

    def commit(self, step: int) -> None:
        """Update the running means with the scale of a step; a batch without rows has no scale."""
        if not (scale := self._waiting.pop(step, b"")):
            return
        ends = from_bfloat16(np.frombuffer(scale, "<u2")).astype(np.float64)
        if self.scale:
            ends = (1 - self._RATE) * self._means + self._RATE * ends
        self._set(ends, zlib.crc32(scale, self._history))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the means, their history, and the scales of steps without commit."""
        state = {
            "scale-means": torch.from_numpy(self._means.copy()),
            "scale-history": torch.tensor(self._history),
        }
        for step, scale in self._waiting.items():
            state[f"scale-step-{step}"] = torch.tensor(list(scale), dtype=torch.uint8)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state that `state_dict` returned."""
        self._set(state["scale-means"].numpy().copy(), int(state["scale-history"]))
        self._waiting = {
            int(name.removeprefix("scale-step-")): bytes(scale.tolist())
            for name, scale in state.items()
            if name.startswith("scale-step-")
        }

    def _set(self, means: npt.NDArray[np.float64], history: int) -> None:
        self._means, self._history = means, history
        self.scale = nearest_bfloat16(means.astype(np.float32)).astype("<u2").tobytes()


def value_code(values: str) -> ValueCode:
    """Return the value code for an option: ``fp32``, ``bf16``, or a number of bits from 1 to 8.

    Raises:
        BadOptionError: no value code has this name.
    """
    require_choice("values", values, VALUES)
    if values in ("fp32", "bf16"):
        return Float32Values() if values == "fp32" else BFloat16Values()
    return AffineValues(int(values))


def nearest_bfloat16(values: Values) -> npt.NDArray[np.uint16]:
    """Return the bits of the nearest finite bfloat16; ties go to the even number."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    finite: npt.NDArray[np.uint16] = np.minimum(rounded & ~_SIGN, LARGEST_BFLOAT16)
    return (rounded & _SIGN) | finite


def bfloat16_above(values: Values) -> npt.NDArray[np.uint16]:
    """Return the bits of the smallest finite bfloat16 that is not below each value."""
    return bfloat16_below(-values) ^ _SIGN


def from_bfloat16(bits: npt.NDArray[np.uint16]) -> Values:
    """Return the values of bfloat16 numbers, given their bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bfloat16_below(values: Values) -> npt.NDArray[np.uint16]:
    """Return the bits of the largest finite bfloat16 that is not above each value.

    For a value below all finite bfloat16 numbers, the result is the smallest one; `quantise` then
    clips the value.
    """
    bits = np.maximum(values, _LOWEST).view(np.uint32)
    below = (bits + (bits >> 31) * np.uint32(0xFFFF)) >> 16
    return below.astype(np.uint16)


def _ends(ends: npt.NDArray[np.uint16]) -> tuple[np.ndarray, np.ndarray]:
    """Return each group's lower and upper range limit, float64, axes (groups, 1) each."""
    exact = from_bfloat16(ends).astype(np.float64)
    return exact[:, :1], exact[:, 1:]


def _outer(grouped: Values) -> Values:
    """Return the smallest and the largest value of each group, axes (groups, 2).

    Raises:
        NonFiniteError: a value is NaN or Inf, so a range limit would also be NaN or Inf.
    """
    outer = np.empty((len(grouped), 2), np.float32)
    if compiled.COMPILED:
        numbers = outer.view(np.int32)
        loops.find_ends(grouped.view(np.int32), numbers)
        numbers ^= (numbers >> 31) & 0x7FFFFFFF
    else:
        grouped.min(axis=1, out=outer[:, 0])
        grouped.max(axis=1, out=outer[:, 1])
    if not np.isfinite(outer).all():
        raise not_finite("a cut")
    return outer


def _in_groups(rows: np.ndarray, groups: int) -> np.ndarray:
    """Reshape numbers of axes (rows, k) so that each scale has one row of numbers."""
    return np.ascontiguousarray(rows).reshape(groups, max(1, rows.size // max(1, groups)))


class GradientCode:
    """The format of gradients for an option: ``fp32``, ``bf16``, or 2 to 8 bits per value.

    With b bits, every row has its own scale, and values are rounded at random without bias
    (Alistarh et al. 2017, QSGD).

    Raises:
        BadOptionError: the option names no format.
    """

    def __init__(self, grad: str) -> None:
        require_choice("grad", grad, GRADIENTS)
        self._float_bytes = {"fp32": 4, "bf16": 2}.get(grad, 0)
        self.bits = 8 * self._float_bytes or int(grad)
        self._top = 2 ** (self.bits - 1) - 1

    @property
    def rounds(self) -> bool:
        """Return whether values are rounded at random."""
        return not self._float_bytes

    def payload_bytes(self, rows: int, values: int) -> int:
        """Return the size in bytes of `values` gradient values in `rows` rows."""
        if self._float_bytes:
            return self._float_bytes * values
        return 2 * rows + packed_bytes(values, self.bits)

    def encode(self, grad: Tensor, mask: Mask | None, context: StepContext) -> bytes:
        """Encode gradients of axes (rows, k); with a mask, encode only the marked values.

        Raises:
            NonFiniteError: a gradient is NaN or Inf.
        """
        require_finite(grad, "a gradient")
        values = grad.cpu().contiguous().numpy()
        if self._float_bytes:
            flat = values if mask is None else gather_marked(values, mask)
            return flat.tobytes() if self.bits == 32 else nearest_bfloat16(flat).tobytes()
        marked = np.ones(values.shape, np.bool_) if mask is None else mask
        sizes = np.abs(np.where(marked, values, 0)).max(axis=1, initial=0)
        ends = bfloat16_above(sizes / self._top)
        scale = from_bfloat16(ends).astype(np.float64)[:, None]
        steps = values / np.where(scale > 0, scale, 1) + _draws(values.shape, context)
        codes = np.clip(np.floor(steps), -self._top, self._top).astype(np.int64) + self._top
        return ends.astype("<u2").tobytes() + pack(
            to_bits(gather_marked(codes, marked)[:, None], self.bits)
        )

    def decode(self, payload: Payload, rows: int, width: int, mask: Mask | None) -> Values:
        """Return the gradients in a payload, axes (rows, width), with 0 at unmarked positions.

        Raises:
            FrameError: `encode` could not have made these bytes.
        """
        marked = np.ones((rows, width), np.bool_) if mask is None else mask
        count = int(np.count_nonzero(marked))
        require_bytes(payload, self.payload_bytes(rows, count), rows)
        read = self._read(memoryview(payload), count, marked)
        if mask is None:
            found = read.astype(np.float32).reshape(rows, width)
        else:
            found = spread_marked(read.astype(np.float32, copy=False), mask)
        if not all_finite(torch.from_numpy(found)):
            raise CorruptFrameError("a payload holds gradients that are not finite")
        return found

    def _read(self, view: memoryview, count: int, marked: Mask) -> Values:
        if self.bits == 32:
            return np.frombuffer(view, "<f4")
        if self.bits == 16:
            return from_bfloat16(np.frombuffer(view, "<u2"))
        head = 2 * len(marked)
        ends = np.frombuffer(view[:head], "<u2")
        codes = from_bits(unpack(view[head:], count, self.bits), self.bits, 1)[:, 0] - self._top
        if (codes > self._top).any() or (ends > LARGEST_BFLOAT16).any():
            raise CorruptFrameError("a payload holds gradients out of their range")
        scale = from_bfloat16(ends).astype(np.float64)
        with np.errstate(over="ignore"):  # infinite values are refused below
            values: Values = (codes * scale[np.nonzero(marked)[0]]).astype(np.float32)
        return values


def all_finite(values: Tensor) -> bool:
    """Return whether all values are finite; minimum and maximum suffice, as NaN spreads."""
    return not values.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(values))).all())


def require_finite(values: Tensor, what: str = "a cut") -> None:
    """Refuse values that contain NaN or infinity; `what` names them in the error.

    Raises:
        NonFiniteError: a value is not finite.
    """
    if not all_finite(values):
        raise not_finite(what)


def not_finite(what: str) -> NonFiniteError:
    """Return the error about a cut or a gradient that contains NaN or infinity."""
    return NonFiniteError(f"{what} holds NaN or Inf", fix="lower the learning rate")


def _draws(shape: tuple[int, ...], context: StepContext) -> np.ndarray | float:
    """Return the label party's random numbers for rounding; 1/2 outside training."""
    if not context.training or context.secret is None:
        return 0.5  # rounds to the nearest code
    return context.secret.uniform(shape, "gradient", context.step)
