"""P2: it deals correlated randomness and evaluates functions on permuted values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from vfl.mpc.ahead import require_same
from vfl.mpc.cut40 import CUT_BYTES, EXPECTED_CARRY, fill
from vfl.mpc.functions import Function
from vfl.mpc.party import Asked, Party
from vfl.mpc.ring import decode, encode, require_room
from vfl.mpc.rules import P0, P1, P2
from vfl.mpc.shares import Shared, blank
from vfl.mpc.truncation import Scaling, bits_after


@dataclass(frozen=True, slots=True)
class Cover:
    """P0's shares of what P2 will answer.

    Attributes:
        asked, function: the question they were drawn for.
        results: a row a result.
    """

    asked: Asked
    function: Function
    results: Tensor


class Helper(Party):
    """The third party. In the program it follows, tensors are shapes.

    Attributes:
        covers: drawn before, by operation.
    """

    def __init__(self, *arguments: object, **more: object) -> None:
        super().__init__(*arguments, **more)  # type: ignore[arg-type]
        self.covers: dict[int, Cover] = {}

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
        wanted = [function.value] * value + [function.slope] * slope
        cover = self.covers.pop(asked.number, None)
        if cover is not None:
            require_same((cover.asked, cover.function), (asked, function), asked.number)
        pads = self._drawn(asked) if cover is None else cover.results
        count = pads.shape[1]
        self.leakage.count("permuted values", where, math.prod(asked.shape), count)
        later: list[list[Tensor]] = []
        for part in self.parts(count):
            size = part.stop - part.start
            words = self._permuted(asked.number, size, cut=self.cuts(function))
            seen = decode(words, self.shown_bits(shared))
            require_room(seen, self._room(function, slope), self.rules.bits, where)
            first, *rest = (
                encode(f(seen), each, where).sub_(pad)
                for f, each, pad in zip(wanted, asked.bits, pads[:, part], strict=True)
            )
            self.channels[P1].send([first], asked.number)
            later.append(rest)
        # Nobody waits for slopes before the values.
        for parts in zip(*later, strict=True):
            self.channels[P1].send(parts, asked.number)
        return asked

    def answer(self, asked: Asked, index: int = 0) -> Shared:
        return shape_only(asked.shape, asked.bits[index])

    def scale(self, shared: Shared, scalings: Sequence[Scaling], where: str) -> Shared:
        self.next_number()
        return shape_only(shared.shape, bits_after(shared.bits, scalings))

    def _drawn(self, asked: Asked) -> Tensor:
        """P0's shares of the results; a row a result."""
        count = max(math.prod(asked.shape), self.rules.least_permuted)
        return self.pad(P0, (len(asked.bits), count), "result", asked.number)

    def _room(self, function: Function, slope: bool) -> int:
        """Bits before the point that values may have.

        Sums that were divided, as a network's are in thesis mode, have at most what the index fix
        was told. In fast mode so does what is trained on, for it meets gradients: it comes with its
        slope, and is bounded only behind a function that has a mirror.
        """
        divided = self.rules.mode == "thesis" and not function.positive
        trained = self.rules.mode == "fast" and slope and function.mirror is None
        return self.rules.magnitude_bits if divided or trained else self.rules.sum_bits

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
        return first.add_(second).add_(EXPECTED_CARRY)


def shape_only(shape: Sequence[int], bits: int) -> Shared:
    """A shared tensor of which nothing but its axes is known."""
    return Shared(blank(shape), bits)
