"""`fix_precision`, `share` for modules, and the methods that `hook` gives to torch's classes."""

from __future__ import annotations

from typing import Any

import torch

from vfl.core.errors import UserError
from vfl.core.registry import require_range
from vfl.tensors.fixed import FixedPrecisionTensor, public
from vfl.tensors.layers import OPERATIONS
from vfl.tensors.pointers import PointerTensor
from vfl.tensors.shares import Session
from vfl.tensors.workers import get, on_parameters, send

BITS = 16
FixedPrecisionTensor.operations = OPERATIONS

_METHODS: dict[type, dict[str, Any]] = {}


def fix_precision(tensor: Any, bits: int = BITS) -> Any:
    """Reals as fixed-precision numbers; of a pointer, see `share`.

    Args:
        tensor: a torch tensor, or a pointer whose values its worker will share.
        bits: after the point, 8 to 20.
    """
    require_range("bits", bits, 8, 20)
    if isinstance(tensor, PointerTensor):
        return Unshared(tensor, bits)
    return public(tensor, bits, bits).requires_grad_(tensor.requires_grad)


class Unshared:
    """What a pointer's worker is going to share.

    Args:
        pointer: to a torch tensor.
        bits: after the point.
    """

    def __init__(self, pointer: PointerTensor, bits: int) -> None:
        self.pointer, self.bits = pointer, bits

    def __repr__(self) -> str:
        return f"<{self.bits} bits, not shared yet: {self.pointer!r}>"

    def share(self, *holders: Any, dealer: Any, mac: bool = False) -> FixedPrecisionTensor:
        """The worker splits its values among the holders; its rule goes with every share."""
        session, owner = Session.of(holders, dealer, mac), self.pointer.location
        if owner.remote != dealer.remote:
            raise UserError(
                "the tensor is in another process than the holders, or they are and it is not",
                got=repr(self.pointer),
                fix="take holders that are elsewhere as it is, or get() it first if you may",
            )
        result = FixedPrecisionTensor(
            session.split_at(self.pointer, self.bits), self.bits, self.bits
        )
        return result.requires_grad_(self.pointer.requires_grad)


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
