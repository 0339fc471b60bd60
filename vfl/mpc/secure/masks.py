"""Cut-layer activations as elements of a ring: masks hide each party's, and their sum is exact.

A real value is rounded to a multiple of 2^-fraction, and the integer is taken modulo 2^bits (two's
complement). A mask that is uniform in the ring makes the masked value uniform too. Masks that add
up to zero preserve the sum of the values modulo 2^bits; this is the true sum if the true sum fits
into the ring. Each party's values must therefore stay within the party's part of the ring's range;
the program checks this before it encodes them.

The masks are pairwise: every pair of parties shares a key stream of pads; one party of the pair
adds a pad, and the other party subtracts the same pad. In an agreed order of the parties, party i
adds the pads of its pairs with later parties and subtracts the pads of its pairs with earlier
parties; the sum of these masks over all parties is zero. Source: Bonawitz et al. 2017, section 4,
without the recovery of lost parties: here a lost party stops the training step.
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

#: Data type of a ring element, by the number of bits; and the signed type of the same size.
_TYPES: dict[int, tuple[np.dtype[Any], np.dtype[Any]]] = {
    8: (np.dtype("u1"), np.dtype("i1")),
    16: (np.dtype("<u2"), np.dtype("<i2")),
    32: (np.dtype("<u4"), np.dtype("<i4")),
    64: (np.dtype("<u8"), np.dtype("<i8")),
}
#: Default number of fraction bits, by the number of bits; elements of 64 bits (products of shares)
#: have no default.
_FRACTIONS = {8: 3, 16: 8, 32: 16}
#: Size of a pad's element, in bytes.
_PAD_BYTES = 4
#: Function that returns the elements by which a party masks its cut-layer activations; the caller
#: may change them.
Mask = Callable[[int], np.ndarray]


@dataclass(frozen=True, slots=True)
class Ring:
    """Integers modulo 2^bits in which parties add values; `fraction` bits follow the binary point.

    >>> Ring.of(32, None, parties=2).reach
    16383.9999847412...
    """

    bits: int
    fraction: int
    parties: int

    @classmethod
    def of(cls, bits: int, fraction: int | None, parties: int) -> Ring:
        """Make a ring of 8, 16 or 32 bits.

        Without `fraction`, a default number of fraction bits is used.

        Raises:
            BadOptionError: the number of bits is not supported, or the fraction bits leave no bits
                for values of 1.
        """
        if bits not in _FRACTIONS:
            choices = ", ".join(map(str, _FRACTIONS))
            raise BadOptionError(
                "no such choice", where="option 'bits'", got=f"{bits}", want=choices
            )
        ring = cls(bits, _FRACTIONS[bits] if fraction is None else fraction, parties)
        if not 0 <= ring.fraction < bits or ring.reach < 1:
            most = ring.most.bit_length() - 1
            raise BadOptionError(
                "out of range",
                where="option 'fraction'",
                got=f"{ring.fraction} of {bits} bits, {parties} parties",
                want=f"0 to {most}, so that a value of 1 fits" if most >= 0 else "more bits",
            )
        return ring

    @property
    def most(self) -> int:
        """Largest magnitude of each party's integers whose sum surely fits into the ring."""
        return int((1 << (self.bits - 1)) - 1) // self.parties

    @property
    def reach(self) -> float:
        """Largest magnitude of each party's real values whose sum surely fits into the ring."""
        return self.most * 2.0**-self.fraction

    @property
    def dtype(self) -> np.dtype[Any]:
        """Data type of a ring element."""
        return _TYPES[self.bits][0]

    @property
    def _signed(self) -> np.dtype[Any]:
        return _TYPES[self.bits][1]

    def encode(self, cut: Tensor, party: str, step: int, mask: Mask | None = None) -> np.ndarray:
        """Encode cut-layer activations, axes (rows, width), as masked ring elements.

        The elements are in row order, axes (rows * width,).

        Args:
            cut: cut-layer activations, float32.
            party: name of the party, for the error message.
            step: number of the training step, for the error message.
            mask: function that returns the mask; None means no mask.

        Raises:
            RingOverflowError: a value is beyond the party's part of the ring's range; nothing is
                returned.
            NonFiniteError: a value is NaN or infinite; nothing is returned.
        """
        values = cut.contiguous().numpy().reshape(-1)
        elements = np.zeros(len(values), self.dtype) if mask is None else mask(len(values))
        if not encode_onto(values, 2.0**self.fraction, self.most, elements.view(self._signed)):
            raise self._overflow(values, party, step)
        return elements

    def check(self, payload: Payload, rows: int, width: int) -> None:
        """Refuse a payload that cannot contain the elements of a cut layer with these axes.

        Raises:
            TruncatedFrameError: the payload is not as long as rows x width elements are.
        """
        wanted = rows * width * self.dtype.itemsize
        if len(payload) != wanted:
            raise TruncatedFrameError(
                "a masked payload has the wrong length",
                got=f"{len(payload)} bytes",
                want=f"{wanted} bytes for {rows} rows of {width}",
            )

    def decode(self, payloads: Sequence[Payload], rows: int, width: int) -> Tensor:
        """Decode the sum of all parties' masked elements; float32 of axes (rows, width).

        Args:
            payloads: payloads of all parties; the masks in them add up to zero.
            rows: number of rows of the cut-layer activations.
            width: width of the cut layer.

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
    """One party's masks in one attempt at a session; the object returns each mask only once.

    Args:
        party: name of the party.
        order: all parties, in the order on which they agreed.
        keys: key of this party's pair with each other party; see `vfl.mpc.secure.keys`.

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
        """Return this party's mask of ring elements, axes (count,).

        The caller may change the mask's memory.

        Args:
            count: number of elements of the mask.
            dtype: unsigned type of an element, so that sums wrap around as in the ring.
            purpose: purpose of the mask, from which it is derived together with the step.
            step: number of the training step or query.

        Raises:
            ReusedPadError: this mask, or the purpose's mask of a later step, was already returned.
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
