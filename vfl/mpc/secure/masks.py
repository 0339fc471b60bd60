"""Cuts as elements of a ring of 2^b numbers: masks hide each cut, and the sum of all cuts is exact.

A value is rounded to a multiple of 2^-fraction and taken modulo 2^bits (two's complement). A mask
that is uniform in the ring makes the masked value uniform, too. Masks that sum to zero preserve the
sum of the values modulo 2^bits, which is the true sum if the true sum fits the ring. Each party's
values must therefore stay within the party's part of the ring; this is checked before encoding.

The masks are pairwise: every pair of parties shares a pad stream; one party adds the pads and the
other party subtracts them. In an agreed order of parties, party i adds the pads of its pairs with
later parties and subtracts the pads of its pairs with earlier parties; the sum over all parties is
zero. Source: Bonawitz et al. 2017, section 4, without its recovery of lost parties: here, in
contrast, a lost party stops the exchange.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vfl.core.errors import BadOptionError, NonFiniteError, RingOverflowError, TruncatedFrameError
from vfl.core.frame import Payload
from vfl.mpc.ring import decode_sum, encode_onto
from vfl.mpc.stream import PadStream

#: Data type of a ring element by its number of bits, and the signed type of the same size.
_TYPES: dict[int, tuple[np.dtype[Any], np.dtype[Any]]] = {
    8: (np.dtype("u1"), np.dtype("i1")),
    16: (np.dtype("<u2"), np.dtype("<i2")),
    32: (np.dtype("<u4"), np.dtype("<i4")),
    64: (np.dtype("<u8"), np.dtype("<i8")),
}
#: Default number of fraction bits, by the number of bits; elements of 64 bits come from products of
#: shares.
_FRACTIONS = {8: 3, 16: 8, 32: 16}
#: Size of an element of a pad, in bytes.
_PAD_BYTES = 4
#: Function that returns elements that mask a cut; the caller may change them.
Mask = Callable[[int], np.ndarray]


@dataclass(frozen=True, slots=True)
class Ring:
    """Integers modulo 2^bits in which values are summed, with `fraction` bits after the point.

    >>> Ring.of(32, None, parties=2).reach
    16383.9999847412...
    """

    bits: int
    fraction: int
    parties: int

    @classmethod
    def of(cls, bits: int, fraction: int | None, parties: int) -> Ring:
        """Make a ring of 8, 16 or 32 bits; without `fraction`, a default is used.

        Raises:
            BadOptionError: the number of bits is not supported, or the fraction bits leave no room
                for values of 1.
        """
        if bits not in _FRACTIONS:
            choices = ", ".join(map(str, _FRACTIONS))
            raise BadOptionError(
                "no such choice", where="option 'bits'", got=f"{bits}", want=choices
            )
        ring = cls(bits, _FRACTIONS[bits] if fraction is None else fraction, parties)
        if not 0 <= ring.fraction < bits or ring.reach < 1:
            most = bits - 2 - math.ceil(math.log2(parties))
            raise BadOptionError(
                "out of range",
                where="option 'fraction'",
                got=f"{ring.fraction} of {bits} bits, {parties} parties",
                want=f"0 to {most}, so that a value of 1 fits" if most >= 0 else "more bits",
            )
        return ring

    @property
    def most(self) -> int:
        """Largest magnitude of each party's integers for which their sum surely fits the ring."""
        return int((1 << (self.bits - 1)) - 1) // self.parties

    @property
    def reach(self) -> float:
        """Largest magnitude of one party's real values."""
        return self.most * 2.0**-self.fraction

    @property
    def dtype(self) -> np.dtype[Any]:
        """Data type of an element."""
        return _TYPES[self.bits][0]

    @property
    def _signed(self) -> np.dtype[Any]:
        return _TYPES[self.bits][1]

    def encode(self, cut: Tensor, party: str, step: int, mask: Mask | None = None) -> np.ndarray:
        """Encode a cut of axes (rows, width) as masked elements in row order; axes (rows * width,).

        Args:
            cut: values of the cut, float32.
            party: name of the party, for the error message.
            step: number of the exchange, for the error message.
            mask: function that returns the mask; None means no mask.

        Raises:
            RingOverflowError: a value is beyond the party's part of the ring; nothing is returned.
            NonFiniteError: a value is NaN or infinite; nothing is returned.
        """
        values = cut.contiguous().numpy().reshape(-1)
        elements = np.zeros(len(values), self.dtype) if mask is None else mask(len(values))
        if not encode_onto(values, 2.0**self.fraction, self.most, elements.view(self._signed)):
            raise self._overflow(values, party, step)
        return elements

    def check(self, payload: Payload, rows: int, width: int) -> None:
        """Refuse a payload that cannot be the elements of a cut of these axes.

        Raises:
            TruncatedFrameError: the payload is not exactly rows x width elements long.
        """
        wanted = rows * width * self.dtype.itemsize
        if len(payload) != wanted:
            raise TruncatedFrameError(
                "a masked payload has the wrong length",
                got=f"{len(payload)} bytes",
                want=f"{wanted} bytes for {rows} rows of {width}",
            )

    def decode(self, payloads: Sequence[Payload], rows: int, width: int) -> Tensor:
        """Decode the sum of masked elements; float32 of axes (rows, width).

        Args:
            payloads: payloads of all parties; the masks in them sum to zero.
            rows: rows of the cuts.
            width: width of the cuts.

        Raises:
            TruncatedFrameError: see `check`.
        """
        for payload in payloads:
            self.check(payload, rows, width)
        *others, last = (np.frombuffer(payload, self._signed) for payload in payloads)
        before = sum(others[1:], start=others[0]) if others else np.zeros_like(last)
        values = decode_sum(before, last, 2.0**-self.fraction)
        return torch.from_numpy(values).view(rows, width)

    def _overflow(
        self, values: np.ndarray, party: str, step: int
    ) -> NonFiniteError | RingOverflowError:
        peak = max(-float(values.min()), float(values.max()))
        if not math.isfinite(peak):
            return NonFiniteError("a cut holds NaN or Inf", fix="lower the learning rate")
        needed = (round(peak * 2.0**self.fraction) * self.parties).bit_length() + 1
        return RingOverflowError(
            f"a value in the cut of party '{party}' does not fit into the masked sum",
            where=f"step {step}",
            got=f"{needed} bits needed, {self.fraction} of them behind the point",
            want=f"{self.bits} bits, for the sum of {self.parties} parties",
            fix="a bottom with bounded outputs (layer_norm, tanh), a lower learning rate, "
            "fewer fraction bits, or more bits",
        )


