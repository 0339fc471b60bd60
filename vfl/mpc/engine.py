"""Engine for arithmetic on additive shares, for any number system and source of randomness.

Each holder (party with shares) has one summand of every shared number. All holders except any one,
even if they work together, learn nothing from their summands. The last role is the dealer: it deals
correlated randomness and learns no shared value; together with one holder, it would learn every
opened value. A program is a function that receives an engine, an object that runs one party. All
parties call the program with tensors of the same shapes; at the dealer a share is a placeholder: a
shape without content.

A tensor is opened once, under a mask u: all holders learn d = x - u, where x is the secret tensor
and u a mask. A product of tensors x and y needs their openings e = x - u and f = y - v. The product
also needs a sharing c of u v, which the dealer deals (Beaver 1991). The product is z = c + e (v +
f) + u f. One holder adds the public f to its share of v. Dealing a sharing takes one message, to
the last holder; the other holders draw their shares from key streams that they share with the
dealer. The protocols of this package differ from each other in these points:

    numbers         the ring 2^64, or a prime field where a false share must be detected;
    dealt online    `vfl.mpc.many.members.Member` for 2 to 8 holders; `vfl.mpc.three_party` for 2
                    holders that ask the dealer for functions of permuted values;
    with MACs       `vfl.mpc.many.authenticated`: every opened value is checked;
    dealt ahead     `vfl.mpc.three_party.fast` follows a program on shapes before values exist;
    stored          `vfl.llm.two_party` keeps dealt numbers on disk until a question arrives;
    in one process  `vfl.mpc.many.members.Lockstep`: all parties at once, without messages.

If one holder knows a factor x in plaintext, `one_way_product` computes the product. The holder of x
opens e = x - u to the other holder, which opens f = y - v in return. Each of these two holders uses
only the opening that it received. Then x y = x f + e v + u v, and the dealer shares u v.
`vfl.mpc.secure.shared_layer` uses only products of this kind.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from vfl.core.errors import DisagreementError
from vfl.core.frame import Link
from vfl.mpc.channel import PHASES, Channel, LeakageLedger, Shape, Traffic, parted
from vfl.mpc.numbers import RING, Ring, broadcast
from vfl.mpc.ring import Operation, decode
from vfl.mpc.rules import name_of
from vfl.mpc.shares import Opened, SharedTensor, blank
from vfl.mpc.stream import KEY_BYTES, PadStream


class Peer:
    """A party with its channels, its key streams shared with peers, and a count of operations.

    Args:
        role: role number: 0, 1 or 2; with more parties, up to the number of parties minus one.
        links: links to the other parties, by their role numbers.
        record: terms, besides those of `agree`, that all parties must have in common, as JSON
            values.
    """

    def __init__(self, role: int, links: Mapping[int, Link], record: Mapping[str, Any]) -> None:
        self.role = role
        self.channels = {peer: Channel(link, name_of(peer)) for peer, link in links.items()}
        self.leakage = LeakageLedger(name_of(role))
        self.pads: dict[int, PadStream] = {}
        self._record = record
        self._number = 0

    @property
    def number(self) -> int:
        """Number of the last operation."""
        return self._number

    def agree(self, terms: Mapping[str, Any], session: str, attempt: int = 0) -> None:
        """Agree on fresh keys for every pair of parties.

        The first party of a pair draws 32 bytes from the operating system's random generator and
        sends them over the link, which must be encrypted if it leaves the process. The same message
        has a digest of all terms, by which the parties check that all of them run one program. The
        keys are only in memory and end with this object; a restarted party starts a new attempt
        with new keys.

        Args:
            terms: settings that all parties must have in common, as JSON values.
            session: name of the session.
            attempt: number of earlier attempts at the session.

        Raises:
            DisagreementError: another party has different terms.
            ProtocolError: another party sent an unexpected message.
        """
        text = json.dumps([terms, self._record, session, attempt], sort_keys=True)
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
                    f"{name_of(peer)} runs another program or has other terms",
                    want="the same network, rules and session at all parties",
                    fix="compare the arguments with which the parties were started",
                )
            if size:
                self.use_key(peer, raw[:size], session, attempt)

    def use_key(self, peer: int, secret: bytes, session: str, attempt: int) -> None:
        """Derive the key of the key stream shared with a peer.

        The stream's key depends on the pair's secret, the session and the attempt.
        """
        first, second = sorted((self.role, peer))
        about = f"vfl.mpc {name_of(first)}-{name_of(second)} {len(session)} {session} {attempt}"
        self.pads[peer] = PadStream(hmac.digest(secret, about.encode(), "sha256"))

    def pad(self, peer: int, shape: Sequence[int], *purpose: str | int) -> Tensor:
        """Draw a pad (one-time mask) that party `peer` can draw too; int64 of the given axes."""
        return drawn(self.pads[peer], shape, *purpose)

    def next_number(self) -> int:
        """Return the number of the operation that begins; all parties get the same number."""
        self._number += 1
        return self._number


def drawn(stream: PadStream, shape: Sequence[int], *purpose: str | int) -> Tensor:
    """Draw a pad that every party with this key stream can draw; int64 of the given axes."""
    elements = stream.elements64(math.prod(shape), *purpose).view("int64")
    return torch.from_numpy(elements).reshape(tuple(shape))


def traffic(party: Peer) -> list[Traffic]:
    """Return the traffic that one party has sent so far."""
    return [
        Traffic(
            name_of(party.role), name_of(peer), phase, channel.frames[phase], channel.sent[phase]
        )
        for peer, channel in sorted(party.channels.items())
        for phase in PHASES
        if channel.frames[phase]
    ]


class Engine(Peer):
    """One party of a computation on shares: a holder of shares, or the dealer.

    Args:
        role: role number of this party, counted from 0; the last role is the dealer's.
        links: links to the other parties, by role. Only the two parties of a link are able to read
            it.
        holders: number of holders of shares.
        record: see `Peer`.

    Attributes:
        holders: number of holders.
        dealer: the dealer's role.
        numbers: number system of the shares.
        front: number of leading axes that a share has in addition to its tensor's own axes.
        part: first words of the purpose for which a holder and the dealer draw the holder's part of
            a mask from their key stream.
    """

    numbers: Ring = RING
    front = 0
    part: ClassVar[tuple[str, ...]] = ("part",)

    def __init__(
        self, role: int, links: Mapping[int, Link], holders: int, record: Mapping[str, Any]
    ) -> None:
        super().__init__(role, links, record)
        self.holders = self.dealer = holders

    @property
    def deals(self) -> bool:
        """Return whether this party is the dealer."""
        return self.role == self.dealer

    @property
    def holds(self) -> bool:
        """Return whether this party is a holder of shares.

        A process that runs all parties is both holder and dealer.
        """
        return self.role != self.dealer

    @property
    def first(self) -> bool:
        """Return whether this is the first holder, which alone adds public summands."""
        return self.role == 0

    @property
    def others(self) -> list[int]:
        """Role numbers of the other holders."""
        return [holder for holder in range(self.holders) if holder != self.role]

    def _stream_of_holders(self) -> PadStream | None:
        """Return a key stream that all holders share and the dealer lacks; None at the dealer."""
        if self.deals:
            return None
        if self.role > 1:
            return PadStream(bytes(self.channels[0].receive_bytes(0, KEY_BYTES)))
        key = self.pads[1 - self.role].elements64(KEY_BYTES // 8, "order").tobytes()
        if self.first:
            for holder in self.others[1:]:
                self.channels[holder].send_bytes(key, 0, "setup")
        return PadStream(key)

    # Operations that share or reveal values.

    def reveal(self, shared: SharedTensor, where: str, to: int | None = None) -> Tensor | None:
        """Reveal values to one holder or to all holders; in `three_party` also to the dealer.

        The result is float64, and None at parties that do not learn the values. The cost is 8 bytes
        per element and one round of messages.

        Args:
            shared: tensor whose values are revealed.
            where: name of the tensor in the ledger of leakage.
            to: role number of the holder that learns the values; None reveals them to all holders.
        """
        total = self._revealed(self.next_number(), shared, to)
        if total is None:
            return None
        self.leakage.count("result", where, total.numel(), total.numel())
        return decode(total, shared.bits)

    def _revealed(self, number: int, shared: SharedTensor, to: int | None) -> Tensor | None:
        """Return the revealed elements at the parties that learn them, and None at all others."""
        if self.deals:
            return None
        if to is None:
            return self._sums([shared.share], number)[0]
        if to != self.role:
            self.channels[to].send([shared.share], number)
            return None
        total = shared.share
        for holder in self.others:
            total = total + self.channels[holder].receive([shared.shape], number)[0]
        return total

    def _share(
        self, number: int, owner: int, shape: Sequence[int], own: Tensor | None, bits: int
    ) -> SharedTensor:
        """Share elements that one holder knows; this takes no message."""
        if self.deals:
            return SharedTensor(blank(shape), bits)
        if own is None:
            return SharedTensor(self.pad(owner, shape, "share", number), bits)
        for holder in self.others:
            own = own - self.pad(holder, shape, "share", number)
        return SharedTensor(own, bits)

    # Sources of masks, and of shares of the masks' products.

    def _mask(
        self,
        shape: Sequence[int],
        *purpose: str | int,
        number: int,
        numbers: Ring | None = None,
    ) -> Tensor:
        """Return a holder's part of a uniform mask; at the dealer, return the whole mask."""
        if not self.deals:
            return self.pad(self.dealer, shape, *self.part, *purpose, number)
        parts = [
            self.pad(holder, shape, *self.part, *purpose, number) for holder in range(self.holders)
        ]
        return reduce((numbers or self.numbers).add, parts)

    def _sums(
        self, parts: Sequence[Tensor], number: int, numbers: Ring | None = None
    ) -> list[Tensor]:
        """Send this holder's parts to the other holders, and return the sums of all parts.

        Sending the parts takes one round of messages.
        """
        numbers = numbers or self.numbers
        for holder in self.others:
            self.channels[holder].send(parts, number)
        totals = list(parts)
        for holder in self.others:
            theirs = self.channels[holder].receive([part.shape for part in parts], number)
            pairs = zip(totals, map(numbers.lift, theirs), strict=True)
            totals = [numbers.add(*pair) for pair in pairs]
        return totals

    def _plus(self, share: Tensor, public: Tensor) -> Tensor:
        """Return a share of a sum with public elements; the first holder adds them to its share."""
        if self.first:
            return share + public
        if not public.dim() or public.shape == share.shape:
            return share
        return share.expand(broadcast(share.shape, public.shape))

    def _deal(
        self,
        values: Sequence[Tensor],
        name: str,
        number: int,
        *,
        numbers: Ring | None = None,
        phase: str = "offline",
    ) -> list[Tensor]:
        """At the dealer, share values; only the last holder receives a message."""
        numbers, last = numbers or self.numbers, self.holders - 1
        flat, shapes = [value.reshape(-1) for value in values], [value.shape for value in values]
        rest = flat[0] if len(flat) == 1 else torch.cat(flat)
        for holder in range(last):
            rest = numbers.sub(rest, self._dealt_pad(holder, shapes, name, number))
        self._send_dealt(rest, number, phase, numbers)
        return [self._blank(value.shape) for value in values]

    def _dealt(
        self, shapes: Sequence[Shape], name: str, number: int, numbers: Ring | None = None
    ) -> list[Tensor]:
        """At a holder, return its share of the values that the dealer shares by `_deal`."""
        if self.role == self.holders - 1:
            return self._receive_dealt(shapes, number, numbers or self.numbers)
        return parted(self._dealt_pad(self.dealer, shapes, name, number), shapes)

    def _dealt_pad(self, peer: int, shapes: Sequence[Shape], name: str, number: int) -> Tensor:
        """Draw the share of dealt values that a holder and the dealer both draw; one axis."""
        return self.pad(peer, (sum(map(math.prod, shapes)),), name, number)

    def _send_dealt(self, rest: Tensor, number: int, phase: str, numbers: Ring) -> None:
        self.channels[self.holders - 1].send([rest], number, phase)

    def _receive_dealt(self, shapes: Sequence[Shape], number: int, numbers: Ring) -> list[Tensor]:
        return self.channels[self.dealer].receive(shapes, number)

    def _blank(self, shape: Sequence[int]) -> Tensor:
        """Return the dealer's placeholder for a share: a shape without content."""
        return blank(shape)


