"""Masks that cancel out: every pair of parties shares a stream, which one adds and one subtracts.

For parties in an agreed order, party i adds the pads of its pairs with later parties and subtracts
those with earlier ones; the sum over all parties is zero (Bonawitz et al. 2017, section 4, without
its recovery of parties that drop out: here a lost party stops the exchange).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vfl.mpc.stream import PadStream

_WORD_BYTES = 4


class PairwiseMasks:
    """One party's masks of one attempt; each is given once.

    Args:
        party: whose.
        order: all parties, in the order they agreed on.
        keys: the key of its pair with each other party; see `vfl.mpc.agreement`.

    >>> order, key = ["bank", "shop"], bytes(32)
    >>> bank = PairwiseMasks("bank", order, {"shop": key})
    >>> shop = PairwiseMasks("shop", order, {"bank": key})
    >>> word = np.dtype(np.uint32)
    >>> (bank.words(3, word, "cut", 0) + shop.words(3, word, "cut", 0)).tolist()
    [0, 0, 0]
    """

    def __init__(self, party: str, order: Sequence[str], keys: Mapping[str, bytes]) -> None:
        place = order.index(party)
        self._streams = [
            (PadStream(keys[other]), order.index(other) > place)
            for other in order
            if other != party
        ]

    def words(self, count: int, dtype: np.dtype[Any], purpose: str, step: int) -> np.ndarray:
        """This party's mask of words of a ring; axes (count,), the caller's own.

        Args:
            count: how many words.
            dtype: of a word, unsigned: sums wrap around.
            purpose: what they are for.
            step: number of the exchange.

        Raises:
            ReusedPadError: this mask, or one of a later step, was used.
        """
        drawn = -(-count * dtype.itemsize // _WORD_BYTES)
        mask: np.ndarray | None = None
        for stream, adds in self._streams:
            pad = stream.words32(drawn, purpose, step).view(dtype)[:count]
            if mask is None:
                mask = pad if adds else np.negative(pad, out=pad)
            elif adds:
                mask += pad
            else:
                mask -= pad
        return np.zeros(count, dtype) if mask is None else mask

    def __repr__(self) -> str:
        return "PairwiseMasks(...)"
