"""Additive shares among 2 to 8 holders, with a dealer that makes its numbers ahead of the holders.

See `vfl.mpc.engine`. The dealer sees no shared value, except in one operation that shows it the
values in permuted order (`Member.apply`). All parties are assumed to follow the protocol. All
holders but one together learn nothing about the remaining holder's values. The dealer together with
any one holder learns every value that is opened under a mask: every factor, and every divided or
compared value.

Products and divisions take one round each. Divisions follow Escudero et al. 2020, section 5.1: the
quotient is exact to one unit, also where a separate division of each share would give a wrong
result. Extracting all bits of a value (`Member.bits_of`) takes four rounds of messages; converting
one bit to a number takes one round.

Numbers have fixed-point form: real numbers are integers of the ring 2^64. The byte counts in the
docstrings below are payloads that one holder sends for n elements.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor

from vfl.core.errors import WidthError
from vfl.core.frame import Link
from vfl.core.registry import require_range
from vfl.mpc.channel import Shape
from vfl.mpc.engine import BeaverEngine
from vfl.mpc.in_process import LocalParties
from vfl.mpc.numbers import LOW, SIGN, WORDS, Ring, broadcast, reach, upper
from vfl.mpc.permuted import permutation
from vfl.mpc.ring import ELEMENT_BITS, Operation, decode, encode
from vfl.mpc.rules import LEAST_PERMUTED
from vfl.mpc.shares import Opened, SharedTensor, blank
from vfl.mpc.stream import KEY_BYTES, PadStream

MOST_HOLDERS = 8
_FIX = "scale the columns, or take fewer fraction bits"
#: Number of random elements that `Lockstep` draws from its key stream at once.
_BLOCK = 1 << 16
#: Number of bits that one product of bits multiplies; and the distances between these bits in the
#: three rounds, which together reach all 64 bits of a word.
_FAN = 4
_STRIDES = (1, 4, 16)
_FANNED = torch.arange(_FAN)[:, None]

#: Number of words that the code processes at once, so that they stay in a processor's cache.
_PIECE = 1 << 12

#: Factors of a product of bits: for each factor, the index of its word, and the number of positions
#: by which the word is shifted (positive means up).
Factors = tuple[tuple[int, int], ...]


class BitEngine(BeaverEngine):
    """Engine that also extracts the bits of shared elements, and multiplies such bits."""

    # In these methods, a word has 64 bits; a secret word is the exclusive or of the holders' shares
    # of it; n is the number of words in a share.

    def bits_of(self, shared: SharedTensor) -> Tensor:
        """Return the bits of shared elements as words of shared bits.

        The conversion takes 56 n bytes and four rounds of messages.

        The carries of a sum take log4(64) = 3 rounds of messages, because each round multiplies
        four bits at a time.
        """
        generate, total = self._summed(shared)
        propagate = total
        for stride in _STRIDES:
            generate, propagate = self._carried(generate, propagate, stride)
        # The mask minus the opened number is the complement of this sum of words.
        return self._flipped(total ^ (generate << 1), -1)

    def highest_bit(self, words: Tensor) -> Tensor:
        """Keep only the highest bit that is 1 in each word.

        The operation takes 24 n bytes and three rounds of messages.
        """
        empty = self._flipped(words, -1)
        for stride in _STRIDES:
            (empty,) = self._ands([empty], [tuple((0, -at * stride) for at in range(_FAN))])
        # Mark the positions above which no bit is 1; then remove the marks at positions whose own
        # bit is 0.
        return empty ^ self._flipped(upper(empty, 1), -1 << SIGN)

    def numbers_of(self, words: Tensor, places: Sequence[int]) -> SharedTensor:
        """Convert shared bits to shared numbers 0 and 1; axes (positions, *word axes). One round.

        The conversion takes 8 n bytes.
        """
        return self._numbers(words, lambda each: _at(places, each))

    def is_negative(self, shared: SharedTensor) -> SharedTensor:
        """Return 1 where a value is below 0, else 0, as numbers without fraction bits.

        The test takes 29 n bytes and five rounds of messages. Only the carry into the highest bit
        is needed, so each round processes a quarter of the bits of the round before.
        """
        shape = shared.shape[self.front :]
        generate, total = map(self._in_a_row, self._summed(shared))
        carry, propagate, counts = generate << 1, total << 1, []
        for stride in _STRIDES:
            counts.append(total.shape[-1])
            carry, propagate = self._carried(carry, propagate, stride, last=True)
            total = _squeezed(total, stride)

        def signs(words: Tensor) -> Tensor:
            for count, stride in zip(reversed(counts), reversed(_STRIDES), strict=True):
                words = _spread(words, count, stride)
            return upper(words, SIGN).view(shape)

        return self._numbers(self._flipped(total ^ carry, -1), signs)

    def leading(self, shared: SharedTensor, places: Sequence[int]) -> SharedTensor:
        """Return the position of the highest 1 bit of each magnitude, and the sign, as integers.

        The operation discloses nothing about the values. The operation takes 88 n bytes and eight
        rounds of messages. For a negative element, the position is that of the complement, which is
        the magnitude minus one.

        Returns:
            axes (positions + 1, *element axes): an entry is 1 at the highest bit's position, if
            that position is in `places`; the last entry is 1 if the element is below 0.
        """
        words = self.bits_of(shared)
        magnitude = words ^ (words >> SIGN)  # each holder flips by its own share of the sign
        # the uppermost bit of a magnitude is 0, so the sign fits there
        top = self.highest_bit(magnitude)
        return self.numbers_of((top & LOW) | (words & ~LOW), [*places, SIGN])

    # Steps that the operations above combine.

    def _summed(self, shared: SharedTensor) -> tuple[Tensor, Tensor]:
        """Return two shared words: the bits that are 1 in two words, and those that differ.

        The sum of the two words is the complement of the element: the first word has the bits of
        the opened number, the second word has the dealt bits of the mask.
        """
        number, shape = self.next_number(), shared.shape[self.front :]
        mask = self._mask(shared.shape, "whole", number=number)
        if self.deals:
            self._deal([self._whole(mask)], "bits", number, numbers=WORDS)
            if not self.holds:
                return blank(shape), blank(shape)
        (opened,) = self._sums([shared.share + mask], number)
        (word,) = self._dealt([shape], "bits", number)
        return ~opened & word, self._flipped(word, ~opened)

    def _numbers(self, words: Tensor, bits: Callable[[Tensor], Tensor]) -> SharedTensor:
        """Convert shared bits to numbers 0 and 1.

        The function `bits` extracts the bits from a word. One round.
        """
        number = self.next_number()
        mask = self._mask(words.shape, "word", number=number, numbers=WORDS)
        if self.deals:
            (dealt,) = self._deal([bits(self._whole(mask, WORDS))], "numbers", number)
            if not self.holds:
                return SharedTensor(dealt, 0)
        (opened,) = self._sums([words ^ mask], number, numbers=WORDS)
        public = bits(opened)
        (dealt,) = self._dealt([public.shape], "numbers", number)
        return SharedTensor(self._plus(dealt * (1 - 2 * public), public), 0)

    def _carried(
        self, generate: Tensor, propagate: Tensor, stride: int, *, last: bool = False
    ) -> tuple[Tensor, Tensor]:
        """For runs of 4 `stride` bits, return which runs generate a carry, and which propagate one.

        The arguments state the same for runs of `stride` bits. With `last`, the result is valid
        only for runs that end at every (4 `stride`)-th bit, including the highest bit; `_squeezed`
        packs these results.
        """
        above = [(*((1, at * stride) for at in range(n)), (0, n * stride)) for n in range(1, _FAN)]
        whole = tuple((1, at * stride) for at in range(_FAN))
        *carried, propagated = self._ands(
            [generate, propagate], [*above, whole], stride if last else 0
        )
        if last:
            generate = _squeezed(generate, stride)
        return reduce(torch.bitwise_xor, carried, generate), propagated

    def _ands(
        self, words: Sequence[Tensor], products: Sequence[Factors], stride: int = 0
    ) -> Sequence[Tensor]:
        """Multiply bits of words, shifted if the factors say so.

        The products take one round of messages and 8 bytes per word. For factors opened under
        masks, the product is a sum over subsets: each term is the dealt product of a subset's
        masks, times the openings of the other factors (Beaver 1991 has two factors). A shift up
        fills the free bits with zeros, and a shift down fills them with ones.

        Args:
            words: shared words.
            products: for each product, its factors, as `Factors` describes them.
            stride: stride by which `_squeezed` packs the products if only some of their bits are
                needed.
        """
        number, plan, shape = self.next_number(), _planned(tuple(products)), words[0].shape
        sizes = *shape[: self.front], len(words), shape[self.front :].numel()
        masks = self._mask(sizes, "bits", number=number, numbers=WORDS)

        def moved(words: Tensor, *, ones: bool = False) -> Tensor:
            every = plan.moved(words, ones=ones)
            return _squeezed(every, stride) if stride else every

        if self.deals:
            pieces = _pieces(moved(self._whole(masks, WORDS)))
            made = torch.cat([plan.of_subsets(piece) for piece in pieces], -1)
            self._deal([made], "products", number, numbers=WORDS)
            if not self.holds:
                return [blank((made.shape[-1],) if stride else shape)] * len(products)
        hidden = torch.stack([self._in_a_row(each) for each in words], self.front) ^ masks
        (opened,) = self._sums([hidden], number, numbers=WORDS)
        openings = moved(opened, ones=True)
        (dealt,) = self._dealt([(plan.subsets, openings.shape[-1])], "products", number)
        every = map(_pieces, (moved(masks), dealt, openings))
        found = [self._sums_of_products(plan, *each) for each in zip(*every, strict=True)]
        shape = torch.Size((*shape[: self.front], -1)) if stride else shape
        return [torch.cat(each, -1).reshape(shape) for each in zip(*found, strict=True)]

    def _sums_of_products(
        self, plan: _Plan, masks: Tensor, dealt: Tensor, openings: Tensor
    ) -> list[Tensor]:
        none = self._flipped(torch.zeros_like(dealt.narrow(-2, 0, 1)), -1)
        return plan.sums(torch.cat([masks, dealt, none], -2), openings)

    def _in_a_row(self, words: Tensor) -> Tensor:
        return words.reshape(*words.shape[: self.front], -1)

    def _flipped(self, word: Tensor, where: Tensor | int) -> Tensor:
        """Flip the bits of a shared word at which the public word `where` has a 1."""
        return word ^ where if self.first else word


class Member(BitEngine):
    """One party of a computation on shares: a holder of shares, or the dealer.

    Args:
        role: number of the role, counted from 0; the last role is the dealer's.
        links: links to the other parties, by role. Only the two parties of a link are able to read
            it.
        holders: number of holders, 2 to 8.
        bits: fraction bits of shared values.
    """

    def __init__(self, role: int, links: Mapping[int, Link], holders: int, bits: int = 20) -> None:
        require_range("holders", holders, 2, MOST_HOLDERS)
        require_range("bits", bits, 8, 24)
        super().__init__(role, links, holders, {"holders": holders, "bits": bits})
        self.bits = bits
        self._order: PadStream | None = None

    def agree(self, terms: Mapping[str, Any], session: str, attempt: int = 0) -> None:
        """See `Peer.agree`; the holders then share a key stream that the dealer lacks."""
        super().agree(terms, session, attempt)
        self._order = self._stream_of_holders()

    # Operations by which the values of one holder become shares.

    def share(
        self, owner: int, shape: Sequence[int], values: Tensor | None, where: str, bits: int = -1
    ) -> SharedTensor:
        """Share values of one holder; this takes no message.

        Args:
            owner: role number of the holder that knows the values.
            shape: axes of the values, which every party knows.
            values: the values at their owner; None at all other parties.
            where: name of the values, for error messages.
            bits: number of fraction bits; a negative number selects the `bits` of this party.

        Raises:
            RingRangeError: a value does not fit into the ring.
            NonFiniteError: a value is NaN or infinite.
        """
        number, bits = self.next_number(), self.bits if bits < 0 else bits
        own = None
        if owner == self.role:
            assert values is not None, "the owner passes the values"
            own = encode(values, bits, where, SIGN - 1 - bits, _FIX)
        return self._share(number, owner, shape, own, bits)

    def own(self, elements: Tensor, bits: int) -> SharedTensor:
        """Treat each holder's own elements as its share of their sum; this takes no message."""
        return SharedTensor(blank(elements.shape) if self.deals else elements, bits)

    def public(self, shared: SharedTensor, value: float, factor: int = 1) -> SharedTensor:
        """Return ``factor * shared + value``; takes no message.

        The public `value` gets the fraction bits of `shared`.
        """
        share = shared.share * factor
        if self.first:
            share = share + round(value * 2.0**shared.bits)
        return SharedTensor(share, shared.bits)

    def shuffled(self, *tensors: SharedTensor) -> list[SharedTensor]:
        """Permute the rows of all tensors in one common random order that the dealer does not know.

        If a later operation lets the dealer select a row, the dealer then cannot identify the row's
        owner. No message.
        """
        number = self.next_number()
        if self.deals:
            return list(tensors)
        assert self._order is not None, "`agree` comes first"
        order = permutation(self._order, len(tensors[0].share), "rows", number)
        return [each.rows(torch.from_numpy(order)) for each in tensors]

    # Operations on quotients; a division already opens its result under a mask.

    def quotient(self, shared: SharedTensor, shift: int) -> SharedTensor:
        """Divide as `divide` does, and store the opening for later element-wise products.

        The holders learn c = x + offset + r, where x is the value and r a mask, so they know the
        quotient up to a mask. The public summand of the quotient is c / 2^shift, where c is read as
        a number without sign, minus offset / 2^shift. The shared summand is one of two masks, A or
        A + B; the highest bit b of c selects which (`vfl.mpc.numbers.Ring.quotient`). A product
        with the quotient therefore takes no extra round: the dealer deals products with A and with
        B (function-dependent preprocessing: Ben-Efraim, Nielsen and Omri 2019). The division takes
        8 n bytes and one round of messages.
        """
        number, shape, place = self.next_number(), shared.shape, SIGN - shift
        mask = self._mask_to_divide(shared.share, shift, number)
        if self.deals:
            low, top = self.numbers.parts(mask, shift)
            opened = Opened((top << place) - low, turn=-2 * top << place)
            return SharedTensor(blank(shape), shared.bits - shift, opened)
        offset = self.numbers.offset
        (c,) = self._sums([self._plus(shared.share + mask, torch.tensor(offset))], number)
        low, top = self._dealt([shape] * 2, "parts", number)
        part, public = self.numbers.quotient(c, low, top, shift, offset)
        share = part + public if self.first else part
        opened = Opened(part, public, turn=upper(c, SIGN))
        return SharedTensor(share, shared.bits - shift, opened)

    def open(self, *tensors: SharedTensor) -> list[SharedTensor]:
        """See `BeaverEngine.open`.

        A quotient is opened once more, so that every kind of product can use it.
        """
        return super().open(
            *(replace(each, opened=None) if each.is_quotient else each for each in tensors)
        )

    def multiply(
        self, left: SharedTensor, right: SharedTensor, operation: Operation = torch.mul
    ) -> SharedTensor:
        """See `BeaverEngine.multiply`; quotients need no further opening."""
        if operation is not torch.mul or not (left.is_quotient or right.is_quotient):
            return super().multiply(left, right, operation)
        if left is right:
            return self._square(left)
        left, right = (each if each.is_quotient else self.open(each)[0] for each in (left, right))
        number, bits = self.next_number(), left.bits + right.bits
        ways = [(one, two) for one in _parts(left) for two in _parts(right)]
        shape = broadcast(left.shape, right.shape)
        if self.deals:
            made = [left.mask_part(one) * right.mask_part(two) for one, two in ways]
            self._deal(made, "product", number)
            return SharedTensor(blank(shape), bits)
        e, f = left.difference(), right.difference()
        share = e * self._plus(right.mask(), f) + left.mask() * f
        dealt = self._dealt([shape] * len(ways), "product", number)
        for (one, two), each in zip(ways, dealt, strict=True):
            each = each * left.mask_part(1) if one else each
            share = share + (each * right.mask_part(1) if two else each)
        return SharedTensor(share, bits)

    def _square(self, one: SharedTensor) -> SharedTensor:
        """Square by (A + b B)^2 = A^2 + b (2 A B + B^2), where b is 0 or 1."""
        number = self.next_number()
        mask, turn = one.mask(), one.mask_part(1)
        if self.deals:
            self._deal([mask * mask, (2 * mask + turn) * turn], "product", number)
            return SharedTensor(blank(one.shape), 2 * one.bits)
        base, more = self._dealt([one.shape] * 2, "product", number)
        e = one.difference()
        share = self._plus(2 * e * mask + base + turn * more, e * e)
        return SharedTensor(share, 2 * one.bits)

    def apply(
        self, shared: SharedTensor, function: Callable[[Tensor], Tensor], where: str, bits: int = -1
    ) -> SharedTensor:
        """Let the dealer apply a function exactly to every element.

        The evaluation takes 8 n bytes and two messages. The dealer sees the values in a secretly
        permuted order, so it learns the set of values, but not the position of any value.

        Raises:
            WidthError: there are too few values for a permutation to hide the positions of the
                values.
            RingRangeError, NonFiniteError: at the dealer, a result of the function does not fit
                into the ring.
        """
        number, count = self.next_number(), shared.share.numel()
        bits = self.bits if bits < 0 else bits
        if count < LEAST_PERMUTED:
            raise WidthError(
                "too few values to hide each other",
                where=where,
                got=f"{count}",
                want=f"at least {LEAST_PERMUTED}",
                fix="use larger batches, or the form 'polynomial', which shows the dealer no"
                " values",
            )
        if self.deals:
            seen = torch.zeros(count, dtype=torch.int64)
            for holder in range(self.holders):
                seen += self.channels[holder].receive([(count,)], number)[0]
            self.leakage.count("permuted values", where, count, count)
            found = encode(function(decode(seen, shared.bits)), bits, where, SIGN - 1 - bits, _FIX)
            self._deal([found], "answer", number, phase="online")
            return SharedTensor(blank(shared.shape), bits)
        assert self._order is not None, "`agree` comes first"
        order = torch.from_numpy(permutation(self._order, count, "elements", number))
        hidden = shared.share.reshape(-1)[order]
        for holder in self.others:  # these fresh shares reveal only their sum
            fresh = self.pad(holder, (count,), "fresh", number)
            hidden = hidden + fresh if self.role < holder else hidden - fresh
        self.channels[self.dealer].send([hidden], number)
        (answer,) = self._dealt([(count,)], "answer", number)
        found = torch.empty_like(answer)
        found[order] = answer
        return SharedTensor(found.reshape(shared.shape), bits)


