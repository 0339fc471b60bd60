"""What is below a fixed-precision tensor: ring elements here, or additive shares at workers.

Both do what a ring of integers does. The protocols of the shares are those of
`vfl.mpc.many_parties`: products with a dealer's triples, exact divisions, signs. Holders and the
dealer are workers of this process; each has its own share, and whoever leads sees none of them.
"""

from __future__ import annotations

import secrets
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vfl.core.errors import UserError
from vfl.core.registry import require, require_range
from vfl.mpc.many_parties import MOST_HOLDERS, LocalMembers, Member
from vfl.mpc.ring import Operation, matmul
from vfl.mpc.shares import SharedTensor, blank
from vfl.mpc.stream import KEY_BYTES, PadStream
from vfl.tensors.base import Link, axes
from vfl.tensors.workers import ME, PointerTensor, Rule, Worker, require_reader

#: A linear map of ring elements, the same at every holder; and a part of a protocol.
Linear = Callable[..., Tensor]


class Ring(Link, ABC):
    """Integers modulo 2^64."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Their axes."""

    @abstractmethod
    def linear(self, linear: Linear, *others: Any) -> Any:
        """A linear map of these and others of the same kind; no message."""

    @abstractmethod
    def plus(self, public: Tensor) -> Any:
        """The sum with public elements; no message."""

    @abstractmethod
    def product(self, other: Any, operation: Operation) -> Any:
        """A bilinear map of these and others of the same kind."""

    @abstractmethod
    def divide(self, shift: int) -> Any:
        """Divided by 2^shift, to one unit."""

    @abstractmethod
    def negative(self) -> Any:
        """1 where an element is below 0, else 0."""

    @abstractmethod
    def transposed(self) -> Any:
        """Rows and columns exchanged."""

    @abstractmethod
    def reveal(self, requester: str) -> Tensor:
        """The elements."""


class Here(Ring):
    """Elements in this process, which is the only one to have them."""

    def __init__(self, elements: Tensor) -> None:
        self.elements = elements

    def __repr__(self) -> str:
        return "<ring elements here>"

    @property
    def shape(self) -> torch.Size:
        """See `Ring`."""
        return self.elements.shape

    def linear(self, linear: Linear, *others: Here) -> Here:
        """See `Ring`."""
        return Here(linear(self.elements, *(each.elements for each in others)))

    def plus(self, public: Tensor) -> Here:
        """See `Ring`."""
        return Here(self.elements + public)

    def product(self, other: Here, operation: Operation) -> Here:
        """See `Ring`."""
        return Here(operation(self.elements, other.elements))

    def divide(self, shift: int) -> Here:
        """See `Ring`."""
        return Here(self.elements >> shift)

    def negative(self) -> Here:
        """See `Ring`."""
        return Here((self.elements < 0).long())

    def transposed(self) -> Here:
        """See `Ring`."""
        return Here(self.elements.t())

    def reveal(self, requester: str) -> Tensor:
        """See `Ring`."""
        return self.elements


class Session:
    """Holders and a dealer that compute together; one for the same workers.

    Args:
        holders: 2 to 8 workers.
        dealer: another worker, that sees no value.
    """

    def __init__(self, holders: Sequence[Worker], dealer: Worker) -> None:
        self.workers = (*holders, dealer)
        self.parties = LocalMembers(len(holders))
        weakref.finalize(self, self.parties.close)

    @classmethod
    def of(cls, holders: Sequence[Worker], dealer: Worker) -> Session:
        """The session of these workers.

        Raises:
            BadOptionError: they are too few, too many, or one is there twice.
        """
        require_range("holders", len(holders), 2, MOST_HOLDERS)
        everybody = (*holders, dealer)
        names = [worker.name for worker in everybody]
        require(
            "dealer", ", ".join(names), "different workers", len(set(everybody)) == len(everybody)
        )
        for worker in everybody:
            worker.require_alive()
        known = holders[0].sessions
        key = tuple(map(id, everybody))
        if key not in known:
            known[key] = cls(holders, dealer)
        session: Session = known[key]
        return session

    def split(self, elements: Tensor, rule: Rule) -> Shares:
        """Elements that one process has as fresh additive shares at the holders."""
        stream = PadStream(secrets.token_bytes(KEY_BYTES))
        pads = [
            torch.from_numpy(stream.elements64(elements.numel(), "share", holder).view("i8"))
            for holder in range(len(self.workers) - 2)
        ]
        pads = [pad.reshape(elements.shape) for pad in pads]
        parts = [*pads, elements - sum(pads), blank(elements.shape)]
        return self.keep([SharedTensor(part, 0) for part in parts], [rule] * len(parts))

    def keep(self, parts: Sequence[SharedTensor], rules: Sequence[Rule]) -> Shares:
        """A part for every worker."""
        pointers = [
            worker.keep(part, Rule(rule.readers))
            for worker, part, rule in zip(self.workers, parts, rules, strict=True)
        ]
        return Shares(self, pointers)


