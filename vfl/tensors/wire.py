"""Requests and answers as bytes: JSON, then the elements of tensors.

Decoding runs no code from the message. A message consists of a length (4 bytes), JSON text of that
length, and raw little-endian elements of tensors and bytes. JSON holds plain values directly. Other
values are an object of one key that names their kind, such as a tensor, the number of a tensor, a
slice, or bytes. A value of an unknown kind is refused before any object is made from it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vfl.core.errors import ProtocolError, UserError
from vfl.core.frame import Payload

_LENGTH = struct.Struct("<I")
_MOST_AXES = 16
_DTYPES = {
    str(each).removeprefix("torch."): each
    for each in (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
}
_FORMATS = {
    str(each).removeprefix("torch."): each
    for each in (torch.preserve_format, torch.contiguous_format)
}
_NUMPY = {
    torch.float32: "<f4", torch.float64: "<f8", torch.int64: "<i8", torch.int32: "<i4",
    torch.uint8: "u1", torch.bool: "?",
}  # fmt: skip


def packed(message: Any, ref: Callable[[Any], int | None] = lambda value: None) -> bytes:
    """Encode a message as bytes.

    Args:
        message: numbers, texts, tensors, slices and bytes, or lists, tuples and dictionaries of
            them.
        ref: function that returns the number of a tensor at the peer if its argument represents
            such a tensor, and otherwise None.

    Raises:
        UserError: the message contains a value of a kind that cannot be sent.
    """
    blobs: list[bytes] = []

    def of(value: Any) -> Any:
        if value is None or isinstance(value, bool | str):
            return value
        if (number := ref(value)) is not None:
            return {"ref": number}
        if isinstance(value, int):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, list):
            return [of(each) for each in value]
        if isinstance(value, tuple):  # also torch.Size
            return {"tuple": [of(each) for each in value]}
        if isinstance(value, bytes | bytearray | memoryview):
            blobs.append(bytes(value))
            return {"bytes": len(blobs[-1])}
        if isinstance(value, Mapping):
            return {"table": {str(key): of(each) for key, each in value.items()}}
        if isinstance(value, slice):
            return {"slice": [of(value.start), of(value.stop), of(value.step)]}
        if value is Ellipsis:
            return {"ellipsis": 0}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.memory_format):
            return {"format": str(value).removeprefix("torch.")}
        if type(value) in (Tensor, torch.nn.Parameter) and value.dtype in _NUMPY:
            kept = value.detach().contiguous().cpu().numpy()
            blobs.append(kept.astype(_NUMPY[value.dtype], copy=False).tobytes())
            kind = str(value.dtype).removeprefix("torch.")
            return {"tensor": [kind, list(value.shape), bool(value.requires_grad)]}
        raise UserError(
            "a value of this kind cannot be sent to a worker",
            got=type(value).__name__,
            want="tensors of floats, whole numbers or booleans, numbers, texts and slices",
            fix="send a tensor first: vfl.tensors.send(tensor, worker)",
        )

    text = json.dumps(of(message), separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *blobs])


def unpacked(payload: Payload, ref: Callable[[int], Any] = lambda number: None) -> Any:
    """Decode a message that `packed` encoded.

    Args:
        payload: bytes from another process.
        ref: function that returns the object for the tensor with a given number.

    Raises:
        ProtocolError: the bytes are not a message.
    """
    view = memoryview(payload)
    try:
        (size,) = _LENGTH.unpack_from(view)
        tree = json.loads(bytes(view[_LENGTH.size : _LENGTH.size + size]).decode())
        reader = _Reader(view[_LENGTH.size + size :], ref)
        message = reader.of(tree)
    except (struct.error, ValueError, TypeError, KeyError, RecursionError, OverflowError):
        raise ProtocolError("a message of a worker cannot be read") from None
    if reader.left:
        raise ProtocolError("a message of a worker is longer than its header states")
    return message


class _Reader:
    def __init__(self, blobs: memoryview, ref: Callable[[int], Any]) -> None:
        self._blobs, self._ref, self._at = blobs, ref, 0

    @property
    def left(self) -> int:
        return len(self._blobs) - self._at

    def of(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.of(each) for each in tree]
        if not isinstance(tree, dict):
            return tree
        ((kind, value),) = tree.items()
        if kind == "ref":
            return self._ref(int(value))
        if kind == "float":
            return float(value)
        if kind == "tuple":
            return tuple(self.of(each) for each in value)
        if kind == "bytes":
            return bytes(self._take(value))
        if kind == "table":
            return {key: self.of(each) for key, each in value.items()}
        if kind == "slice":
            return slice(*(self.of(each) for each in value))
        if kind == "ellipsis":
            return Ellipsis
        if kind == "dtype":
            return _DTYPES[value]
        if kind == "format":
            return _FORMATS[value]
        if kind == "tensor":
            return self._tensor(*value)
        raise ValueError(kind)

    def _tensor(self, dtype: str, shape: list[int], grad: bool) -> Tensor:
        if len(shape) > _MOST_AXES or any(type(size) is not int or size < 0 for size in shape):
            raise ValueError("axes")
        kind = np.dtype(_NUMPY[_DTYPES[dtype]])
        raw = self._take(math.prod(shape) * kind.itemsize)
        values = torch.from_numpy(np.frombuffer(bytearray(raw), kind).reshape(shape))
        return values.requires_grad_(grad) if grad else values

    def _take(self, size: int) -> memoryview:
        if type(size) is not int or not 0 <= size <= self.left:
            raise ValueError("bytes")
        self._at += size
        return self._blobs[self._at - size : self._at]
