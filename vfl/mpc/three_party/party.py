"""The three parties: their common operations, and the parts of P0, P1 and P2 in them.

All three parties follow one program and call the same operations in the same order; each party
computes its own part of an operation. P0 and P1 hold additive shares. P2 deals correlated
randomness and evaluates functions on permuted values; P2's tensors in the program are shapes
without content. The modules `vfl.mpc.three_party.thesis` and `vfl.mpc.three_party.fast` add the
ways to open and multiply tensors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from vfl.core.errors import ReusedPadError
from vfl.core.frame import Link
from vfl.mpc.channel import pack, parted
from vfl.mpc.engine import Engine
from vfl.mpc.permuted import (
    EXPECTED_CARRY,
    UPPER_BYTES,
    Function,
    Permutation,
    from_upper_bytes,
    upper_bytes,
)
from vfl.mpc.ring import (
    ELEMENT_BYTES,
    Operation,
    decode,
    encode,
    product_shape,
    require_integer_bits,
)
from vfl.mpc.rules import HOLDERS, P0, P1, P2, Rules
from vfl.mpc.shares import (
    MovedIndices,
    SharedTensor,
    Truncation,
    bits_after,
    blank,
    truncate_first,
    truncate_second,
)

_Drawn = TypeVar("_Drawn")

#: Smallest number of values that go to P2 in several messages instead of one. Larger tensors are
#: sent in parts, so that P2 can answer while it still receives; there are few parts, because a link
#: stores only its last frames for a retransmission.
_LEAST_PARTED = 2**14
_PARTS = 3
#: Purposes of a pair's pads that most programs use; the keys of other purposes are derived at their
#: first use.
_PURPOSES: Mapping[str, Sequence[tuple[str | int, ...]]] = {
    "P2": [("mask", 0), ("mask", 1), ("mask", 2), ("product",), ("result",)],
    "holders": [("order",), ("fresh",), ("dummies",), ("signs",)],
}


@dataclass(frozen=True, slots=True)
class Question:
    """A request to P2 to evaluate a function of shared values.

    Attributes:
        number: number of the operation that contains the question.
        shape: axes of the values.
        bits: fraction bits of each result.
        value: whether the function value f(x) is requested; random signs of x change f(x), but not
            derivatives.
    """

    number: int
    shape: torch.Size
    bits: tuple[int, ...]
    value: bool


@dataclass(frozen=True, slots=True)
class Product:
    """A product of two shared tensors, and the divisions after it.

    Attributes:
        number: number of the operation.
        left, right: the two factors; in fast mode, they were opened under masks before.
        operation: `ring.matmul`, `torch.mul` or another bilinear map.
        truncations: truncations after the product, in order; they use the index correction of
            algorithm 5.1.
        where: name of the layer in error messages and in the ledger of leakage.
    """

    number: int
    left: SharedTensor
    right: SharedTensor
    operation: Operation
    truncations: Sequence[Truncation]
    where: str

    @property
    def shape(self) -> torch.Size:
        """Axes of the product's result."""
        return product_shape(self.operation, self.left.share, self.right.share)

    def dealt_bytes(self, rules: Rules) -> int:
        """Return how many upper bytes of each element of the dealt product P2 sends: 5, 6 or 8.

        P1 replaces the omitted lower bytes by the middle of their range. P1's share, and thus the
        product, is then off by at most half a unit of the lowest sent byte. After the divisions
        that follow the product, this error is at most an eighth of a unit. If no division follows,
        this error is at most an eighth of 2^-bits, the resolution of shared values.
        """
        unit = self.left.bits + self.right.bits - rules.bits
        if self.truncations:
            unit = sum(one.shift - (one.times.bit_length() - 1) for one in self.truncations)
            # If a later truncation also multiplies, its factor enlarges the error by up to twice
            # the largest power of two below the factor.
            unit -= any(one.times > 1 for one in self.truncations)
        spare = (unit - 2) // 8
        return ELEMENT_BYTES - min(spare, 3) if spare >= 2 else ELEMENT_BYTES


