"""Workers that hold tensors, and pointers to what they hold.

A virtual worker lives in this process: it protects nobody, and behaves as one that does. It keeps
its tensors by number, runs operations of `vfl.tensors.base.OPERATIONS` on them, and asks its rule
who may read a result: whoever may read every operand. A tensor goes when its last pointer does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Self

import torch
from torch import Tensor

from vfl.core.errors import ConsentError, LostPeerError, UserError
from vfl.core.registry import require
from vfl.tensors.base import OPERATIONS, VIEWS, ChainTensor, axes

#: Who asks, in this process.
ME = "me"
_EVERYBODY: frozenset[str] | None = None


@dataclass(slots=True)
class Rule:
    """Who may read; one object for all tensors on the same memory.

    Attributes:
        readers: names, or None for everybody.
    """

    readers: frozenset[str] | None = _EVERYBODY

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


class Worker:
    """A worker of this process.

    Args:
        name: by which messages and rules call it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.sessions: dict[Any, Any] = {}
        self._held: dict[int, Held] = {}
        self._numbers = count(1)
        self._stopped = False

    def __repr__(self) -> str:
        state = ", stopped" if self._stopped else ""
        return f"<worker {self.name}: {len(self._held)} tensors{state}>"

    def __len__(self) -> int:
        return len(self._held)

    def load(self, tensor: Tensor, readers: Iterable[str] | None = ()) -> PointerTensor:
        """As its owner: put a tensor here, which only `readers` may get; nobody if not given.

        Args:
            tensor: a copy of it is kept.
            readers: names; None is everybody.
        """
        rule = Rule(None if readers is None else frozenset(readers))
        kept = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return self.keep(kept, rule)

    def allow(self, tensor: Any, reader: str = ME) -> None:
        """As its owner: let somebody get a tensor, or this worker's share of one."""
        for pointer in tensor.pointers():
            if pointer.location is self:
                for rule in (self.held(pointer).rule, self.held(pointer).grad_rule):
                    if rule.readers is not None:
                        rule.readers |= {reader}

    def stop(self) -> None:
        """End: what it held is gone, and whoever asks is told."""
        self._stopped = True
        self._held.clear()

    # What the chain asks.

    def keep(self, value: Any, rule: Rule) -> PointerTensor:
        """Keep a value under a number; a pointer to it."""
        self.require_alive()
        number = next(self._numbers)
        self._held[number] = Held(value, rule)
        return PointerTensor(self, number, value.shape)

    def held(self, pointer: PointerTensor) -> Held:
        """What a pointer of this worker points to.

        Raises:
            LostPeerError: the worker has ended.
        """
        found = self._held.get(pointer.number)
        if found is None:
            self.require_alive()
            raise UserError("no such tensor", where=self.name, fix="send it again")
        return found

    def require_alive(self) -> None:
        """Refuse what is asked of a worker that has ended.

        Raises:
            LostPeerError: it has.
        """
        if self._stopped:
            raise LostPeerError(
                f"{self.name} has stopped", fix="start a new worker and send its tensors again"
            )

    def forget(self, number: int) -> None:
        """Nobody points there any more."""
        self._held.pop(number, None)

    def run(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """An operation on tensors that are here.

        Raises:
            UserError: it is not allowed, or an operand is elsewhere.
        """
        call = OPERATIONS.get(name)
        short = name.rpartition(".")[2]
        in_place = short[-1] == "_" and short[0] != "_"
        if call is None:
            PointerTensor.refuse(name)
        # A result in memory that somebody else reads would pass by its rule.
        if "out" in kwargs or kwargs.get("inplace"):
            PointerTensor.refuse(f"{name} into another tensor, or in place")
        if in_place and not isinstance(args[0], PointerTensor):
            PointerTensor.refuse(f"{name} on a tensor that is not at the worker")
        used: list[Held] = []
        real = [self._real(each, used) if isinstance(each, _DEEP) else each for each in args]
        named = {key: self._real(value, used) for key, value in kwargs.items()} if kwargs else {}
        try:
            result = call(*real, **named)
        except (RuntimeError, IndexError, TypeError):  # whose text may hold values
            raise UserError(
                "torch cannot do this with these operands",
                where=f"{name} at {self.name}",
                got=", ".join(axes(each.value.shape) for each in used),
                fix="compare the shapes and types of the operands",
            ) from None
        if in_place:
            for other in used[1:]:
                used[0].rule.narrow(other.rule)
            return args[0]
        rule = used[0].rule if short in VIEWS else Rule()
        for each in used:
            rule.narrow(each.rule)
        return self.keep(result, rule)

    def _real(self, value: Any, used: list[Held]) -> Any:
        if isinstance(value, PointerTensor):
            if value.location is not self:
                raise UserError(
                    "two tensors are at different workers",
                    got=f"{self.name} and {value.location.name}",
                    want="operands at one worker",
                    fix=f"move one of them: tensor.move({self.name})",
                )
            held = self.held(value)
            if not isinstance(held.value, Tensor):
                PointerTensor.refuse("an operation on one share")
            used.append(held)
            return held.value
        if isinstance(value, ChainTensor) or (isinstance(value, Tensor) and value.dim()):
            raise UserError(
                "an operand is not at the worker",
                where=self.name,
                got="a local or shared tensor",
                fix=f"send it first: tensor.send({self.name})",
            )
        if isinstance(value, list | tuple):
            return type(value)(self._real(each, used) for each in value)
        return value

    def backward(self, pointer: PointerTensor) -> None:
        """Gradients of everything here that a scalar depends on; who may not read it, not them."""
        loss = self.held(pointer)
        try:
            loss.value.backward()
        except RuntimeError:
            raise UserError(
                "torch cannot follow gradients from here",
                where=self.name,
                got=axes(loss.value.shape),
                want="a scalar of tensors whose gradients are wanted",
                fix="call requires_grad_() on what is learned, and backward() on a sum or mean",
            ) from None
        for each in self._held.values():
            if isinstance(each.value, Tensor) and each.value.requires_grad:
                each.grad_rule.narrow(loss.rule)


class PointerTensor(ChainTensor):
    """A tensor at a worker.

    Args:
        location: the worker.
        number: under which the worker has it.
        shape: its axes.
    """

    kind = "a tensor at a worker"

    def __init__(self, location: Worker, number: int, shape: torch.Size) -> None:
        self.location, self.number, self._shape = location, number, shape

    @classmethod
    def operate(cls, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Let the worker do it; the result is a pointer too."""
        first = args[0]
        if not isinstance(first, PointerTensor):
            first = _pointer_in([*args, *kwargs.values()])
        return first.location.run(name, args, kwargs)

    def pointers(self) -> list[PointerTensor]:
        """To everything at workers that this tensor is made of."""
        return [self]

    def get(self, requester: str = ME) -> Tensor:
        """The tensor, if its owner lets you.

        Raises:
            ConsentError: the owner does not.
            LostPeerError: the worker has ended.
        """
        held = self.location.held(self)
        require_reader(held.rule, requester, self.location, self._shape)
        if not isinstance(held.value, Tensor):
            self.refuse("get of one share")
        value: Tensor = held.value.detach().clone()
        return value.requires_grad_(held.value.requires_grad)

    def move(self, worker: Worker) -> PointerTensor:
        """The tensor at another worker, under the same rule; gradients do not follow it.

        Raises:
            ConsentError: the owner lets this worker not read it.
        """
        held = self.location.held(self)
        require_reader(held.rule, worker.name, self.location, self._shape)
        if not isinstance(held.value, Tensor):
            self.refuse("move of one share")
        return worker.keep(held.value.detach().clone(), Rule(held.rule.readers))

    def backward(self) -> None:  # type: ignore[override]
        """See `Worker.backward`."""
        self.location.backward(self)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Let gradients flow here."""
        self.location.held(self).value.requires_grad_(requires_grad)
        return self

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether gradients flow here."""
        return bool(self.location.held(self).value.requires_grad)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Of the elements."""
        found: torch.dtype = self.location.held(self).value.dtype
        return found

    @property  # type: ignore[override]
    def grad(self) -> PointerTensor | None:
        """A pointer to the gradient."""
        held = self.location.held(self)
        if held.value.grad is None:
            return None
        return self.location.keep(held.value.grad, held.grad_rule)

    @grad.setter
    def grad(self, value: PointerTensor | None) -> None:
        held = self.location.held(self)
        held.value.grad = None if value is None else self.location.held(value).value
        held.grad_rule = Rule() if value is None else self.location.held(value).rule

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"<pointer to {axes(self._shape)} at {self.location.name}, number {self.number}>"

    def __del__(self) -> None:
        location = getattr(self, "location", None)
        if location is not None:
            location.forget(self.number)


_DEEP = (Tensor, list, tuple)


def _pointer_in(values: Iterable[Any]) -> PointerTensor:
    for value in values:
        if isinstance(value, PointerTensor):
            return value
        if isinstance(value, list | tuple):
            return _pointer_in(value)
    raise AssertionError("torch found a pointer among the operands")


def require_reader(rule: Rule, requester: str, owner: Worker, shape: torch.Size) -> None:
    """Refuse a tensor to somebody its rule does not name.

    Raises:
        ConsentError: the rule does not.
    """
    if rule.readers is not None and requester not in rule.readers:
        raise ConsentError(
            f"{owner.name} does not let {requester} have this tensor",
            where=f"a tensor {axes(shape)} at {owner.name}",
            want="a reader that its owner allows",
            fix=f"the owner may call {owner.name}.allow(tensor, {requester!r})",
        )


def virtual(*names: str) -> list[Worker]:
    """Workers of this process, by name.

    >>> alice, bob = virtual("alice", "bob")
    >>> alice
    <worker alice: 0 tensors>
    """
    require("names", len(names), "different names", len(set(names)) == len(names) > 0)
    return [Worker(name) for name in names]


def send(tensor: Any, worker: Worker) -> Any:
    """A tensor at a worker, or a module whose parameters are there from now on."""
    if isinstance(tensor, torch.nn.Module):
        return on_parameters(tensor, lambda each: send(each, worker))
    if isinstance(tensor, ChainTensor):
        raise UserError(
            "this tensor is not here", got=repr(tensor), want="a torch tensor", fix="move() it"
        )
    return worker.load(tensor, None)


def on_parameters(module: torch.nn.Module, change: Callable[[Any], Any]) -> torch.nn.Module:
    """Put something else in the place of every parameter and buffer; the module itself."""
    for each in module.modules():
        for kept in (each._parameters, each._buffers):
            for name, value in kept.items():
                if value is not None:
                    kept[name] = change(value)
    return module


def get(module: torch.nn.Module) -> torch.nn.Module:
    """A module with its parameters here again."""

    def here(value: Any) -> Any:
        got: Tensor = value.get() if isinstance(value, ChainTensor) else value  # type: ignore[attr-defined]
        got = got.float_precision() if isinstance(got, ChainTensor) else got  # type: ignore[attr-defined]
        return torch.nn.Parameter(got.detach()) if value.requires_grad else got

    return on_parameters(module, here)
