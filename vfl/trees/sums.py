"""Sums over rows that no party has in full, for regressions on several parties' columns.

Holders are the parties with columns X of the same rows. The last holder is the label party, which
has labels y and receives the sums. A helper is a further party without data; its role number is the
last one. The helper draws masks like a dealer (`vfl.mpc.engine`), and receives the margins (linear
predictors) of secretly permuted rows.

A holder's mask A for its columns is a pad that this holder has in common with the helper. The
holder sends the masked columns E = X - A to all other holders (it opens them), once with each mask.
So the other holders have E but not A, and the helper has A but not E. The helper deals new shares
for each computation. In the formulas, m are the rows' means, w their weights, and brackets are
additive shares among all holders. The holders send their shares of the results to the label party:

    X^T X    E^T E + E^T A + A^T E + [A^T A]        the owner of a column adds E^T A;
    X^T y    X^T f + E^T c + [A^T c]                the label party opens f = y - c once;
    X^T m    E^T [m] + [A^T m]                      the helper has m and w of every row;
    X^T w X  E^T [w] E + E^T [w A] + [w A]^T E + [A^T w A].

For the last two formulas, each holder sends the helper its part of the margins, plus pads that
cancel out in the sum over holders. The helper sends 8 n (k + 2) + 8 k (k + 1) bytes of shares to
the label party, for n rows and k columns. The other holders derive their shares from a seed that
each has in common with the helper.

Sums of the label party's integers over the rows of each bin of another holder's columns
(`bin_sums`) are computed like the sums of boosted trees (`vfl.trees.shared`). The holder of these
columns draws one share of the n integers, the helper receives the other share, and both sum their
shares bin by bin. The helper also receives the bins, with rows in an order that is secret to the
helper and differs between holders.

Numbers are fixed-point numbers in the ring 2^64; the number of fraction bits is the largest, up to
26 for X, for which sums over so many rows fit. X has `fine_bits` fraction bits in the products X^T
X, X^T y and X^T m. In X^T w X, X has `coarse_bits` fraction bits and another mask.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
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
from vfl.trees.histograms import bin_kind, sums_of
from vfl.trees.newton import Family, Sums

#: Number of bits of a sum, without the sign bit and without one bit for rounding.
_SUM_BITS = 62
#: Number of fraction bits of a margin.
_MARGIN_BITS = 32
_MOST_BITS = 26
#: Largest number of fraction bits of means and of weights; the helper has these values and chooses
#: the number of bits by their sizes.
_MOST_SHIFT = 256
_FIX = "remove columns whose coefficients grow without limit, or set l2=0.001"
#: Format of the helper's message about the means: the sum of the family's normaliser b(m) over the
#: margins m of all rows, and the numbers of fraction bits of means and of weights.
_ABOUT = struct.Struct("<dqq")
#: Requests of the label party: "compute the sums at these coefficients", and "end".
_GO_ON, _DONE = b"G", b"D"
_LABEL_PARTY = "the label party"
_WORDS = _ABOUT.size // ELEMENT_BYTES


def fine_bits(rows: int) -> int:
    """Return the fraction bits of a standardised column in products with one other factor per row.

    >>> fine_bits(569), fine_bits(100_000)
    (26, 22)
    """
    return min(_MOST_BITS, (_SUM_BITS - _bits_of(rows)) // 2)


def coarse_bits(rows: int) -> int:
    """Return the fraction bits of a standardised column in products with two other factors.

    >>> coarse_bits(569), coarse_bits(100_000)
    (17, 15)
    """
    return (_SUM_BITS - _bits_of(rows)) // 3


@dataclass(frozen=True, slots=True)
class Masked:
    """Masked columns of all holders, as one party has them.

    Attributes:
        opened: the masked columns E that were sent, axes (rows, columns); empty at the helper.
        mask: at a holder, the mask of its own columns; at the helper, the masks A of all columns.
        bits: fraction bits.
    """

    opened: Tensor
    mask: Tensor
    bits: int


class Summing(Engine):
    """One party of this protocol: a holder of columns (the label party last), or the helper.

    Args:
        role: number of the party's role, from 0; the helper has the highest number.
        links: network links to the other parties, by role. No other code may receive messages from
            these links.
        rows: number of rows.
        columns: number of columns of each holder, at least one; the intercept is a column of ones.

    Attributes:
        order: order of the rows in messages to the helper; all holders have it, the helper does
            not.
        dithers: whether the rows' means and weights are rounded at random; otherwise, rounding
            errors of many equal rows would add up.
        spend: callback that receives how many sums over a holder's columns are about to be
            disclosed to the label party; it may raise an error.
    """

    spend: Callable[[int], object] = staticmethod(lambda count: None)

    def __init__(
        self, role: int, links: Mapping[int, Link], rows: int, columns: Sequence[int]
    ) -> None:
        record = {"rows": rows, "columns": list(columns)}
        super().__init__(role, links, len(columns), record)
        self.rows, self.columns = rows, list(columns)
        self.label = len(columns) - 1
        self.order = np.empty(0, np.int64)
        self.dithers = False

    def agree(self, terms: Mapping[str, object], session: str, attempt: int = 0) -> None:
        """See `Peer.agree`; afterwards, the holders draw a common secret order of rows."""
        super().agree(terms, session, attempt)
        common: PadStream | None = self._stream_of_holders()
        if common is not None:
            self.order = permutation(common, self.rows, "rows")

    def bin_sums(
        self,
        sizes: Sequence[tuple[int, int]],
        bins: np.ndarray | None = None,
        numbers: np.ndarray | None = None,
    ) -> list[np.ndarray] | None:
        """At the label party, return sums of its integers over the rows in each bin of each holder.

        Each other holder sends the helper one or two bytes per cell of its columns; for each of
        these holders, the label party sends the helper 8 bytes per row.

        Args:
            sizes: for each other holder, the number of its columns and the number of bins per
                column.
            bins: at a holder other than the label party, the bin numbers of its cells, axes (rows,
                columns).
            numbers: at the label party, the integers to sum, int64, axes (rows,).

        Returns:
            One array per holder without labels, int64, axes (columns, bins).

        Raises:
            ProtocolError: a cell has a bin number that is too large.
        """
        number, found = self.next_number(), list[np.ndarray]()
        for holder, shape in enumerate(sizes):
            if self.deals:
                self._add_helped(holder, shape, number)
            elif holder == self.role:
                assert bins is not None, "a holder has bins"
                self._add_own(bins, shape, number)
            elif self.role == self.label:
                assert numbers is not None, "the label party has numbers"
                found.append(self._added(holder, numbers, shape, number))
        return found if self.role == self.label else None

    def open_columns(self, own: Tensor | None, bits: int) -> Masked:
        """Send every holder's masked columns to all other holders, at 8 bytes per cell.

        Args:
            own: at a holder, its standardised columns, float64, axes (rows, columns).
            bits: fraction bits.
        """
        number = self.next_number()
        shapes = [(self.rows, count) for count in self.columns]
        if self.deals:
            masks = [self.pad(at, shape, "columns", number) for at, shape in enumerate(shapes)]
            return Masked(torch.empty(0, dtype=torch.int64), torch.cat(masks, 1), bits)
        assert own is not None, "a holder has columns"
        mask = self.pad(self.dealer, shapes[self.role], "columns", number)
        # Cells are rounded up or down at random, so that rounding errors of rows with equal cells
        # do not add up.
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

    def narrowed(self, columns: Masked, keep: np.ndarray) -> Masked:
        """Keep some of the opened columns; later sums use only the kept columns.

        Args:
            columns: masked columns of all holders, as `open_columns` returned them.
            keep: for each column, whether to keep it, bool, axes (columns,).
        """
        mask, opened = keep if self.deals else keep[self._own], columns.opened
        ends = np.cumsum(self.columns)[:-1]
        self.columns = [int(part.sum()) for part in np.split(keep, ends)]
        if not self.deals:
            opened = opened[:, torch.from_numpy(keep)]
        return Masked(opened, columns.mask[:, torch.from_numpy(mask)], columns.bits)

    def gram(self, columns: Masked) -> Tensor | None:
        """Return X^T X at the label party, float64, axes (columns, columns); elsewhere None."""
        number, count = self.next_number(), sum(self.columns)
        if self.deals:
            self._deal([matmul(columns.mask.t(), columns.mask)], "gram", number)
            return None
        (share,) = self._dealt([(count, count)], "gram", number)
        self.spend(self._of_pairs)
        beside = matmul(columns.opened.t(), columns.mask)
        share[:, self._own] += beside
        share[self._own] += beside.t()
        if self.first:
            share += matmul(columns.opened.t(), columns.opened)
        (total,) = self._at_label([share], number) or (None,)
        return None if total is None else self._counted("X^T X", decode(total, 2 * columns.bits))

    def label_products(self, columns: Masked, labels: Tensor | None) -> Tensor | None:
        """Return X^T y at the label party, float64, axes (columns,).

        The label party sends each other holder 8 bytes per row.

        Args:
            columns: opened columns.
            labels: at the label party, the labels, float64, axes (rows,).
        """
        number, count = self.next_number(), sum(self.columns)
        if self.deals:
            mask = self.pad(self.label, (self.rows, 1), "labels", number)
            self._deal([matmul(columns.mask.t(), mask)], "products", number)
            return None
        (share,) = self._dealt([(count, 1)], "products", number)
        self.spend(self.columns[self.role])
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
        """Return X^T m and X^T w X at the label party, for the rows' means m and weights w.

        Args:
            family: distribution family of the labels.
            fine: opened columns with fine fraction bits.
            coarse: the same columns, opened again with coarse fraction bits.
            margins: at a holder, the part of each row's margin that results from its own columns,
                float64, axes (rows,).
        """
        number, count = self.next_number(), sum(self.columns)
        if self.deals:
            self._deal_means(number, family, fine, coarse)
            return None
        assert margins is not None, "a party with columns has its part of the margins"
        self.spend(self.columns[self.role] + self._of_pairs)
        part = encode(margins[self.order], _MARGIN_BITS, "margins", _SUM_BITS - _MARGIN_BITS, _FIX)
        for holder in self.others:  # masked; the helper learns only the parts' sum
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
                "means with an invalid number of bits",
                where="the helper's message",
                want=f"at most {_MOST_SHIFT}",
            )
        first = decode(found[0], fine.bits + of_means)[:, 0]
        second = decode(found[1], 2 * coarse.bits + of_weights)
        self._counted("X^T m", first)
        self._counted("X^T w X", second)
        return Sums(first.numpy(), second.numpy(), normaliser)

    # Steps of the methods above.

    def _add_helped(self, holder: int, shape: tuple[int, int], number: int) -> None:
        """At the helper: sum its share of the integers over a holder's bins, and send the sums."""
        kind = bin_kind(shape[1])
        channel, size = self.channels[holder], self.rows * shape[0] * kind.itemsize
        raw = np.frombuffer(channel.receive_bytes(number, size), kind)
        bins = np.ascontiguousarray(raw.reshape(shape[0], self.rows).T)
        if bins.size and bins.max() >= shape[1]:
            raise ProtocolError(
                "a bin number is larger than its column has bins", where=f"bins of {channel.peer}"
            )
        self.leakage.count("bins of cells", "rows permuted", bins.size, bins.size)
        (share,) = self.channels[self.label].receive([(self.rows,)], number)
        sums = _sums_over(bins, share.numpy().view(np.uint64), shape[1])
        self.channels[self.label].send([sums - self.pad(holder, shape, "bin sums", number)], number)

    def _add_own(self, bins: np.ndarray, shape: tuple[int, int], number: int) -> None:
        """At a holder without labels: sum its share over its bins; send the sums plus a pad."""
        self.spend(math.prod(shape))
        order = permutation(self.pads[self.label], self.rows, "rows", number)
        permuted = bins[order].astype(bin_kind(shape[1]))
        self.channels[self.dealer].send_bytes(permuted.tobytes("F"), number, "setup")
        share = self.pad(self.label, (self.rows,), "share", number)
        sums = _sums_over(bins, share.numpy().view(np.uint64), shape[1])
        hidden = sums + self.pad(self.dealer, shape, "bin sums", number)
        self.channels[self.label].send([hidden], number)

    def _added(
        self, holder: int, numbers: np.ndarray, shape: tuple[int, int], number: int
    ) -> np.ndarray:
        """At the label party: receive the two masked sums of a holder and the helper; add them."""
        order = permutation(self.pads[holder], self.rows, "rows", number)
        rest = torch.from_numpy(numbers) - self.pad(holder, (self.rows,), "share", number)
        self.channels[self.dealer].send([rest[order]], number)
        (own,) = self.channels[holder].receive([shape], number)
        (helped,) = self.channels[self.dealer].receive([shape], number)
        self.leakage.count("sums over rows", "bins", own.numel(), self.rows)
        found: np.ndarray = (own + helped).numpy()
        return found

    @property
    def _of_pairs(self) -> int:
        """Number of products of two columns, at least one of which is this holder's."""
        own, count = self.columns[self.role], sum(self.columns)
        return own * (count - own) + own * (own + 1) // 2

    def _deal_means(self, number: int, family: Family, fine: Masked, coarse: Masked) -> None:
        """At the helper: compute means and weights of permuted rows, and deal shares of them."""
        total = torch.zeros(self.rows, dtype=torch.int64)
        for holder in range(self.holders):
            total += self.channels[holder].receive([(self.rows,)], number)[0]
        self.leakage.count("permuted margins", "training rows", self.rows, self.rows)
        margins = decode(total, _MARGIN_BITS).numpy()
        normaliser = float(family.normaliser(margins).sum())
        if not math.isfinite(normaliser):  # the label party then takes a shorter step
            margins = np.zeros_like(margins)
        means = torch.from_numpy(family.mean(margins))
        weights = torch.from_numpy(family.variance(margins))
        of_means = self._bits_beside(fine.bits, means)
        of_weights = self._bits_of_weights(coarse.bits, float(weights.max()))
        dither = torch.zeros(self.rows, dtype=torch.float64)
        if self.dithers:  # the same rounding in all Newton steps lets them converge
            dither = torch.rand(self.rows, generator=generator(0, "means")).double() - 0.5
        m, w = (
            encode((one + dither * 2.0**-bits)[:, None], bits, what, _SUM_BITS - bits)
            for what, one, bits in (("means", means, of_means), ("weights", weights, of_weights))
        )
        masked = w * coarse.mask
        dealt = [m, w, masked, matmul(fine.mask.t(), m), matmul(coarse.mask.t(), masked)]
        self._deal(dealt, "means", number, phase="online")
        about = np.frombuffer(_ABOUT.pack(normaliser, of_means, of_weights), "<i8")
        told = torch.from_numpy(about.copy()) + self.pad(self.label, (_WORDS,), "about", number)
        self.channels[self.label].send([told], number)

    def _bits_beside(self, bits: int, numbers: Tensor) -> int:
        """Return the fraction bits for values of rows in their products with a standardised column.

        By the Cauchy-Schwarz inequality, a sum of these products is at most the number of rows
        times the root mean square of the values.
        """
        size = float(numbers.square().mean().sqrt())
        return _SUM_BITS - bits - _bits_of(self.rows) - math.ceil(math.log2(max(size, 2.0**-40)))

    def _bits_of_weights(self, bits: int, largest: float) -> int:
        """Return the fraction bits for row weights in products with two standardised columns."""
        size = math.ceil(math.log2(max(largest, 2.0**-40)))
        return _SUM_BITS - 2 * bits - _bits_of(self.rows) - size

    @property
    def _own(self) -> slice:
        """Positions of this holder's columns among all columns."""
        start = sum(self.columns[: self.role])
        return slice(start, start + self.columns[self.role])

    def _at_label(self, shares: Sequence[Tensor], number: int) -> list[Tensor] | None:
        """At the label party, return the sum of all holders' shares; elsewhere, send the share."""
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


