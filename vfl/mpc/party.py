"""What the three parties have in common: channels, keys, a count of operations.

All three follow one program and call the same operations in the same order; each does its own
part. P0 and P1 hold shares. P2 deals correlated randomness and evaluates functions on permuted
values; the tensors it sees in the program are shapes without content.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vfl.errors import DisagreementError
from vfl.link import Link
from vfl.mpc.channel import Channel
from vfl.mpc.functions import Function
from vfl.mpc.leakage import LeakageLedger
from vfl.mpc.ring import Operation, require_room
from vfl.mpc.rules import NAMES, Rules
from vfl.mpc.shares import Shared
from vfl.mpc.stream import KEY_BYTES, PadStream
from vfl.mpc.truncation import Scaling

#: Fewer values go to P2 in one message. More go in parts, so that P2 answers while it still hears;
#: few parts, for a link keeps but the last frames for the case that it breaks.
_LEAST_PARTED = 2**14
_PARTS = 3


@dataclass(frozen=True, slots=True)
class Asked:
    """A question to P2.

    Attributes:
        number: of the operation.
        shape: of what was asked about.
        bits: fraction bits of each result.
        mirrored: whether signs that were laid over the values show in the first result.
    """

    number: int
    shape: torch.Size
    bits: tuple[int, ...]
    mirrored: bool


class Party(ABC):
    """One of the three.

    Args:
        role: 0, 1 or 2.
        links: to the other two, by role. Nobody but the two ends may read the link of P0 and P1:
            with the dealer's seeds it tells everything.
        rules: the same at all three.
    """

    def __init__(self, role: int, links: Mapping[int, Link], rules: Rules) -> None:
        self.role = role
        self.rules = rules
        self.channels = {peer: Channel(link, NAMES[peer]) for peer, link in links.items()}
        self.leakage = LeakageLedger(NAMES[role])
        self.pads: dict[int, PadStream] = {}
        self._number = 0

    @property
    def number(self) -> int:
        """Of the last operation."""
        return self._number

    def agree(self, terms: Mapping[str, Any], session: str, attempt: int = 0) -> None:
        """Fresh keys for every pair, after checking that all parties are about to do the same.

        The first of a pair draws 32 bytes from the operating system and sends them over the link,
        which must be encrypted where it leaves the process. They are kept in memory only and end
        with this object; a restarted party begins a new attempt with new ones.

        Args:
            terms: what all parties must have alike, as JSON values.
            session: name of the session.
            attempt: counts restarts.

        Raises:
            DisagreementError: another party has other terms.
        """
        text = json.dumps([terms, self.rules.record(), session, attempt], sort_keys=True)
        digest = hashlib.sha256(text.encode()).digest()
        for peer in sorted(self.channels):
            secret = secrets.token_bytes(KEY_BYTES) if self.role < peer else b""
            self.channels[peer].send_bytes(secret + digest, 0, "setup")
            if secret:
                self.use_key(peer, secret, session, attempt)
        for peer in sorted(self.channels):
            size = KEY_BYTES if self.role > peer else 0
            raw = bytes(self.channels[peer].receive_bytes(0, size + len(digest)))
            if not hmac.compare_digest(raw[size:], digest):
                raise DisagreementError(
                    f"{NAMES[peer]} is about to compute something else",
                    want="one network, one set of rules, one session at all three parties",
                    fix="compare the arguments with which the parties were started",
                )
            if size:
                self.use_key(peer, raw[:size], session, attempt)

    def shown_bits(self, shared: Shared) -> int:
        """Fraction bits at which `ask` shows values to P2; 40 bits of a word need twice those."""
        return max(shared.bits, 2 * self.rules.bits if self.rules.mode == "fast" else 0)

    def cuts(self, function: Function) -> bool:
        """Whether 40 bits are enough; near 0 the functions of positive numbers need them all."""
        return self.rules.cuts and not function.positive

    def question(
        self, shared: Shared, function: Function, *, value: bool, slope: bool, bits: int
    ) -> Asked:
        """The next operation, as `ask` describes it."""
        values = [self.rules.bits if bits < 0 else bits] * value
        given = (*values, *[self.slope_bits(function)] * slope)
        return Asked(self.next_number(), shared.shape, given, value)

    def parts(self, count: int) -> list[slice]:
        """The messages in which so many values go to P2, and come back."""
        whole = self.rules.mode == "thesis" or count < _LEAST_PARTED
        size = count if whole else -(-count // _PARTS)
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def slope_bits(self, function: Function) -> int:
        """Fraction bits of the slopes that `answer` gives."""
        whole = function.whole_slope and self.rules.mode == "fast"
        return 0 if whole else self.rules.bits

    def use_key(self, peer: int, secret: bytes, session: str, attempt: int) -> None:
        """Bind a secret of a pair to the pair, the session and the attempt."""
        first, second = sorted((self.role, peer))
        about = f"vfl.mpc {NAMES[first]}-{NAMES[second]} {len(session)} {session} {attempt}"
        self.pads[peer] = PadStream(hmac.digest(secret, about.encode(), "sha256"))

    def pad(self, peer: int, shape: Sequence[int], *purpose: str | int) -> Tensor:
        """A pad that `peer` has too; int64 of the given axes."""
        words = self.pads[peer].words64(math.prod(shape), *purpose).view("int64")
        return torch.from_numpy(words).reshape(tuple(shape))

    def deal(self, program: Callable[[Party], None]) -> None:
        """Do now what a program needs of the dealer, where the mode can; see `Ahead`.

        Args:
            program: the operations that come next, on shapes.
        """

    def next_number(self) -> int:
        """The number of the operation that begins; the same at all parties."""
        self._number += 1
        return self._number

    def share_bounded(
        self,
        owner: int,
        shape: Sequence[int],
        values: Tensor | None,
        where: str,
        scale: str,
        bits: int = -1,
    ) -> Shared:
        """`share` what a network divides later: values below 2 to the rules' `magnitude_bits`.

        Once it is shared nobody sees a value, or that a product of it has left its range.

        Args:
            owner: see `share`.
            shape: see `share`.
            values: see `share`.
            where: see `share`.
            scale: what to scale if a value is too large, for the message.
            bits: see `share`.

        Raises:
            RingRangeError: a value is too large.
        """
        if values is not None:
            fraction = self.rules.bits if bits < 0 else bits
            fix = (
                f"scale {scale}, or raise magnitude_bits ({self.rules.most_magnitude_bits} at most)"
            )
            require_room(values.double(), self.rules.magnitude_bits, fraction, where, fix)
        return self.share(owner, shape, values, where, bits)

    @abstractmethod
    def share(
        self, owner: int, shape: Sequence[int], values: Tensor | None, where: str, bits: int = -1
    ) -> Shared:
        """Values of one party as shares; from P0 or P1 this costs no message.

        Args:
            owner: whose values they are.
            shape: their axes, which everybody knows.
            values: the values at their owner, None elsewhere.
            where: their name, for messages.
            bits: fraction bits, those of the rules if negative.

        Raises:
            RingRangeError: a value does not fit.
        """

    @abstractmethod
    def reveal(self, shared: Shared, to: int, where: str) -> Tensor | None:
        """The values, at one party; float64, None elsewhere."""

    @abstractmethod
    def open(self, *tensors: Shared, phase: str = "online") -> list[Shared]:
        """The same tensors, ready to be multiplied; in thesis mode each product opens anew.

        Args:
            tensors: those that were opened before stay as they are.
            phase: what the bytes are counted as.
        """

    @abstractmethod
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
        """A product of two shared tensors (corrected algorithm 5.1, SSMul).

        Args:
            left: one operand, opened before.
            right: the other, opened before.
            operation: `ring.matmul`, `torch.mul` or another bilinear map.
            scalings: divisions after it, one after the other, with the index fix.
            beside: a shared tensor of the product's scale that is scaled in the same messages.
            where: the layer, for messages and the ledger.

        Returns:
            The product, and `beside`, each with the fraction bits that are left.
        """

    @abstractmethod
    def scale(self, shared: Shared, scalings: Sequence[Scaling], where: str) -> Shared:
        """Divisions alone, one message from P0 to P1."""

    @abstractmethod
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
        """A function on every element, evaluated by P2 on permuted values (algorithm 5.2).

        Args:
            shared: of any axes and scale.
            function: what to evaluate.
            where: the layer.
            value: whether f(x) is wanted.
            slope: whether f'(x) is wanted.
            bits: fraction bits of f(x), those of the rules if negative.

        Returns:
            What to give `answer`; who asks need not wait for it.
        """

    @abstractmethod
    def answer(self, asked: Asked, index: int = 0) -> Shared:
        """One result: the value is the first of those that were wanted, the slope the last.

        They are taken in this order, and those of one question before those of the next.
        """

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
        """Ask, and take all results; see `ask`."""
        asked = self.ask(shared, function, where, value=value, slope=slope, bits=bits)
        return [self.answer(asked, index) for index in range(len(asked.bits))]
