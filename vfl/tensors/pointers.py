"""Pointers to tensors at workers, and what a worker keeps under a number: below workers and shares.

A rule says who may read what is kept. A `PointerTensor` hands every operation to its worker, and
the tensor goes when its last pointer does.
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

#: Who asks, in this process.
ME = "me"
_EVERYBODY: frozenset[str] | None = None
#: Of a tensor at a worker: its number there and its axes.
Handle = tuple[int, torch.Size]


@dataclass(slots=True)
class Rule:
    """Who may read; one object for all tensors on the same memory.

    Attributes:
        readers: names, or None for everybody.
    """

    readers: frozenset[str] | None = _EVERYBODY

    @property
    def hides(self) -> bool:
        """Whether not everybody may read."""
        return self.readers is not None

    def narrow(self, other: Rule) -> None:
        """Nobody who may not read the other either."""
        if other.readers is not None:
            self.readers = other.readers if self.readers is None else self.readers & other.readers


@dataclass(slots=True)
class Held:
    """A tensor at a worker, or a share.

    Attributes:
        value: what it is.
        rule: who may read it.
        grad_rule: who may read its gradient.
    """

    value: Any
    rule: Rule
    grad_rule: Rule = field(default_factory=Rule)


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of the worker that is asked, by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Mask:
    """What a dealer drew for somebody to hide values under.

    Attributes:
        elements: of the field.
        tokens: of each holder, which only the dealer, that holder and whoever has the mask know.
    """

    elements: Tensor
    tokens: Sequence[bytes] = ()

    @property
    def shape(self) -> torch.Size:
        """Its axes."""
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
    """Values less a mask, for one holder.

    Attributes:
        elements: of the field.
        token: of that holder and the mask: who says this, was given the mask.
        readers: who may read the values, as their owner says.
    """

    elements: Tensor
    token: bytes
    readers: Sequence[str] | None

    @property
    def shape(self) -> torch.Size:
        """Their axes."""
        return self.elements.shape


@dataclass(frozen=True, slots=True)
class Votes:
    """Votes of a teacher, with the terms under which they may be counted; see `private.pate`.

    Attributes:
        ones: axes (rows, classes).
        sigma: deviation of the noise of a count.
        name: of these votes, which are counted once.
    """

    ones: Tensor
    sigma: float
    name: bytes

    @property
    def shape(self) -> torch.Size:
        """Rows and classes."""
        return self.ones.shape


class PointerTensor(ChainTensor):
    """A tensor at a worker.

    Args:
        location: the worker.
        number: under which the worker has it.
        shape: its axes.
    """

    kind = "a tensor at a worker"

    def __init__(self, location: Any, number: int, shape: Sequence[int]) -> None:
        self.location, self.number, self._shape = location, number, torch.Size(shape)

    @classmethod
    def operate(cls, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Let the worker do it; the result is a pointer too."""
        first = args[0]
        if not isinstance(first, PointerTensor):
            first = _pointer_in([*args, *kwargs.values()])
        number, shape = first.location.run(name, args, kwargs)
        if number == first.number:  # in place
            first._shape = torch.Size(shape)
            return first
        return PointerTensor(first.location, number, shape)

    def pointers(self) -> list[PointerTensor]:
        """To everything at workers that this tensor is made of."""
        return [self]

    def get(self, requester: str = ME) -> Tensor:
        """The tensor, if its owner lets you.

        Args:
            requester: who asks; a worker elsewhere knows that by itself.

        Raises:
            ConsentError: the owner does not.
            LostPeerError: the worker has ended.
        """
        found: Tensor = self.location.read(self.number, requester)
        return found

    def move(self, worker: Any) -> PointerTensor:
        """The tensor at another worker, under the same rule; gradients do not follow it.

        Nobody between the two can read it.

        Raises:
            ConsentError: the owner lets this worker not read it.
        """
        parcel = self.location.pack(self.number, worker.name, worker.public_key())
        return PointerTensor(worker, *worker.accept(parcel))

    def backward(self) -> None:  # type: ignore[override]
        """See `Worker.backward`."""
        self.location.backward(self.number)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Let gradients flow here."""
        self.location.require_grad(self.number, requires_grad)
        return self

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether gradients flow here."""
        return bool(self.location.note(self.number)[1])

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Of the elements."""
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
    raise AssertionError("torch found a pointer among the operands")


def require_reader(rule: Rule, requester: str, owner: str, shape: torch.Size) -> None:
    """Refuse a tensor to somebody its rule does not name.

    Raises:
        ConsentError: the rule does not.
    """
    if rule.readers is not None and requester not in rule.readers:
        raise ConsentError(
            f"{owner} does not let {requester} have this tensor",
            where=f"a tensor {axes(shape)} at {owner}",
            want="a reader that its owner allows",
            fix=f"the owner may call {owner}.allow(tensor, {requester!r})",
        )
