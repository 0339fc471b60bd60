"""Ring numbers as payloads: 8 bytes a number, little-endian, whole matrices one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vfl.errors import TruncatedFrameError
from vfl.frame import Payload
from vfl.mpc.ring import WORD_BYTES


def words_bytes(words: Tensor) -> bytes:
    """The payload of ring numbers, int64 of any shape, in row order."""
    return words.contiguous().numpy().astype("<i8", copy=False).tobytes()


def size_of(shape: tuple[int, ...]) -> int:
    """Bytes of ring numbers of these axes.

    >>> size_of((3, 5))
    120
    """
    return WORD_BYTES * math.prod(shape)


def read_words(payload: Payload, shape: tuple[int, ...]) -> Tensor:
    """The ring numbers of a payload of exactly that size; int64, writable."""
    words = np.frombuffer(payload, "<i8").astype(np.int64)
    return torch.from_numpy(words).reshape(shape)


def split_payload(payload: Payload, sizes: Sequence[int], where: str) -> list[memoryview]:
    """The parts of a payload, by their sizes in bytes.

    Raises:
        TruncatedFrameError: it is not exactly as long as all of them.
    """
    if len(payload) != sum(sizes):
        raise TruncatedFrameError(
            "a payload of shared numbers has the wrong length",
            where=where,
            got=f"{len(payload)} bytes",
            want=f"{sum(sizes)} bytes",
        )
    whole, start, parts = memoryview(payload), 0, []
    for size in sizes:
        parts.append(whole[start : start + size])
        start += size
    return parts
