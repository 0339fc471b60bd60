"""The upper 40 of 64 bits of a share, for values that are only looked at and not gone on with.

Fact: two shares without their lower 24 bits add up to the value less a carry of 2^24 on average,
which the reader adds; the error stays below 2^24, so 2^(24 - bits) of the value.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

CUT_BYTES = 5
EXPECTED_CARRY = 1 << 24
#: The bytes of a word that are kept: where they stand in it, and packed.
_NAMES, _FORMATS = ["low", "high"], ["<u4", "u1"]
_IN_WORD = np.dtype({"names": _NAMES, "formats": _FORMATS, "offsets": [3, 7], "itemsize": 8})
_PACKED = np.dtype({"names": _NAMES, "formats": _FORMATS, "offsets": [0, 4], "itemsize": CUT_BYTES})


def cut(words: Tensor) -> memoryview:
    """The upper five bytes of each word."""
    packed = np.empty(words.numel(), _PACKED)
    _copy(words.numpy().astype("<i8", copy=False).reshape(-1).view(_IN_WORD), packed)
    return packed.view(np.uint8).data


def fill(payload: memoryview) -> Tensor:
    """Words with the lower three bytes zero; int64 of one axis."""
    packed = np.frombuffer(payload, _PACKED)
    words = np.zeros(len(packed), "<i8")
    _copy(packed, words.view(_IN_WORD))
    return torch.from_numpy(words.astype(np.int64, copy=False))


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    """Field by field: numpy copies four bytes at once, but five one by one."""
    for name in _NAMES:
        target[name] = source[name]
