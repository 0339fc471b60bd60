"""Additive shares that carry a MAC: a holder that lies about one is found (SPDZ).

Damgard, Pastro, Smart and Zakarias 2012, with a dealer in place of their preprocessing. Numbers are
integers modulo the prime p = 2^61 - 1, for in the ring 2^64 a MAC would miss a lie about high bits.
Holders have shares of a key a that nobody knows, and of x as well as of a x. Whatever is opened is
checked before it is used: each holder commits itself to its part of the sum that is 0 if all told
the truth, and then shows it. A lie passes with probability 2^-61. The dealer is trusted to deal
what it should, and colludes with nobody.

A share has two rows: of the value, and of its MAC. Signed numbers are below 2^59 in magnitude.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vfl.core.errors import CheatingError
from vfl.core.frame import Link
from vfl.mpc.channel import pack
from vfl.mpc.many_parties import Member
from vfl.mpc.ring import Operation, matmul
from vfl.mpc.rules import name_of
from vfl.mpc.shares import Opened, SharedTensor, blank

BITS = 61
P = (1 << BITS) - 1
#: What makes a signed number one from 0 to 2^60.
_OFFSET_BIT = 59
_OFFSET = 1 << _OFFSET_BIT
_HALF, _LIMB, _TERMS = 31, 21, 1 << 18
_DIGEST_BYTES, _NONCE_BYTES = 32, 16


class Field:
    """Integers modulo 2^61 - 1, as int64 from 0 to p - 1; what leaves them so."""

    def lift(self, elements: Tensor) -> Tensor:
        """Signed numbers as elements."""
        return torch.remainder(elements, P)

    def lower(self, elements: Tensor) -> Tensor:
        """Elements as signed numbers."""
        return torch.where(elements > P // 2, elements - P, elements)

    def reduce(self, numbers: Tensor) -> Tensor:
        """Of numbers from 0 to 2^63."""
        folded = (numbers & P) + (numbers >> BITS)
        return torch.where(folded >= P, folded - P, folded)

    def add(self, one: Tensor, two: Tensor) -> Tensor:
        """The sum."""
        return self.reduce(one + two)

    def sub(self, one: Tensor, two: Tensor) -> Tensor:
        """The difference."""
        return self.reduce(one + (P - two))

    def mul(self, one: Tensor, two: Tensor | int) -> Tensor:
        """The product of every two elements; 2^62 is 2, and 2^61 is 1.

        >>> FIELD.mul(torch.tensor([P - 1, 1 << 40]), torch.tensor([P - 2, 1 << 40])).tolist()
        [2, 524288]
        """
        if isinstance(two, int):
            two = torch.tensor(two % P)
        low = (1 << _HALF) - 1
        one_high, one_low, two_high, two_low = one >> _HALF, one & low, two >> _HALF, two & low
        middle = one_high * two_low + one_low * two_high
        small = one_low * two_low
        middle_low = (middle & ((1 << BITS - _HALF) - 1)) << _HALF
        total = 2 * one_high * two_high + (middle >> BITS - _HALF) + middle_low
        return self.reduce(self.reduce(total) + (small & P) + (small >> BITS))

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """The product of matrices, by limbs of 21 bits whose products int64 adds up exactly."""
        ones, twos = self._limbs(left), self._limbs(right)
        found = torch.zeros((), dtype=torch.int64)
        for place in range(2 * len(ones) - 1):
            pairs = [(at, place - at) for at in range(3) if 0 <= place - at < 3]
            total = sum(ones[at] @ twos[to] for at, to in pairs)
            assert isinstance(total, Tensor)
            power = 1 << (_LIMB * place % BITS)
            found = self.add(found, self.mul(self.reduce(total), power))
        return found

    def product(self, operation: Operation, left: Tensor, right: Tensor) -> Tensor:
        """A bilinear map: matrices, or element by element."""
        return self.matmul(left, right) if operation is matmul else self.mul(left, right)

    def additive(self, linear: Callable[..., Tensor], *operands: Tensor) -> Tensor:
        """A map that only moves and adds elements, of fewer than 2^30 to one."""
        low = linear(*(each & ((1 << _HALF) - 1) for each in operands))
        high = linear(*(each >> _HALF for each in operands))
        return self.add(self.lift(low), self.mul(self.lift(high), 1 << _HALF))

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum of several."""
        found = parts[0]
        for part in parts[1:]:
            found = self.add(found, part)
        return found

    def _limbs(self, elements: Tensor) -> list[Tensor]:
        mask = (1 << _LIMB) - 1
        return [elements & mask, elements >> _LIMB & mask, elements >> 2 * _LIMB]