class Shares(Ring):
    """A pointer to every holder's share, and to what the dealer keeps of its masks.

    Attributes:
        pointers: by holder, the dealer's last.
    """

    def __init__(self, session: Session, pointers: Sequence[PointerTensor]) -> None:
        self.session, self.pointers = session, pointers

    def __repr__(self) -> str:
        *holders, dealer = (worker.name for worker in self.session.workers)
        return f"<additive shares at {', '.join(holders)}; dealer {dealer}>"

    @property
    def shape(self) -> torch.Size:
        """See `Ring`."""
        return self.pointers[0].size()  # type: ignore[no-any-return]

    def linear(self, linear: Linear, *others: Shares) -> Shares:
        """See `Ring`."""

        def each(_: int, own: SharedTensor, *rest: SharedTensor) -> SharedTensor:
            return SharedTensor(linear(own.share, *(one.share for one in rest)), 0)

        return self._alone(each, *others)

    def plus(self, public: Tensor) -> Shares:
        """See `Ring`."""
        shape = (public + blank(self.shape)).shape

        def each(role: int, own: SharedTensor) -> SharedTensor:
            return SharedTensor(own.share.expand(shape) if role else own.share + public, 0)

        return self._alone(each)

    def product(self, other: Shares, operation: Operation) -> Shares:
        """See `Ring`; what was opened under a mask stays so for later products."""
        if operation is matmul:
            fits = len(self.shape) == len(other.shape) == 2 and self.shape[1] == other.shape[0]
        else:
            fits = _broadcast(self.shape, other.shape)
        if not fits:  # before any party has begun
            raise UserError(
                "two shared tensors cannot be multiplied",
                got=f"{axes(self.shape)} and {axes(other.shape)}",
                fix="compare their shapes",
            )
        operands = (self, other)

        def each(member: Member) -> SharedTensor:
            held = [ring.held(member.role) for ring in operands]
            held[0].value, held[1].value = member.open(held[0].value, held[1].value)
            return member.multiply(held[0].value, held[1].value, operation)

        return self._together(each, other)

    def divide(self, shift: int) -> Shares:
        """See `Ring`."""

        def each(member: Member) -> SharedTensor:
            return SharedTensor(member.divide(self.held(member.role).value, shift).share, 0)

        return self._together(each)

    def negative(self) -> Shares:
        """See `Ring`."""
        return self._together(lambda member: member.is_negative(self.held(member.role).value))

    def transposed(self) -> Shares:
        """See `Ring`; an opening stays one."""
        return self._alone(lambda _, own: own.transposed())

    def reveal(self, requester: str = ME) -> Tensor:
        """See `Ring`.

        Raises:
            ConsentError: a holder keeps its share from this reader.
        """
        total = torch.zeros(self.shape, dtype=torch.int64)
        for role, worker in enumerate(self.session.workers[:-1]):
            held = self.held(role)
            require_reader(held.rule, requester, worker, self.shape)
            total = total + held.value.share
        return total

    def held(self, role: int) -> Any:
        """What a worker keeps of it."""
        return self.session.workers[role].held(self.pointers[role])

    def _alone(self, each: Callable[..., SharedTensor], *others: Shares) -> Shares:
        rings, rules = (self, *others), self._rules(*others)
        found = [
            each(role, *(ring.held(role).value for ring in rings))
            for role in range(len(self.pointers))
        ]
        return self.session.keep(found, rules)

    def _together(self, each: Callable[[Member], SharedTensor], *others: Shares) -> Shares:
        """A protocol: the dealer's part first, for it awaits nothing."""
        rules = self._rules(*others)
        parties = self.session.parties
        try:
            dealt = each(parties.parties[-1])
        except BaseException:  # the holders would count other operations than the dealer
            parties.close()
            raise
        found = parties.run(each, range(len(self.pointers) - 1))
        return self.session.keep([*found, dealt], rules)

    def _rules(self, *others: Shares) -> list[Rule]:
        """At every worker: who may read what comes of these. A stopped worker says so here."""
        for other in others:
            self._require_session_of(other)
        rules = []
        for role in range(len(self.pointers)):
            rule = Rule()
            for ring in (self, *others):
                rule.narrow(ring.held(role).rule)
            rules.append(rule)
        return rules

    def _require_session_of(self, other: Shares) -> None:
        if other.session is not self.session:
            raise UserError(
                "two tensors are shared among different workers",
                got=f"{self!r} and {other!r}",
                fix="share both among the same holders, with one dealer",
            )


def _broadcast(one: torch.Size, other: torch.Size) -> bool:
    """Whether torch lets two shapes meet, element by element."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)
