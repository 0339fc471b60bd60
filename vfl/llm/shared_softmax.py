"""Softmax of attention scores on additive shares: no party sees scores, permuted or not.

A form with ``protect="scores"`` uses this softmax. The holders open only values under uniform masks
of the same ring, so neither learns anything. The dealer deals offline and sees no value.

**Look-up by a shared one-hot vector** (one-time truth tables: Ishai, Kushilevitz, Meldgaard,
Orlandi and Paskin-Cherniavsky 2013, section 3). The holders open c = x + r in a ring of m bits. The
dealer knows the mask r. It has shared a vector of 2^m entries, which is 1 at r and 0 elsewhere. The
vector is 1 at c - v exactly if x = v. So a weighted sum over the vector is a share of a public
table's entry at x, and takes no further message.

The softmax of a row of scores, of magnitude below 2^score_bits, takes five steps:

1. The largest score m, with an error of at most 1. One-hot vectors of the rounded scores give the
   number of scores at or above each level. A second look-up tests for which levels it is 0.
2. e = exp(s - m). The upper digit of the exponent is looked up. The lower digit is c - r, and
   exp(c - r) = exp(c) exp(-r): c is public, and the dealer multiplies the vector by exp(-r).
3. p = e y, where y is looked up, and is 1 / sum(e) with an error of at most 9 %.
4. p / sum(p). The sum is from .9 to 1.1, and its inverse is looked up with 12 bits. The upper bit
   of a mask lifts p into the larger ring of this product (see `vfl.mpc.numbers`).
5. P1 sends its share under a pad, and then has that pad as its share, which is known in advance.

The cost is seven openings, of two simultaneous messages each, and one more message. **No party
notices a score beyond the range**, since none sees it; the result of its row is then wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vfl.llm.packing import pack_elements, packed_bytes, unpack_elements
from vfl.llm.two_party import Role, Shared
from vfl.mpc.engine import masked_product
from vfl.mpc.numbers import RING, Ring
from vfl.mpc.ring import ELEMENT_BITS
from vfl.mpc.rules import P0, P1, P2
from vfl.mpc.shares import blank

#: Number of openings of a softmax, of which both messages travel at the same time.
OPENINGS = 7
#: Most entries of vectors that are dealt in one message and are in memory at once.
_BLOCK = 1 << 20
#: Bits of an exponent: behind the point, and those of its lower digit, which is below 8.
_EXPONENT, _DIGIT = 13, 16
#: Fraction bits of exp(-r), of exp(c), and of their product before the next one.
_DEALT, _PUBLIC, _EXPONENTIAL = 26, 14, 15
#: Upper digits that matter; and the largest upper digit plus c, as an exponent is at most 1.01.
_DIGITS, _MOST_ARGUMENT = (1, 0, -1, -2), 9.01
#: Fraction bits of a sum of exponentials that is looked up, and of its inverse; least such sum.
_SUM, _INVERSE, _LEAST_SUM = 5, 9, 0.3
#: Fraction bits of a probability before it is normalised, and bits of its ring; the offset that
#: makes it positive; fraction bits of the second inverse, and bits of its argument minus 1.
_NEARLY, _NEARLY_RING, _OFFSET = 13, 15, 1 << 11
_SECOND, _SECOND_RING = 12, 10

#: Opened elements of a block, and this holder's share of the dealt vectors.
Block = tuple[slice, Tensor, Tensor]
#: At the dealer: the factor of a one-hot vector, from the lower digit of its mask.
Factor = Callable[[Tensor], Tensor]


class SharingRole(Role):
    """A role that also computes a softmax on shares; see the module."""

    def softmax(self, scores: Shared, rows: Tensor, bits: int, ring: int) -> Shared:
        """Return the softmax of each row, exact to three units of 2^-12.

        Args:
            scores: axes (scores,); two bits of the ring are above the range of a score.
            rows: row of each score, in order.
            bits: fraction bits of the result.
            ring: bits of its elements.

        The plain reference is ``torch.softmax``, row by row.
        """
        above = scores.share - (self._largest(scores, rows)[rows] << scores.bits)
        longest = int(rows.bincount().max())
        above_sum = math.ceil(math.log2(math.e * longest + 2))
        parts = self._exponentials(
            Shared(above, scores.bits, scores.ring),
            max(_EXPONENTIAL + _INVERSE + 2, _EXPONENTIAL + above_sum),
        )
        inverse = self._inverse(self._totals(parts, rows), _SUM + above_sum, parts.ring)
        nearly = Shared(
            self._by_row(parts, inverse, rows), parts.bits + _INVERSE, _EXPONENTIAL + _INVERSE + 2
        )
        found = self._normalised(nearly, rows, bits, ring)
        return self._known(found)

    def _largest(self, scores: Shared, rows: Tensor) -> Tensor:
        """Return each row's largest score, rounded, in a ring of the bits before the point."""
        level = scores.dropped(scores.bits)
        reach = 1 << level.ring - 2
        levels, last = torch.arange(1 - reach, reach + 1), (1 << level.ring) - 1
        count, longest = int(rows[-1]) + 1, int(rows.bincount().max())
        numbers = max(1, longest).bit_length()
        at_level = torch.zeros(count, 2 * reach, dtype=torch.int64)
        for at, c, dealt in self._looked_up(level, numbers):
            one_hot = dealt.gather(1, (c[:, None] - levels) & last)
            at_level.index_add_(0, rows[at], one_hot)
        reaching = at_level.flip(1).cumsum(1).reshape(-1)
        none = torch.zeros(count * 2 * reach, dtype=torch.int64)
        for at, c, dealt in self._looked_up(Shared(reaching, 0, numbers), level.ring):
            none[at] = dealt.gather(1, c[:, None])[:, 0]
        return self._plus(-none.reshape(count, -1).sum(1), torch.tensor(reach))

    def _exponentials(self, above: Shared, ring: int) -> Shared:
        """Return exp of scores minus about the largest of their row."""
        exponent = above.dropped(above.bits - _EXPONENT)
        last, drop = (1 << exponent.ring - _DIGIT) - 1, _DEALT + _PUBLIC - _EXPONENTIAL
        found = torch.zeros(exponent.share.shape, dtype=torch.int64)
        for at, c, dealt in self._looked_up(exponent, ring + drop, _DIGIT, _decay):
            low = (c & (1 << _DIGIT) - 1).double() * 2.0**-_EXPONENT
            for digit in _DIGITS:
                argument = low + digit * 2.0 ** (_DIGIT - _EXPONENT)
                factor = _rounded(argument.clamp(max=_MOST_ARGUMENT).exp(), _PUBLIC)
                factor[argument > _MOST_ARGUMENT] = 0  # the result would exceed every exponential
                place = (c >> _DIGIT) - digit & last
                found[at] += factor * dealt.gather(1, place[:, None])[:, 0]
        return Shared(found, _DEALT + _PUBLIC, ring + drop).dropped(drop)

    def _inverse(self, totals: Shared, bits: int, ring: int) -> Tensor:
        """Return about 1 / sum."""
        x = totals.dropped(totals.bits - _SUM).within(bits)
        sums = torch.arange(1 << bits).double() * 2.0**-_SUM
        table = _rounded(1 / sums.clamp(min=_LEAST_SUM), _INVERSE)
        found = torch.zeros(x.share.shape, dtype=torch.int64)
        for block in self._looked_up(x, ring):
            found[block[0]] = _from_table(table, block)
        return found

    def _by_row(self, parts: Shared, factors: Tensor, rows: Tensor) -> Tensor:
        """Return products of elements with the factor of their row."""
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
        """Divide probabilities by their sums, which are from .9 to 1.1."""
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
        for block in self._vectors(c_sum, r, _SECOND_RING, numbers):
            y[block[0]] = _from_table(table, block)
        number = self.next_number()
        if self.offline:
            return Shared(blank(wide), bits, ring)
        (f,) = self._open(number, (y - t, numbers.bits))
        # x = c - u, and 2^15 more where the sum x + u wrapped: u's upper bit is 1, and c's is 0.
        f, wrapped = f[rows], 1 - (c >> _NEARLY_RING - 1) << _NEARLY_RING
        share = (c - _OFFSET) * y[rows] - f * whole - whole_t + wrapped * (f * top + top_t)
        return Shared(share, _NEARLY + _SECOND, numbers.bits).dropped(drop)

    def _known(self, shared: Shared) -> Shared:
        """Share again, so that P1's share is a pad; one message, P1 to P0, of s bits an element."""
        number, share = self.next_number(), shared.share
        if self.role == P1:
            pad = self._kept(lambda: self.pad(P2, share.shape, "again", number))
            if not self.offline:
                self._send(P0, number, (share - pad, shared.ring))
            share = pad
        elif self.role == P0 and not self.offline:
            share = share + self._receive(P1, number, (share.shape, shared.ring))[0]
        return Shared(share, shared.bits, shared.ring, known=self._fast)

    def _totals(self, shared: Shared, rows: Tensor) -> Shared:
        """Return each row's sum."""
        zeros = torch.zeros(int(rows[-1]) + 1, dtype=torch.int64)
        return shared.map(lambda share: zeros.index_add(0, rows, share))

    # Look-ups.

    def _looked_up(
        self, x: Shared, ring: int, low: int = 0, factor: Factor = torch.ones_like
    ) -> Iterator[Block]:
        """Open x masked; yield the blocks of `_vectors`. One opening of the bits of x's ring."""
        number = self.next_number()
        r, c = self._kept_mask(x.share.shape, "r", number), x.share
        if not self.offline:
            (c,) = self._open(number, (x.share + r, x.ring))
        yield from self._vectors(c, r, x.ring, Ring(ring), low, factor)

    def _vectors(
        self,
        c: Tensor,
        r: Tensor,
        bits: int,
        numbers: Ring,
        low: int = 0,
        factor: Factor = torch.ones_like,
    ) -> Iterator[Block]:
        """Yield shares of the masks' one-hot vectors, in blocks; online only.

        Args:
            c: opened elements, axes (elements,).
            r: at the dealer their masks.
            bits: bits of an element.
            numbers: ring of the vectors.
            low: number of lower bits that do not choose an entry.
            factor: factor of a vector, from those lower bits of the mask.
        """
        entries = 1 << bits - low
        each = max(1, _BLOCK // entries)
        for start in range(0, len(c), each):
            at, number = slice(start, start + each), self.next_number()
            shape = (len(c[at]), entries)
            if self.deals:
                places = r[at] >> low & entries - 1
                values = torch.zeros(shape, dtype=torch.int64)
                values.scatter_(1, places[:, None], factor(r[at] & (1 << low) - 1)[:, None])
                self._deal([values], "W", number, numbers=numbers)
            (dealt,) = self._kept_dealt([shape], number, numbers)
            if not self.offline:
                yield at, c[at], dealt

    def _kept_mask(self, shape: Sequence[int], name: str, number: int) -> Tensor:
        """Return this holder's part of a mask that is drawn offline; at the dealer the whole."""
        if self.deals:
            return self._mask(shape, name, number=number)
        return self._kept(lambda: self._mask(shape, name, number=number))

    def _kept_dealt(
        self, shapes: Sequence[Sequence[int]], number: int, numbers: Ring
    ) -> list[Tensor]:
        """Return this holder's shares of dealt values, stored packed; blanks elsewhere."""
        if self.offline:
            if self.holds:
                for each in self._dealt(shapes, "W", number, numbers):
                    self._keep(_packed(each, numbers.bits))
            return [blank(shape) for shape in shapes]
        return [_unpacked(self._take(), shape, numbers.bits) for shape in shapes]

    def _open(self, number: int, *parts: tuple[Tensor, int]) -> list[Tensor]:
        """Open masked shares to both holders in one message each way, of the bits of each."""
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


def _decay(low: Tensor) -> Tensor:
    """Return exp(-r) of a lower digit."""
    return _rounded((-low.double() * 2.0**-_EXPONENT).exp(), _DEALT)


def _rounded(values: Tensor, bits: int) -> Tensor:
    return (values * 2.0**bits).round().to(torch.int64)


def _of_row(elements: Tensor, factors: Tensor, rows: Tensor) -> Tensor:
    return elements * factors[rows]


def _from_table(table: Tensor, block: Block) -> Tensor:
    """Return shares of a public table's entries at the looked up values."""
    _, c, dealt = block
    places = c[:, None] - torch.arange(len(table)) & len(table) - 1
    return (table[places] * dealt).sum(1)


def _packed(elements: Tensor, bits: int) -> Tensor:
    """Return elements in as few words as hold their lower bits."""
    payload = pack_elements(elements, bits)
    words = np.zeros(-(-len(payload) // 8), np.int64)
    words.view(np.uint8)[: len(payload)] = np.frombuffer(payload, np.uint8)
    return torch.from_numpy(words)


def _unpacked(words: Tensor, shape: Sequence[int], bits: int) -> Tensor:
    count = math.prod(shape)
    payload = words.numpy().view(np.uint8).data[: packed_bytes(count, bits)]
    return unpack_elements(payload, count, bits).reshape(tuple(shape))
