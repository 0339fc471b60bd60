"""Representations of fixed-precision values: local ring elements, or shares at workers.

In both representations, values are integers of a ring or of a prime field. The protocols on shares
are those of `vfl.mpc.engine`, for many parties or with MACs: products with a dealer's Beaver
triples, exact divisions by powers of 2, and signs. Each holder has one share. The leader, which
sends the requests, has only shares of values that it shares itself or that it may read.

One step of a computation has a kind, operands and parameters, which are equal for all workers; each
worker executes the step by `perform`. If all workers are in this process and use no MACs, one
`Lockstep` object computes for all of them.
"""

from __future__ import annotations

import hmac
import secrets
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from vfl.core.errors import AuthenticationError, CheatingError, UserError
from vfl.core.registry import require, require_range
from vfl.mpc.engine import BeaverEngine, drawn
from vfl.mpc.in_process import LocalParties
from vfl.mpc.many.authenticated import AuthenticatedMember, fresh
from vfl.mpc.many.members import MOST_HOLDERS, BitEngine, Lockstep, Member
from vfl.mpc.numbers import FIELD, RING, reach
from vfl.mpc.numbers import Ring as Numbers
from vfl.mpc.ring import ELEMENT_BITS, Operation, encode, matmul
from vfl.mpc.shares import Opened, SharedTensor, blank
from vfl.mpc.stream import KEY_BYTES, PadStream
from vfl.tensors.base import Link, axes
from vfl.tensors.convolution import KINDS, Geometry, convolution
from vfl.tensors.keys import seal
from vfl.tensors.pointers import (
    ME,
    Mask,
    Masked,
    MaskShare,
    PointerTensor,
    Rule,
    require_reader,
)
from vfl.tensors.wire import packed


def bilinear(name: str, numbers: Sequence[int] = ()) -> Operation:
    """Return the bilinear map of a name; `numbers` describe the `Geometry` of a convolution."""
    if name in KINDS:
        return convolution(name, Geometry.of(numbers))
    return torch.mul if name == "mul" else matmul


# Linear maps. Each linear map accepts tensors with one more axis in front, for the holders or for a
# value and its MAC; this axis may also have length 1.


def _added(one: Tensor, two: Tensor) -> Tensor:
    return reach(one, two.dim() - 1) + reach(two, one.dim() - 1)


def _stacked(dim: int, *stacks: Tensor) -> Tensor:
    return torch.stack(stacks, dim + 1 if dim >= 0 else dim)


def _scatter_add(stack: Tensor, indices: Tensor, shape: Sequence[int]) -> Tensor:
    total = torch.zeros(stack.shape[0], torch.Size(shape).numel(), dtype=torch.int64)
    total.index_add_(1, indices.reshape(-1), stack.reshape(stack.shape[0], -1))
    return total.reshape(stack.shape[0], *shape)


def _summed_to(stack: Tensor, sizes: Sequence[int]) -> Tensor:
    kept = (stack.shape[0], *(1,) * (stack.dim() - 1 - len(sizes)), *sizes)
    return stack.sum_to_size(kept).reshape(stack.shape[0], *sizes)


