"""A program followed ahead of time, on shapes, for what can be done before it runs.

Masks, orders and signs depend on no value, and products of masks on nothing else. So P2 can deal
and all three can draw while nobody waits. The operations get the numbers they will have when the
program runs, and with them the same pads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from vfl.errors import ReusedPadError
from vfl.mpc.functions import Function
from vfl.mpc.party import Asked, Party
from vfl.mpc.ring import Operation, product_shape
from vfl.mpc.shares import Opened, Shared, blank, owned_by
from vfl.mpc.truncation import Scaling, bits_after


def openings(closed: Sequence[Shared]) -> list[tuple[object, ...]]:
    """What tells the openings of one operation from those of another: axes, and who opens what."""
    return [(each.shape, each.owned, each.faced) for each in closed]


def factors(left: Shared, right: Shared, operation: Operation) -> tuple[object, ...]:
    """What tells one product from another."""
    return (operation, *openings([left, right]))


def require_same(ahead: object, now: object, number: int) -> None:
    """What was drawn ahead is for one operation: a mask of fewer rows would stretch over more.

    Raises:
        ReusedPadError: the operation of that number is another one; nothing of it was sent.
    """
    if ahead != now:
        raise ReusedPadError(
            "what was drawn ahead was drawn for another operation",
            where=f"operation {number}",
            want="the program that was given to `deal`, with the same axes",
            fix="run that program, or begin a new session and deal for this one",
        )


class Preparer(Protocol):
    """What a party does ahead of each kind of operation, by the operation's number."""

    def draw_ahead(self, number: int, closed: Sequence[Shared]) -> list[Opened]:
        """The masks of an opening."""

    def deal_ahead(self, number: int, left: Shared, right: Shared, operation: Operation) -> None:
        """A product's correlated randomness."""

    def hide_ahead(self, asked: Asked, function: Function) -> None:
        """Pads, and the order, of a question to P2."""

    def foreseen(self, asked: Asked, index: int) -> Tensor | None:
        """This party's share of a result, where that is a pad: at P0."""


class Ahead(Party):
    """Stands in for a party while a program is followed on shapes; sends nothing by itself.

    Args:
        party: whose turn it is; its count of operations stays where it is.
        preparer: the same, as it prepares.
    """

    def __init__(self, party: Party, preparer: Preparer) -> None:
        super().__init__(party.role, {}, party.rules)
        self._number = party.number
        self._preparer = preparer

    def share(
        self, owner: int, shape: Sequence[int], values: Tensor | None, where: str, bits: int = -1
    ) -> Shared:
        self.next_number()
        bits = self.rules.bits if bits < 0 else bits
        return Shared(blank(shape), bits, owned=owned_by(owner, shape))

    def reveal(self, shared: Shared, to: int, where: str) -> Tensor | None:
        self.next_number()
        return None

    def open(self, *tensors: Shared, phase: str = "online") -> list[Shared]:
        number, closed = self.next_number(), [each for each in tensors if each.opened is None]
        masks = iter(self._preparer.draw_ahead(number, closed))
        return [
            each if each.opened is not None else replace(each, opened=next(masks))
            for each in tensors
        ]

    def multiply(
        self,
        left: Shared,
        right: Shared,
        operation: Operation,
        scalings: Sequence[Scaling] = (),
        *,
        beside: Shared | None = None,
        where: str,
    ) -> tuple[Shared, Shared | None]:
        self._preparer.deal_ahead(self.next_number(), left, right, operation)
        shape = product_shape(operation, left.words, right.words)
        bits = bits_after(left.bits + right.bits, scalings)
        rest = None if beside is None else Shared(blank(beside.shape), bits)
        return Shared(blank(shape), bits), rest

    def scale(self, shared: Shared, scalings: Sequence[Scaling], where: str) -> Shared:
        self.next_number()
        return Shared(blank(shared.shape), bits_after(shared.bits, scalings))

    def ask(
        self,
        shared: Shared,
        function: Function,
        where: str,
        *,
        value: bool,
        slope: bool,
        bits: int = -1,
    ) -> Asked:
        asked = self.question(shared, function, value=value, slope=slope, bits=bits)
        self._preparer.hide_ahead(asked, function)
        return asked

    def answer(self, asked: Asked, index: int = 0) -> Shared:
        words = self._preparer.foreseen(asked, index)
        words = blank(asked.shape) if words is None else words
        return Shared(words, asked.bits[index], foreseen=True)
