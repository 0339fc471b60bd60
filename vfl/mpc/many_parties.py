"""Additive shares among 2 to 8 holders, and a dealer whose part is done before theirs.

Each holder has one summand of every number; all of them but one learn nothing together. The last
role is the dealer's: it sends correlated randomness one way, to the last holder alone, for the
others draw theirs from streams they have in common with it. It sees no value, unless the form that
asks it with permuted values (`Member.apply`) is chosen. All follow the protocol; the dealer with
all other holders learns what a holder has.

A program is a function of a `Member`. All parties call it with the same shapes; at the dealer a
share is a shape without content. Products open both factors under masks (Beaver 1991) and take a
round, divisions one (Escudero et al. 2020, section 5.1: exact but for one unit, also where every
holder's own division would be wrong), bits four (`Member.bits_of`), one bit as a number one.

Numbers are fixed point in the ring 2^64. Bytes below are payloads a holder sends, n elements.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from vfl.core.errors import WidthError
from vfl.core.frame import Link
from vfl.core.registry import require_range
from vfl.mpc.channel import parted
from vfl.mpc.party import Peer
from vfl.mpc.permuted import permutation
from vfl.mpc.ring import ELEMENT_BITS, Operation, decode, encode
from vfl.mpc.shares import Opened, SharedTensor, blank
from vfl.mpc.stream import KEY_BYTES, PadStream
from vfl.mpc.trio import LocalParties

#: Fewer values are not hidden by an order among them.
LEAST_PERMUTED = 32
MOST_HOLDERS = 8
_FIX = "scale the columns, or take fewer fraction bits"
_SIGN = ELEMENT_BITS - 1
_LOW = (1 << _SIGN) - 1
#: What makes a number that is divided positive, if it is below it.
_OFFSET = 1 << (_SIGN - 1)
#: Elements that `Lockstep` draws at once.
_BLOCK = 1 << 16
#: Factors of one product of bits, and what it takes to reach every bit of a word.
_FAN = 4
_STRIDES = (1, 4, 16)

#: A product of bits: words by their index, each moved by so many places, up if positive.
Factors = tuple[tuple[int, int], ...]


class Member(Peer):
    """One of the holders, or the dealer.

    Args:
        role: from 0; the last is the dealer's.
        links: to the others, by role. Nobody but its two ends may read one.
        holders: how many there are, 2 to 8.
        bits: fraction bits of shared values.

    Attributes:
        dealer: the dealer's role.
    """

    def __init__(self, role: int, links: Mapping[int, Link], holders: int, bits: int = 20) -> None:
        require_range("holders", holders, 2, MOST_HOLDERS)
        require_range("bits", bits, 8, 24)
        super().__init__(role, links, {"holders": holders, "bits": bits})
        self.holders, self.bits, self.dealer = holders, bits, holders
        self._order: PadStream | None = None

    @property
    def deals(self) -> bool:
        """Whether this is the dealer."""
        return self.role == self.dealer

    @property
    def holds(self) -> bool:
        """Whether this is a holder; `Lockstep` is all of them, and the dealer too."""
        return self.role != self.dealer

    @property
    def others(self) -> list[int]:
        """The other holders."""
        return [holder for holder in range(self.holders) if holder != self.role]

    def agree(self, terms: Mapping[str, Any], session: str, attempt: int = 0) -> None:
        """See `Peer.agree`; the holders then have a stream in common that the dealer lacks."""
        super().agree(terms, session, attempt)
        if self.deals:
            return
        if self.role == 0:
            key = self.pads[1].elements64(KEY_BYTES // 8, "order").tobytes()
            for holder in self.others[1:]:
                self.channels[holder].send_bytes(key, 0, "setup")
        elif self.role == 1:
            key = self.pads[0].elements64(KEY_BYTES // 8, "order").tobytes()
        else:
            key = bytes(self.channels[0].receive_bytes(0, KEY_BYTES))
        self._order = PadStream(key)

    # Values in and out.

    def share(
        self, owner: int, shape: Sequence[int], values: Tensor | None, where: str, bits: int = -1
    ) -> SharedTensor:
        """Values of one holder as shares; no message.

        Args:
            owner: whose values they are.
            shape: their axes, which everybody knows.
            values: the values at their owner, None elsewhere.
            where: their name, for messages.
            bits: fraction bits, the member's own if negative.

        Raises:
            RingRangeError: a value does not fit.
        """
        number, bits = self.next_number(), self.bits if bits < 0 else bits
        if self.deals:
            return SharedTensor(blank(shape), bits)
        if owner != self.role:
            return SharedTensor(self.pad(owner, shape, "share", number), bits)
        assert values is not None, "the owner has the values"
        own = encode(values, bits, where, _SIGN - 1 - bits, _FIX)
        for holder in self.others:
            own = own - self.pad(holder, shape, "share", number)
        return SharedTensor(own, bits)

    def own(self, elements: Tensor, bits: int) -> SharedTensor:
        """What every holder adds of its own, as one sum: each one's part is its share."""
        return SharedTensor(blank(elements.shape) if self.deals else elements, bits)

    def public(self, shared: SharedTensor, value: float, factor: int = 1) -> SharedTensor:
        """``factor * shared + value``: what needs no message; the value at the shared scale."""
        share = shared.share * factor
        if self.role == 0:
            share = share + round(value * 2.0**shared.bits)
        return SharedTensor(share, shared.bits)

    def reveal(self, shared: SharedTensor, where: str, to: int | None = None) -> Tensor | None:
        """The values at one holder, or at all; float64, None elsewhere. 8 n bytes, one round."""
        number = self.next_number()
        if self.deals:
            return None
        if to not in (None, self.role):
            self.channels[to].send([shared.share], number)
            return None
        total = shared.share
        if to is None:
            (total,) = self._sums([shared.share], number)
        else:
            for holder in self.others:
                total = total + self.channels[holder].receive([shared.shape], number)[0]
        self.leakage.count("result", where, total.numel(), total.numel())
        return decode(total, shared.bits)

    def shuffled(self, *tensors: SharedTensor) -> list[SharedTensor]:
        """The rows of tensors of as many rows, in one order that the dealer does not know.

        The dealer then cannot tell whose row it is that a later operation picks. No message.
        """
        number = self.next_number()
        if self.deals:
            return list(tensors)
        assert self._order is not None, "`agree` comes first"
        order = permutation(self._order, len(tensors[0].share), "rows", number)
        return [each.rows(torch.from_numpy(order)) for each in tensors]

    # Products and divisions.

    def open(self, *tensors: SharedTensor) -> list[SharedTensor]:
        """The same tensors, ready to be multiplied, in one round; 8 bytes an element.

        A tensor that was opened before stays as it is, and so do its rows and its transpose: a mask
        stands for one tensor, and meets a fresh one in every product.
        """
        number = self.next_number()
        closed = [each for each in tensors if each.opened is None]
        masks = [
            self._mask(each.shape, "mask", at, number=number) for at, each in enumerate(closed)
        ]
        differences: Sequence[Tensor | None] = [None] * len(closed)
        if self.holds and closed:
            pairs = zip(closed, masks, strict=True)
            differences = self._sums([each.share - mask for each, mask in pairs], number)
        opened = (
            replace(each, opened=Opened(mask, difference))
            for each, mask, difference in zip(closed, masks, differences, strict=True)
        )
        return [each if each.opened is not None else next(opened) for each in tensors]

    def multiply(
        self, left: SharedTensor, right: SharedTensor, operation: Operation = torch.mul
    ) -> SharedTensor:
        """A product, with the fractions of both; one round where a factor was not opened before.

        Args:
            left: one factor, of axes that the operation takes.
            right: the other.
            operation: a bilinear map: `torch.mul`, `vfl.mpc.ring.matmul` and the like.
        """
        left, right = self.open(left, right)
        number, bits = self.next_number(), left.bits + right.bits
        u, v = left.mask(), right.mask()
        if self.deals:
            whole = operation(self._whole(u), self._whole(v))
            (dealt,) = self._deal([whole], "product", number)
            if not self.holds:
                return SharedTensor(dealt, bits)
        e, f = left.difference(), right.difference()
        share = operation(e, self._plus(v, f)) + operation(u, f)
        return SharedTensor(share + self._dealt([share.shape], "product", number)[0], bits)

    def divide(
        self, shared: SharedTensor, shift: int, *, positive: bool = False, below: bool = False
    ) -> SharedTensor:
        """Without its lowest fraction bits: rounded down, or one unit more. 8 n bytes, one round.

        Args:
            shared: values whose elements are below 2^62 in magnitude.
            shift: how many bits.
            positive: they are from 0 to 2^63 instead.
            below: one unit less, so that it is never above the value.
        """
        number, offset = self.next_number(), 0 if positive else _OFFSET
        mask = self._mask(shared.shape, "whole", number=number)
        if self.deals:
            whole = self._whole(mask)
            self._deal([(whole & _LOW) >> shift, _upper(whole, _SIGN)], "parts", number)
            if not self.holds:
                return SharedTensor(blank(shared.shape), shared.bits - shift)
        hidden = self._plus(shared.share + mask, offset)
        (opened,) = self._sums([hidden], number)
        low, top = self._dealt([shared.shape] * 2, "parts", number)
        # Whether the lower 63 bits carried: the two uppermost bits differ. As numbers, for those
        # of the mask are shared: b + t - 2 b t.
        public = _upper(opened, _SIGN)
        share = (top * (1 - 2 * public) << (_SIGN - shift)) - low
        known = ((opened & _LOW) >> shift) + (public << (_SIGN - shift))
        share = self._plus(share, known - ((offset >> shift) + below))
        return SharedTensor(share, shared.bits - shift)

    # Bits. Words of 64 bits whose exclusive or is the secret; n words each.

    def bits_of(self, shared: SharedTensor) -> Tensor:
        """Its elements' bits as words of shared bits. 56 n bytes, four rounds.

        A sum's carries take log4(64) rounds where products of four bits take one.
        """
        generate, total = self._summed(shared)
        propagate = total
        for stride in _STRIDES:
            generate, propagate = self._carried(generate, propagate, stride)
        # The mask less the opened number is this sum's complement.
        return self._flipped(total ^ (generate << 1), -1)

    def highest_bit(self, words: Tensor) -> Tensor:
        """Of each word the uppermost bit that is one, alone; 24 n bytes, three rounds."""
        empty = self._flipped(words, -1)
        for stride in _STRIDES:
            (empty,) = self._ands([empty], [tuple((0, -at * stride) for at in range(_FAN))])
        # Places from which on all above are empty, less those where this one is too.
        return empty ^ (_down(empty, 1, ones=self.role == 0))

    def numbers_of(self, words: Tensor, places: Sequence[int]) -> SharedTensor:
        """Bits as the numbers 0 and 1; axes (places, *those of the words). One round.

        8 n bytes, or n / 8 of the uppermost bit alone.
        """
        number, shape = self.next_number(), torch.Size((len(places), *words.shape))
        every = ELEMENT_BITS if tuple(places) == (_SIGN,) else 1
        mask = self._mask(words.shape, "word", number=number, of_bits=True)
        bits = torch.stack([_upper(mask, place) & 1 for place in places])
        if self.deals:
            self._deal([bits], "numbers", number)
            return SharedTensor(blank(shape), 0)
        (opened,) = self._sums([_squeezed(words ^ mask, every)], number, of_bits=True)
        opened = _spread(opened, words.shape, every)
        (dealt,) = self._dealt([shape], "numbers", number)
        public = torch.stack([_upper(opened, place) & 1 for place in places])
        share = dealt * (1 - 2 * public)
        return SharedTensor(share + public if self.role == 0 else share, 0)

    def is_negative(self, shared: SharedTensor) -> SharedTensor:
        """1 where a value is below 0, else 0; no fraction bits. 29 n bytes, five rounds.

        Of the carries only the last counts, so each round needs a quarter of the bits before.
        """
        generate, total = self._summed(shared)
        carry, propagate = generate << 1, total << 1
        for stride in _STRIDES:
            carry, propagate = self._carried(carry, propagate, stride, last=True)
        return SharedTensor(self.numbers_of(self._flipped(total ^ carry, -1), [_SIGN]).share[0], 0)

    def apply(
        self, shared: SharedTensor, function: Callable[[Tensor], Tensor], where: str, bits: int = -1
    ) -> SharedTensor:
        """A function of every element, exactly, by the dealer; 8 n bytes, two messages.

        The dealer sees the values, in an order it does not know: the multiset of them.

        Raises:
            WidthError: they are too few to hide one another.
            RingRangeError: a result does not fit.
        """
        number, count = self.next_number(), shared.share.numel()
        bits = self.bits if bits < 0 else bits
        if count < LEAST_PERMUTED:
            raise WidthError(
                "too few values to hide among one another",
                where=where,
                got=f"{count}",
                want=f"at least {LEAST_PERMUTED}",
                fix="take larger batches, or the form that shows the dealer nothing",
            )
        if self.deals:
            seen = torch.zeros(count, dtype=torch.int64)
            for holder in range(self.holders):
                seen += self.channels[holder].receive([(count,)], number)[0]
            self.leakage.count("permuted values", where, count, count)
            found = encode(function(decode(seen, shared.bits)), bits, where, _SIGN - 1 - bits, _FIX)
            self._deal([found], "answer", number, phase="online")
            return SharedTensor(blank(shared.shape), bits)
        assert self._order is not None, "`agree` comes first"
        order = torch.from_numpy(permutation(self._order, count, "elements", number))
        hidden = shared.share.reshape(-1)[order]
        for holder in self.others:  # shares that tell no more than their sum
            fresh = self.pad(holder, (count,), "fresh", number)
            hidden = hidden + fresh if self.role < holder else hidden - fresh
        self.channels[self.dealer].send([hidden], number)
        (answer,) = self._dealt([(count,)], "answer", number)
        found = torch.empty_like(answer)
        found[order] = answer
        return SharedTensor(found.reshape(shared.shape), bits)

    # What the above is made of.

    def _summed(self, shared: SharedTensor) -> tuple[Tensor, Tensor]:
        """Which bits of two words are both one, and which differ.

        Their sum is the complement of the element, which is what was opened less a mask whose bits
        are dealt.
        """
        number = self.next_number()
        mask = self._mask(shared.shape, "whole", number=number)
        if self.deals:
            self._deal([mask], "bits", number, of_bits=True)
            return blank(shared.shape), blank(shared.shape)
        (opened,) = self._sums([shared.share + mask], number)
        (word,) = self._dealt([shared.shape], "bits", number, of_bits=True)
        return ~opened & word, self._flipped(word, ~opened)

    def _carried(
        self, generate: Tensor, propagate: Tensor, stride: int, *, last: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Which runs of 4 `stride` bits make a carry, and which pass one on, from shorter runs.

        With `last` only of runs that end at every so many bits, the uppermost included.
        """
        above = [(*((1, at * stride) for at in range(n)), (0, n * stride)) for n in range(1, _FAN)]
        whole = tuple((1, at * stride) for at in range(_FAN))
        every = (stride, _FAN * stride) if last else (1, 1)
        *carried, propagated = self._ands([generate, propagate], [*above, whole], *every)
        return reduce(torch.bitwise_xor, carried, generate), propagated

    def _ands(
        self, words: Sequence[Tensor], products: Sequence[Factors], given: int = 1, wanted: int = 1
    ) -> list[Tensor]:
        """Products of bits, moved or not, in one round; 8 bytes a word.

        Of factors that were opened under masks the product is a sum over subsets: those masks'
        product, which is dealt, times the other factors' openings (Beaver 1991 has two factors).
        Bits that a move upwards brings in are zeros, downwards ones.

        Args:
            words: shared.
            products: of which words, moved how far.
            given: words count at every so many bits only, the last one included.
            wanted: likewise of the products.
        """
        number, shape = self.next_number(), words[0].shape
        masks = [
            self._mask(each.shape, "bits", at, number=number, of_bits=True)
            for at, each in enumerate(words)
        ]
        subsets = list(
            dict.fromkeys(
                subset
                for factors in products
                for size in range(2, len(factors) + 1)
                for subset in combinations(factors, size)
            )
        )
        if self.deals:
            made = [
                reduce(torch.bitwise_and, [_moved(masks[word], by) for word, by in subset])
                for subset in subsets
            ]
            made = [_squeezed(each, wanted) for each in made]
            self._deal(made, "products", number, of_bits=True)
            return [blank(shape)] * len(products)
        hidden = [_squeezed(word ^ mask, given) for word, mask in zip(words, masks, strict=True)]
        opened = [_spread(each, shape, given) for each in self._sums(hidden, number, of_bits=True)]
        sizes = [_squeezed(words[0], wanted).shape] * len(subsets)
        dealt = self._dealt(sizes, "products", number, of_bits=True)
        of_masks = {
            subset: _spread(each, shape, wanted)
            for subset, each in zip(subsets, dealt, strict=True)
        }
        found = []
        for factors in products:
            known = {(word, by): _moved(opened[word], by, ones=True) for word, by in factors}
            of_masks |= {((word, by),): _moved(masks[word], by) for word, by in factors}
            total = torch.zeros_like(words[0])
            if self.role == 0:
                total ^= reduce(torch.bitwise_and, known.values())
            for size in range(1, len(factors) + 1):
                for subset in combinations(factors, size):
                    rest = [known[each] for each in factors if each not in subset]
                    total ^= reduce(torch.bitwise_and, rest, of_masks[subset])
            found.append(total)
        return found

    def _plus(self, share: Tensor, public: Tensor | int) -> Tensor:
        """A shared value and a public one, which the first holder adds."""
        return share + public if self.role == 0 else share

    def _whole(self, mask: Tensor) -> Tensor:
        """At the dealer: what all holders' parts of a mask are together."""
        return mask

    def _flipped(self, word: Tensor, where: Tensor | int) -> Tensor:
        """A shared word with some public bits the other way."""
        return word ^ where if self.role == 0 else word

    def _sums(self, parts: Sequence[Tensor], number: int, *, of_bits: bool = False) -> list[Tensor]:
        """What all holders' parts are together, at each of them; one round."""
        for holder in self.others:
            self.channels[holder].send(parts, number)
        totals = list(parts)
        for holder in self.others:
            theirs = self.channels[holder].receive([part.shape for part in parts], number)
            totals = [_joined(*pair, of_bits) for pair in zip(totals, theirs, strict=True)]
        return totals

    def _mask(
        self, shape: Sequence[int], *purpose: str | int, number: int, of_bits: bool = False
    ) -> Tensor:
        """This holder's part of a uniform mask; at the dealer the whole."""
        if not self.deals:
            return self.pad(self.dealer, shape, "part", *purpose, number)
        parts = [
            self.pad(holder, shape, "part", *purpose, number) for holder in range(self.holders)
        ]
        return reduce(lambda one, two: _joined(one, two, of_bits), parts)

    def _deal(
        self,
        values: Sequence[Tensor],
        name: str,
        number: int,
        *,
        of_bits: bool = False,
        phase: str = "offline",
    ) -> list[Tensor]:
        """At the dealer: shares of what it knows, of which only the last holder is sent one."""
        last = self.holders - 1
        size = sum(value.numel() for value in values)
        rest = torch.cat([value.reshape(-1) for value in values])
        for holder in range(last):
            pad = self.pad(holder, (size,), name, number)
            rest = rest ^ pad if of_bits else rest - pad
        self.channels[last].send([rest], number, phase)
        return [blank(value.shape) for value in values]

    def _dealt(
        self, shapes: Sequence[Sequence[int]], name: str, number: int, *, of_bits: bool = False
    ) -> list[Tensor]:
        """At a holder: its share of what the dealer dealt, by `_deal` of the same arguments."""
        if self.role == self.holders - 1:
            return self.channels[self.dealer].receive(shapes, number)
        size = sum(torch.Size(shape).numel() for shape in shapes)
        return parted(self.pad(self.dealer, (size,), name, number), shapes)


class Lockstep(Member):
    """All holders and the dealer in one process, one operation after the other, without messages.

    Shares and masks have an axis of holders in front; what is opened has none. It multiplies and
    divides, by the methods of `Member`; comparisons want parties of their own.

    Args:
        holders: 2 to 8.
    """

    deals, holds = True, True

    def __init__(self, holders: int) -> None:
        super().__init__(0, {}, holders)
        self._stream = PadStream(secrets.token_bytes(KEY_BYTES))
        self._block, self._taken, self._blocks = torch.empty(0, dtype=torch.int64), 0, 0
        self._waiting: list[Tensor] = []
        self._divisions: dict[int, tuple[Sequence[Tensor], int]] = {}

    def _uniform(self, shape: Sequence[int]) -> Tensor:
        """Fresh elements, drawn from the stream a block at a time."""
        count = math.prod(shape)
        if self._taken + count > len(self._block):
            self._blocks += 1
            drawn = self._stream.elements64(max(_BLOCK, count), "block", self._blocks)
            self._block, self._taken = torch.from_numpy(drawn.view("i8")), 0
        self._taken += count
        return self._block[self._taken - count : self._taken].view(tuple(shape))

    def split(self, whole: Tensor) -> Tensor:
        """Fresh shares of elements; axes (holders, *theirs)."""
        shares = torch.empty((self.holders, *whole.shape), dtype=torch.int64)
        shares[1:] = self._uniform((self.holders - 1, *whole.shape))
        torch.sub(whole, shares[1] if self.holders == 2 else shares[1:].sum(0), out=shares[0])
        return shares

    def divide(
        self, shared: SharedTensor, shift: int, *, positive: bool = False, below: bool = False
    ) -> SharedTensor:
        """See `Member.divide`; what is dealt for it is dealt a block at a time."""
        shape, offset = shared.share.shape, 0 if positive else _OFFSET
        mask, part, turn = self._division(shift, shape)
        opened = self._whole(shared.share + mask) + offset
        # The share is p - t (1 - 2 b) of what is dealt and b, the upper bit of what was opened.
        share = torch.addcmul(part, turn, opened >> _SIGN)
        share[0] += ((opened >> shift) & ((1 << ELEMENT_BITS - shift) - 1)) - (
            (offset >> shift) + below
        )
        return SharedTensor(share, shared.bits - shift)

    def _division(self, shift: int, shape: Sequence[int]) -> list[Tensor]:
        """Shares of a mask, of its upper bit less its other ones, and of twice that bit."""
        count = math.prod(shape[1:])
        block, taken = self._divisions.get(shift, ((), _BLOCK))
        if taken + count > (block[0].shape[1] if block else 0):
            mask = self._uniform((self.holders, max(_BLOCK // 4, count)))
            whole = self._whole(mask)
            top = _upper(whole, _SIGN) << (_SIGN - shift)
            block, taken = (mask, self.split(top - ((whole & _LOW) >> shift)), self.split(top)), 0
            block[2].mul_(2)
        self._divisions[shift] = (block, taken + count)
        return [each[:, taken : taken + count].view(tuple(shape)) for each in block]

    def _mask(
        self, shape: Sequence[int], *purpose: str | int, number: int, of_bits: bool = False
    ) -> Tensor:
        return self._uniform(shape)

    def _whole(self, mask: Tensor) -> Tensor:
        return mask[0] + mask[1] if self.holders == 2 else mask.sum(0)

    def _plus(self, share: Tensor, public: Tensor | int) -> Tensor:
        if isinstance(public, Tensor) and public.dim() >= share.dim():
            share = share.expand(self.holders, *public.shape)
        added = share.clone()
        added[0] += public
        return added

    def _deal(
        self,
        values: Sequence[Tensor],
        name: str,
        number: int,
        *,
        of_bits: bool = False,
        phase: str = "offline",
    ) -> list[Tensor]:
        self._waiting = [self.split(value) for value in values]
        return self._waiting

    def _dealt(
        self, shapes: Sequence[Sequence[int]], name: str, number: int, *, of_bits: bool = False
    ) -> list[Tensor]:
        return self._waiting

    def _sums(self, parts: Sequence[Tensor], number: int, *, of_bits: bool = False) -> list[Tensor]:
        return [self._whole(part) for part in parts]


class LocalMembers(LocalParties[Member]):
    """Holders and a dealer as threads of this process.

    Args:
        holders: 2 to 8.
        bits: fraction bits of shared values.
        terms: what the parties compare before they begin.
        timeout_s: how long a party waits for a message.
    """

    def __init__(
        self,
        holders: int,
        bits: int = 20,
        terms: Mapping[str, Any] | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        require_range("holders", holders, 2, MOST_HOLDERS)
        super().__init__(
            lambda role, links: Member(role, links, holders, bits), timeout_s, holders + 1
        )
        self.agree(terms or {})


def _joined(one: Tensor, two: Tensor, of_bits: bool) -> Tensor:
    return one ^ two if of_bits else one + two


def _upper(word: Tensor, place: int) -> Tensor:
    """A word's bits from a place on, moved down to the first; zeros come in."""
    return _down(word, place, ones=False)


def _down(word: Tensor, by: int, *, ones: bool) -> Tensor:
    if by == 0:
        return word
    kept = (1 << (ELEMENT_BITS - by)) - 1
    return (word >> by) | ~kept if ones else (word >> by) & kept


def _moved(word: Tensor, by: int, *, ones: bool = False) -> Tensor:
    """Up, with zeros, or down, with zeros or ones."""
    return word << by if by >= 0 else _down(word, -by, ones=ones)


def _squeezed(words: Tensor, every: int) -> Tensor:
    """Every so many bits of words, the uppermost included, so many words in one; one axis.

    >>> _squeezed(torch.tensor([-(2**63), 0, 0, 2**47]), 16)
    tensor([281509336449024])
    >>> _spread(_, (4,), 16).tolist() == [-(2**63), 0, 0, 2**47]
    True
    """
    if every == 1:
        return words
    flat = torch.nn.functional.pad(
        _picked(words.reshape(-1), every - 1, every), (0, -words.numel() % every)
    )
    rows = flat.reshape(every, -1)
    joined: Tensor = reduce(torch.bitwise_or, [row << at for at, row in enumerate(rows)])
    return joined


def _spread(squeezed: Tensor, shape: Sequence[int], every: int) -> Tensor:
    """The words of `_squeezed`, with zeros elsewhere."""
    if every == 1:
        return squeezed
    rows = [_picked(squeezed, at, every) << (every - 1) for at in range(every)]
    return torch.cat(rows)[: torch.Size(shape).numel()].reshape(tuple(shape))


def _picked(words: Tensor, by: int, every: int) -> Tensor:
    """Moved down, and of that every so many bits, the lowest included."""
    bits = sum(1 << place for place in range(0, ELEMENT_BITS, every))
    picked: Tensor = (words >> by) & bits
    return picked
