"""The ways to send a cut that ``vfl bench codecs`` measures, one turn at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import zstandard
from torch import Tensor

from vfl.compression import StepContext, make
from vfl.core.errors import WidthError
from vfl.core.frame import Frame, Kind, from_bytes, to_bytes
from vfl.core.seeds import Secret

#: Codecs, the same for every width; `k` is filled in.
SPECS = (
    "topk:k={k},values=8",
    "randtopk:k={k},values=8",
    "topk:k={k},values=4,packer=range",
    "size:k={k},values=8",
    "sign",
    "quantise:values=8",
    "quantise:values=2,packer=range",
    "relu:values=4,packer=bitmap",
)
BASE = "torch.topk"


class Cost(NamedTuple):
    """Of one batch: seconds to make its bytes and to read them, and how many they are."""

    encode_s: float
    decode_s: float
    wire_bytes: int


#: One measurement, of a step with its batch.
Turn = Callable[[int, Tensor], Cost]


def contenders(width: int, k: int) -> dict[str, Turn]:
    """What is measured for cuts of a width, with what it is compared with at the head.

    Codecs that would need too large a table are left out.
    """
    found: dict[str, Turn] = {"memcpy": _memcpy, BASE: partial(_topk, k), "zstd -1, dense": _zstd}
    for spec in (each.format(k=k) for each in SPECS):
        try:
            found[spec] = _CodecTurn(spec, width)
        except WidthError:
            continue
    return found


class _CodecTurn:
    """A codec at both ends of a link; its module at the feature party is not counted."""

    def __init__(self, spec: str, width: int) -> None:
        self._codec = make(spec)
        self._codec.check(width)
        module = self._codec.client_module(width)
        self._module = module.eval() if module is not None else None
        self._secret = Secret.of_simulation(0, "bench")

    @torch.no_grad()
    def __call__(self, step: int, batch: Tensor) -> Cost:
        cut = self._module(batch) if self._module is not None else batch
        rows, width = cut.shape
        sender, reader = StepContext(step, True, self._secret), StepContext(step, True)
        began = time.thread_time()
        raw = to_bytes(Frame(Kind.CUT, step, self._codec.encode(cut, sender).payload))
        encoded = time.thread_time()
        self._codec.decode(from_bytes(raw).payload, rows, width, reader)
        decoded = time.thread_time()
        self._codec.commit(step)
        return Cost(encoded - began, decoded - encoded, len(raw))


def _memcpy(step: int, batch: Tensor) -> Cost:
    began = time.thread_time()
    batch.clone()
    return Cost(time.thread_time() - began, 0.0, 4 * batch.numel())


def _topk(k: int, step: int, batch: Tensor) -> Cost:
    began = time.thread_time()
    torch.topk(batch.abs(), k)
    return Cost(time.thread_time() - began, 0.0, 0)


def _zstd(step: int, batch: Tensor) -> Cost:
    began = time.thread_time()
    raw = zstandard.ZstdCompressor(level=1).compress(batch.numpy().data)
    encoded = time.thread_time()
    zstandard.ZstdDecompressor().decompress(raw)
    return Cost(encoded - began, time.thread_time() - encoded, len(raw))