class Asked:
    """Sums at coefficients that the label party chooses, for as many requests as it sends.

    Args:
        player: this party.
        of: distribution family of the labels.
        fine: opened columns with fine fraction bits.
        coarse: the same columns, opened again with coarse fraction bits; None if no sums at
            coefficients are requested.
        own: columns of this holder, float64, axes (rows, columns); None at the helper.
    """

    def __init__(
        self,
        player: Summing,
        of: Family,
        fine: Masked,
        coarse: Masked | None,
        own: np.ndarray | None,
    ) -> None:
        self._player, self._of = player, of
        self._fine, self._coarse, self._own = fine, coarse, own

    def at(self, parts: Sequence[np.ndarray]) -> Sums:
        """At the label party: request the sums at given coefficients, and return them.

        Args:
            parts: coefficients of each holder's columns, by role.
        """
        player, own = self._player, self._own
        number = player.next_number()
        for role, channel in player.channels.items():
            content = b"" if role == player.dealer else parts[role].astype("<f8").tobytes()
            channel.send_bytes(_GO_ON + content, number, "online")
        assert self._coarse is not None, "columns were opened twice"
        assert own is not None, "the label party has columns"
        margins = torch.from_numpy(own @ parts[-1])
        found = player.sums_at(self._of, self._fine, self._coarse, margins)
        assert found is not None, "the label party learns these sums"
        return found

    def end(self, last: Mapping[int, bytes]) -> None:
        """At the label party: notify all other parties that no more requests follow.

        Args:
            last: last message to each holder, by role.
        """
        number = self._player.next_number()
        for role, channel in self._player.channels.items():
            channel.send_bytes(_DONE + last.get(role, b""), number, "online")

    def follow(self, most: int, last_bytes: int) -> bytes:
        """At other parties: answer requests until the label party ends; return its last message.

        Args:
            most: largest number of sums that the label party may request.
            last_bytes: size of the last message in bytes.

        Raises:
            ProtocolError: the label party sends an invalid request, or too many requests.
        """
        player, own = self._player, self._own
        link, size = player.channels[player.label], 0
        if own is not None:
            size = ELEMENT_BYTES * own.shape[1]
        for _ in range(most):
            number = player.next_number()
            raw = link.receive_bytes(number, 1, 1 + max(size, last_bytes))
            if bytes(raw[:1]) == _DONE:
                return bytes(raw[1:])
            if self._coarse is None or bytes(raw[:1]) != _GO_ON or len(raw) != 1 + size:
                raise ProtocolError("unexpected coefficients", where=_LABEL_PARTY)
            margins = None
            if own is not None:
                margins = torch.from_numpy(own @ np.frombuffer(raw[1:], "<f8"))
                player.leakage.count("coefficients", "own columns", own.shape[1], own.shape[1])
            player.sums_at(self._of, self._fine, self._coarse, margins)
        raise ProtocolError(
            "the label party requests more sums than a fit can need", where=_LABEL_PARTY
        )


def _sums_over(bins: np.ndarray, elements: np.ndarray, width: int) -> Tensor:
    """Sum ring elements over the rows of each bin, int64, axes (columns, bins)."""
    sums = sums_of(bins, np.zeros(len(bins), np.uint8), 1, elements, width)[0]
    return torch.from_numpy(sums.view(np.int64))


def largest_frame(rows: int, columns: Sequence[int]) -> int:
    """Return the payload size in bytes of the largest message, which contains the helper's shares.

    >>> largest_frame(1000, [3, 2])
    56240
    """
    count = sum(columns)
    return ELEMENT_BYTES * (rows * (count + 2) + count * (count + 1))


def _bits_of(count: int) -> int:
    return max(1, count - 1).bit_length()
