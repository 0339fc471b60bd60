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
from vfl.tensors.private import PrivateTraining, pate
from vfl.tensors.remote import Pool, Ticket, serve
from vfl.tensors.workers import PointerTensor, Worker, find, get, on_parameters, send, virtual

__all__ = [
    "ChainTensor",
    "FixedPrecisionTensor",
    "PointerTensor",
    "Pool",
    "PrivateTraining",
    "Ticket",
    "Worker",
    "find",
    "fix_precision",
    "get",
    "hook",
    "pate",
    "send",
    "serve",
    "share",
    "unhook",
    "virtual",
]

_METHODS: dict[type, dict[str, Any]] = {}


def share(
    module: torch.nn.Module, *holders: Any, dealer: Any, bits: int = BITS, mac: bool = False
) -> torch.nn.Module:
    """A module whose parameters are shares from now on; the module itself.

    Args:
        module: of layers that shared tensors support.
        holders: 2 to 8 workers.
        dealer: another worker.
        bits: after the point.
        mac: whether shares carry MACs, so that a holder that lies is found.
    """
    return on_parameters(
        module, lambda each: fix_precision(each, bits).share(*holders, dealer=dealer, mac=mac)
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