class BeaverEngine(Engine):
    """Engine whose dealer deals for products and divisions at the time of their computation."""

    def plus(self, shared: SharedTensor, public: Tensor) -> SharedTensor:
        """Return the sum with public elements, broadcast to the axes of both; takes no message."""
        return SharedTensor(self._plus(shared.share, public), shared.bits)

    def open(self, *tensors: SharedTensor) -> list[SharedTensor]:
        """Open tensors under masks for multiplication; one round of messages, 8 bytes per element.

        A tensor that was opened before stays as it is, and so do its rows and its transpose: a mask
        belongs to one tensor, and every product uses a fresh sharing of the masks' product.
        """
        number = self.next_number()
        closed = [each for each in tensors if each.opened is None]
        if not closed:
            return list(tensors)
        masks = self._masks([each.share for each in closed], number)
        hidden = [each.share for each in closed]
        if self.holds:
            hidden = [self.numbers.sub(*pair) for pair in zip(hidden, masks, strict=True)]
        opened = (
            replace(each, opened=Opened(mask, difference))
            for each, mask, difference in zip(
                closed, masks, self._opened(hidden, number), strict=True
            )
        )
        return [each if each.opened is not None else next(opened) for each in tensors]

    def multiply(
        self, left: SharedTensor, right: SharedTensor, operation: Operation = torch.mul
    ) -> SharedTensor:
        """Multiply two tensors.

        The numbers of fraction bits add up. The product takes one round of messages if a factor was
        not opened before.

        Args:
            left: one factor, of axes that the operation accepts.
            right: the other factor.
            operation: bilinear map, such as `torch.mul` or `vfl.mpc.ring.matmul`.
        """
        left, right = self.open(left, right)
        number, bits, numbers = self.next_number(), left.bits + right.bits, self.numbers
        u, v = left.mask(), right.mask()
        if self.deals:
            whole = numbers.product(operation, self._whole(u), self._whole(v))
            (dealt,) = self._deal([whole], "product", number)
            if not self.holds:
                return SharedTensor(dealt, bits)
        e, f = left.difference(), right.difference()
        share = masked_product(numbers, operation, (e, f), u, self._plus(v, f))
        (dealt,) = self._dealt([share.shape[self.front :]], "product", number)
        return SharedTensor(numbers.add(share, dealt), bits)

    def divide(
        self, shared: SharedTensor, shift: int, *, positive: bool = False, below: bool = False
    ) -> SharedTensor:
        """Divide by 2^shift; the result is rounded down, or is one unit higher.

        In the prime field, the result may also be one unit lower than that. The division takes 8
        bytes per element and one round of messages.

        Args:
            shared: values whose elements are below 2^62 in magnitude; in the prime field, below
                2^59.
            shift: number of low bits to remove.
            positive: whether the elements are from 0 to 2^63 - 1 (in the prime field 2^60 - 1)
                instead of signed.
            below: whether to subtract one unit from the result, so that it never exceeds the exact
                value.
        """
        number, bits, numbers = self.next_number(), shared.bits - shift, self.numbers
        offset, shape = 0 if positive else numbers.offset, shared.shape[self.front :]
        mask = self._mask_to_divide(shared.share, shift, number)
        hidden = shared.share
        if self.holds:
            hidden = self._plus(numbers.add(hidden, mask), torch.tensor(offset))
        (opened,) = self._opened([hidden], number)
        if opened is None or not self.holds:
            return SharedTensor(self._blank(shape), bits)
        low, top = self._dealt([shape] * 2, "parts", number)
        share, public = numbers.quotient(opened, low, top, shift, offset)
        return SharedTensor(self._plus(share, numbers.lift(public - int(below))), bits)

    # Steps that the operations above combine.

    def _masks(self, shares: Sequence[Tensor], number: int) -> list[Tensor]:
        """Return this party's parts of the masks under which it opens tensors; see `_mask`."""
        return [self._mask(each.shape, "mask", at, number=number) for at, each in enumerate(shares)]

    def _mask_to_divide(self, share: Tensor, shift: int, number: int) -> Tensor:
        """Return this party's part of the mask for a division.

        The dealer then also deals shares of the mask's parts.
        """
        mask = self._mask(share.shape, "whole", number=number)
        if self.deals:
            self._deal(self.numbers.parts(self._whole(mask), shift), "parts", number)
        return mask

    def _whole(self, mask: Tensor, numbers: Ring | None = None) -> Tensor:
        """At the dealer, return the sum of all holders' parts of a mask."""
        return mask

    def _opened(self, hidden: Sequence[Tensor], number: int) -> Sequence[Tensor | None]:
        """Open masked shares to each holder; this takes one round of messages."""
        return self._sums(hidden, number) if self.holds else [None] * len(hidden)