FIELD = Field()


class AuthenticatedMember(Member):
    """A holder of shares with MACs, or the dealer; the steps of `Member` that tensors need.

    Args:
        role, links, holders: see `Member`.
    """

    def __init__(self, role: int, links: Mapping[int, Link], holders: int) -> None:
        super().__init__(role, links, holders)
        self._alpha = torch.zeros((), dtype=torch.int64)

    def agree(self, terms: Mapping[str, Any], session: str, attempt: int = 0) -> None:
        """See `Member.agree`; then everybody has a share of the key."""
        super().agree({**terms, "mac": True}, session, attempt)
        if self.deals:
            self._alpha = fresh(()).reshape(())
        (self._alpha,) = self._spread_out([self._alpha], [()], "key", self.next_number())
        if self.deals:
            return

    # What the dealer deals.

    def _spread_out(
        self, values: Sequence[Tensor], shapes: Sequence[Sequence[int]], name: str, number: int
    ) -> list[Tensor]:
        """Shares of what the dealer has, one sent to the last holder; at the dealer the values."""
        last = self.holders - 1
        if not self.deals:
            if self.role == last:
                return self.channels[self.dealer].receive(shapes, number)
            return [
                FIELD.lift(self.pad(self.dealer, shape, name, at, number) & P)
                for at, shape in enumerate(shapes)
            ]
        rest = []
        for at, value in enumerate(values):
            for holder in range(last):
                pad = self.pad(holder, value.shape, name, at, number) & P
                value = FIELD.sub(value, FIELD.lift(pad))
            rest.append(value)
        self.channels[last].send(rest, number, "offline")
        return list(values)

    def dealt(
        self, make: Callable[[], Sequence[Tensor]], shapes: Sequence[Sequence[int]], name: str
    ) -> tuple[list[SharedTensor], Sequence[Tensor]]:
        """Shares with MACs of what the dealer makes; at the dealer blanks, and what it made."""
        number = self.next_number()
        if self.deals:
            made = list(make())
            both = [torch.stack([value, FIELD.mul(value, self._alpha)]) for value in made]
            self._spread_out(both, [], name, number)
            return [self._blank(value.shape) for value in made], made
        found = self._spread_out([], [(2, *shape) for shape in shapes], name, number)
        return [SharedTensor(each, 0) for each in found], []

    def _blank(self, shape: Sequence[int]) -> SharedTensor:
        return SharedTensor(blank((2, *shape)), 0)

    # What is opened, and checked.

    def opened(self, *shared: SharedTensor) -> list[Tensor]:
        """Values that everybody may see, once their MACs were checked; three rounds.

        Raises:
            CheatingError: a holder lied.
        """
        number = self.next_number()
        if self.deals:
            return [blank(each.shape[1:]) for each in shared]
        parts = [each.share[0] for each in shared]
        totals = self._field_sums(parts, number)
        checks = [
            FIELD.sub(each.share[1], FIELD.mul(total, self._alpha))
            for each, total in zip(shared, totals, strict=True)
        ]
        self._check(checks, number)
        return totals

    def _field_sums(self, parts: Sequence[Tensor], number: int) -> list[Tensor]:
        for holder in self.others:
            self.channels[holder].send(parts, number)
        totals = list(parts)
        for holder in self.others:
            theirs = self.channels[holder].receive([part.shape for part in parts], number)
            totals = [
                FIELD.add(one, FIELD.lift(two)) for one, two in zip(totals, theirs, strict=True)
            ]
        return totals

    def _check(self, parts: Sequence[Tensor], number: int) -> None:
        """Whether the holders' parts add up to 0, each told before it is known."""
        own = secrets.token_bytes(_NONCE_BYTES) + bytes(pack(parts))
        for holder in self.others:
            self.channels[holder].send_bytes(_commitment(own, self.role), number, "online")
        told = {
            holder: bytes(self.channels[holder].receive_bytes(number, _DIGEST_BYTES))
            for holder in self.others
        }
        for holder in self.others:
            self.channels[holder].send_bytes(own, number, "online")
        totals = [each.reshape(-1) for each in parts]
        total = torch.cat(totals)
        for holder in self.others:
            raw = bytes(self.channels[holder].receive_bytes(number, len(own)))
            if not hmac.compare_digest(_commitment(raw, holder), told[holder]):
                raise self._lie(number, f"of {name_of(holder)} another part than it committed to")
            words = torch.frombuffer(bytearray(raw[_NONCE_BYTES:]), dtype=torch.int64)
            total = FIELD.add(total, FIELD.lift(words))
        if bool(total.any()):
            raise self._lie(number, "parts of the check that do not add up to 0")

    def _lie(self, number: int, got: str) -> CheatingError:
        return CheatingError(
            "a holder lied about its share",
            where=f"operation {number}",
            got=got,
            want="shares whose MACs fit what was opened",
            fix="stop working with these holders; nothing that follows can be trusted",
        )

    # The steps.

    def known(self, shared: SharedTensor, public: Tensor) -> SharedTensor:
        """The sum with public elements; no message."""
        if self.deals:
            return self._blank((public + shared.share[0]).shape)
        first = public if self.role == 0 else torch.zeros_like(public)
        added = torch.stack([first, FIELD.mul(public, self._alpha)])
        missing = (1,) * (added.dim() - shared.share.dim())
        share = shared.share.reshape(2, *missing, *shared.share.shape[1:])
        added = added.reshape(2, *(1,) * (share.dim() - added.dim()), *public.shape)
        return SharedTensor(FIELD.add(share, added), 0)

    def open(self, *tensors: SharedTensor) -> list[SharedTensor]:
        """See `Member.open`; what was opened was checked."""
        closed = [each for each in tensors if each.opened is None]
        shapes = [each.shape[1:] for each in closed]
        if not closed:
            return list(tensors)
        masks, made = self.dealt(lambda: [fresh(shape) for shape in shapes], shapes, "mask")
        hidden = [self._minus(each, mask) for each, mask in zip(closed, masks, strict=True)]
        differences = self.opened(*hidden)
        kept = iter(
            SharedTensor(each.share, 0, Opened(made[at] if self.deals else mask.share, difference))
            for at, (each, mask, difference) in enumerate(
                zip(closed, masks, differences, strict=True)
            )
        )
        return [each if each.opened is not None else next(kept) for each in tensors]

    def multiply(
        self, left: SharedTensor, right: SharedTensor, operation: Operation = torch.mul
    ) -> SharedTensor:
        """See `Member.multiply`."""
        left, right = self.open(left, right)
        u, v = left.mask(), right.mask()
        if self.deals:
            ((product,), _) = self.dealt(lambda: [FIELD.product(operation, u, v)], [], "product")
            return product
        e, f = left.difference(), right.difference()
        both = FIELD.product(operation, e, f)
        ((product,), _) = self.dealt(list, [both.shape], "product")
        share = [
            FIELD.total([FIELD.product(operation, e, v[at]), FIELD.product(operation, u[at], f),
                         product.share[at]])
            for at in range(2)
        ]  # fmt: skip
        return self.known(SharedTensor(torch.stack(share), 0), both)

    def divide(
        self, shared: SharedTensor, shift: int, *, positive: bool = False, below: bool = False
    ) -> SharedTensor:
        """See `Member.divide`: x + r wraps around p where r has its upper bit, and the sum not."""
        shape = shared.shape[1:]
        (mask, low, top), _ = self.dealt(lambda: _parts(fresh(shape), shift), [shape] * 3, "parts")
        (c,) = self.opened(self.known(self._plus_share(shared, mask), torch.tensor(_OFFSET)))
        if self.deals:
            return self._blank(shape)
        wraps = 1 - (c >> (BITS - 1))
        share = FIELD.sub(FIELD.mul(top.share, wraps * (P >> shift)), low.share)
        public = FIELD.lift((c >> shift) - (_OFFSET >> shift))
        return self.known(SharedTensor(share, 0), public)

    def is_negative(self, shared: SharedTensor) -> SharedTensor:
        """See `Member.is_negative`; 1 where a value is below 0. Ten openings.

        As in `divide`, x + 2^59 + r = c, so that y = (x + 2^59) mod 2^59 is c' - r' - w, plus 2^59
        where c' < r' + w; w tells whether the sum wrapped. That comparison is of a public number
        with dealt bits (Damgard, Geisler and Kroigaard 2007): one of 61 numbers is 0, or none.
        """
        shape, places = shared.shape[1:], _OFFSET_BIT

        def make() -> list[Tensor]:
            r = fresh(shape)
            lower = r & (_OFFSET - 1)
            bits = torch.stack([lower >> at & 1 for at in range(places)])
            flip, factor = fresh(shape) & 1, fresh(shape).clamp(min=1)
            return [r, lower, r >> (BITS - 1), bits, flip, factor]

        shapes = [shape, shape, shape, (places, *shape), shape, shape]
        (mask, lower, top, bits, flip, factor), _ = self.dealt(make, shapes, "bits")
        (c,) = self.opened(self.known(self._plus_share(shared, mask), torch.tensor(_OFFSET)))
        if self.deals:
            numbers = self._blank((places + 2, *shape))
        else:
            wraps = FIELD.mul(top.share, 1 - (c >> (BITS - 1)))
            numbers = self._numbers(c, wraps, bits.share, flip.share)
        while numbers.shape[1] > 1:  # their product
            if numbers.shape[1] % 2:
                numbers = self._with_one(numbers)
            half = numbers.shape[1] // 2
            one = SharedTensor(numbers.share[:, :half], 0)
            numbers = self.multiply(one, SharedTensor(numbers.share[:, half:], 0))
        (zero,) = self.opened(self.multiply(SharedTensor(numbers.share[:, 0], 0), factor))
        if self.deals:
            return self._blank(shape)
        found = (zero == 0).long()  # whether c' < r' + w, but for the flip
        less = self.known(
            SharedTensor(FIELD.mul(flip.share, FIELD.lift(1 - 2 * found)), 0), found
        ).share
        y = FIELD.total(
            [FIELD.sub(FIELD.mul(less, _OFFSET), lower.share), FIELD.sub(wraps * 0, wraps)]
        )
        rest = self.known(SharedTensor(y, 0), c & (_OFFSET - 1))
        whole = self.known(shared, torch.tensor(_OFFSET).expand(shape))
        above = FIELD.mul(FIELD.sub(whole.share, rest.share), pow(_OFFSET, -1, P))
        return self.known(SharedTensor(FIELD.sub(above * 0, above), 0), torch.ones_like(c))

    def _numbers(self, c: Tensor, wraps: Tensor, bits: Tensor, flip: Tensor) -> SharedTensor:
        """One is 0 if the public number is the smaller one, or with the flip the larger one.

        Compared are 4 c' + 1 and 4 r' + 2 w, which are never equal.
        """
        secret = torch.cat([torch.zeros_like(wraps)[:, None], wraps[:, None], bits], 1)
        lower = c & (_OFFSET - 1)
        public = [
            torch.ones_like(c),
            torch.zeros_like(c),
            *(lower >> at & 1 for at in range(_OFFSET_BIT)),
        ]
        sign = self.known(SharedTensor(FIELD.mul(flip, P - 2), 0), torch.ones_like(c)).share
        above, found = torch.zeros_like(wraps), []
        for at in reversed(range(len(public))):
            bit, one = public[at], SharedTensor(secret[:, at], 0)
            less = self.known(one, FIELD.lift(-bit)).share
            found.append(FIELD.total([FIELD.sub(less, sign), FIELD.mul(above, 3)]))
            differs = self.known(
                SharedTensor(FIELD.mul(one.share, FIELD.lift(1 - 2 * bit)), 0), bit
            )
            above = FIELD.add(above, differs.share)
        return SharedTensor(torch.stack(found, 1), 0)

    def _with_one(self, numbers: SharedTensor) -> SharedTensor:
        shape = (1, *numbers.shape[2:])
        one = self.known(
            SharedTensor(torch.zeros((2, *shape), dtype=torch.int64), 0),
            torch.ones(shape, dtype=torch.int64),
        )
        return SharedTensor(torch.cat([numbers.share, one.share], 1), 0)

    def _minus(self, one: SharedTensor, two: SharedTensor) -> SharedTensor:
        return one if self.deals else SharedTensor(FIELD.sub(one.share, two.share), 0)

    def _plus_share(self, one: SharedTensor, two: SharedTensor) -> SharedTensor:
        return one if self.deals else SharedTensor(FIELD.add(one.share, two.share), 0)


def _parts(mask: Tensor, shift: int) -> list[Tensor]:
    return [mask, mask >> shift, mask >> (BITS - 1)]


def fresh(shape: Sequence[int]) -> Tensor:
    """Uniform elements, from the operating system."""
    count = max(1, torch.Size(shape).numel())
    words = torch.frombuffer(bytearray(secrets.token_bytes(8 * count)), dtype=torch.int64) & P
    return FIELD.lift(words).reshape(tuple(shape))


def _commitment(content: bytes, role: int) -> bytes:
    return hashlib.sha256(b"vfl.mpc part of a check %d " % role + content).digest()