class Lockstep(BitEngine):
    """All holders and the dealer in one process, which runs their operations without messages.

    Shares and masks have a leading axis for the holders; opened values have no such axis.

    Args:
        holders: number of holders, 2 to 8.
    """

    deals, holds, front = True, True, 1

    def __init__(self, holders: int) -> None:
        super().__init__(0, {}, holders, {})
        self._stream = PadStream(secrets.token_bytes(KEY_BYTES))
        self._block, self._taken, self._blocks = torch.empty(0, dtype=torch.int64), 0, 0
        self._waiting: list[Tensor] = []
        self._divisions: dict[int, tuple[Sequence[Tensor], int]] = {}

    def _uniform(self, shape: Sequence[int]) -> Tensor:
        """Return fresh uniform elements; they are drawn from the key stream a block at a time."""
        count = math.prod(shape)
        if self._taken + count > len(self._block):
            self._blocks += 1
            drawn = self._stream.elements64(max(_BLOCK, count), "block", self._blocks)
            self._block, self._taken = torch.from_numpy(drawn.view("i8")), 0
        self._taken += count
        return self._block[self._taken - count : self._taken].view(tuple(shape))

    def split(self, whole: Tensor, numbers: Ring | None = None) -> Tensor:
        """Split elements into fresh shares, one for each holder; axes (holders, *element axes)."""
        pads = self._uniform((self.holders - 1, *whole.shape))
        rest = reduce((numbers or self.numbers).sub, pads.unbind(0), whole)
        return torch.cat([rest[None], pads])

    def divide(
        self, shared: SharedTensor, shift: int, *, positive: bool = False, below: bool = False
    ) -> SharedTensor:
        """See `BeaverEngine.divide`; masks for a whole block of elements are dealt in advance."""
        shape, offset = shared.share.shape, 0 if positive else self.numbers.offset
        mask, part, turn = self._division(shift, shape)
        opened = self._whole(shared.share + mask) + offset
        # The share is p - b t, where p and t are dealt numbers (see `_division`), and b is the
        # opening's highest bit; the arithmetic shift of the opening returns -b.
        share = torch.addcmul(part, turn, opened >> SIGN)
        share[0] += ((opened >> shift) & ((1 << ELEMENT_BITS - shift) - 1)) - (
            (offset >> shift) + below
        )
        return SharedTensor(share, shared.bits - shift)

    def _division(self, shift: int, shape: Sequence[int]) -> list[Tensor]:
        """Return shares of a mask, and of two numbers that are derived from it.

        The two numbers are the highest bit minus the lower bits, and twice the highest bit.
        """
        count = math.prod(shape[1:])
        block, taken = self._divisions.get(shift, ((), _BLOCK))
        if taken + count > (block[0].shape[1] if block else 0):
            mask = self._uniform((self.holders, max(_BLOCK // 4, count)))
            whole = self._whole(mask)
            top = upper(whole, SIGN) << (SIGN - shift)
            block, taken = (mask, self.split(top - ((whole & LOW) >> shift)), self.split(top)), 0
            block[2].mul_(2)
        self._divisions[shift] = (block, taken + count)
        return [each[:, taken : taken + count].view(tuple(shape)) for each in block]

    def _mask(
        self,
        shape: Sequence[int],
        *purpose: str | int,
        number: int,
        numbers: Ring | None = None,
    ) -> Tensor:
        return self._uniform(shape)

    def _whole(self, mask: Tensor, numbers: Ring | None = None) -> Tensor:
        return reduce((numbers or self.numbers).add, mask.unbind(0))

    def _flipped(self, word: Tensor, where: Tensor | int) -> Tensor:
        flipped = word.clone()
        flipped[0] ^= where
        return flipped

    def _plus(self, share: Tensor, public: Tensor) -> Tensor:
        if public.dim() and public.shape != share.shape[1:]:
            sizes = broadcast(share.shape[1:], public.shape)
            share = reach(share, len(sizes)).expand(self.holders, *sizes)
        added = share.clone()
        added[0] += public
        return added

    def _deal(
        self,
        values: Sequence[Tensor],
        name: str,
        number: int,
        *,
        numbers: Ring | None = None,
        phase: str = "offline",
    ) -> list[Tensor]:
        self._waiting = [self.split(value, numbers) for value in values]
        return self._waiting

    def _dealt(
        self, shapes: Sequence[Shape], name: str, number: int, numbers: Ring | None = None
    ) -> list[Tensor]:
        return self._waiting

    def _sums(
        self, parts: Sequence[Tensor], number: int, numbers: Ring | None = None
    ) -> list[Tensor]:
        return [self._whole(part, numbers) for part in parts]


class LocalMembers(LocalParties[Member]):
    """Holders and a dealer as threads of this process.

    Args:
        holders: number of holders, 2 to 8.
        bits: fraction bits of shared values.
        terms: settings that the parties compare before they begin to compute.
        timeout_s: seconds that a party waits for a message.
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


def _parts(one: SharedTensor) -> range:
    """Return the indices of a mask's parts: one part, or two parts for a quotient.

    See `Member.quotient`.
    """
    return range(2 if one.is_quotient else 1)


def _at(places: Sequence[int], words: Tensor) -> Tensor:
    """Return the bits of words at some positions as numbers 0 and 1.

    The axes are (positions, *word axes).
    """
    return words >> torch.tensor(places).view(-1, *(1,) * words.dim()) & 1


@dataclass(frozen=True, slots=True)
class _Plan:
    """Layout of the rows that products of bits use.

    There is one row per different factor, then one row per subset of factors.

    Attributes:
        words: for each factor, the index of its word, the number of bits of its shift, and the mask
            of bits that a shift down keeps (None for a shift up).
        grown: for subsets of two factors, then of three and so on: the row of the subset without
            its last factor, and the row of this last factor.
        groups: groups of products with equal numbers of factors. A group contains the products'
            positions in the request, the rows of all subsets of factors (the empty set last), and
            the rows of the factors (the last factor first).
    """

    words: tuple[Tensor, Tensor, Tensor | None]
    grown: Sequence[tuple[Tensor, Tensor]]
    groups: Sequence[tuple[Sequence[int], Tensor, Sequence[Tensor]]]

    @property
    def subsets(self) -> int:
        """Number of different subsets of two or more factors, over all groups."""
        return sum(len(last) for _, last in self.grown)

    def moved(self, words: Tensor, *, ones: bool = False) -> Tensor:
        """Return the word of every factor, shifted as the factor says.

        The axes (*front, words, elements) become (*front, factors, elements).
        """
        index, by, kept = self.words
        moved = words.index_select(-2, index)
        if kept is None:
            return moved.bitwise_left_shift_(by)
        moved.bitwise_right_shift_(by).bitwise_and_(kept)
        return moved.bitwise_or_(~kept) if ones else moved

    def of_subsets(self, factors: Tensor) -> Tensor:
        """Return for each subset the product of its factors' masks, from every factor's mask."""
        rows = factors
        for before, last in self.grown:
            rows = torch.cat([rows, rows[before] & factors[last]])
        return rows[len(factors) :]

    def sums(self, rows: Tensor, openings: Tensor) -> list[Tensor]:
        """Return this holder's share of each product; axes (*front, elements).

        The factors are opened one after another: the share with one more opened factor is the share
        under this factor's mask, plus the factor's opening times the share without the factor.

        Args:
            rows: shares of the product of masks for each subset of factors; the last row belongs to
                the empty set.
            openings: the opening of every factor.
        """
        found: dict[int, Tensor] = {}
        for places, subsets, sides in self.groups:
            size = *rows.shape[:-2], len(places), 2, -1, rows.shape[-1]
            share = rows.index_select(-2, subsets)
            for side in sides:
                without, masked = share.view(size).unbind(-3)
                share = (without & openings[side][:, None]).bitwise_xor_(masked)
            found |= zip(places, share.squeeze(-2).unbind(-2), strict=True)
        return [found[place] for place in range(len(found))]


@lru_cache(maxsize=64)
def _planned(products: tuple[Factors, ...]) -> _Plan:
    sizes = range(2, max(map(len, products)) + 1)
    factors: Factors = tuple(dict.fromkeys(chain(*products)))
    grown = [
        list(dict.fromkeys(chain(*(combinations(each, size) for each in products))))
        for size in sizes
    ]
    every = [*((factor,) for factor in factors), *chain(*grown), ()]
    rows = {subset: row for row, subset in enumerate(every)}

    def subsets_of(product: Factors) -> list[int]:
        chosen = range(1 << len(product))
        return [rows[tuple(f for at, f in enumerate(product) if one >> at & 1)] for one in chosen]

    groups = []
    for size in sorted({len(product) for product in products}):
        places = [place for place, product in enumerate(products) if len(product) == size]
        subsets = torch.tensor([subsets_of(products[place]) for place in places]).flatten()
        sides = torch.tensor([[rows[each,] for each in products[place]] for place in places])
        groups.append((places, subsets, sides.t().flip(0).unbind()))
    index, by = torch.tensor(factors).t()
    upwards = bool((by >= 0).all())
    assert upwards or (by <= 0).all(), "all factors move in one direction"
    kept = [(1 << ELEMENT_BITS + each) - 1 if each < 0 else -1 for each in by.tolist()]
    return _Plan(
        (index, by.abs()[:, None], None if upwards else torch.tensor(kept)[:, None]),
        [
            (torch.tensor([rows[s[:-1]] for s in same]), torch.tensor([rows[s[-1:]] for s in same]))
            for same in grown
        ],
        groups,
    )


def _pieces(words: Tensor) -> list[Tensor]:
    starts = range(0, max(1, words.shape[-1]), _PIECE)
    return [words[..., start : start + _PIECE] for start in starts]


def _squeezed(words: Tensor, stride: int) -> Tensor:
    """Keep the highest quarter of each run of 4 `stride` bits; pack four words into one.

    >>> words = torch.tensor([-(2**63), 0, 0, 2**47])
    >>> _squeezed(words, 1)
    tensor([1153062242095202304])
    >>> _spread(_squeezed(words, 1), 4, 1).tolist() == words.tolist()
    True
    """
    picked = words >> (_FAN - 1) * stride & _lowest(stride)
    if missing := -words.shape[-1] % _FAN:
        picked = torch.nn.functional.pad(picked, (0, missing))
    rows = picked.view(*words.shape[:-1], _FAN, -1)
    return (rows << stride * _FANNED).sum(-2)  # no two words have a bit at the same position


def _spread(squeezed: Tensor, count: int, stride: int) -> Tensor:
    """Unpack the `count` words that `_squeezed` packed; the bits that it dropped become 0."""
    rows = squeezed[..., None, :] >> stride * _FANNED & _lowest(stride)
    return (rows << (_FAN - 1) * stride).flatten(-2)[..., :count]


@lru_cache(maxsize=ELEMENT_BITS)
def _lowest(stride: int) -> int:
    """Return a word in which the lowest quarter of each run of 4 `stride` bits is 1."""
    return sum(((1 << stride) - 1) << place for place in range(0, ELEMENT_BITS, _FAN * stride))