def masked_product(
    numbers: Ring,
    operation: Operation,
    opened: tuple[Tensor, Tensor],
    left_mask: Tensor,
    right: Tensor,
    dealt: Tensor | None = None,
) -> Tensor:
    """Return a holder's share of a product: w + e (v + f) + u f, where w is the dealt part.

    Args:
        numbers: number system of the elements.
        operation: bilinear map that is the product.
        opened: e and f, the two factors minus their masks, which all holders know.
        left_mask: this holder's part of u, the mask of the left factor.
        right: this holder's part of v, the mask of the right factor; the first holder has added f
            to it.
        dealt: this holder's share w of the masks' product; None if the caller adds w later.
    """
    e, f = opened
    found = numbers.product(operation, e, right)
    if dealt is not None:
        found = numbers.add(dealt, found)
    return numbers.add(found, numbers.product(operation, left_mask, f))


def one_way_product(
    numbers: Ring, operation: Operation, factors: tuple[Tensor, Tensor], dealt: Tensor
) -> Tensor:
    """Return a holder's share of a product of a factor x that one holder knows in plaintext.

    Args:
        numbers: number system of the elements.
        operation: bilinear map that is the product.
        factors: the two factors at this holder, in the operation's order. At the holder of x, these
            are x and the opening f plus this holder's own share of y, if there is one. At the other
            holder, these are the opening e, and the mask v.
        dealt: this holder's share of the masks' product; see `dealt_product`.
    """
    return numbers.add(numbers.product(operation, *factors), dealt)


def dealt_product(
    numbers: Ring, operation: Operation, masks: tuple[Tensor, Tensor], pad: Tensor
) -> Tensor:
    """At the dealer, return one share of the product of two masks; `pad` is the other share."""
    return numbers.sub(numbers.product(operation, *masks), pad)
