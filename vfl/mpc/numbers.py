"""Number systems of shares: integers modulo 2^64 (ring), and modulo the prime 2^61 - 1 (field).

Elements of both number systems are stored as int64. Ring elements wrap around like int64, so
torch's own operations are the operations of the ring. Field elements are from 0 to p - 1; the field
exists because in the ring a MAC would miss a change of high bits.

To divide a shared x by 2^shift, the holders open c = x + offset + r, where r is a mask. The dealer
has dealt shares of the parts of the mask (Escudero et al. 2020, section 5.1). Whether the sum
wrapped around follows from two uppermost bits: the highest bit of c, which all holders see, and
that of r, which is shared. In the ring, the quotient is rounded down or is one unit higher; in the
field, it may also be one unit lower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vfl.mpc.ring import ELEMENT_BITS, Composed, Operation, matmul, matmul_each

#: Position of the highest bit of a ring element, and a mask of all bits below it.
SIGN = ELEMENT_BITS - 1
LOW = (1 << SIGN) - 1
#: Number of bits of a field element, and the field's prime.
BITS = 61
P = (1 << BITS) - 1
_HALF, _LIMB = 31, 21


class Ring:
    """Integers modulo 2^bits; subclasses define other number systems and override the differences.

    Args:
        bits: number of low bits of an element that count; if `bits` is below 64, a message may
            carry only the low bits.

    Attributes:
        offset: number that is added to a signed value before a division to make it positive.
    """

    offset = 1 << (SIGN - 1)

    def __init__(self, bits: int = ELEMENT_BITS) -> None:
        self.bits = bits

    def lift(self, elements: Tensor) -> Tensor:
        """Convert signed numbers to elements."""
        return elements

    def lower(self, elements: Tensor) -> Tensor:
        """Convert elements to signed numbers."""
        return elements

    def add(self, one: Tensor, two: Tensor) -> Tensor:
        """Return the sum of two elements."""
        return one + two

    def sub(self, one: Tensor, two: Tensor) -> Tensor:
        """Return the difference of two elements."""
        return one - two

    def mul(self, one: Tensor, two: Tensor | int) -> Tensor:
        """Return the element-wise product."""
        return one * two

    def product(self, operation: Operation, left: Tensor, right: Tensor) -> Tensor:
        """Apply a bilinear map, such as a matrix product, to operands with any leading axes."""
        if isinstance(operation, Composed):
            pair = self.additive(operation.left, left), self.additive(operation.right, right)
            return self.additive(operation.after, self.product(matmul, *pair))
        return matmul_each(left, right) if operation is matmul else operation(left, right)

    def additive(self, linear: Callable[..., Tensor], *operands: Tensor) -> Tensor:
        """Apply a map that only moves and adds elements, for example one that extracts patches."""
        return linear(*operands)

    def parts(self, mask: Tensor, shift: int) -> list[Tensor]:
        """Return the bits of a mask below the highest, shifted down, and the mask's highest bit."""
        return [(mask & LOW) >> shift, upper(mask, SIGN)]

    def quotient(
        self, opened: Tensor, low: Tensor, top: Tensor, shift: int, offset: int
    ) -> tuple[Tensor, Tensor]:
        """Divide an opened value; return a holder's share and a public summand.

        One holder adds the public summand to its share.

        Args:
            opened: the opened value c.
            low: a share of the first of the two parts that `parts` returns for the mask.
            top: a share of the second part.
            shift: number of bits by which to divide.
            offset: number that was added to x before the opening.
        """
        # The highest bits b (of c) and t (of the mask) differ if the sum of the lower 63 bits
        # carried. The bit t is shared, so arithmetic computes the exclusive or: b + t - 2 b t.
        public = upper(opened, SIGN)
        share = (top * (1 - 2 * public) << (SIGN - shift)) - low
        return share, ((opened & LOW) >> shift) + (public << (SIGN - shift)) - (offset >> shift)


class Field(Ring):
    """Integers modulo 2^61 - 1, stored as int64 from 0 to p - 1."""

    offset = 1 << (BITS - 2)

    def lift(self, elements: Tensor) -> Tensor:
        return torch.remainder(elements, P)

    def lower(self, elements: Tensor) -> Tensor:
        return torch.where(elements > P // 2, elements - P, elements)

    def reduce(self, numbers: Tensor) -> Tensor:
        """Reduce numbers from 0 to 2^63 - 1 modulo p."""
        folded = (numbers & P) + (numbers >> BITS)
        return torch.where(folded >= P, folded - P, folded)

    def add(self, one: Tensor, two: Tensor) -> Tensor:
        return self.reduce(one + two)

    def sub(self, one: Tensor, two: Tensor) -> Tensor:
        return self.reduce(one + (P - two))

    def mul(self, one: Tensor, two: Tensor | int) -> Tensor:
        """Return the element-wise product modulo p, by the equalities 2^62 = 2 and 2^61 = 1.

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
        """Multiply matrices in limbs of 21 bits.

        int64 represents the sums of products of limbs exactly up to an inner size of 2^19.
        """
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
        if isinstance(operation, Composed):
            return super().product(operation, left, right)
        return self.matmul(left, right) if operation is matmul else self.mul(left, right)

    def additive(self, linear: Callable[..., Tensor], *operands: Tensor) -> Tensor:
        """See `Ring`; each result may be the sum of at most 2^30 - 1 elements."""
        low = linear(*(each & ((1 << _HALF) - 1) for each in operands))
        high = linear(*(each >> _HALF for each in operands))
        return self.add(self.lift(low), self.mul(self.lift(high), 1 << _HALF))

    def parts(self, mask: Tensor, shift: int) -> list[Tensor]:
        return [mask >> shift, mask >> (BITS - 1)]

    def quotient(
        self, opened: Tensor, low: Tensor, top: Tensor, shift: int, offset: int
    ) -> tuple[Tensor, Tensor]:
        # Adding the mask wrapped around p if the mask's highest bit is 1 and the opening's highest
        # bit is 0.
        wraps = 1 - (opened >> (BITS - 1))
        share = self.sub(self.mul(top, wraps * (P >> shift)), low)
        return share, (opened >> shift) - (offset >> shift)

    def _limbs(self, elements: Tensor) -> list[Tensor]:
        mask = (1 << _LIMB) - 1
        return [elements & mask, elements >> _LIMB & mask, elements >> 2 * _LIMB]


class Words(Ring):
    """Words of 64 bits; their addition is the exclusive or."""

    def add(self, one: Tensor, two: Tensor) -> Tensor:
        return one ^ two

    def sub(self, one: Tensor, two: Tensor) -> Tensor:
        return one ^ two


RING, WORDS, FIELD = Ring(), Words(), Field()


def broadcast(one: Sequence[int], two: Sequence[int]) -> torch.Size:
    """Return the axes to which two shapes broadcast together."""
    shape: torch.Size = torch.broadcast_shapes(one, two)  # type: ignore[no-untyped-call]
    return shape


def reach(stack: Tensor, axes: int) -> Tensor:
    """Give stacked tensors at least this many axes, by axes of length 1 after the first axis."""
    missing = axes + 1 - stack.dim()
    if missing <= 0:
        return stack
    return stack.reshape(stack.shape[0], *(1,) * missing, *stack.shape[1:])


def upper(word: Tensor, place: int) -> Tensor:
    """Shift the bits of words down, so that bit `place` becomes bit 0; fill with zeros."""
    return (word >> place) & ((1 << (ELEMENT_BITS - place)) - 1) if place else word
