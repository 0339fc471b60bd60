"""Workers that store tensors, and functions that send tensors to workers.

A worker stores its tensors under numbers, and runs the operations of `vfl.tensors.base.OPERATIONS`
on them. Only readers that may read every operand of an operation may read its result. A worker
deletes a tensor when the leader has deleted the pointer to it, unless the owner gave the tensor a
name. A request to a worker is a call
of a method that the decorator `asked` marks; its arguments are plain data.

A virtual worker is in this process: it protects no secret from this process, but behaves like a
worker that does. `vfl.tensors.remote` defines workers of other processes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vfl.core.errors import (
    ConsentError,
    LostPeerError,
    UnknownNameError,
    UserError,
    nearest,
)
from vfl.core.registry import require
from vfl.core.seeds import Secret
from vfl.mpc.numbers import FIELD
from vfl.mpc.shares import SharedTensor
from vfl.privacy import PrivacyStatement
from vfl.privacy.statement import added
from vfl.tensors.base import IN_PLACE, OPERATIONS, VIEWS, ChainTensor, axes
from vfl.tensors.foreseen import UNFIT, Form, foreseen, lost
from vfl.tensors.keys import WorkerKeys, seal
from vfl.tensors.pointers import (
    ME,
    Handle,
    Held,
    Mask,
    Masked,
    MaskShare,
    PointerTensor,
    Ref,
    Rule,
    Votes,
    require_at,
    require_reader,
)
from vfl.tensors.private import Budget, Teacher, promise_of, sanitised_gradients, tally
from vfl.tensors.requests import (
    Bits,
    Contents,
    Count,
    Flag,
    Holders,
    Keys,
    NamedOperands,
    NoisyStep,
    Number,
    Numbers,
    Operands,
    Parcel,
    Peers,
    Readers,
    Role,
    Sigma,
    Text,
    Threshold,
    Values,
    asked,
    require_parameters,
)
from vfl.tensors.shares import begin_session, elements_of, perform, sealed_shares
from vfl.tensors.wire import packed, unpacked

if TYPE_CHECKING:
    from vfl.tensors.budgets import BudgetLedger

_DEEP = (Tensor, list, tuple, Ref)


class Worker:
    """A worker that runs in the leader's process, or the core of a worker process.

    Args:
        name: the worker's name in error messages and rules of readers.
        keys: the worker's keys, and the fingerprints of other workers' keys that it knows; with
            None, the worker makes new keys and knows no fingerprint.
        ledger: ledger on disk of the spent privacy budgets; without it, the record of spending ends
            with this process.

    Attributes:
        keys: keys with which other workers encrypt messages for this worker.
        budgets: privacy budgets that the worker's owner granted for trainings with noise, by number
            of the tensor.
        members: the worker's engine in each computation on shares, by name of the computation's
            session.
        plans: networks that are trained with noise at this worker, by identifier of the training.
        teachers: teacher networks that vote, by name of the network.
        join: function by which a worker process joins a computation on shares with other worker
            processes; None if the worker runs in the leader's process.
    """

    remote = False

    def __init__(
        self, name: str, keys: WorkerKeys | None = None, ledger: BudgetLedger | None = None
    ) -> None:
        self.name, self.keys, self._ledger = name, keys or WorkerKeys(name), ledger
        self.sessions: dict[Any, Any] = {}
        self.members: dict[str, Any] = {}
        self.budgets: dict[int, Any] = {}
        self._granted: list[Any] = []
        self.plans: dict[str, Any] = {}
        self.teachers: dict[str, Any] = {}
        self._counted: set[bytes] = set()
        self._handed_out: set[int] = set()
        self._held: dict[int, Held] = {}
        self._tags: dict[str, int] = {}
        self._numbers = count(1)
        self._stopped = False
        self.join: Callable[..., None] | None = None

    def __repr__(self) -> str:
        state = ", stopped" if self._stopped else ""
        return f"<worker {self.name}: {len(self)} tensors{state}>"

    def __len__(self) -> int:
        return len(self._held) + sum(len(each) for each in self.sessions.values())

    # Methods for the worker's owner.

    def load(
        self, tensor: Tensor, readers: Iterable[str] | None = (), tag: str = ""
    ) -> PointerTensor:
        """Store a tensor that only `readers` may read; by default, no requester may read it.

        Args:
            tensor: tensor to copy and store.
            readers: names of the parties that may read the tensor; None means everyone.
            tag: name under which `find` returns the tensor, also in other processes; a tensor with
                a name stays until the worker ends.
        """
        rule = Rule.of(readers)
        pointer = self.keep(tensor.detach().clone().requires_grad_(tensor.requires_grad), rule)
        if tag:
            self._tags[tag] = pointer.number
        return pointer

    def allow(self, tensor: Any, reader: str = ME) -> None:
        """Allow a reader to read a tensor, or to read this worker's share of a tensor."""
        for pointer in tensor.pointers():
            if pointer.location is self:
                held = self.held(pointer)
                for rule in (held.rule, held.grad_rule):
                    if rule.readers is not None:
                        rule.readers |= {reader}

    def grant(self, tag: str, *, epsilon: float, delta: float = 1e-5) -> None:
        """Allow trainings to compute noisy gradients from a tensor that was loaded under a name.

        Args:
            tag: name of a tensor of rows or of labels; a training needs a grant for both tensors.
            epsilon: epsilon that all trainings together may spend; it includes spending that the
                ledger recorded earlier.
            delta: delta that belongs to this epsilon.
        """
        number, _ = self.find(tag)
        budget = Budget(epsilon, delta, version=self._tensor(number)._version)
        if self._ledger is not None:
            budget.spent = self._ledger.spent(tag)
            budget.keep = partial(self._ledger.keep, tag)
        self.budgets[number] = budget
        self._granted.append(budget)

    def teach(
        self,
        tag: str,
        network: torch.nn.Module,
        aggregator: str,
        *,
        epsilon: float,
        delta: float = 1e-5,
    ) -> None:
        """Let a teacher network vote for the classes of public rows; see `private.pate`.

        Args:
            tag: name by which requests name the network.
            network: network that the worker's owner trained on its own rows.
            aggregator: name of the worker that may count the votes.
            epsilon: epsilon that all votes together may spend.
            delta: delta that belongs to this epsilon.
        """
        budget = Budget(epsilon, delta)
        self.teachers[tag] = Teacher(network, aggregator, budget)
        self._granted.append(budget)

    def granted(self) -> PrivacyStatement:
        """Return the privacy guarantee of one record over all tables, under all grants so far.

        The guarantee counts tables, teachers and repeated grants separately, so it adds their
        epsilons and deltas.

        Raises:
            PrivacyError: the owner has granted no budget.
        """
        return added(map(promise_of, self._granted))

    def stop(self) -> None:
        """Stop the worker and delete all its tensors; later requests raise LostPeerError."""
        if not self._stopped:
            for budget in self.budgets.values():
                budget.settle()
        self._stopped = True
        self._held.clear()
        self.members.clear()

    # Requests.

    @asked
    def store(self, value: Values, readers: Readers = None) -> Handle:
        """Store a tensor that a requester sent."""
        rule = Rule.of(readers)
        kept = value.detach().clone().requires_grad_(value.requires_grad)
        return self._kept(kept, rule)

    @asked
    def find(self, tag: Text) -> Handle:
        """Return the tensor that the worker's owner loaded under a name.

        Raises:
            UnknownNameError: no tensor has this name.
        """
        if tag not in self._tags:
            raise UnknownNameError(
                "no tensor has this name",
                where=self.name,
                want=", ".join(self._tags) or "a name that the owner gave",
                fix=nearest(tag, self._tags) or "its owner loads it: load(tensor, tag=...)",
            )
        number = self._tags[tag]
        return number, self._of(number).value.shape

    @asked
    def run(self, name: Text, args: Operands, kwargs: NamedOperands) -> Handle:
        """Run an operation of torch on tensors at this worker.

        Raises:
            UserError: the operation is not allowed, or an operand belongs to another worker.
        """
        call = OPERATIONS.get(name)
        if call is None:
            PointerTensor.refuse(name)
        # Refuse to write a result into the memory of another tensor, because the readers of that
        # tensor could then read the result.
        if kwargs and ("out" in kwargs or kwargs.get("inplace")):
            PointerTensor.refuse(f"{name} into another tensor, or in place")
        if name.endswith("batch_norm") and (kwargs.get("training") or any(args[5:6])):
            PointerTensor.refuse(f"{name} in training, which writes into its running mean")
        if name in IN_PLACE and not isinstance(args[0], PointerTensor | Ref):
            PointerTensor.refuse(f"{name} on a tensor that is not at the worker")
        used: list[Held] = []
        real = [self._real(each, used) if isinstance(each, _DEEP) else each for each in args]
        named = {key: self._real(value, used) for key, value in kwargs.items()} if kwargs else {}
        hidden = {id(each.value) for each in used if each.rule.hides}
        result = self._called(name, call, real, named, used, hidden)
        if name in IN_PLACE:
            for other in used[1:]:
                used[0].rule.narrow(other.rule)
            return args[0].number, used[0].value.shape
        if not isinstance(result, Tensor):
            PointerTensor.refuse(f"{name} with several results")
        rule = used[0].rule if name in VIEWS else Rule()
        for each in used:
            # If torch returns a stored tensor itself as the result, return a view of it under the
            # same rule of readers.
            if each.value is result:
                rule, result = each.rule, result.view_as(result)
        if hidden:
            for each in used:
                rule.narrow(each.rule)
        return self._kept(result, rule)

    def _called(
        self,
        name: str,
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        used: Sequence[Held],
        hidden: Collection[int],
    ) -> Any:
        """Compute the result of an operation.

        The result's shape and errors may depend on values of public operands only.

        Raises:
            UserError: torch cannot compute this operation.
        """
        form: Form | None = None
        try:
            if hidden:
                form = foreseen(call, args, kwargs, hidden)
            result = call(*args, **kwargs)
        except UNFIT:  # the text of torch's own error may contain values
            if form is None:
                raise UserError(
                    "torch cannot compute this operation on these operands",
                    where=f"{name} at {self.name}",
                    got=", ".join(axes(each.value.shape) for each in used),
                    want="operands that fit each other, and a result whose axes depend on no"
                    " secret value",
                    fix="compare the shapes and types of the operands",
                ) from None
            result = None
        if form is not None and (result is None or tuple(result.shape) != form.shape):
            result = lost(form, [each.value for each in used])
            if name in IN_PLACE:
                used[0].value.detach().copy_(result.detach())
        return result

    @asked
    def read(self, number: Number, requester: Text = ME) -> Tensor:
        """Return a tensor, or this worker's share of a tensor, to a requester that may read it.

        Raises:
            ConsentError: the tensor's rule of readers excludes this requester.
        """
        held = self._of(number)
        require_reader(held.rule, requester, self.name, held.value.shape)
        if isinstance(held.value, SharedTensor):
            return held.value.share
        if isinstance(held.value, MaskShare):
            return held.value.shared.share
        if isinstance(held.value, Mask):
            return held.value.elements
        value = self._tensor(number)
        return value.detach().clone().requires_grad_(value.requires_grad)

    @asked
    def note(self, number: Number) -> tuple[torch.dtype, bool]:
        """Return a tensor's element type, and whether operations on it record gradients."""
        value = self._tensor(number)
        return value.dtype, value.requires_grad

    @asked
    def require_grad(self, number: Number, wanted: Flag) -> None:
        """Set whether operations on a tensor record gradients."""
        self._tensor(number).requires_grad_(wanted)

    @asked
    def gradient(self, number: Number) -> Handle | None:
        """Return a handle of the gradient of a tensor, or None."""
        value = self._tensor(number)
        grad = value.grad if value.is_leaf else None
        return None if grad is None else self._kept(grad, self._of(number).grad_rule)

    @asked
    def set_gradient(self, number: Number, other: Number | None) -> None:
        """Set a tensor's gradient to a copy of another tensor, or remove the gradient."""
        held = self._of(number)
        # The gradient is a copy, because later gradients are added to it, and the readers of the
        # other tensor must not read these.
        held.value.grad = None if other is None else self._tensor(other).detach().clone()
        held.grad_rule = Rule(None if other is None else self._of(other).rule.readers)

    @asked
    def backward(self, number: Number) -> None:
        """Compute a scalar's gradients with respect to all tensors on which it depends.

        The scalar's rule of readers then also applies to the gradients.
        """
        loss = self._of(number)
        # Only tensors that still exist get gradients, because no rule of readers would protect the
        # gradient of a deleted tensor.
        leaves = [
            each
            for each in self._held.values()
            if isinstance(each.value, Tensor) and each.value.requires_grad and each.value.is_leaf
        ]
        # Restrict the rules of readers first: if torch fails midway, some tensors already have
        # their gradients.
        for each in leaves:
            each.grad_rule.narrow(loss.rule)
        try:
            torch.autograd.backward(self._tensor(number), inputs=[each.value for each in leaves])
        except RuntimeError:
            raise UserError(
                "torch cannot compute gradients of this tensor",
                where=self.name,
                got=axes(loss.value.shape),
                want="a scalar that depends on tensors with requires_grad",
                fix="call requires_grad_() on the trained tensors, and backward() on a sum or mean",
            ) from None

    @asked
    def forget(self, numbers: Numbers) -> None:
        """Delete tensors to which no pointer refers any more."""
        for number in numbers:
            if number not in self._tags.values():
                self._held.pop(number, None)

    # Tensors that this worker sends to another worker, encrypted so that the leader cannot read
    # them.

    @asked
    def age(self, known: Count) -> int:
        """Return the counter of the worker's store, which only increases.

        Without a store, the counter is 0. See `vfl.session.store.witness`.

        Raises:
            RolledBackError: the leader knows a larger counter, so the store was restored from an
                old copy.
        """
        if self._ledger is None:
            return 0
        self._ledger.witness.require(known, "whoever leads")
        return self._ledger.witness.announce()

    @asked
    def count(self) -> int:
        """Return the number of tensors that this worker stores."""
        return len(self)

    @asked
    def public_key(self) -> bytes:
        """Return the public key with which other workers encrypt messages for this worker.

        See `WorkerKeys.public`.
        """
        return self.keys.public

    @asked
    def pack(self, number: Number, reader: Text, key: Parcel) -> bytes:
        """Encrypt a tensor and its rule of readers for another worker.

        Args:
            number: number of the tensor.
            reader: name of the other worker; the tensor's rule of readers must include it.
            key: the other worker's public key.

        Raises:
            ConsentError: the owner does not allow the other worker to read the tensor.
            AuthenticationError: the key does not belong to the other worker.
        """
        held = self._of(number)
        require_reader(held.rule, reader, self.name, held.value.shape)
        self.keys.require_of(reader, key)
        content: dict[str, Any] = {"readers": held.rule.names}
        if isinstance(held.value, Mask):
            # Two values hidden by the same mask would disclose their difference.
            if number in self._handed_out:
                raise ConsentError("a mask can be sent only once", where=self.name)
            self._handed_out.add(number)
            content |= {"value": held.value.elements, "mask": list(held.value.tokens)}
        elif isinstance(held.value, Votes):
            content |= {"value": held.value.ones, "votes": [held.value.sigma, held.value.name]}
        else:
            content["value"] = self._tensor(number).detach()
        return seal(key, packed(content))

    @asked
    def accept(self, parcel: Parcel) -> Handle:
        """Store a tensor that another worker encrypted for this worker.

        Each encrypted message can be opened only once.

        Raises:
            AuthenticationError: the message is for another worker, was changed, or was opened
                before.
        """
        content = Contents.model_validate(unpacked(self.keys.unseal(parcel)))
        rule = Rule.of(content.readers)
        value: Any = content.value
        if content.share:
            value = SharedTensor(value, 0)
        elif content.mask is not None:
            value, rule = Mask(value, content.mask), Rule(frozenset())
        elif content.token is not None:
            value = Masked(value, content.token, content.readers)
            rule = Rule(frozenset())
        elif content.votes is not None:
            value = Votes(value, *content.votes)
        return self._kept(value, rule)

    # Computations on shares; see `vfl.tensors.shares`.

    @asked
    def split(self, number: Number, bits: Bits, keys: Keys) -> list[bytes]:
        """Split elements into new shares, and encrypt each share for its holder.

        Each message also contains the rule of readers.
        """
        self.keys.require_known(keys)
        held = self._of(number)
        elements = elements_of(self._tensor(number), bits, hidden=held.rule.hides)
        return sealed_shares(elements, held.rule, keys)

    @asked
    def masked(self, number: Number, mask: Number, bits: Bits, keys: Keys) -> list[bytes]:
        """Return a tensor minus a dealer's mask, with its rule of readers.

        The result is encrypted for each holder. Each mask can be used only once.

        Args:
            number: number of the tensor.
            mask: number of the mask.
            bits: fraction bits.
            keys: public keys of the holders.

        Returns:
            Encrypted messages, one for each holder.
        """
        self.keys.require_known(keys)
        held, pad = self._of(number), self._held.pop(mask, None)
        if pad is None or not isinstance(pad.value, Mask):
            raise UserError("this is not the mask of a dealer", where=self.name)
        elements = elements_of(self._tensor(number), bits, hidden=held.rule.hides)
        hidden = FIELD.lower(FIELD.sub(FIELD.lift(elements), pad.value.elements))
        return [
            seal(key, packed({"value": hidden, "readers": held.rule.names, "token": token}))
            for key, token in zip(keys, pad.value.tokens, strict=True)
        ]

    @asked
    def sit(self, session: Text, role: Role, holders: Holders, mac: Flag, peers: Peers) -> None:
        """Join a computation on shares; only workers in processes of their own can do so."""
        if self.join is None:
            raise UserError(
                "a worker of this process cannot join workers of other processes", where=self.name
            )
        everybody = holders + 1
        require("peers", len(peers), f"{everybody} workers", len(peers) == everybody > role)
        self.join(session, role, holders, mac, peers)

    def begin_session(self, holders: Sequence[Any], dealer: Any, mac: bool) -> Any:
        """Begin a computation whose workers all run in this process."""
        return begin_session(holders, dealer, mac)

    @asked
    def perform(self, session: Text, kind: Text, numbers: Numbers, parameters: Operands) -> Handle:
        """Compute this worker's part of one step of a computation on shares."""
        require_parameters(kind, parameters, f"perform at {self.name}")
        member = self.members.get(session)
        if member is None:
            self.require_alive()
            raise UserError("no such computation", where=self.name, fix="share the tensors again")
        held = [self._of(number) for number in numbers]
        found = perform(member, kind, [each.value for each in held], parameters)
        for each, operand in zip(held, found.operands, strict=False):
            each.value = operand
        rule = Rule.of(found.readers)
        if not found.final:
            for each in held:
                rule.narrow(each.rule)
        return self._kept(found.value, rule)

    # Learning with noise; see `vfl.tensors.private`.

    @asked
    def private_step(self, request: NoisyStep) -> list[Tensor]:
        """Return noisy gradients of rows at this worker; the gradient of each row is clipped."""
        return sanitised_gradients(self, dict(request))

    @asked
    def vote(self, tag: Text, rows: Values, sigma: Sigma) -> Handle:
        """Return a teacher network's votes for rows.

        Only an aggregator that adds noise may count the votes.

        Raises:
            ConsentError: the privacy budget of the owner does not allow these votes.
        """
        if tag not in self.teachers:
            raise UnknownNameError(
                "no voting network has this name",
                where=self.name,
                want=", ".join(self.teachers) or "a name that its owner gave",
                fix=nearest(tag, self.teachers)
                or "its owner calls teach(tag, network, aggregator, epsilon=1.0)",
            )
        teacher = self.teachers[tag]
        try:
            votes = teacher.vote(rows, sigma, self.name)
        # The text of torch's own error may contain values.
        except (RuntimeError, IndexError, TypeError):
            raise UserError(
                "the network does not accept these rows", where=self.name, got=axes(rows.shape)
            ) from None
        return self._kept(votes, Rule(frozenset({teacher.aggregator})))

    @asked
    def tally(self, numbers: Numbers, threshold: Threshold) -> Tensor:
        """Label rows with noise, by teachers' votes at this worker; see `private.tally`.

        Raises:
            ConsentError: a teacher allows only another aggregator, or its votes were counted
                before.
        """
        held = [self._of(number) for number in numbers]
        votes = [each.value for each in held]
        if len({each.shape for each in votes}) != 1 or not all(
            isinstance(each, Votes) for each in votes
        ):
            raise UserError("the teachers' votes are about different rows", where=self.name)
        for each in held:
            require_reader(each.rule, self.name, self.name, each.value.shape)
        names = {each.name for each in votes}
        if len(names) < len(votes) or names & self._counted:
            raise ConsentError(
                "votes can be counted only once", where=self.name, fix="let the teachers vote again"
            )
        self._counted |= names
        return tally(votes, threshold, Secret.fresh())

    # Internal methods.

    def keep(self, value: Any, rule: Rule) -> PointerTensor:
        """Store a value under a new number; return a pointer to it."""
        return PointerTensor(self, *self._kept(value, rule))

    def held(self, pointer: PointerTensor) -> Held:
        """Return the worker's record to which a pointer refers.

        Raises:
            LostPeerError: the worker has stopped.
            UserError: the worker has no such tensor.
        """
        return self._of(pointer.number)

    def held_at(self, number: int) -> Held:
        """Return the record of the tensor with a number."""
        return self._of(number)

    def require_alive(self) -> None:
        """Raise an error if the worker has stopped.

        Raises:
            LostPeerError: the worker has stopped.
        """
        if self._stopped:
            raise LostPeerError(
                f"{self.name} has stopped", fix="start a new worker and send its tensors again"
            )

    def _kept(self, value: Any, rule: Rule) -> Handle:
        if self._stopped:
            self.require_alive()
        number = next(self._numbers)
        self._held[number] = Held(value, rule)
        return number, value.shape

    def _of(self, number: int) -> Held:
        found = self._held.get(number)
        if found is None:
            self.require_alive()
            raise UserError("no such tensor", where=self.name, fix="send it again")
        return found

    def _tensor(self, number: int) -> Tensor:
        value = self._of(number).value
        if not isinstance(value, Tensor):
            PointerTensor.refuse("an operation on a single share")
        return value

    def _real(self, value: Any, used: list[Held]) -> Any:
        if isinstance(value, PointerTensor):
            require_at(value, self)
        if isinstance(value, PointerTensor | Ref):
            held = self._of(value.number)
            if not isinstance(held.value, Tensor):
                PointerTensor.refuse("an operation on a single share")
            used.append(held)
            return held.value
        if isinstance(value, ChainTensor) or (isinstance(value, Tensor) and value.dim()):
            raise UserError(
                "an operand is not at the worker",
                where=self.name,
                got="a local or shared tensor",
                fix=f"send it first: vfl.tensors.send(tensor, {self.name})",
            )
        if isinstance(value, list | tuple):
            return type(value)(self._real(each, used) for each in value)
        return value