class Party(Engine, ABC):
    """One of the three parties of the protocol in chapter 5.

    Args:
        role: role number: 0, 1 or 2.
        links: links to the other two parties, by their role numbers. Only P0 and P1 may be able to
            read their link: from its messages, the dealer (P2) could compute all values.
        rules: rules, equal at all three parties.

    Attributes:
        ahead: pads and products that were drawn ahead of time, by kind and operation number, each
            with a key that identifies its operation.
    """

    part = ()

    def __init__(self, role: int, links: Mapping[int, Link], rules: Rules) -> None:
        super().__init__(role, links, len(HOLDERS), rules.record())
        self.rules = rules
        self.ahead: dict[tuple[str, int], tuple[object, Any]] = {}

    def use_key(self, peer: int, secret: bytes, session: str, attempt: int) -> None:
        super().use_key(peer, secret, session, attempt)
        self.pads[peer].expand(*_PURPOSES["P2" if P2 in (self.role, peer) else "holders"])

    def shown_bits(self, shared: SharedTensor) -> int:
        """Return the number of fraction bits with which `ask` sends values to P2.

        In fast mode, this is at least twice the rules' number: 40 bits per value need as many.
        """
        return max(shared.bits, 2 * self.rules.bits if self.rules.mode == "fast" else 0)

    def sends_40_bits(self, function: Function) -> bool:
        """Return whether 40 bits per value are sent.

        Functions of positive numbers near 0 need all 64 bits.
        """
        return self.rules.sends_40_bits and not function.positive

    def parts(self, count: int) -> list[slice]:
        """Return the parts in which `count` values are sent to P2 and back, as slices."""
        whole = self.rules.mode == "thesis" or count < _LEAST_PARTED
        size = count if whole else -(-count // _PARTS)
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def deal(self, program: Callable[[Party], None]) -> None:
        """Let P2 deal for a program in advance, if the mode can do so; see `Preprocessing`.

        Args:
            program: program of the next operations; it runs on shapes without values.
        """

    @contextmanager
    def pipelined(self) -> Iterator[None]:
        """Return a context in which P2 may deal for later operations before it answers questions.

        Only the mode `fast` implements this.

        When the context ends, P2 has answered all questions.
        """
        yield

    def drawn_ahead(
        self, kind: str, number: int, operation: object, draw: Callable[[], _Drawn]
    ) -> _Drawn:
        """Return the pads that were drawn in advance for an operation, or draw them now.

        Raises:
            ReusedPadError: the operation of this number differs from the one in the program given
                to `deal`, so its mask might be too short and would repeat; no message of the
                operation was sent.
        """
        before = self.ahead.pop((kind, number), None)
        if before is None:
            return draw()
        if before[0] != operation:
            raise ReusedPadError(
                "pads that were drawn in advance belong to another operation",
                where=f"operation {number}",
                want="the program that was given to `deal`, with the same axes",
                fix="run that program, or begin a new session and deal for this one",
            )
        drawn: _Drawn = before[1]
        return drawn

    def continue_from(self, number: int) -> None:
        """Continue to count operations from `number`.

        The masks of earlier operations cannot be drawn again.

        Raises:
            ReusedPadError: these keys were already used for operations with larger numbers.
        """
        if number < self._number:
            raise ReusedPadError(
                "operations cannot be counted again under the same keys",
                got=f"operation {number}",
                want=f"at least {self._number}",
                fix="begin a new attempt, with new keys",
            )
        self._number = number

    def share(
        self,
        owner: int,
        shape: Sequence[int],
        values: Tensor | None,
        where: str,
        bits: int = -1,
        scale: str = "",
    ) -> SharedTensor:
        """Share the values of one party.

        If P0 or P1 is the owner, sharing takes no message.

        Args:
            owner: role number of the party that owns the values.
            shape: axes of the values, which all parties know.
            values: the values at their owner; None elsewhere.
            where: name of the values, for error messages.
            bits: number of fraction bits; a negative number selects the rules' number.
            scale: words for what to scale if a value is too large; required for values that a
                network divides later. Such values must be below 2 to the rules' `magnitude_bits` in
                magnitude, because after sharing no party can notice that a value or a product has
                left its range.

        Raises:
            RingRangeError: a value does not fit into the ring.
            NonFiniteError: a value is NaN or infinite.
        """
        rules, bits = self.rules, self.rules.bits if bits < 0 else bits
        if scale and values is not None:
            fix = f"scale {scale}, or raise magnitude_bits ({rules.most_magnitude_bits} at most)"
            require_integer_bits(values.double(), rules.magnitude_bits, bits, where, fix)
        number, own = self.next_number(), None
        if owner == self.role:
            assert values is not None, "the owner passes the values"
            own = encode(values, bits, where)
        return self._share(number, owner, shape, own, bits)

    def _share(
        self, number: int, owner: int, shape: Sequence[int], own: Tensor | None, bits: int
    ) -> SharedTensor:
        if owner != self.dealer:
            return super()._share(number, owner, shape, own, bits)
        if own is not None:
            return SharedTensor(self._deal([own], "share", number, phase="setup")[0], bits)
        return SharedTensor(self._dealt([shape], "share", number)[0], bits)

    def open(self, *tensors: SharedTensor, phase: str = "online") -> list[SharedTensor]:
        """Open tensors under masks, for multiplication.

        In thesis mode this does nothing, because each product opens its own factors.

        Args:
            tensors: tensors to open; tensors that are already open stay unchanged.
            phase: phase in which the bytes are counted.
        """
        number, closed = self.next_number(), [each for each in tensors if each.opened is None]
        opened = iter(self._open(number, closed, phase))
        return [each if each.opened is not None else next(opened) for each in tensors]

    def _open(
        self, number: int, closed: Sequence[SharedTensor], phase: str
    ) -> Sequence[SharedTensor]:
        """Run this party's part of opening tensors; modes that open tensors override it."""
        return closed

    def multiply(
        self,
        left: SharedTensor,
        right: SharedTensor,
        operation: Operation,
        truncations: Sequence[Truncation] = (),
        *,
        beside: SharedTensor | None = None,
        where: str,
    ) -> tuple[SharedTensor, SharedTensor | None]:
        """Multiply two shared tensors (algorithm 5.1, SSMul, with corrections).

        Args:
            left: left factor, as `open` returned it.
            right: right factor, as `open` returned it.
            operation: see `Product`.
            truncations: truncations (divisions) of the product.
            where: name of the layer in error messages and in the ledger of leakage.
            beside: another shared tensor with as many fraction bits as the product; the same
                messages truncate both.

        Returns:
            The product, and `beside` if given, with the fraction bits that remain.
        """
        product = Product(self.next_number(), left, right, operation, truncations, where)
        bits = bits_after(left.bits + right.bits, truncations)
        found = self._product(product, [] if beside is None else [beside.share])
        shared = [SharedTensor(part, bits) for part in found]
        return shared[0], None if beside is None else shared[1]

    @abstractmethod
    def _product(self, product: Product, more: list[Tensor]) -> list[Tensor]:
        """Return this party's share of a product and of `more`, after equal truncations."""

    def truncate(
        self, shared: SharedTensor, truncations: Sequence[Truncation], where: str
    ) -> SharedTensor:
        """Truncate a tensor that is no product; P0 sends P1 one message for this."""
        (share,) = self._truncated([shared.share], truncations, self.next_number(), where)
        return SharedTensor(share, bits_after(shared.bits, truncations))

    @abstractmethod
    def _truncated(
        self, parts: Sequence[Tensor], truncations: Sequence[Truncation], number: int, where: str
    ) -> list[Tensor]:
        """Run truncations that need a message of their own."""

    def ask(
        self,
        shared: SharedTensor,
        function: Function,
        where: str,
        *,
        value: bool,
        slope: bool,
        bits: int = -1,
    ) -> Question:
        """Ask P2 for a function of every element, in a permuted order (algorithm 5.2).

        Args:
            shared: shared tensor of any axes and any number of fraction bits.
            function: element-wise function that P2 evaluates.
            where: name of the layer, for error messages and the ledger of leakage.
            value: whether the function value f(x) is requested.
            slope: whether the derivative f'(x) is requested.
            bits: number of fraction bits of f(x); a negative number selects the rules' number.

        Returns:
            The question, as an argument for `answer`. The caller may start other operations before
            it calls `answer`.
        """
        values = [self.rules.bits if bits < 0 else bits] * value
        whole_slope = function.whole_slope and self.rules.mode == "fast"
        results = (*values, *[0 if whole_slope else self.rules.bits] * slope)
        asked = Question(self.next_number(), shared.shape, results, value)
        self._ask(asked, shared, function, where)
        return asked

    @abstractmethod
    def _ask(self, asked: Question, shared: SharedTensor, function: Function, where: str) -> None:
        """Run this party's part of a question to P2."""

    @abstractmethod
    def answer(self, asked: Question, index: int = 0) -> SharedTensor:
        """Return one of the results: the function value is first, the derivative last.

        A party must receive the results of a question in this order, and all of them before those
        of the next question.
        """

    def apply(
        self,
        shared: SharedTensor,
        function: Function,
        where: str,
        *,
        value: bool,
        slope: bool,
        bits: int = -1,
    ) -> list[SharedTensor]:
        """Ask P2 a question, and return all its results; see `ask`."""
        asked = self.ask(shared, function, where, value=value, slope=slope, bits=bits)
        return [self.answer(asked, index) for index in range(len(asked.bits))]


@dataclass(frozen=True, slots=True)
class PreparedQuestion:
    """A holder's pads for one question to P2, drawn at the time of the question or in advance.

    Attributes:
        permutation: permutation of the values, with dummies and random signs.
        fresh: see `ShareHolder._for_dealer`.
        results: P0's shares of P2's future answers; empty at P1.
    """

    permutation: Permutation
    fresh: Tensor
    results: Sequence[Tensor]


class ShareHolder(Party):
    """One of the two parties that hold shares (P0, P1).

    Attributes:
        prepared: pads of the questions that P2 has not answered yet, by operation number.
    """

    def __init__(self, role: int, links: Mapping[int, Link], rules: Rules) -> None:
        super().__init__(role, links, rules)
        self.prepared: dict[int, PreparedQuestion] = {}
        # P2 deals for later operations while it waits, and sends slopes after function values, so
        # its frames may arrive early.
        if P2 in self.channels:
            self.channels[P2].keeps_early = True

    @property
    def other(self) -> int:
        """Role number of the other holder of shares."""
        return P1 - self.role

    def _revealed(self, number: int, shared: SharedTensor, to: int | None) -> Tensor | None:
        if to == self.dealer:
            fresh = self.pad(self.other, shared.shape, "fresh", number)
            shared = replace(shared, share=self._for_dealer(shared.share, fresh))
        return super()._revealed(number, shared, to)

    def _ask(self, asked: Question, shared: SharedTensor, function: Function, where: str) -> None:
        prepared = self.prepared[asked.number] = self.drawn_ahead(
            "ask", asked.number, (asked, function), lambda: self._prepare(asked, function)
        )
        shown = shared.finer(self.shown_bits(shared))
        hidden = prepared.permutation.apply(shown.share, shown.bits, self.first)
        hidden = self._for_dealer(hidden, prepared.fresh)
        for part in self.parts(len(hidden)):
            elements = hidden[part]
            payload = upper_bytes(elements) if self.sends_40_bits(function) else pack([elements])
            self.channels[P2].send_bytes(payload, asked.number, "online")

    def answer(self, asked: Question, index: int = 0) -> SharedTensor:
        prepared, last = self.prepared[asked.number], index == len(asked.bits) - 1
        elements = prepared.results[index] if self.first else self._received(asked, index)
        if last:
            del self.prepared[asked.number]
        return SharedTensor(elements, asked.bits[index])

    def _prepare(self, asked: Question, function: Function) -> PreparedQuestion:
        elements = math.prod(asked.shape)
        permutation = Permutation(
            self.pads[self.other], self.rules, elements, function, asked.number
        )
        fresh = self.pad(self.other, (permutation.count,), "fresh", asked.number)
        if not self.first:
            return PreparedQuestion(permutation, fresh, [])
        pads = self.pad(P2, (len(asked.bits), permutation.count), "result", asked.number)
        found = [self._found(asked, index, pad, permutation) for index, pad in enumerate(pads)]
        return PreparedQuestion(permutation, fresh, found)

    def _found(
        self, asked: Question, index: int, elements: Tensor, permutation: Permutation
    ) -> Tensor:
        """Return this holder's share of one of P2's results, with values in original order."""
        mirrored = asked.value and index == 0
        found = permutation.undo(elements, asked.bits[index], self.first, mirrored)
        return found.reshape(asked.shape)

    def _received(self, asked: Question, index: int) -> Tensor:
        permutation, owed = self.prepared[asked.number].permutation, self.channels[P2].owed
        whole = [slice(0, permutation.count)]
        parts = whole if index else self.parts(permutation.count)
        found = [self._from_dealer([(part.stop - part.start,)], asked.number)[0] for part in parts]
        (owed.discard if index == len(asked.bits) - 1 else owed.add)(asked.number)
        elements = found[0] if len(found) == 1 else torch.cat(found)
        return self._found(asked, index, elements, permutation)

    def _from_dealer(self, shapes: Sequence[Sequence[int]], number: int) -> list[Tensor]:
        """Receive P2's next message that belongs to an operation."""
        return self.channels[P2].receive(shapes, number)

    def _for_dealer(self, elements: Tensor, fresh: Tensor) -> Tensor:
        """Return a fresh share of the same value, so that P2 learns only the sum of both shares.

        Without a fresh share, the share of a product is a holder's openings times masks that P2
        dealt: P2 could solve this equation in inputs and weights if the values are few and small.
        If a holder knows values in plaintext, its share without this step would be the value
        itself.
        """
        return elements + fresh if self.first else elements - fresh

    def _truncated(
        self, parts: Sequence[Tensor], truncations: Sequence[Truncation], number: int, where: str
    ) -> list[Tensor]:
        if self.first:
            found, moved = self._truncate_first(parts, truncations)
            self.channels[P1].send_moved([], moved, number)
            return found
        sizes = [sum(part.numel() for part in parts)] * len(truncations)
        _, moved = self.channels[P0].receive_moved([], sizes, number)
        return self._truncate_second(parts, truncations, moved, where)

    def _truncate_first(
        self, parts: Sequence[Tensor], truncations: Sequence[Truncation]
    ) -> tuple[list[Tensor], list[MovedIndices]]:
        """Run P0's part of all truncations, of a product and of the tensors `beside` it."""
        elements = _joined(parts)
        moved = truncate_first(elements, truncations)
        return parted(elements, [part.shape for part in parts]), moved

    def _truncate_second(
        self,
        parts: Sequence[Tensor],
        truncations: Sequence[Truncation],
        moved: Sequence[MovedIndices],
        where: str,
    ) -> list[Tensor]:
        """Run P1's part of all truncations, with the indices that P0 sent."""
        elements = _joined(parts)
        truncate_second(elements, truncations, moved)
        for indices in moved:
            self.leakage.count(
                "indices near the wrap-around", where, len(indices), elements.numel()
            )
        return parted(elements, [part.shape for part in parts])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


class Dealer(Party):
    """P2, which deals and evaluates functions; its tensors in the program are shapes."""

    def _revealed(self, number: int, shared: SharedTensor, to: int | None) -> Tensor | None:
        return torch.add(*self._both(number, shared.shape)) if to == self.role else None

    def _both(self, number: int, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Receive values of these axes from P0 and P1."""
        (first,) = self.channels[P0].receive([shape], number)
        (second,) = self.channels[P1].receive([shape], number)
        return first, second

    def _product(self, product: Product, more: list[Tensor]) -> list[Tensor]:
        self._deal_product(product)
        return [blank(product.shape), *more]

    @abstractmethod
    def _deal_product(self, product: Product) -> None:
        """Send P1 its share of the product of both factors' masks; P0's share is a pad."""

    def _truncated(
        self, parts: Sequence[Tensor], truncations: Sequence[Truncation], number: int, where: str
    ) -> list[Tensor]:
        return list(parts)

    def _ask(self, asked: Question, shared: SharedTensor, function: Function, where: str) -> None:
        slope = len(asked.bits) > asked.value
        wanted = [function.value] * asked.value + [function.slope] * slope
        pads = self.drawn_ahead(
            "ask", asked.number, (asked, function), lambda: self._result_masks(asked)
        )
        count = pads.shape[1]
        self.leakage.count("permuted values", where, math.prod(asked.shape), count)
        later: list[list[Tensor]] = []
        for part in self.parts(count):
            size = part.stop - part.start
            elements = self._permuted(asked.number, size, cut=self.sends_40_bits(function))
            seen = decode(elements, self.shown_bits(shared))
            require_integer_bits(seen, self._room(function, slope), self.rules.bits, where)
            first, *rest = (
                encode(f(seen), each, where).sub_(pad)
                for f, each, pad in zip(wanted, asked.bits, pads[:, part], strict=True)
            )
            self.channels[P1].send([first], asked.number)
            later.append(rest)
        # Function values are sent before slopes, because no party waits for a slope before it needs
        # a value.
        for parts in zip(*later, strict=True):
            self.channels[P1].send(parts, asked.number)

    def answer(self, asked: Question, index: int = 0) -> SharedTensor:
        return shape_only(asked.shape, asked.bits[index])

    def _result_masks(self, asked: Question) -> Tensor:
        """Return P0's shares of the results of a question, one row per result."""
        count = max(math.prod(asked.shape), self.rules.least_permuted)
        return self.pad(P0, (len(asked.bits), count), "result", asked.number)

    def _room(self, function: Function, slope: bool) -> int:
        """Return how many bits before the binary point the values of a question may have.

        Values that were divided before, as in a network in thesis mode, may have at most the number
        of bits for which the index correction works. In fast mode, this limit also holds for values
        in training, which are later multiplied by gradients. Fast mode requests such a value
        together with its slope; only a function with a symmetry (`mirror`) has bounded results, so
        it needs no limit.
        """
        divided = self.rules.mode == "thesis" and not function.positive
        trained = self.rules.mode == "fast" and slope and function.mirror is None
        return self.rules.magnitude_bits if divided or trained else self.rules.sum_bits

    def _permuted(self, number: int, count: int, *, cut: bool) -> Tensor:
        """Receive the permuted shares of both holders, and return their sum, with one axis."""
        if not cut:
            return torch.add(*self._both(number, (count,)))
        first, second = (
            from_upper_bytes(self.channels[holder].receive_bytes(number, UPPER_BYTES * count))
            for holder in (P0, P1)
        )
        return first.add_(second).add_(EXPECTED_CARRY)


def shape_only(shape: Sequence[int], bits: int) -> SharedTensor:
    """Return a shared tensor of which this party knows only the axes and fraction bits."""
    return SharedTensor(blank(shape), bits)
