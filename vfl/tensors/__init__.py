"""Tensors at workers, and tensors that are shares: torch code on values it does not have.

    alice, bob, carol = vfl.tensors.virtual("alice", "bob", "carol")
    pointer = vfl.tensors.send(x, alice)
    shared = vfl.tensors.fix_precision(x).share(alice, bob, dealer=carol)

Ordinary torch code runs on both. After `hook()` tensors and modules have `send` and the like as
methods. Workers live in this process: see docs/tensors.md for what that protects, and what not.
"""

from __future__ import annotations

from typing import Any

import torch

from vfl.tensors.base import ChainTensor
from vfl.tensors.fixed import BITS, FixedPrecisionTensor, fix_precision
from vfl.tensors.workers import PointerTensor, Worker, get, on_parameters, send, virtual

__all__ = [
    "ChainTensor",
    "FixedPrecisionTensor",
    "PointerTensor",
    "Worker",
    "fix_precision",
    "get",
    "hook",
    "send",
    "share",
    "unhook",
    "virtual",
]

_METHODS: dict[type, dict[str, Any]] = {}


def share(
    module: torch.nn.Module, *holders: Worker, dealer: Worker, bits: int = BITS
) -> torch.nn.Module:
    """A module whose parameters are shares from now on; the module itself.

    Args:
        module: of layers that shared tensors support.
        holders: 2 to 8 workers.
        dealer: another worker.
        bits: after the point.
    """
    return on_parameters(
        module, lambda each: fix_precision(each, bits).share(*holders, dealer=dealer)
    )


def hook() -> None:
    """Give torch's tensors and modules `send`, `fix_precision`, `share` and `get`."""
    if not _METHODS:
        _METHODS[torch.Tensor] = {"send": send, "fix_precision": fix_precision}
        _METHODS[torch.nn.Module] = {"send": send, "share": share, "get": get}
        for where, methods in _METHODS.items():
            for name, method in methods.items():
                setattr(where, name, method)


def unhook() -> None:
    """Take back what `hook` gave."""
    for where, methods in _METHODS.items():
        for name in methods:
            delattr(where, name)
    _METHODS.clear()