def virtual(*names: str) -> list[Worker]:
    """Make workers in this process, one for each name.

    >>> alice, bob = virtual("alice", "bob")
    >>> alice
    <worker alice: 0 tensors>
    """
    require("names", len(names), "different names", len(set(names)) == len(names) > 0)
    return [Worker(name) for name in names]


def find(worker: Any, tag: str) -> PointerTensor:
    """Return a pointer to the tensor that a worker's owner loaded under a name."""
    return PointerTensor(worker, *worker.find(tag))


def send(tensor: Any, worker: Any) -> Any:
    """Send a tensor to a worker; for a module, send its parameters and buffers.

    In a module, pointers replace the parameters and buffers.
    """
    if isinstance(tensor, torch.nn.Module):
        return on_parameters(tensor, lambda each: send(each, worker))
    if isinstance(tensor, ChainTensor):
        raise UserError(
            "this tensor is not in this process",
            got=repr(tensor),
            want="a torch tensor",
            fix="move() it",
        )
    return PointerTensor(worker, *worker.store(tensor))


def on_parameters(module: torch.nn.Module, change: Callable[[Any], Any]) -> torch.nn.Module:
    """Replace every parameter and buffer by the result of `change`; return the same module."""
    for each in module.modules():
        for kept in (each._parameters, each._buffers):
            for name, value in kept.items():
                if value is not None:
                    kept[name] = change(value)
    return module


def get(module: torch.nn.Module) -> torch.nn.Module:
    """Bring a module's parameters and buffers from workers to this process; return the module."""

    def here(value: Any) -> Any:
        got: Tensor = value.get() if isinstance(value, ChainTensor) else value  # type: ignore[attr-defined]
        got = got.float_precision() if isinstance(got, ChainTensor) else got  # type: ignore[attr-defined]
        return torch.nn.Parameter(got.detach()) if value.requires_grad else got

    return on_parameters(module, here)
