"""Sums over rows that no party sees, for a regression on columns of several parties.

Holders have columns X of the same rows; the last of them, the label party, has labels y and learns
the sums. A helper, the last role, has no data. It draws masks as a dealer does (`vfl.mpc.engine`),
and it gets the margins of rows in one order that it does not know.

A holder's mask A is a pad in common with the helper. It opens E = X - A to the other holders, once:
they know E and not A, the helper A and not E. What is dealt is fresh each time; brackets are shares
of all holders, which send theirs of the results to the label party:

    X^T X    E^T E + E^T A + A^T E + [A^T A]        the owner of a column adds E^T A
    X^T y    X^T f + E^T c + [A^T c]                the label party opens f = y - c once
    X^T m    E^T [m] + [A^T m]                      the helper has m and w of every row
    X^T w X  E^T [w] E + E^T [w A] + [w A]^T E + [A^T w A]

An exchange of the last two: each holder sends the helper its part of the margins, with pads that
cancel out in the sum. The helper deals 8 n (k + 2) + 8 k (k + 1) bytes to the label party, for n
rows and k columns; other holders draw their shares. Numbers are fixed point in the ring 2^64, with
as many bits as sums of so many rows leave: of X in X^T X, X^T y and X^T m `fine_bits`, in X^T w X,
which has another mask, `coarse_bits`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vfl.core.errors import ProtocolError
from vfl.core.frame import Link
from vfl.core.seeds import generator
from vfl.mpc.engine import Engine
from vfl.mpc.permuted import permutation
from vfl.mpc.ring import ELEMENT_BYTES, decode, encode, matmul
from vfl.mpc.stream import PadStream
from vfl.trees.newton import Family, Sums

#: Bits of a sum, its sign apart, and one that rounding may take.
_SUM_BITS = 62
#: Fraction bits of a margin.
_MARGIN_BITS = 32
_MOST_BITS = 26
#: Most fraction bits of means and weights, whose sizes the helper knows.
_MOST_SHIFT = 256
_FIX = "leave out columns whose coefficients grow without an end, or l2=0.001"
#: What the helper says of its means: the sum of normalisers, and the bits of m and w.
_ABOUT = struct.Struct("<dqq")
_WORDS = _ABOUT.size // ELEMENT_BYTES


def fine_bits(rows: int) -> int:
    """Fraction bits of a standardised column in a product with another number of each row.

    >>> fine_bits(569), fine_bits(100_000)
    (26, 22)
    """
    return min(_MOST_BITS, (_SUM_BITS - _bits_of(rows)) // 2)


def coarse_bits(rows: int) -> int:
    """Fraction bits of a standardised column in a product with two others.

    >>> coarse_bits(569), coarse_bits(100_000)
    (17, 15)
    """
    return (_SUM_BITS - _bits_of(rows)) // 3


@dataclass(frozen=True, slots=True)
class Masked:
    """Columns side by side as one party has them.

    Attributes:
        opened: E, axes (rows, columns); empty at the helper.
        mask: at a holder that of its own columns, at the helper A.
        bits: fraction bits.
    """

    opened: Tensor
    mask: Tensor
    bits: int


class Summing(Engine):
    """A holder of columns, the last of them the label party, or the helper.

    Args:
        role: from 0; the last is the helper's.
        links: to the others, by role. Nobody but its two ends may read one.
        rows: how many there are.
        columns: how many each holder has, at least one; the intercept is a column of ones.

    Attributes:
        order: of the rows, which the helper does not know.
    """

    def __init__(
        self, role: int, links: Mapping[int, Link], rows: int, columns: Sequence[int]
    ) -> None:
        record = {"rows": rows, "columns": list(columns)}
        super().__init__(role, links, len(columns), record)
        self.rows, self.columns = rows, list(columns)
        self.label = len(columns) - 1
        self.order = np.empty(0, np.int64)

    def agree(self, terms: Mapping[str, object], session: str, attempt: int = 0) -> None:
        """See `Peer.agree`; the holders then draw an order of the rows."""
        super().agree(terms, session, attempt)
        common: PadStream | None = self._stream_of_holders()
        if common is not None:
            self.order = permutation(common, self.rows, "rows")

    def open_columns(self, own: Tensor | None, bits: int) -> Masked:
        """Open every holder's columns to the other holders, under masks; 8 bytes a cell.

        Args:
            own: at a holder its standardised columns, float64, axes (rows, columns).
            bits: fraction bits.
        """
        number = self.next_number()
        shapes = [(self.rows, count) for count in self.columns]
        if self.deals:
            masks = [self.pad(at, shape, "columns", number) for at, shape in enumerate(shapes)]
            return Masked(torch.empty(0, dtype=torch.int64), torch.cat(masks, 1), bits)
        assert own is not None, "a holder has columns"
        mask = self.pad(self.dealer, shapes[self.role], "columns", number)
        # Rounded up or down at random, so that errors of rows with equal cells do not add up.
        draw = generator(bits, "sums", self.role)
        dither = torch.rand(own.shape, generator=draw, dtype=torch.float64) - 0.5
        rounded = encode(own + dither * 2.0**-bits, bits, "columns", _SUM_BITS - bits)
        hidden = rounded[self.order] - mask
        for holder in self.others:
            self.channels[holder].send([hidden], number, "setup")
        parts = [
            hidden if at == self.role else self.channels[at].receive([shape], number)[0]
            for at, shape in enumerate(shapes)
        ]
        return Masked(torch.cat(parts, 1), mask, bits)

    def gram(self, columns: Masked) -> Tensor | None:
        """X^T X at the label party, float64, axes (columns, columns)."""
        number, count = self.next_number(), sum(self.columns)
        if self.deals:
            self._deal([matmul(columns.mask.t(), columns.mask)], "gram", number)
            return None
        (share,) = self._dealt([(count, count)], "gram", number)
        beside = matmul(columns.opened.t(), columns.mask)
        share[:, self._own] += beside
        share[self._own] += beside.t()
        if self.first:
            share += matmul(columns.opened.t(), columns.opened)
        (total,) = self._at_label([share], number) or (None,)
        return None if total is None else self._counted("X^T X", decode(total, 2 * columns.bits))

    def label_products(self, columns: Masked, labels: Tensor | None) -> Tensor | None:
        """X^T y at the label party, float64, axes (columns,); 8 bytes a row from it.

        Args:
            columns: opened.
            labels: at the label party, float64, axes (rows,).
        """
        number, count = self.next_number(), sum(self.columns)
        if self.deals:
            mask = self.pad(self.label, (self.rows, 1), "labels", number)
            self._deal([matmul(columns.mask.t(), mask)], "products", number)
            return None
        (share,) = self._dealt([(count, 1)], "products", number)
        bits = 0
        if self.role == self.label:
            assert labels is not None, "the label party has labels"
            bits = self._bits_beside(columns.bits, labels)
            mask = self.pad(self.dealer, (self.rows, 1), "labels", number)
            whole = encode(labels[self.order, None], bits, "labels", _SUM_BITS - bits)
            hidden = whole - mask
            for holder in self.others:
                self.channels[holder].send([hidden], number, "setup")
            share += matmul(columns.opened.t(), mask)
        else:
            (hidden,) = self.channels[self.label].receive([(self.rows, 1)], number)
        share[self._own] += matmul((columns.opened[:, self._own] + columns.mask).t(), hidden)
        (total,) = self._at_label([share], number) or (None,)
        if total is None:
            return None
        return self._counted("X^T y", decode(total, columns.bits + bits)[:, 0])

    def sums_at(
        self, family: Family, fine: Masked, coarse: Masked, margins: Tensor | None
    ) -> Sums | None:
        """X^T m and X^T w X at the label party, for the means and weights of margins.

        Args:
            family: of the labels.
            fine: all columns, opened.
            coarse: the same, opened again.
            margins: at a holder its own columns' part of each row's margin, float64, axes (rows,).
        """
        number, count = self.next_number(), sum(self.columns)
        if self.deals:
            self._deal_means(number, family, fine, coarse)
            return None
        assert margins is not None, "a holder has its part"
        part = encode(margins[self.order], _MARGIN_BITS, "margins", _SUM_BITS - _MARGIN_BITS, _FIX)
        for holder in self.others:  # parts that tell no more than their sum
            fresh = self.pad(holder, (self.rows,), "margins", number)
            part = part + fresh if self.role < holder else part - fresh
        self.channels[self.dealer].send([part], number)
        shapes = [(self.rows, 1), (self.rows, 1), (self.rows, count), (count, 1), (count, count)]
        m, w, masked, means, curvature = self._dealt(shapes, "means", number)
        means = means + matmul(fine.opened.t(), m)
        beside = matmul(coarse.opened.t(), masked)
        curvature = curvature + beside + beside.t()
        curvature += matmul(coarse.opened.t(), w * coarse.opened)
        found = self._at_label([means, curvature], number)
        if found is None:
            return None
        (about,) = self.channels[self.dealer].receive([(_WORDS,)], number)
        about = about - self.pad(self.dealer, (_WORDS,), "about", number)
        normaliser, of_means, of_weights = _ABOUT.unpack(about.numpy().tobytes())
        if max(abs(of_means), abs(of_weights)) > _MOST_SHIFT:
            raise ProtocolError(
                "means of other bits than sums can have",
                where="the helper's message",
                want=f"at most {_MOST_SHIFT}",
            )
        first = decode(found[0], fine.bits + of_means)[:, 0]
        second = decode(found[1], 2 * coarse.bits + of_weights)
        self._counted("X^T m", first)
        self._counted("X^T w X", second)
        return Sums(first.numpy(), second.numpy(), normaliser)

    # What the above is made of.

    def _deal_means(self, number: int, family: Family, fine: Masked, coarse: Masked) -> None:
        """At the helper: means of the margins, which it sees in an order that it does not know."""
        total = torch.zeros(self.rows, dtype=torch.int64)
        for holder in range(self.holders):
            total += self.channels[holder].receive([(self.rows,)], number)[0]
        self.leakage.count("permuted margins", "training rows", self.rows, self.rows)
        margins = decode(total, _MARGIN_BITS).numpy()
        normaliser = float(family.normaliser(margins).sum())
        if not math.isfinite(normaliser):  # the label party takes a shorter step
            margins = np.zeros_like(margins)
        means = torch.from_numpy(family.mean(margins))
        weights = torch.from_numpy(family.variance(margins))
        of_means = self._bits_beside(fine.bits, means)
        of_weights = self._bits_of_weights(coarse.bits, float(weights.max()))
        m = encode(means[:, None], of_means, "means", _SUM_BITS - of_means)
        w = encode(weights[:, None], of_weights, "weights", _SUM_BITS - of_weights)
        masked = w * coarse.mask
        dealt = [m, w, masked, matmul(fine.mask.t(), m), matmul(coarse.mask.t(), masked)]
        self._deal(dealt, "means", number, phase="online")
        about = np.frombuffer(_ABOUT.pack(normaliser, of_means, of_weights), "<i8")
        told = torch.from_numpy(about.copy()) + self.pad(self.label, (_WORDS,), "about", number)
        self.channels[self.label].send([told], number)

    def _bits_beside(self, bits: int, numbers: Tensor) -> int:
        """Fraction bits of numbers whose products with a standardised column can be added up.

        By Cauchy and Schwarz the sum is at most the rows, times the root of the mean square.
        """
        size = float(numbers.square().mean().sqrt())
        return _SUM_BITS - bits - _bits_of(self.rows) - math.ceil(math.log2(max(size, 2.0**-40)))

    def _bits_of_weights(self, bits: int, largest: float) -> int:
        """Likewise of weights, beside two columns."""
        size = math.ceil(math.log2(max(largest, 2.0**-40)))
        return _SUM_BITS - 2 * bits - _bits_of(self.rows) - size

    @property
    def _own(self) -> slice:
        """Where a holder's columns stand among all."""
        start = sum(self.columns[: self.role])
        return slice(start, start + self.columns[self.role])

    def _at_label(self, shares: Sequence[Tensor], number: int) -> list[Tensor] | None:
        """The sums of all holders' shares, at the label party."""
        if self.role != self.label:
            self.channels[self.label].send(shares, number)
            return None
        totals = list(shares)
        for holder in self.others:
            theirs = self.channels[holder].receive([share.shape for share in shares], number)
            totals = [one + other for one, other in zip(totals, theirs, strict=True)]
        return totals

    def _counted(self, what: str, values: Tensor) -> Tensor:
        self.leakage.count("sums over rows", what, values.numel(), self.rows)
        return values


def largest_frame(rows: int, columns: Sequence[int]) -> int:
    """Payload bytes of the largest message: what the helper deals.

    >>> largest_frame(1000, [3, 2])
    56240
    """
    count = sum(columns)
    return ELEMENT_BYTES * (rows * (count + 2) + count * (count + 1))


def _bits_of(count: int) -> int:
    return max(1, count - 1).bit_length()
