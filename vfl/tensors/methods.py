"""`fix_precision`, `share` for modules, and the methods that `hook` adds to torch's classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vfl.core.errors import UserError
from vfl.core.registry import require_range
from vfl.mpc.many.members import Member
from vfl.tensors.fixed import FixedPrecisionTensor, public
from vfl.tensors.layers import OPERATIONS
from vfl.tensors.pointers import PointerTensor
from vfl.tensors.shares import PartySession, Session, elements_of
from vfl.tensors.workers import get, on_parameters, send

BITS = 16
FixedPrecisionTensor.operations = OPERATIONS

_METHODS: dict[type, dict[str, Any]] = {}


def fix_precision(tensor: Any, bits: int = BITS) -> Any:
    """Convert real numbers to fixed-precision numbers; for a pointer, see `Unshared.share`.

    Args:
        tensor: a torch tensor, or a pointer to a tensor that the worker itself will split into
            shares.
        bits: number of fraction bits of the integers that represent the numbers, 8 to 20.
    """
    require_range("bits", bits, 8, 20)
    if isinstance(tensor, PointerTensor):
        return Unshared(tensor, bits)
    return public(tensor, bits, bits).requires_grad_(tensor.requires_grad)


class Unshared:
    """Values at a pointer's worker; the worker itself will split them into shares.

    Args:
        pointer: pointer to a torch tensor.
        bits: number of fraction bits of the shared integers.
    """

    def __init__(self, pointer: PointerTensor, bits: int) -> None:
        self.pointer, self.bits = pointer, bits

    def __repr__(self) -> str:
        return f"<{self.bits} bits, not shared yet: {self.pointer!r}>"

    def share(self, *holders: Any, dealer: Any, mac: bool = False) -> FixedPrecisionTensor:
        """Ask the pointer's worker to split its values into shares for the holders.

        The rule of who may read the values applies to every share.
        """
        session, owner = Session.of(holders, dealer, mac), self.pointer.location
        if owner.remote != dealer.remote:
            raise UserError(
                "the tensor and the holders must all be in this process, or all in others",
                got=repr(self.pointer),
                fix="choose holders in the same place as the tensor, or call get() first if you"
                " may see the values",
            )
        result = FixedPrecisionTensor(
            session.split_at(self.pointer, self.bits), self.bits, self.bits
        )
        return result.requires_grad_(self.pointer.requires_grad)


class Party:
    """Shared tensors for a program that all parties run, each party in a process of its own.

    Args:
        member: engine of this party, with the keys that the parties agreed on; see
            `vfl.mpc.many.members.Member`.
        bits: number of fraction bits of the shared integers.

    >>> from vfl.mpc.many.members import LocalMembers
    >>> x = torch.tensor([1.5, -2.0])
    >>> def program(member):
    ...     party = Party(member)
    ...     shared = party.share(0, (2,), x if member.role == 0 else None)
    ...     return torch.relu(shared * shared - 3).get().float_precision()
    >>> with LocalMembers(2) as members:
    ...     members.run(program)[1]
    tensor([0., 1.])
    """

    def __init__(self, member: Member, bits: int = BITS) -> None:
        require_range("bits", bits, 8, 20)
        self._session, self.bits = PartySession(member), bits

    def share(self, owner: int, shape: Sequence[int], values: Tensor | None) -> Any:
        """Share the values of one holder among all holders; takes no message.

        Args:
            owner: role number of the holder that has the values.
            shape: shape of the values, which all parties know.
            values: the values at their owner; None at the other parties.

        Raises:
            RingRangeError, NonFiniteError: a value does not fit into the ring, or is not finite.
        """
        own = values if self._session.member.role == owner else None
        elements = None if own is None else elements_of(own, self.bits)
        child = self._session.of_owner(owner, shape, elements)
        found = FixedPrecisionTensor(child, self.bits, self.bits)
        return found.requires_grad_(values is not None and values.requires_grad)


def share(
    module: torch.nn.Module, *holders: Any, dealer: Any, bits: int = BITS, mac: bool = False
) -> torch.nn.Module:
    """Replace a module's parameters and buffers by shares; return the module itself.

    Args:
        module: module with only such layers as shared tensors support.
        holders: 2 to 8 workers that each receive one share.
        dealer: another worker, which deals the correlated randomness for products and receives no
            value.
        bits: number of fraction bits of the shared integers.
        mac: whether shares have MACs (message authentication codes), by which holders detect a
            false share.
    """
    return on_parameters(
        module, lambda each: fix_precision(each, bits).share(*holders, dealer=dealer, mac=mac)
    )


def hook() -> None:
    """Add `send` and `fix_precision` to torch's tensors, and `send`, `share`, `get` to modules."""
    if not _METHODS:
        _METHODS[torch.Tensor] = {"send": send, "fix_precision": fix_precision}
        _METHODS[torch.nn.Module] = {"send": send, "share": share, "get": get}
        for where, methods in _METHODS.items():
            for name, method in methods.items():
                setattr(where, name, method)


def unhook() -> None:
    """Remove the methods that `hook` added to torch's classes."""
    for where, methods in _METHODS.items():
        for name in methods:
            delattr(where, name)
    _METHODS.clear()
