"""`share` for modules, and the methods that `hook` gives to torch's classes."""

from __future__ import annotations

from typing import Any

import torch

from vfl.tensors.fixed import BITS, fix_precision
from vfl.tensors.workers import get, on_parameters, send

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
