"""Softmax of attention scores on additive shares: no party sees scores, not even permuted.

Forms (protocol settings) with ``protect="scores"`` use this softmax. The two holders open only
values under uniform masks of the same ring, so neither holder learns a value. The dealer deals
randomness offline and sees no value.

**Look-up by a shared one-hot vector** (one-time truth tables: Ishai, Kushilevitz, Meldgaard,
Orlandi and Paskin-Cherniavsky 2013, section 3). For a secret x, the holders open c = x + r in a
ring of m bits. The dealer knows the mask r, and has shared a vector of 2^m entries that is 1 at
entry r and 0 elsewhere. Entry c - v of the vector is 1 if x = v, and otherwise 0. For any public
table T, the sum over v of T[v] times entry c - v is therefore T[x]. Each holder computes its share
of this sum locally.

The softmax of a row of scores s, of magnitude below 2^score_bits, takes five steps:

1. m, the largest score of the row, with an error of at most 1. The one-hot vectors of the rounded
   scores give, for each level, the number of scores at or above it. A second look-up tests which of
   these numbers are 0; this yields m.
2. e = exp(s - m). A look-up gives the exponential of the upper digit of s - m. The lower digit is c
   - r, and exp(c - r) = exp(c) exp(-r): c is public, and the dealer multiplies the one-hot vector
   by exp(-r).
3. p = e y, where y approximates 1 / sum(e); a look-up gives y with an error of at most 9 %.
4. The result p / sum(p). The sum of p is from .9 to 1.1, and a look-up gives its inverse with 12
   bits. The highest bit of p's mask converts p to the larger ring of this product (see
   `vfl.mpc.numbers`).
5. P1 sends P0 its share of the result minus a pad, and P0 adds this message to its own share. The
   pad is P1's new share, so P1 knows its share in advance.

The softmax takes seven openings, of two simultaneous messages each, and one more message. **No
party notices a score beyond the range**, because no party sees scores; in that case, the softmax of
the score's row is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vfl.llm.packing import pack_elements, packed_bytes, unpack_elements
from vfl.llm.two_party import Role, Shared
from vfl.llm.weights import BLOCK
from vfl.mpc.engine import masked_product
from vfl.mpc.numbers import RING, Ring
from vfl.mpc.ring import ELEMENT_BITS
from vfl.mpc.rules import P1
from vfl.mpc.shares import blank

#: Number of openings in one softmax; the two messages of an opening travel at the same time.
OPENINGS = 7
#: Fraction bits of an exponent s - m, and number of bits of the exponent's lower digit, whose value
#: is below 8.
_EXPONENT, _DIGIT = 13, 16
#: Fraction bits of exp(-r), of exp(c), and of their product before it enters the next product.
_DEALT, _PUBLIC, _EXPONENTIAL = 26, 14, 15
#: Upper digits for which an exponential is not 0; and the largest argument of exp(c): an exponent
#: is at most 1.01 and r is below 8.
_DIGITS, _MOST_ARGUMENT = (1, 0, -1, -2), 9.01
#: Fraction bits of a sum of exponentials whose inverse is looked up; smallest number of fraction
#: bits of the inverse, and the inverse's largest relative error by rounding; the smallest such sum.
_SUM, _INVERSE, _INVERSE_ERROR, _LEAST_SUM = 5, 9, 0.09, 0.3
#: Fraction bits of a probability before its normalisation, and bits of its ring; the offset that
#: makes it positive; fraction bits of the second inverse, and number of bits of this inverse's
#: argument, which is the sum minus 1.
_NEARLY, _NEARLY_RING, _OFFSET = 13, 15, 1 << 11
_SECOND, _SECOND_RING = 12, 10

#: A block of a look-up: indices of its elements, the elements' opened values, and this holder's
#: share of their one-hot vectors.
Block = tuple[Tensor, Tensor, Tensor]
#: Function from the lower digits of the masks to the factors by which the dealer multiplies the
#: one-hot vectors.
Factor = Callable[[Tensor], Tensor]


class SharingRole(Role):
    """A `Role` that also computes a softmax on shares; see the module's description."""

    def softmax(self, scores: Shared, rows: Tensor, bits: int, ring: int) -> Shared:
        """Return the softmax of each row, with an error of at most three units of 2^-12.

        Args:
            scores: shared scores, axes (scores,); the ring has two more bits than the range of a
                score needs.
            rows: number of the row to which each score belongs, ascending.
            bits: fraction bits of the result.
            ring: number of bits of an element of the result.

        The same function in plain torch is ``torch.softmax``, row by row.
        """
        lengths = rows.bincount()
        largest = self._largest(scores, rows, lengths)
        above = replace(scores, share=scores.share - (largest[rows] << scores.bits))
        above_sum = _bits_of(int(math.e * length + 2) for length in lengths.tolist())
        ring_of_sum = _EXPONENTIAL + int(above_sum.max())
        inverse_bits = inverse_bits_of(int(lengths.max()))
        ring_of_product = _EXPONENTIAL + inverse_bits + 2
        parts = self._exponentials(above, max(ring_of_product, ring_of_sum))
        totals = self._totals(parts, rows)
        inverse = self._inverse(totals, _SUM + above_sum, inverse_bits, parts.ring)
        nearly = Shared(
            self._by_row(parts, inverse, rows), parts.bits + inverse_bits, ring_of_product
        )
        found = self._normalised(nearly, rows, bits, ring)
        return self._shared_again(found, "again", self.next_number())

    def _largest(self, scores: Shared, rows: Tensor, lengths: Tensor) -> Tensor:
        """Return each row's largest score, rounded.

        The result's ring has only the bits before the binary point.
        """
        level = scores.dropped(scores.bits)
        reach = 1 << level.ring - 2
        levels, last = torch.arange(1 - reach, reach + 1), (1 << level.ring) - 1
        count = len(lengths)
        bits = _bits_of(lengths.tolist())
        numbers = int(bits.max())
        at_level = torch.zeros(count, 2 * reach, dtype=torch.int64)
        for at, c, dealt in self._looked_up(level, numbers):
            one_hot = dealt.gather(1, (c[:, None] - levels) & last)
            at_level.index_add_(0, rows[at], one_hot)
        reaching = at_level.flip(1).cumsum(1).reshape(-1)
        none, counts = torch.zeros_like(reaching), Shared(reaching, 0, numbers)
        bits = bits.repeat_interleave(2 * reach)
        for at, c, dealt in self._looked_up(counts, level.ring, bits=bits):
            none[at] = dealt.gather(1, c[:, None])[:, 0]
        return self._plus(-none.reshape(count, -1).sum(1), torch.tensor(reach))

    def _exponentials(self, above: Shared, ring: int) -> Shared:
        """Return the exponentials of `above`: scores minus their row's rounded largest score."""
        exponent = above.dropped(above.bits - _EXPONENT)
        last, drop = (1 << exponent.ring - _DIGIT) - 1, _DEALT + _PUBLIC - _EXPONENTIAL
        found = torch.zeros(exponent.share.shape, dtype=torch.int64)
        for at, c, dealt in self._looked_up(exponent, ring + drop, _DIGIT, _decay):
            low = (c & (1 << _DIGIT) - 1).double() * 2.0**-_EXPONENT
            for digit in _DIGITS:
                argument = low + digit * 2.0 ** (_DIGIT - _EXPONENT)
                factor = _rounded(argument.clamp(max=_MOST_ARGUMENT).exp(), _PUBLIC)
                # An exponential that is larger than any valid one.
                factor[argument > _MOST_ARGUMENT] = 0
                place = (c >> _DIGIT) - digit & last
                found[at] += factor * dealt.gather(1, place[:, None])[:, 0]
        return Shared(found, _DEALT + _PUBLIC, ring + drop).dropped(drop)

    def _inverse(self, totals: Shared, bits: Tensor, inverse_bits: int, ring: int) -> Tensor:
        """Return approximate inverses of the rows' sums, with `inverse_bits` fraction bits."""
        x = totals.dropped(totals.bits - _SUM).within(int(bits.max()))
        sums = torch.arange(1 << x.ring).double() * 2.0**-_SUM
        table = _rounded(1 / sums.clamp(min=_LEAST_SUM), inverse_bits)
        found = torch.zeros(x.share.shape, dtype=torch.int64)
        for block in self._looked_up(x, ring, bits=bits):
            found[block[0]] = _from_table(table, block)
        return found

    def _by_row(self, parts: Shared, factors: Tensor, rows: Tensor) -> Tensor:
        """Multiply each element by the factor of its row; this takes one opening."""
        number, numbers = self.next_number(), Ring(parts.ring)
        shapes = parts.share.shape, factors.shape
        operation = partial(_of_row, rows=rows)
        u, v = (
            self._kept_mask(shape, name, number) for shape, name in zip(shapes, "uv", strict=True)
        )
        if self.deals:
            self._deal([operation(u, v)], "W", number, numbers=numbers)
        (w,) = self._kept_dealt(shapes[:1], number, numbers)
        if self.offline:
            return blank(shapes[0])
        e, f = self._open(number, (parts.share - u, parts.ring), (factors - v, parts.ring))
        return masked_product(RING, operation, (e, f), u, self._plus(v, f), w)

    def _normalised(self, nearly: Shared, rows: Tensor, bits: int, ring: int) -> Shared:
        """Divide probabilities by the sum of their row, which is from .9 to 1.1."""
        number, drop = self.next_number(), _NEARLY + _SECOND - bits
        numbers = Ring(ring + drop)
        totals = self._totals(nearly, rows)
        x = totals.dropped(totals.bits - _SECOND).within(_SECOND_RING)
        p = nearly.dropped(nearly.bits - _NEARLY)
        wide, rowwise = p.share.shape, x.share.shape
        r = self._kept_mask(rowwise, "r", number)
        u = self._kept_mask(wide, "u", number)
        t = self._kept_mask(rowwise, "t", number)
        if self.deals:
            whole, top = u & (1 << _NEARLY_RING) - 1, u >> _NEARLY_RING - 1 & 1
            values = torch.stack([whole, top, whole * t[rows], top * t[rows]])
            self._deal([values], "W", number, numbers=numbers)
        ((whole, top, whole_t, top_t),) = self._kept_dealt([(4, *wide)], number, numbers)
        c_sum = c = blank(rowwise)
        if not self.offline:
            hidden = self._plus(p.share + u, torch.tensor(_OFFSET))
            c_sum, c = self._open(number, (x.share + r, _SECOND_RING), (hidden, _NEARLY_RING))
        near_one = torch.arange(1 << _SECOND_RING) * 2.0**-_SECOND
        near_one[1 << _SECOND_RING - 1 :] -= 2.0 ** (_SECOND_RING - _SECOND)
        table = _rounded(1 / (1 + near_one.double()), _SECOND)
        y = torch.zeros(rowwise, dtype=torch.int64)
        for block in self._vectors(c_sum, r, torch.full(rowwise, _SECOND_RING), numbers):
            y[block[0]] = _from_table(table, block)
        number = self.next_number()
        if self.offline:
            return Shared(blank(wide), bits, ring)
        (f,) = self._open(number, (y - t, numbers.bits))
        # With mask u, the ring gives x = p + offset as c - u, plus 2^15 where x + u wrapped around:
        # there u's highest bit is 1, and c's is 0.
        f, wrapped = f[rows], 1 - (c >> _NEARLY_RING - 1) << _NEARLY_RING
        share = (c - _OFFSET) * y[rows] - f * whole - whole_t + wrapped * (f * top + top_t)
        return Shared(share, _NEARLY + _SECOND, numbers.bits).dropped(drop)

    def _totals(self, shared: Shared, rows: Tensor) -> Shared:
        """Return the sum of each row, as shares."""
        zeros = torch.zeros(int(rows[-1]) + 1, dtype=torch.int64)
        return shared.map(lambda share: zeros.index_add(0, rows, share))

    # Look-ups.

    def _looked_up(
        self,
        x: Shared,
        ring: int,
        low: int = 0,
        factor: Factor = torch.ones_like,
        bits: Tensor | None = None,
    ) -> Iterator[Block]:
        """Open elements under masks, and yield the blocks of `_vectors`; this takes one opening."""
        number = self.next_number()
        r, c = self._kept_mask(x.share.shape, "r", number), x.share
        if not self.offline:
            (c,) = self._open(number, (x.share + r, x.ring))
        bits = torch.full(x.share.shape, x.ring) if bits is None else bits
        yield from self._vectors(c, r, bits, Ring(ring), low, factor)

    def _vectors(
        self,
        c: Tensor,
        r: Tensor,
        bits: Tensor,
        numbers: Ring,
        low: int = 0,
        factor: Factor = torch.ones_like,
    ) -> Iterator[Block]:
        """Yield shares of the one-hot vectors of masks, block by block; offline, yield nothing.

        Args:
            c: opened masked elements, axes (elements,).
            r: the masks of the elements, at the dealer.
            bits: for each element, a number of bits that its value needs at most; vectors for fewer
                bits are shorter.
            numbers: ring of the vectors' entries.
            low: number of lower bits of an element that do not select an entry.
            factor: function that returns the factors of the vectors from the `low` lower bits of
                the masks.
        """
        for own in bits.bincount().nonzero()[:, 0].tolist():
            entries, group = 1 << own - low, (bits == own).nonzero()[:, 0]
            for at in group.split(max(1, BLOCK // entries)):
                number, shape = self.next_number(), (len(at), entries)
                if self.deals:
                    values = torch.zeros(shape, dtype=torch.int64)
                    places = r[at] >> low & entries - 1
                    values.scatter_(1, places[:, None], factor(r[at] & (1 << low) - 1)[:, None])
                    self._deal([values], "W", number, numbers=numbers)
                (dealt,) = self._kept_dealt([shape], number, numbers)
                if not self.offline:
                    yield at, c[at] & (1 << own) - 1, dealt

    def _kept_mask(self, shape: Sequence[int], name: str, number: int) -> Tensor:
        """Return this holder's share of a mask drawn offline; at the dealer, the whole mask."""
        if self.deals:
            return self._mask(shape, name, number=number)
        return self._kept(lambda: self._mask(shape, name, number=number))

    def _kept_dealt(
        self, shapes: Sequence[Sequence[int]], number: int, numbers: Ring
    ) -> list[Tensor]:
        """Return stored shares of values that the dealer dealt.

        Offline, store the shares packed and return blank tensors.
        """
        if self.offline:
            if self.holds:
                for each in self._dealt(shapes, "W", number, numbers):
                    self._keep(_packed(each, numbers.bits))
            return [blank(shape) for shape in shapes]
        return [_unpacked(self._take(), shape, numbers.bits) for shape in shapes]

    def _open(self, number: int, *parts: tuple[Tensor, int]) -> list[Tensor]:
        """Open masked shares to both holders.

        Each tensor is sent with a number of bits per element of its own.
        """
        peer = P1 - self.role
        self._send(peer, number, *parts)
        theirs = self._receive(peer, number, *((own.shape, bits) for own, bits in parts))
        opened = [
            own + other & (1 << bits) - 1 if bits < ELEMENT_BITS else own + other
            for (own, bits), other in zip(parts, theirs, strict=True)
        ]
        seen = zip(opened, parts, strict=True)
        self._watched(number, *((each, Shared(each, 0, bits)) for each, (_, bits) in seen))
        return opened


def inverse_bits_of(longest: int) -> int:
    """Return the fraction bits of the inverses for rows of at most `longest` scores.

    The sum S of a row's exponentials is at most e (2.718) times the row's length, plus 2. Rounding
    1 / S to b bits gives a relative error of at most S 2^-(b + 1), which stays below 9 %.

    >>> inverse_bits_of(32), inverse_bits_of(256), inverse_bits_of(1024)
    (9, 12, 14)
    """
    most = (math.e * longest + 2) / _INVERSE_ERROR
    return max(_INVERSE, math.ceil(math.log2(most)) - 1)


def _bits_of(numbers: Iterable[int]) -> Tensor:
    """Return the number of bits that each number needs; the result is equal on all machines."""
    return torch.tensor([each.bit_length() for each in numbers])


def _decay(low: Tensor) -> Tensor:
    """Return exp(-r), the dealer's factor, for the lower digit r of a mask."""
    return _rounded((-low.double() * 2.0**-_EXPONENT).exp(), _DEALT)


def _rounded(values: Tensor, bits: int) -> Tensor:
    return (values * 2.0**bits).round().to(torch.int64)


def _of_row(elements: Tensor, factors: Tensor, rows: Tensor) -> Tensor:
    return elements * factors[rows]


def _from_table(table: Tensor, block: Block) -> Tensor:
    """Return shares of the entries that the elements of a block select from a public table."""
    _, c, dealt = block
    entries = dealt.shape[1]
    places = c[:, None] - torch.arange(entries) & entries - 1
    return (table[places] * dealt).sum(1)


def _packed(elements: Tensor, bits: int) -> Tensor:
    """Pack the `bits` lower bits of elements into as few int64 words as possible."""
    payload = pack_elements(elements, bits)
    words = np.zeros(-(-len(payload) // 8), np.int64)
    words.view(np.uint8)[: len(payload)] = np.frombuffer(payload, np.uint8)
    return torch.from_numpy(words)


def _unpacked(words: Tensor, shape: Sequence[int], bits: int) -> Tensor:
    count = math.prod(shape)
    payload = words.numpy().view(np.uint8).data[: packed_bytes(count, bits)]
    return unpack_elements(payload, count, bits).reshape(tuple(shape))
