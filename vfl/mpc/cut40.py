"""The upper 40 of 64 bits of a share, for values that are only looked at and not gone on with.

Fact: two shares without their lower 24 bits add up to the value less a carry of 2^24 on average,
which the reader adds; the error stays below 2^24, so 2^(24 - bits) of the value.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

CUT_BYTES = 5
_DROPPED = 3
EXPECTED_CARRY = 1 << 24


def cut(words: Tensor) -> memoryview:
    """The upper five bytes of each word."""
    rows = words.numpy().astype("<i8", copy=False).view(np.uint8).reshape(-1, 8)
    return np.ascontiguousarray(rows[:, _DROPPED:]).reshape(-1).data


def fill(payload: memoryview) -> Tensor:
    """Words with the lower three bytes zero; int64 of one axis."""
    upper = np.frombuffer(payload, np.uint8).reshape(-1, CUT_BYTES)
    words = np.zeros((len(upper), 8), np.uint8)
    words[:, _DROPPED:] = upper
    return torch.from_numpy(words.view("<i8").reshape(-1).astype(np.int64, copy=False))
