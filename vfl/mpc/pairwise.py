"""Masks that cancel out: every pair of parties shares a stream, which one adds and one subtracts.

For parties in an agreed order, party i adds the pads of its pairs with later parties and subtracts
those with earlier ones; the sum over all parties is zero (Bonawitz et al. 2017, section 4, without
its recovery of parties that drop out: here a lost party stops the exchange).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vfl.mpc.stream import PadStream

_WORD_BYTES = 4
#: Words that are masked at once: their values, words and pads fit into a core's own cache, outside
#: of which a secure sum takes three times as long.
BLOCK = 16384
#: More blocks than a frame of the largest size has.
_BLOCKS = 2**20


class PairwiseMasks:
    """One party's masks of one attempt; each is given once.

    Args:
        party: whose.
        order: all parties, in the order they agreed on.
        keys: the key of its pair with each other party; see `vfl.mpc.agreement`.

    >>> order, key = ["bank", "shop"], bytes(32)
    >>> bank = PairwiseMasks("bank", order, {"shop": key})
    >>> shop = PairwiseMasks("shop", order, {"bank": key})
    >>> words = np.array([[5, 6, 7], [10, 20, 30]], dtype=np.uint32)
    >>> bank.add_to(words[0], "cut", 0), shop.add_to(words[1], "cut", 0)
    (None, None)
    >>> (words[0] + words[1]).tolist()
    [15, 26, 37]
    """

    def __init__(self, party: str, order: Sequence[str], keys: Mapping[str, bytes]) -> None:
        place = order.index(party)
        self._streams = [
            (PadStream(keys[other]), order.index(other) > place)
            for other in order
            if other != party
        ]

    def add_to(self, words: np.ndarray, purpose: str, step: int, block: int = 0) -> None:
        """Add this party's mask to a block of words of a ring, in place.

        Args:
            words: unsigned integers of axes (words,), which wrap around; at most `BLOCK`.
            purpose: what they are for.
            step: number of the exchange.
            block: number of the block, where a purpose has several in a step.

        Raises:
            ReusedPadError: this mask, or one of a later block or step, was used.
        """
        assert len(words) <= BLOCK, "a mask is of one block"
        assert block < _BLOCKS, "a frame has no room for so many"
        count = -(-words.nbytes // _WORD_BYTES)
        for stream, adds in self._streams:
            pad = stream.words32(count, purpose, step * _BLOCKS + block)
            if adds:
                words += pad.view(words.dtype)[: len(words)]
            else:
                words -= pad.view(words.dtype)[: len(words)]

    def __repr__(self) -> str:
        return "PairwiseMasks(...)"
