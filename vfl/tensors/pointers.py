"""Pointers to tensors at workers, and a worker's records by number; below workers and shares.

A rule lists who may read a record. A `PointerTensor` passes every operation to its worker; the
worker deletes the tensor when its last pointer is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from vfl.core.errors import ConsentError
from vfl.mpc.shares import SharedTensor
from vfl.tensors.base import ChainTensor, axes

#: Name of the requester in this process.
ME = "me"
_EVERYBODY: frozenset[str] | None = None
#: Handle of a tensor at a worker: its number there and its axes.
Handle = tuple[int, torch.Size]


@dataclass(slots=True)
class Rule:
    """Permitted readers; all tensors on the same memory share one object.

    Attributes:
        readers: names, or None for everyone.
    """

    readers: frozenset[str] | None = _EVERYBODY

    @property
    def hides(self) -> bool:
        """Return whether some requesters may not read."""
        return self.readers is not None

    def narrow(self, other: Rule) -> None:
        """Remove readers that a second rule does not allow."""
        if other.readers is not None:
            self.readers = other.readers if self.readers is None else self.readers & other.readers


@dataclass(slots=True)
class Held:
    """A tensor at a worker, or a share.

    Attributes:
        value: the tensor or share.
        rule: permitted readers of the value.
        grad_rule: permitted readers of its gradient.
    """

    value: Any
    rule: Rule
    grad_rule: Rule = field(default_factory=Rule)


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference by number to a tensor of the worker that receives the request."""

    number: int


@dataclass(frozen=True, slots=True)
class Mask:
    """A dealer's mask, under which another worker hides values.

    Attributes:
        elements: elements of the field.
        tokens: one token for each holder; only the dealer, that holder and the mask's receiver know
            it.
    """

    elements: Tensor
    tokens: Sequence[bytes] = ()

    @property
    def shape(self) -> torch.Size:
        """Axes of the mask."""
        return self.elements.shape


@dataclass(frozen=True, slots=True)
class MaskShare:
    """A holder's share of a mask, and its token."""

    shared: SharedTensor
    token: bytes

    @property
    def shape(self) -> torch.Size:
        """Axes of the share."""
        return self.shared.share.shape


@dataclass(frozen=True, slots=True)
class Masked:
    """Values minus a mask, sent to one holder.

    Attributes:
        elements: elements of the field.
        token: token of that holder and mask; it proves that its sender received the mask.
        readers: names that may read the values, set by their owner.
    """

    elements: Tensor
    token: bytes
    readers: Sequence[str] | None

    @property
    def shape(self) -> torch.Size:
        """Axes of the values."""
        return self.elements.shape


@dataclass(frozen=True, slots=True)
class Votes:
    """A teacher's votes and the terms of their counting; see `private.pate`.

    Attributes:
        ones: axes (rows, classes).
        sigma: standard deviation of the noise on a count.
        name: identifier of these votes, which may be counted once.
    """

    ones: Tensor
    sigma: float
    name: bytes

    @property
    def shape(self) -> torch.Size:
        """Rows and classes."""
        return self.ones.shape


class PointerTensor(ChainTensor):
    """A pointer to a tensor at a worker.

    Args:
        location: the worker.
        number: its number at the worker.
        shape: its axes.
    """

    kind = "a tensor at a worker"

    def __init__(self, location: Any, number: int, shape: Sequence[int]) -> None:
        self.location, self.number, self._shape = location, number, torch.Size(shape)

    @classmethod
    def operate(cls, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the operation at the worker; the result is a pointer too."""
        first = args[0]
        if not isinstance(first, PointerTensor):
            first = _pointer_in([*args, *kwargs.values()])
        number, shape = first.location.run(name, args, kwargs)
        if number == first.number:  # an in-place operation
            first._shape = torch.Size(shape)
            return first
        return PointerTensor(first.location, number, shape)

    def pointers(self) -> list[PointerTensor]:
        """Return pointers to all parts of this tensor at workers."""
        return [self]

    def get(self, requester: str = ME) -> Tensor:
        """Return the tensor, if its owner allows it.

        Args:
            requester: name of the requester; a worker in another process knows it from the
                connection.

        Raises:
            ConsentError: the owner does not allow it.
            LostPeerError: the worker has ended.
        """
        found: Tensor = self.location.read(self.number, requester)
        return found

    def move(self, worker: Any) -> PointerTensor:
        """Move the tensor to another worker under the same rule; its gradient is not moved.

        The message is sealed, so that the leader cannot read it.

        Raises:
            ConsentError: the owner does not allow this worker to read it.
        """
        parcel = self.location.pack(self.number, worker.name, worker.public_key())
        return PointerTensor(worker, *worker.accept(parcel))

    def backward(self) -> None:  # type: ignore[override]
        """See `Worker.backward`."""
        self.location.backward(self.number)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Record gradients for this tensor."""
        self.location.require_grad(self.number, requires_grad)
        return self

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Return whether the tensor records gradients."""
        return bool(self.location.note(self.number)[1])

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Type of the elements."""
        found: torch.dtype = self.location.note(self.number)[0]
        return found

    @property  # type: ignore[override]
    def grad(self) -> PointerTensor | None:
        """A pointer to the gradient."""
        handle = self.location.gradient(self.number)
        return None if handle is None else PointerTensor(self.location, *handle)

    @grad.setter
    def grad(self, value: PointerTensor | None) -> None:
        self.location.set_gradient(self.number, None if value is None else value.number)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"<pointer to {axes(self._shape)} at {self.location.name}, number {self.number}>"

    def __del__(self) -> None:
        location = getattr(self, "location", None)
        if location is not None:
            location.forget((self.number,))


def _pointer_in(values: Iterable[Any]) -> PointerTensor:
    for value in values:
        if isinstance(value, PointerTensor):
            return value
        if isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value):
            return _pointer_in(value)
    raise AssertionError("one of the operands is a pointer")


def require_reader(rule: Rule, requester: str, owner: str, shape: torch.Size) -> None:
    """Refuse a tensor to a requester that its rule does not name.

    Raises:
        ConsentError: the rule does not name the requester.
    """
    if rule.readers is not None and requester not in rule.readers:
        raise ConsentError(
            f"{owner} does not let {requester} have this tensor",
            where=f"a tensor {axes(shape)} at {owner}",
            want="a reader that its owner allows",
            fix=f"the owner may call {owner}.allow(tensor, {requester!r})",
        )
