"""Pointers to tensors at workers, and the records that a worker stores of its tensors.

The rule in a record lists the names of the parties that may read the tensor. A `PointerTensor`
sends every operation to its worker. When the pointer to a tensor is deleted, the worker deletes the
tensor, unless the worker's owner gave it a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from vfl.core.errors import ConsentError, UserError
from vfl.mpc.shares import SharedTensor
from vfl.tensors.base import ChainTensor, axes

#: Name by which a worker knows the requester in this process.
ME = "me"
_EVERYBODY: frozenset[str] | None = None
#: Handle of a tensor at a worker: the tensor's number at this worker, and the tensor's shape.
Handle = tuple[int, torch.Size]


@dataclass(slots=True)
class Rule:
    """The names that may read a tensor; tensors that share memory also share one rule object.

    Attributes:
        readers: names of the parties that may read the tensor, or None if everyone may read it.
    """

    readers: frozenset[str] | None = _EVERYBODY

    @classmethod
    def of(cls, names: Iterable[str] | None) -> Rule:
        """Return the rule that lets these parties read, or everyone for None."""
        return cls(None if names is None else frozenset(names))

    @property
    def names(self) -> list[str] | None:
        """The readers in a fixed order, in the form of a message; None for everyone."""
        return None if self.readers is None else sorted(self.readers)

    @property
    def hides(self) -> bool:
        """Return whether the rule excludes some requesters from reading."""
        return self.readers is not None

    def narrow(self, other: Rule) -> None:
        """Remove the readers that a second rule excludes."""
        if other.readers is not None:
            self.readers = other.readers if self.readers is None else self.readers & other.readers


@dataclass(slots=True)
class Held:
    """A worker's record of one tensor or of one share.

    Attributes:
        value: the tensor or share.
        rule: permitted readers of the value.
        grad_rule: permitted readers of the value's gradient.
    """

    value: Any
    rule: Rule
    grad_rule: Rule = field(default_factory=Rule)


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference, by number, to a tensor of the worker that receives the request."""

    number: int


@dataclass(frozen=True, slots=True)
class Mask:
    """A random mask from a dealer, for another worker.

    The other worker subtracts the mask from its values before it sends the values.

    Attributes:
        elements: elements of the prime field.
        tokens: one secret token for each holder; only the dealer, this holder and the worker that
            receives the mask know the token.
    """

    elements: Tensor
    tokens: Sequence[bytes] = ()

    @property
    def shape(self) -> torch.Size:
        """Shape of the mask."""
        return self.elements.shape


@dataclass(frozen=True, slots=True)
class MaskShare:
    """A holder's share of a mask, and its token."""

    shared: SharedTensor
    token: bytes

    @property
    def shape(self) -> torch.Size:
        """Shape of the share."""
        return self.shared.share.shape


@dataclass(frozen=True, slots=True)
class Masked:
    """Values minus a mask, in the form that one holder receives.

    Attributes:
        elements: elements of the prime field.
        token: the holder's token of this mask; it proves that the sender of the masked values
            received the mask from the dealer.
        readers: names of the parties that may read the values; the owner of the values has chosen
            them.
    """

    elements: Tensor
    token: bytes
    readers: Sequence[str] | None

    @property
    def shape(self) -> torch.Size:
        """Shape of the values."""
        return self.elements.shape


@dataclass(frozen=True, slots=True)
class Votes:
    """A teacher network's votes, and the conditions for counting them; see `private.pate`.

    Attributes:
        ones: one-hot vectors with the votes, axes (rows, classes).
        sigma: standard deviation of the noise that each count of votes must get.
        name: identifier of these votes; a worker accepts it for counting only once.
    """

    ones: Tensor
    sigma: float
    name: bytes

    @property
    def shape(self) -> torch.Size:
        """Number of rows and number of classes."""
        return self.ones.shape


class PointerTensor(ChainTensor):
    """A tensor without values that points to a tensor at a worker.

    Args:
        location: the worker.
        number: number of the tensor at the worker.
        shape: its axes.
    """

    kind = "a tensor at a worker"

    def __init__(self, location: Any, number: int, shape: Sequence[int]) -> None:
        self.location, self.number, self._shape = location, number, torch.Size(shape)

    @classmethod
    def operate(cls, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation at the worker; the result is a pointer to the operation's result."""
        first = args[0]
        if not isinstance(first, PointerTensor):
            first = _pointer_in([*args, *kwargs.values()])
        number, shape = first.location.run(name, args, kwargs)
        if number == first.number:  # the operation changed this tensor in place
            first._shape = torch.Size(shape)
            return first
        return PointerTensor(first.location, number, shape)

    def pointers(self) -> list[PointerTensor]:
        """Return pointers to all tensors at workers that represent this tensor."""
        return [self]

    def get(self, requester: str = ME) -> Tensor:
        """Return the tensor's values, if the tensor's owner allows the requester to read them.

        Args:
            requester: name of the requester; a worker in another process ignores it and takes the
                name from the connection.

        Raises:
            ConsentError: the owner does not allow the requester to read the tensor.
            LostPeerError: the worker has ended.
        """
        found: Tensor = self.location.read(self.number, requester)
        return found

    def move(self, worker: Any) -> PointerTensor:
        """Move the tensor and its rule of readers to another worker, but not its gradient.

        The message between the workers is encrypted, so that the leader cannot read it.

        Raises:
            ConsentError: the owner does not allow the other worker to read the tensor.
        """
        parcel = self.location.pack(self.number, worker.name, worker.public_key())
        return PointerTensor(worker, *worker.accept(parcel))

    def backward(self) -> None:  # type: ignore[override]
        """See `Worker.backward`."""
        self.location.backward(self.number)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set whether operations on this tensor record gradients."""
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
        """A pointer to the gradient of the tensor, or None."""
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


def require_at(pointer: PointerTensor, worker: Any) -> None:
    """Refuse a pointer to a tensor of another worker.

    Raises:
        UserError: the tensor is at another worker.
    """
    if pointer.location is not worker:
        raise UserError(
            "two tensors are at different workers",
            got=f"{worker.name} and {pointer.location.name}",
            want="operands at one worker",
            fix=f"move one of them: tensor.move({worker.name})",
        )


def _pointer_in(values: Iterable[Any]) -> PointerTensor:
    for value in values:
        if isinstance(value, PointerTensor):
            return value
        if isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value):
            return _pointer_in(value)
    raise AssertionError("one of the operands is a pointer")


def require_reader(rule: Rule, requester: str, owner: str, shape: torch.Size) -> None:
    """Refuse a tensor to a requester that the tensor's rule of readers excludes.

    Raises:
        ConsentError: the rule excludes the requester.
    """
    if rule.readers is not None and requester not in rule.readers:
        raise ConsentError(
            f"{owner} does not let {requester} have this tensor",
            where=f"a tensor {axes(shape)} at {owner}",
            want="a reader that its owner allows",
            fix=f"the owner may call {owner}.allow(tensor, {requester!r})",
        )
