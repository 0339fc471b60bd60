"""Additive shares with a MAC, by which the holders detect a false share of a holder (SPDZ).

Source: Damgard, Pastro, Smart and Zakarias 2012, with a dealer in place of the paper's
preprocessing. Numbers are integers modulo the prime p = 2^61 - 1; in the ring 2^64 a MAC would miss
a change of high bits. Each holder has a share of a key a, which only the dealer knows, a share of
each value x, and a share of the product a x. Every opened value is checked before it is used: each
holder first commits to its part of a sum that is 0 if all shares are true, and then discloses the
part. A false share passes this check with a probability of about 2^-61. The holders trust the
dealer to deal correct values, and not to collude with any holder: the dealer and one holder
together could read opened values, and forge a share with a valid MAC.

A share has two rows: one for the value, one for its MAC. Signed numbers must be below 2^59 in
magnitude to be shared.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from vfl.core.errors import CheatingError
from vfl.core.frame import Link
from vfl.mpc.channel import Shape, pack
from vfl.mpc.engine import BeaverEngine
from vfl.mpc.numbers import BITS, FIELD, P, Ring, broadcast, reach
from vfl.mpc.rules import name_of
from vfl.mpc.shares import SharedTensor, blank

#: Offset that maps signed numbers to 0 .. 2^60.
_OFFSET = FIELD.offset
_OFFSET_BIT = BITS - 2
_DIGEST_BYTES, _NONCE_BYTES = 32, 16
#: Number of fraction bits in the terms that all parties compare; the shares themselves have no
#: fraction bits.
_RECORDED_BITS = 20


class AuthenticatedMember(BeaverEngine):
    """A holder of shares with MACs, or the dealer; MACs check every opened value.

    Args:
        role, links, holders: see `Engine`.
    """

    numbers, front = FIELD, 1

    def __init__(self, role: int, links: Mapping[int, Link], holders: int) -> None:
        super().__init__(role, links, holders, {"holders": holders, "bits": _RECORDED_BITS})
        self._alpha = torch.zeros((), dtype=torch.int64)
        self._parts: list[Tensor] = []

    def agree(self, terms: Mapping[str, Any], session: str, attempt: int = 0) -> None:
        """See `Peer.agree`; afterwards every holder also has a share of the MAC key."""
        super().agree({**terms, "mac": True}, session, attempt)
        number = self.next_number()
        if self.deals:
            self._alpha = fresh(())
            super()._deal([self._alpha], "key", number)
        else:
            (self._alpha,) = super()._dealt([()], "key", number)

    # Values that the dealer knows and shares.

    def dealt(
        self, make: Callable[[], Sequence[Tensor]], shapes: Sequence[Sequence[int]], name: str
    ) -> tuple[list[SharedTensor], Sequence[Tensor]]:
        """Share values, with MACs, that the dealer computes by calling `make`.

        At the dealer, the method returns placeholders for the shares, and the values themselves.
        """
        number = self.next_number()
        if self.deals:
            made = list(make())
            return [SharedTensor(each, 0) for each in self._deal(made, name, number)], made
        return [SharedTensor(each, 0) for each in self._dealt(shapes, name, number)], []

    def _deal(self, values: Sequence[Tensor], name: str, number: int, **_: Any) -> list[Tensor]:
        both = [torch.stack([value, FIELD.mul(value, self._alpha)]) for value in values]
        super()._deal(both, name, number)
        return [self._blank(value.shape) for value in values]

    def _dealt(
        self, shapes: Sequence[Shape], name: str, number: int, numbers: Ring | None = None
    ) -> list[Tensor]:
        if found := self._parts:  # the dealer dealt these shares together with their mask
            self._parts = []
            return found
        return super()._dealt([(2, *shape) for shape in shapes], name, number)

    def _dealt_pad(self, peer: int, shapes: Sequence[Shape], name: str, number: int) -> Tensor:
        pads = [self.pad(peer, shape, name, at, number) for at, shape in enumerate(shapes)]
        return FIELD.lift(torch.cat([each.reshape(-1) for each in pads]) & P)

    def _masks(self, shares: Sequence[Tensor], number: int) -> list[Tensor]:
        shapes = [each.shape[1:] for each in shares]
        if not self.deals:
            return self._dealt(shapes, "mask", number)
        made = [fresh(shape) for shape in shapes]
        self._deal(made, "mask", number)
        return made

    def _mask_to_divide(self, share: Tensor, shift: int, number: int) -> Tensor:
        shape = share.shape[1:]
        if self.deals:
            mask = fresh(shape)
            self._deal([mask, *FIELD.parts(mask, shift)], "parts", number)
            return mask
        mask, *self._parts = self._dealt([shape] * 3, "parts", number)
        return mask

    def _blank(self, shape: Sequence[int]) -> Tensor:
        return blank((2, *shape))

    # Openings of values, and the checks of their MACs.

    def opened(self, *shared: SharedTensor) -> list[Tensor]:
        """Open values to all holders, and check their MACs; takes three rounds of messages.

        Raises:
            CheatingError: a holder sent a false share.
        """
        return self._opened([each.share for each in shared], 0)

    def _revealed(self, number: int, shared: SharedTensor, to: int | None) -> Tensor | None:
        raise AssertionError("shares with MACs are opened by `opened`, which checks them")

    def _opened(self, hidden: Sequence[Tensor], number: int) -> list[Tensor]:
        """Open masked shares, under a new operation number; `number` is their masks' number."""
        number = self.next_number()
        if self.deals:
            return [blank(each.shape[1:]) for each in hidden]
        totals = self._sums([each[0] for each in hidden], number)
        checks = [
            FIELD.sub(each[1], FIELD.mul(total, self._alpha))
            for each, total in zip(hidden, totals, strict=True)
        ]
        self._check(checks, number)
        return totals

    def _check(self, parts: Sequence[Tensor], number: int) -> None:
        """Check that the holders' parts add up to 0.

        Each holder commits to its part before it sends it.
        """
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
            want="shares whose MACs match the opened values",
            fix="stop working with these holders; no further result can be trusted",
        )

    # Operations that engines of all protocols have.

    def open(self, *tensors: SharedTensor) -> list[SharedTensor]:
        """See `BeaverEngine.open`; if every tensor is already open, no operation is counted."""
        return super().open(*tensors) if any(one.opened is None for one in tensors) else [*tensors]

    def _plus(self, share: Tensor, public: Tensor) -> Tensor:
        sizes = broadcast(share.shape[1:], public.shape)
        if self.deals:
            return self._blank(sizes)
        first = public if self.first else torch.zeros_like(public)
        added = torch.stack([first, FIELD.mul(public, self._alpha)])
        return FIELD.add(reach(share, len(sizes)), reach(added, len(sizes)))

    def is_negative(self, shared: SharedTensor) -> SharedTensor:
        """Return 1 where a value is below 0, else 0; this takes nine openings.

        As in `divide`, the holders open c = x + 2^59 + r, where x is the value and r a dealt mask.
        Let c' and r' be c and r modulo 2^59, and let w be 1 if the sum wrapped around p, else 0.
        The number y = (x + 2^59) mod 2^59 is then c' - r' - w, plus 2^59 where c' < r' + w; y gives
        the sign of x. The test c' < r' + w compares a public number with dealt bits (Damgard,
        Geisler and Kroigaard 2007): the holders compute 61 numbers, of which exactly one is 0 if
        the inequality holds, and none is 0 otherwise.
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
        (c,) = self.opened(self.plus(self.sum_of(shared, mask), torch.tensor(_OFFSET)))
        if self.deals:
            numbers = SharedTensor(self._blank((places + 2, *shape)), 0)
        else:
            wraps = FIELD.mul(top.share, 1 - (c >> (BITS - 1)))
            numbers = self._numbers(c, wraps, bits.share, flip.share)
        while numbers.shape[1] > 1:  # multiply the 61 numbers in pairs
            if numbers.shape[1] % 2:
                numbers = self._with_one(numbers)
            half = numbers.shape[1] // 2
            one = SharedTensor(numbers.share[:, :half], 0)
            numbers = self.multiply(one, SharedTensor(numbers.share[:, half:], 0))
        (zero,) = self.opened(self.multiply(SharedTensor(numbers.share[:, 0], 0), factor))
        if self.deals:
            return SharedTensor(self._blank(shape), 0)
        # 1 where c' < r' + w holds, except that a random flip bit may invert the result.
        found = (zero == 0).long()
        less = self.plus(
            SharedTensor(FIELD.mul(flip.share, FIELD.lift(1 - 2 * found)), 0), found
        ).share
        y = reduce(
            FIELD.add,
            [FIELD.sub(FIELD.mul(less, _OFFSET), lower.share), FIELD.sub(wraps * 0, wraps)],
        )
        rest = self.plus(SharedTensor(y, 0), c & (_OFFSET - 1))
        whole = self.plus(shared, torch.tensor(_OFFSET).expand(shape))
        above = FIELD.mul(FIELD.sub(whole.share, rest.share), pow(_OFFSET, -1, P))
        return self.plus(SharedTensor(FIELD.sub(above * 0, above), 0), torch.ones_like(c))

    def leading(self, shared: SharedTensor, places: Sequence[int]) -> SharedTensor:
        """See `vfl.mpc.many.members.Member.leading`.

        This method compares magnitudes with all powers of two. For an element beyond the last of
        the positions, the method returns the last position.
        """
        negative = self.is_negative(shared)
        sign = self.plus(SharedTensor(FIELD.mul(negative.share, P - 2), 0), _ones(shared.shape[1:]))
        magnitude = self.multiply(SharedTensor(shared.share, 0), sign)
        powers = torch.tensor([1 << place for place in places])
        powers = FIELD.lift(-powers).reshape(-1, *[1] * (shared.share.dim() - 1))
        whole = magnitude.share[:, None].expand(-1, len(places), *shared.shape[1:])
        below = self.is_negative(
            self.plus(SharedTensor(whole, 0), powers.expand(len(places), *shared.shape[1:]))
        )
        if self.deals:
            return SharedTensor(self._blank((len(places) + 1, *shared.shape[1:])), 0)
        last = self.plus(SharedTensor(FIELD.sub(below.share * 0, below.share)[:, -1:], 0),
                         _ones((1, *shared.shape[1:])))  # fmt: skip
        between = FIELD.sub(below.share[:, 1:], below.share[:, :-1])
        return SharedTensor(torch.cat([between, last.share, negative.share[:, None]], 1), 0)

    def _numbers(self, c: Tensor, wraps: Tensor, bits: Tensor, flip: Tensor) -> SharedTensor:
        """Return numbers of which one is 0 if the public number is smaller.

        Where `flip` is 1, one is 0 if the public number is larger. The two compared numbers are 4
        c' + 1 and 4 r' + 2 w, which are never equal.
        """
        secret = torch.cat([torch.zeros_like(wraps)[:, None], wraps[:, None], bits], 1)
        lower = c & (_OFFSET - 1)
        public = [
            torch.ones_like(c),
            torch.zeros_like(c),
            *(lower >> at & 1 for at in range(_OFFSET_BIT)),
        ]
        sign = self.plus(SharedTensor(FIELD.mul(flip, P - 2), 0), torch.ones_like(c)).share
        above, found = torch.zeros_like(wraps), []
        for at in reversed(range(len(public))):
            bit, one = public[at], SharedTensor(secret[:, at], 0)
            less = self.plus(one, FIELD.lift(-bit)).share
            found.append(reduce(FIELD.add, [FIELD.sub(less, sign), FIELD.mul(above, 3)]))
            differs = self.plus(SharedTensor(FIELD.mul(one.share, FIELD.lift(1 - 2 * bit)), 0), bit)
            above = FIELD.add(above, differs.share)
        return SharedTensor(torch.stack(found, 1), 0)

    def _with_one(self, numbers: SharedTensor) -> SharedTensor:
        shape = (1, *numbers.shape[2:])
        one = self.plus(
            SharedTensor(torch.zeros((2, *shape), dtype=torch.int64), 0),
            torch.ones(shape, dtype=torch.int64),
        )
        return SharedTensor(torch.cat([numbers.share, one.share], 1), 0)

    def sum_of(self, one: SharedTensor, two: SharedTensor) -> SharedTensor:
        """Return the sum of two shared tensors; takes no message."""
        return one if self.deals else SharedTensor(FIELD.add(one.share, two.share), 0)


def _ones(shape: Sequence[int]) -> Tensor:
    return torch.ones(tuple(shape), dtype=torch.int64)


def fresh(shape: Sequence[int]) -> Tensor:
    """Draw uniform elements from the operating system's random generator."""
    count = max(1, torch.Size(shape).numel())
    words = torch.frombuffer(bytearray(secrets.token_bytes(8 * count)), dtype=torch.int64) & P
    return FIELD.lift(words).reshape(tuple(shape))


def _commitment(content: bytes, role: int) -> bytes:
    return hashlib.sha256(b"vfl.mpc part of a check %d " % role + content).digest()
