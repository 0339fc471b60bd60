"""P2: it deals correlated randomness and evaluates functions on permuted values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vfl.mpc.cut40 import CUT_BYTES, EXPECTED_CARRY, fill
from vfl.mpc.functions import Function
from vfl.mpc.party import Party
from vfl.mpc.ring import decode, encode, limit_bits, require_room
from vfl.mpc.rules import P0, P1, P2
from vfl.mpc.shares import Shared, blank
from vfl.mpc.truncation import Scaling, bits_after


class Helper(Party):
    """The third party. In the program it follows, tensors are shapes."""

    def share(
        self, owner: int, shape: Sequence[int], values: Tensor | None, where: str, bits: int = -1
    ) -> Shared:
        number, bits = self.next_number(), self.rules.bits if bits < 0 else bits
        if owner == P2:
            assert values is not None, "the owner has the values"
            mask = self.pad(P0, shape, "share", number)
            self.channels[P1].send([encode(values, bits, where) - mask], number, "setup")
        return shape_only(shape, bits)

    def reveal(self, shared: Shared, to: int, where: str) -> Tensor | None:
        number = self.next_number()
        if to != P2:
            return None
        first, second = (
            self.channels[holder].receive([shared.shape], number)[0] for holder in (P0, P1)
        )
        self.leakage.count("result", where, first.numel(), first.numel())
        return decode(first + second, shared.bits)

    def apply(
        self, shared: Shared, function: Function, where: str, *, value: bool, slope: bool
    ) -> list[Shared]:
        number = self.next_number()
        elements = shared.words.numel()
        count = max(elements, self.rules.least_permuted)
        words = self._permuted(number, count, cut=self.cuts(function))
        seen = decode(words, self.shown_bits(shared))
        self.leakage.count("permuted values", where, elements, count)
        # A bit before it is too late: a sum that has wrapped looks like any other number.
        require_room(seen, limit_bits(self.rules.bits) - 1, self.rules.bits, where)
        results, bits = [], []
        if value:
            bits.append(self.rules.bits)
            results.append(encode(function.value(seen), bits[-1], where))
        if slope:
            bits.append(self.slope_bits(function))
            results.append(encode(function.slope(seen), bits[-1], where))
        answer = torch.stack(results)
        answer -= self.pad(P0, answer.shape, "result", number)
        self.channels[P1].send([answer], number)
        return [shape_only(shared.shape, each) for each in bits]

    def scale(self, shared: Shared, scalings: Sequence[Scaling], where: str) -> Shared:
        self.next_number()
        return shape_only(shared.shape, bits_after(shared.bits, scalings))

    def _permuted(self, number: int, count: int, *, cut: bool) -> Tensor:
        """The sum of the two permuted shares; one axis."""
        if not cut:
            first, second = (
                self.channels[holder].receive([(count,)], number)[0] for holder in (P0, P1)
            )
            return first + second
        first, second = (
            fill(self.channels[holder].receive_bytes(number, CUT_BYTES * count))
            for holder in (P0, P1)
        )
        return first + second + EXPECTED_CARRY


def shape_only(shape: Sequence[int], bits: int) -> Shared:
    """A shared tensor of which nothing but its axes is known."""
    return Shared(blank(shape), bits)