class PairwiseMasks:
    """One party's masks of one attempt; the object returns each mask only once.

    Args:
        party: name of the party.
        order: all parties, in the agreed order.
        keys: key of the pair with each other party; see `vfl.mpc.secure.keys`.

    >>> order, key = ["bank", "shop"], bytes(32)
    >>> bank = PairwiseMasks("bank", order, {"shop": key})
    >>> shop = PairwiseMasks("shop", order, {"bank": key})
    >>> element = np.dtype(np.uint32)
    >>> (bank.elements(3, element, "cut", 0) + shop.elements(3, element, "cut", 0)).tolist()
    [0, 0, 0]
    """

    def __init__(self, party: str, order: Sequence[str], keys: Mapping[str, bytes]) -> None:
        place = order.index(party)
        self._streams = [
            (PadStream(keys[other]), order.index(other) > place)
            for other in order
            if other != party
        ]

    def elements(self, count: int, dtype: np.dtype[Any], purpose: str, step: int) -> np.ndarray:
        """Return this party's mask of ring elements; axes (count,); the caller may change it.

        Args:
            count: number of elements.
            dtype: unsigned type of an element, so that sums wrap around.
            purpose: purpose of the mask; the mask is derived from it and the step.
            step: number of the exchange.

        Raises:
            ReusedPadError: this mask, or the mask of a later step, was returned before.
        """
        drawn = -(-count * dtype.itemsize // _PAD_BYTES)
        mask: np.ndarray | None = None
        for stream, adds in self._streams:
            pad = stream.elements32(drawn, purpose, step).view(dtype)[:count]
            if mask is None:
                mask = pad if adds else np.negative(pad, out=pad)
            elif adds:
                mask += pad
            else:
                mask -= pad
        return np.zeros(count, dtype) if mask is None else mask

    def __repr__(self) -> str:
        return "PairwiseMasks(...)"
