"""A program followed ahead of time, on shapes, for what the dealer can do before it runs.

Products need masks only, so P2 can deal them while nobody waits. The operations get the numbers
they will have when the program runs, and with them the same pads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from vfl.mpc.functions import Function
from vfl.mpc.party import Party
from vfl.mpc.ring import Operation, product_shape
from vfl.mpc.shares import Opened, Shared, blank
from vfl.mpc.truncation import Scaling, bits_after

#: The masks of an opening: operation and tensors to masks.
Draw = Callable[[int, Sequence[Tensor]], list[Tensor]]
#: One product: operation number, operands, map.
Deal = Callable[[int, Shared, Shared, Operation], None]


class Ahead(Party):
    """Stands in for a party while a program is followed on shapes; sends nothing by itself.

    Args:
        party: whose turn it is; its count of operations stays where it is.
        deal: called for every product.
        draw: called for every opening; shapes if not given.
    """

    def __init__(self, party: Party, deal: Deal, draw: Draw | None = None) -> None:
        super().__init__(party.role, {}, party.rules)
        self.pads = party.pads
        self._number = party.number
        self._deal = deal
        self._draw = draw or (lambda number, closed: [blank(each.shape) for each in closed])

    def share(
        self, owner: int, shape: Sequence[int], values: Tensor | None, where: str, bits: int = -1
    ) -> Shared:
        self.next_number()
        return Shared(blank(shape), self.rules.bits if bits < 0 else bits)

    def reveal(self, shared: Shared, to: int, where: str) -> Tensor | None:
        self.next_number()
        return None

    def open(self, *tensors: Shared, phase: str = "online") -> list[Shared]:
        number = self.next_number()
        masks = iter(self._draw(number, [each.words for each in tensors if each.opened is None]))
        return [
            each if each.opened is not None else replace(each, opened=Opened(next(masks), None))
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
        self._deal(self.next_number(), left, right, operation)
        shape = product_shape(operation, left.words, right.words)
        bits = bits_after(left.bits + right.bits, scalings)
        rest = None if beside is None else Shared(blank(beside.shape), bits)
        return Shared(blank(shape), bits), rest

    def scale(self, shared: Shared, scalings: Sequence[Scaling], where: str) -> Shared:
        self.next_number()
        return Shared(blank(shared.shape), bits_after(shared.bits, scalings))

    def apply(
        self,
        shared: Shared,
        function: Function,
        where: str,
        *,
        value: bool,
        slope: bool,
        bits: int = -1,
    ) -> list[Shared]:
        self.next_number()
        given = self.result_bits(function, value, slope, bits)
        return [Shared(blank(shared.shape), each) for each in given]