def _summed(stack: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    return stack.sum([each + 1 for each in dims], keepdim=keepdim) if dims else stack


#: Linear maps that only move and add elements, by name. The arguments of each map are a stack of
#: shares, the map's parameters, and stacks of further operands.
LINEAR: Mapping[str, Callable[..., Tensor]] = {
    "add": _added,
    "reshape": lambda stack, sizes: stack.reshape(stack.shape[0], *sizes),
    "expand": lambda stack, sizes: reach(stack, len(sizes)).expand(stack.shape[0], *sizes),
    "sum_to": lambda stack, sizes: _summed_to(stack, sizes),
    "gather": lambda stack, indices: stack.reshape(stack.shape[0], -1)[:, indices],
    "spread": _scatter_add,
    "sum": _summed,
    "pad": lambda stack, around: torch.nn.functional.pad(stack, tuple(around)),
    "stack": lambda stack, dim, *others: _stacked(dim, stack, *others),
    "cat": lambda stack, dim, *others: torch.cat((stack, *others), dim + 1 if dim >= 0 else dim),
    "clone": torch.clone,
}


def mapped(
    numbers: Numbers, name: str, parameters: Sequence[Any], stacks: Sequence[Tensor]
) -> Tensor:
    """Apply the linear map of a name to stacks of shares."""
    first, *others = stacks
    if name == "scale":  # multiplies by a public number
        return numbers.mul(first, parameters[0])
    if name == "by":  # multiplies by a public tensor, from the right or the left
        elements, operation, from_left, *rest = parameters
        elements = numbers.lift(elements)
        if operation == "mul":
            return numbers.mul(reach(first, elements.dim()), elements)
        pair = (elements, first) if from_left else (first, elements)
        return numbers.product(bilinear(operation, *rest), *pair)
    linear = LINEAR[name]
    return numbers.additive(lambda one, *rest: linear(one, *parameters, *rest), first, *others)


@dataclass(frozen=True, slots=True)
class Found:
    """The result of one step of a computation at one worker.

    Attributes:
        value: the worker's share of the result, or the value if the step opened it.
        operands: the operands of a product; after the product, each operand also has its value that
            was opened under a mask.
        readers: names of the parties that may read the value; None means everyone.
        final: whether `readers` alone determines who may read the result; otherwise, the rules of
            the operands also apply.
    """

    value: Any
    operands: Sequence[Any] = ()
    readers: Sequence[str] | None = None
    final: bool = False


def perform(
    member: BeaverEngine, kind: str, operands: Sequence[Any], parameters: Sequence[Any]
) -> Found:
    """Compute one party's part of one step of a computation on shares.

    Args:
        member: engine of one holder or of the dealer, or of all parties together.
        kind: kind of the step: "linear", "plus", "product", "divide", "negative", "leading",
            "blank" or "transposed"; with MACs also "mask", "input" and "disclose".
        operands: the party's shares of the operands.
        parameters: parameters of this kind of step.
    """
    if kind == "input":
        return _input(member, *operands)
    operands = [_as_share(each) for each in operands]
    match kind:
        case "linear":
            name, *rest = parameters
            front = (slice(None),) if member.front else (None,)
            stacks = [each.share[front] for each in operands]
            found = mapped(member.numbers, name, rest, stacks)
            opened = _moved(operands[0], name, rest) if isinstance(member, Member) else None
            return Found(SharedTensor(found if member.front else found[0], 0, opened))
        case "plus":
            return Found(member.plus(operands[0], member.numbers.lift(parameters[0])))
        case "product":
            operation = bilinear(*parameters)
            return _product(member, operands, operation)
        case "divide" if isinstance(member, Member):
            divided = member.quotient(operands[0], parameters[0])
            return Found(SharedTensor(divided.share, 0, divided.opened))
        case "divide":
            return Found(SharedTensor(member.divide(operands[0], parameters[0]).share, 0))
        case "negative" if isinstance(member, BitEngine | AuthenticatedMember):
            return Found(member.is_negative(operands[0]))
        case "leading" if isinstance(member, BitEngine | AuthenticatedMember):
            return Found(member.leading(operands[0], range(parameters[0], parameters[1] + 1)))
        case "blank":
            return Found(SharedTensor(blank(parameters[0]), 0))
        case "transposed":
            return Found(operands[0].transposed())
        case "mask" if isinstance(member, AuthenticatedMember):
            return _mask(member, *parameters)
        case "disclose" if isinstance(member, AuthenticatedMember):
            return Found(member.opened(member.sum_of(*operands))[0])
    raise UserError("no worker knows this step", got=kind)


#: Linear maps of one tensor that only move its elements. If the tensor was opened under a mask
#: before, the opened value and the mask can be moved in the same way, so no new opening is needed.
_MOVES = frozenset({"reshape", "expand", "gather", "pad", "clone"})


def _moved(operand: SharedTensor, name: str, parameters: Sequence[Any]) -> Opened | None:
    if operand.opened is None or name not in _MOVES:
        return None
    return operand.opened.moved(lambda each: mapped(RING, name, parameters, [each[None]])[0])


def _as_share(operand: Any) -> Any:
    """Return a mask as a share.

    The dealer, which has the whole mask, gets a share without values.
    """
    if isinstance(operand, Mask):
        return SharedTensor(blank((2, *operand.shape)), 0)
    return operand.shared if isinstance(operand, MaskShare) else operand


def _mask(member: AuthenticatedMember, sizes: Sequence[int], reader: str | None) -> Found:
    """Share a random mask that one reader may read; if `reader` is None, everyone may read it.

    The purpose for which the mask's shares are drawn from the key streams contains the reader's
    name. If the leader names different readers to the dealer and to a holder, the shares therefore
    do not fit together.
    """
    name = "input" if reader is None else f"input of {reader}"
    (shared,), made = member.dealt(lambda: [fresh(sizes)], [sizes], name)
    number, readers = member.next_number(), None if reader is None else [reader]

    def token(peer: int) -> bytes:
        return member.pad(peer, (2,), f"token of {name}", number).numpy().tobytes()

    if member.deals:
        return Found(Mask(made[0], [token(each) for each in range(member.holders)]), (), readers)
    return Found(MaskShare(shared, token(member.dealer)), (), readers)


def _input(member: BeaverEngine, mask: Any, masked: Any) -> Found:
    """Turn a masked value into a share; the value's owner has chosen who may read it.

    The token proves that the sender of the masked value received the mask from the dealer. Without
    this check, the leader could send a value and a rule of readers of its own choice, and then read
    the mask.
    """
    assert isinstance(member, AuthenticatedMember), "only shares with MACs come from masks"
    if member.deals:
        return Found(member.plus(_as_share(mask), blank(masked.share.shape)))
    if not (isinstance(mask, MaskShare) and isinstance(masked, Masked)):
        raise UserError("the two arguments are not a mask and the values that it hides")
    if not hmac.compare_digest(mask.token, masked.token):
        raise AuthenticationError("another mask hides these values")
    shared = member.plus(mask.shared, FIELD.lift(masked.elements))
    return Found(shared, readers=masked.readers, final=True)


def _product(member: BeaverEngine, operands: Sequence[SharedTensor], operation: Operation) -> Found:
    """Multiply two shared tensors.

    If shares have a leading axis, the factors of an element-wise product first get equal numbers of
    axes.
    """
    one, two = operands
    most = max(one.share.dim(), two.share.dim())
    same = not member.front or operation is not torch.mul or one.share.dim() == two.share.dim()
    if not same:
        one, two = (SharedTensor(reach(each.share, most - 1), 0) for each in operands)
    if operation is torch.mul and (one.is_quotient or two.is_quotient):
        opened = [each if each.is_quotient else member.open(each)[0] for each in (one, two)]
        one, two = opened[0], opened[0] if one is two else opened[1]
    else:
        one, *rest = member.open(*([one] if one is two else [one, two]))
        two = rest[0] if rest else one
    found = SharedTensor(member.multiply(one, two, operation).share, 0)
    return Found(found, [one, two] if same else ())


def elements_of(
    values: Tensor, bits: int, precision: int | None = None, hidden: bool = False
) -> Tensor:
    """Encode real numbers as ring elements that are small enough for products of two of them.

    Args:
        values: any float or integer tensor.
        bits: fraction bits.
        precision: fraction bits of the other factor in such a product; by default `bits`.
        hidden: whether a value that does not fit is replaced by the nearest value that fits, and
            NaN by 0, without an error. Secret values need this replacement, because an error would
            disclose a value.

    Raises:
        RingRangeError, NonFiniteError: a value does not fit or is not finite; `hidden` is false.
    """
    room = ELEMENT_BITS - 2 - 2 * (bits if precision is None else precision)
    if hidden:
        require_range("bits", bits, 0, ELEMENT_BITS // 2 - 2)
        largest = 2.0**room * (1 - torch.finfo(torch.float64).eps)
        values = values.detach().double().nan_to_num().clamp(-largest, largest)
    return encode(values, bits, "a tensor", room, "scale the columns, or use fewer fraction bits")


def split(elements: Tensor, holders: int) -> list[Tensor]:
    """Split ring elements into new additive shares, one for each holder."""
    stream = PadStream(secrets.token_bytes(KEY_BYTES))
    pads = [drawn(stream, elements.shape, "share", holder) for holder in range(1, holders)]
    return [reduce(torch.sub, pads, elements), *pads]


def sealed_shares(elements: Tensor, rule: Rule, keys: Sequence[bytes]) -> list[bytes]:
    """Split ring elements into new shares, and encrypt each share and the rule for its holder."""
    return [
        seal(key, packed({"value": part, "readers": rule.names, "share": True}))
        for key, part in zip(keys, split(elements, len(keys)), strict=True)
    ]


class Ring(Link, ABC):
    """Integers modulo 2^64 or of a prime field, in a local or shared representation."""

    shape: torch.Size

    @abstractmethod
    def linear(self, name: str, *parameters: Any, others: Sequence[Any] = ()) -> Any:
        """Apply a linear map by name: a map in `LINEAR`, "scale" or "by".

        The map takes no message.
        """

    @abstractmethod
    def plus(self, public: Tensor) -> Any:
        """Return the sum with public elements; takes no message."""

    @abstractmethod
    def product(self, other: Any, operation: str, *numbers: Any) -> Any:
        """Apply the bilinear map of this name (see `bilinear`) to these elements and to `other`."""

    @abstractmethod
    def divide(self, shift: int) -> Any:
        """Divide by 2^shift, with an error of at most one unit."""

    @abstractmethod
    def negative(self) -> Any:
        """Return 1 for each element below 0, and 0 for all others."""

    @abstractmethod
    def leading(self, low: int, high: int) -> Any:
        """Return the position of each magnitude's leading one, from `low` to `high`, and the sign.

        The result has the axes (positions + 1, *axes of the elements). The entry at the position of
        the leading one is 1; the last entry is 1 for elements below 0.
        """

    @abstractmethod
    def transposed(self) -> Any:
        """Exchange the last two axes."""

    @abstractmethod
    def reveal(self, requester: str) -> Tensor:
        """Return the elements, opened for the requester."""


class Here(Ring):
    """Ring elements that are local: this process knows their values."""

    def __init__(self, elements: Tensor) -> None:
        self.elements, self.shape = elements, elements.shape

    def __repr__(self) -> str:
        return "<ring elements here>"

    def linear(self, name: str, *parameters: Any, others: Sequence[Here] = ()) -> Here:
        """See `Ring`."""
        stacks = [self.elements[None], *(each.elements[None] for each in others)]
        return Here(mapped(RING, name, parameters, stacks)[0])

    def plus(self, public: Tensor) -> Here:
        """See `Ring`."""
        return Here(self.elements + public)

    def product(self, other: Here, operation: str, *numbers: Any) -> Here:
        """See `Ring`."""
        return Here(RING.product(bilinear(operation, *numbers), self.elements, other.elements))

    def divide(self, shift: int) -> Here:
        """See `Ring`."""
        return Here(self.elements >> shift)

    def negative(self) -> Here:
        """See `Ring`."""
        return Here((self.elements < 0).long())

    def leading(self, low: int, high: int) -> Here:
        """See `Ring`."""
        magnitude = self.elements.abs()
        places = [(magnitude >> place) == 1 for place in range(low, high + 1)]
        return Here(torch.stack([*places, self.elements < 0]).long())

    def transposed(self) -> Here:
        """See `Ring`."""
        return Here(self.elements.mT)

    def reveal(self, requester: str) -> Tensor:
        """See `Ring`."""
        return self.elements


class Shares(Ring):
    """Ring elements that are shared: every holder has an additive share of each.

    Attributes:
        session: session of the workers that store the shares and compute on them.
        parts: references by which the session finds the shares of these elements.
    """

    def __init__(self, session: Session, parts: Any, shape: Sequence[int]) -> None:
        self.session, self.parts, self.shape = session, parts, torch.Size(shape)

    def __repr__(self) -> str:
        *holders, dealer = (
            getattr(worker, "name", f"P{worker}") for worker in self.session.workers
        )
        mac = " with MACs" if self.session.mac else ""
        return f"<additive shares{mac} at {', '.join(holders)}; dealer {dealer}>"

    @property
    def pointers(self) -> list[PointerTensor]:
        """Return pointers to every holder's share of the elements, and to the dealer's part."""
        return self.session.pointers(self)

    def linear(self, name: str, *parameters: Any, others: Sequence[Shares] = ()) -> Shares:
        """See `Ring`."""
        return self.session.do("linear", [self, *others], name, *parameters)

    def plus(self, public: Tensor) -> Shares:
        """See `Ring`."""
        return self.session.do("plus", [self], public)

    def product(self, other: Shares, operation: str, *numbers: Any) -> Shares:
        """See `Ring`; factors opened under masks are stored for later products."""
        if operation == "matmul":
            fits = len(self.shape) == len(other.shape) >= 2 and self.shape[-1] == other.shape[-2]
            fits = fits and self.shape[:-2] == other.shape[:-2]
        elif operation in KINDS:
            fits = True  # the geometry was made from these shapes
        else:
            fits = _broadcast(self.shape, other.shape)
        if not fits:  # refuse the shapes before any party begins to compute
            raise UserError(
                "two shared tensors cannot be multiplied",
                got=f"{axes(self.shape)} and {axes(other.shape)}",
                fix="compare their shapes",
            )
        return self.session.do("product", [self, other], operation, *numbers)

    def divide(self, shift: int) -> Shares:
        """See `Ring`."""
        return self.session.do("divide", [self], shift)

    def negative(self) -> Shares:
        """See `Ring`."""
        return self.session.do("negative", [self])

    def leading(self, low: int, high: int) -> Shares:
        """See `Ring`."""
        return self.session.do("leading", [self], low, high)

    def transposed(self) -> Shares:
        """See `Ring`; values that were opened under masks stay valid for the result."""
        if len(self.shape) < 2:
            raise UserError("only matrices can be transposed", got=axes(self.shape))
        return self.session.do("transposed", [self])

    def reveal(self, requester: str = ME) -> Tensor:
        """See `Ring`.

        Raises:
            ConsentError: a holder does not allow the requester to read the holder's share.
            CheatingError: a holder sent a false share.
        """
        return self.session.reveal(self, requester)


class Session(ABC):
    """Share holders and a dealer that compute together.

    The same workers use the same session until it ends.

    Args:
        holders: 2 to 8 workers that each hold one share.
        dealer: another worker, which deals the correlated randomness for products and receives no
            value.
        mac: whether shares have MACs (message authentication codes).
    """

    def __init__(self, holders: Sequence[Any], dealer: Any, mac: bool) -> None:
        self.workers, self.mac = (*holders, dealer), mac

    @staticmethod
    def of(holders: Sequence[Any], dealer: Any, mac: bool = False) -> Session:
        """Return the session of these workers; begin a session if there is none.

        Raises:
            BadOptionError: there are fewer than 2 or more than 8 holders, or a worker is named
                twice.
            UserError: some workers are in this process and others are not.
        """
        require_range("holders", len(holders), 2, MOST_HOLDERS)
        everybody = (*holders, dealer)
        names = [worker.name for worker in everybody]
        require(
            "dealer", ", ".join(names), "different workers", len(set(everybody)) == len(everybody)
        )
        for worker in everybody:
            worker.require_alive()
        if len({worker.remote for worker in everybody}) > 1:
            raise UserError(
                "workers of this process and of others cannot share one tensor",
                got=", ".join(names),
                fix="use workers that are all virtual, or all in other processes",
            )
        known = holders[0].sessions
        key = (*map(id, everybody), mac)
        if key not in known:
            session = holders[0].begin_session(holders, dealer, mac)
            for worker in everybody:
                worker.sessions[key] = session
        found: Session = known[key]
        return found

    def forgotten(self) -> None:
        """End the session; tensors that are shared later by the same workers use a new session."""
        for worker in self.workers:
            for key in [key for key, one in worker.sessions.items() if one is self]:
                del worker.sessions[key]

    def require_own(self, operands: Sequence[Shares]) -> None:
        """Refuse tensors that belong to the session of other workers."""
        for other in operands:
            if other.session is not self:
                raise UserError(
                    "two tensors are shared among different workers",
                    got=f"{operands[0]!r} and {other!r}",
                    fix="share both tensors among the same holders, with the same dealer",
                )

    @abstractmethod
    def split(self, elements: Tensor) -> Shares:
        """Split elements that this process knows into new shares."""

    @abstractmethod
    def split_at(self, pointer: PointerTensor, bits: int) -> Shares:
        """Split elements at a worker into shares, to which the elements' reader rule applies."""

    @abstractmethod
    def do(self, kind: str, operands: Sequence[Shares], *parameters: Any) -> Shares:
        """Run one step of the computation at all workers; see `perform`."""

    @abstractmethod
    def reveal(self, shares: Shares, requester: str) -> Tensor:
        """See `Ring.reveal`."""

    @abstractmethod
    def pointers(self, shares: Shares) -> list[PointerTensor]:
        """Return a pointer to each worker's part of the shares."""

    def __len__(self) -> int:
        """Return the number of tensors of each worker that are in this session.

        The number is 0 if the workers store the tensors themselves.
        """
        return 0


@dataclass(slots=True)
class Stack:
    """The shares of all holders in this process, and each worker's rule of readers.

    The dealer's rule is the last one.
    """

    value: SharedTensor
    rules: Sequence[Rule]
    session: LockstepSession

    def __del__(self) -> None:
        self.session.count -= 1


class LockstepSession(Session):
    """Session of workers that all run in this process.

    One `vfl.mpc.many.members.Lockstep` object computes for all of them.
    """

    def __init__(self, holders: Sequence[Any], dealer: Any, mac: bool = False) -> None:
        super().__init__(holders, dealer, mac)
        self._member = Lockstep(len(holders))
        self._open_rules = [Rule() for _ in self.workers]
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def split(self, elements: Tensor) -> Shares:
        """See `Session`."""
        return self._kept(SharedTensor(self._member.split(elements), 0), self._open_rules)

    def split_at(self, pointer: PointerTensor, bits: int) -> Shares:
        """See `Session`."""
        held = pointer.location.held(pointer)
        elements = elements_of(held.value, bits, hidden=held.rule.hides)
        rules = [Rule(held.rule.readers) for _ in self.workers]
        return self._kept(SharedTensor(self._member.split(elements), 0), rules)

    def do(self, kind: str, operands: Sequence[Shares], *parameters: Any) -> Shares:
        """See `Session`."""
        self.require_own(operands)
        rules = self._rules(operands)
        values = [each.parts.value for each in operands]
        if kind == "linear":  # linear steps are frequent, so they skip `perform`
            share = mapped(RING, parameters[0], parameters[1:], [each.share for each in values])
            return self._kept(SharedTensor(share, 0), rules)
        found = perform(self._member, kind, values, parameters)
        for each, value in zip(operands, found.operands, strict=False):
            each.parts.value = value
        return self._kept(found.value, rules)

    def reveal(self, shares: Shares, requester: str) -> Tensor:
        """See `Session`."""
        self._rules([shares])
        for worker, rule in zip(self.workers[:-1], shares.parts.rules, strict=False):
            require_reader(rule, requester, worker.name, shares.shape)
        total: Tensor = shares.parts.value.share.sum(0)
        return total

    def pointers(self, shares: Shares) -> list[PointerTensor]:
        """See `Session`; a pointer is made only when this method is called."""
        parts = [*shares.parts.value.share, blank(shares.shape)]
        return [
            worker.keep(SharedTensor(part, 0), rule)
            for worker, part, rule in zip(self.workers, parts, shares.parts.rules, strict=True)
        ]

    def _kept(self, value: SharedTensor, rules: Sequence[Rule]) -> Shares:
        self.count += 1
        return Shares(self, Stack(value, rules, self), value.share.shape[1:])

    def _rules(self, operands: Sequence[Shares]) -> Sequence[Rule]:
        """Return the rule of readers of a result at every worker.

        The method raises an error if a worker has stopped.
        """
        for worker in self.workers:
            worker.require_alive()
        owned = [each.parts.rules for each in operands if each.parts.rules is not self._open_rules]
        if not owned:
            return self._open_rules
        rules = [Rule() for _ in self.workers]
        for each in owned:
            for rule, other in zip(rules, each, strict=True):
                rule.narrow(other)
        return rules


class PartySession(Session):
    """Session of one party, if all parties run the same program, each party in its own process.

    There is no leader, so a step sends only the messages of its cryptographic protocol.

    Args:
        member: engine of this party. The last role is the dealer, whose tensors have a shape but no
            values.
    """

    def __init__(self, member: Member) -> None:
        super().__init__(range(member.holders), member.dealer, False)
        self.member = member

    def split(self, elements: Tensor) -> Shares:
        """Share values that all parties know; see `Session`."""
        share = elements if self.member.first else torch.zeros_like(elements)
        return self._kept(blank(elements.shape) if self.member.deals else share)

    def split_at(self, pointer: PointerTensor, bits: int) -> Shares:
        """Raise an error, because this session has no workers."""
        raise UserError(
            "a program that all parties run contains a pointer to a worker",
            fix="share values at the party that owns them",
        )

    def of_owner(self, owner: int, shape: Sequence[int], elements: Tensor | None) -> Shares:
        """Share the elements of one holder among all holders; takes no message.

        Args:
            owner: role number of the holder that has the elements.
            shape: shape of the elements, which all parties know.
            elements: the elements at their owner; None at the other parties.
        """
        shared = self.member._share(self.member.next_number(), owner, shape, elements, 0)
        return self._kept(shared.share)

    def do(self, kind: str, operands: Sequence[Shares], *parameters: Any) -> Shares:
        """See `Session`."""
        found = perform(self.member, kind, [each.parts for each in operands], parameters)
        for each, value in zip(operands, found.operands, strict=False):
            each.parts = value
        return Shares(self, found.value, found.value.shape)

    def reveal(self, shares: Shares, requester: str) -> Tensor:
        """Open the elements to all holders; the dealer receives zeros."""
        found = self.member._revealed(self.member.next_number(), shares.parts, None)
        return torch.zeros(shares.shape, dtype=torch.int64) if found is None else found

    def pointers(self, shares: Shares) -> list[PointerTensor]:
        """Return no pointers, because this session has no workers."""
        return []

    def _kept(self, share: Tensor) -> Shares:
        return Shares(self, SharedTensor(share, 0), share.shape)


class PointerSession(Session):
    """Session of workers that store their own shares; the leader has a pointer to each share.

    Args:
        holders, dealer, mac: see `Session`.
        ask: function that sends one request to several workers at the same time, with different
            arguments for each worker, and returns their answers.
        name: name by which the workers know the session.
    """

    def __init__(
        self,
        holders: Sequence[Any],
        dealer: Any,
        mac: bool,
        ask: Callable[[str, Sequence[tuple[Any, Sequence[Any]]]], list[Any]],
        name: str,
    ) -> None:
        super().__init__(holders, dealer, mac)
        self._ask, self._name = ask, name

    def split(self, elements: Tensor) -> Shares:
        """See `Session`."""
        if self.mac:
            mask = self.do("mask", [], list(elements.shape), None)
            pad = self.workers[-1].read(mask.parts[-1].number, ME)
            return self.do("plus", [mask], FIELD.lower(FIELD.sub(FIELD.lift(elements), pad)))
        keys = self._ask("public_key", [(each, ()) for each in self.workers[:-1]])
        return self._accepted(sealed_shares(elements, Rule(), keys), elements.shape)

    def split_at(self, pointer: PointerTensor, bits: int) -> Shares:
        """See `Session`."""
        owner, dealer = pointer.location, self.workers[-1]
        keys = self._ask("public_key", [(each, ()) for each in self.workers[:-1]])
        if not self.mac:
            parcels = owner.split(pointer.number, bits, keys)
            return self._accepted(parcels, pointer.shape)
        mask = self.do("mask", [], list(pointer.shape), owner.name)
        parcel = dealer.pack(mask.parts[-1].number, owner.name, owner.public_key())
        number, _ = owner.accept(parcel)
        parcels = owner.masked(pointer.number, number, bits, keys)
        return self.do("input", [mask, self._accepted(parcels, pointer.shape)])

    def do(self, kind: str, operands: Sequence[Shares], *parameters: Any) -> Shares:
        """See `Session`."""
        self.require_own(operands)
        for worker in self.workers:
            worker.require_alive()
        asked = [
            (worker, (self._name, kind, [each.parts[role].number for each in operands], parameters))
            for role, worker in enumerate(self.workers)
        ]
        try:
            handles = self._ask("perform", asked)
        # End the session: from here on, the parties would number their operations differently.
        except BaseException:
            self.forgotten()
            raise
        pointers = [
            PointerTensor(worker, *handle)
            for worker, handle in zip(self.workers, handles, strict=True)
        ]
        shape = pointers[0].size()
        # With MACs, the two entries of the first axis are a value and its MAC.
        behind = self.mac and kind != "disclose"
        return Shares(self, pointers, shape[1:] if behind else shape)

    def reveal(self, shares: Shares, requester: str) -> Tensor:
        """See `Session`."""
        holders = self.workers[:-1]
        if not self.mac:
            total = torch.zeros(shares.shape, dtype=torch.int64)
            for part in self._read(shares, requester):
                total = total + part
            return total
        for worker in self.workers:
            worker.require_alive()
        mask = self.do("mask", [], list(shares.shape), requester)
        revealed = self._read(self.do("disclose", [shares, mask]), requester)
        if any(not torch.equal(each, revealed[0]) for each in revealed[1:]):
            raise CheatingError(
                "holders reported different values",
                where=", ".join(each.name for each in holders),
                fix="stop working with these holders; no further result can be trusted",
            )
        pad = self.workers[-1].read(mask.parts[-1].number, requester)
        return FIELD.lower(FIELD.sub(revealed[0], pad))

    def pointers(self, shares: Shares) -> list[PointerTensor]:
        """See `Session`."""
        return list(shares.parts)

    def _read(self, shares: Shares, requester: str) -> list[Tensor]:
        return [
            worker.read(pointer.number, requester)
            for worker, pointer in zip(self.workers[:-1], shares.parts, strict=False)
        ]

    def _accepted(self, parcels: Sequence[bytes], shape: torch.Size) -> Shares:
        pointers = [
            PointerTensor(worker, *worker.accept(parcel))
            for worker, parcel in zip(self.workers[:-1], parcels, strict=True)
        ]
        dealer = self.workers[-1]
        handle = dealer.perform(self._name, "blank", [], [list(shape)])
        return Shares(self, [*pointers, PointerTensor(dealer, *handle)], shape)


def begin_session(holders: Sequence[Any], dealer: Any, mac: bool) -> Session:
    """Begin a session of workers in this process.

    With MACs, each worker computes in its own thread.
    """
    if not mac:
        return LockstepSession(holders, dealer)
    parties = LocalParties(
        lambda role, links: AuthenticatedMember(role, links, len(holders)), 30.0, len(holders) + 1
    )
    parties.agree({})
    name, everybody = secrets.token_hex(8), (*holders, dealer)
    for member, worker in zip(parties.parties, everybody, strict=True):
        worker.members[name] = member

    def ask(what: str, asked: Sequence[tuple[Any, Sequence[Any]]]) -> list[Any]:
        if what != "perform":
            return [getattr(worker, what)(*args) for worker, args in asked]
        programs = {id(worker): args for worker, args in asked}
        return parties.run(
            lambda member: everybody[member.role].perform(*programs[id(everybody[member.role])])
        )

    session = PointerSession(holders, dealer, mac, ask, name)
    weakref.finalize(session, parties.close, wait=False)
    return session


def _broadcast(one: torch.Size, other: torch.Size) -> bool:
    """Return whether two shapes can be broadcast together in an element-wise operation."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)
