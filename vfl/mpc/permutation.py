"""Secret permutations that are the same on every processor.

Sorting whole words gives one result on any machine, where sorting indices by key does not: the
wide vector sorts of numpy are unstable. So each word carries its index in its low bits.
"""

from __future__ import annotations

import numpy as np

from vfl.mpc.stream import PadStream

_LEAST_INDEX_BITS = 20


def permutation(pads: PadStream, count: int, *purpose: str | int) -> np.ndarray:
    """A uniform permutation of ``range(count)``; int64 of shape (count,).

    Args:
        pads: the stream of the two parties that permute.
        count: how many elements.
        purpose: see `PadStream.words64`.

    Two equal sort keys would order their elements by index: among 2^20 elements any two of their
    44-bit keys meet with probability 0.03, among 2^16 with 0.0001, which shifts no more than one
    pair of neighbours.

    Raises:
        ReusedPadError: the permutation of this purpose and step was drawn before.
    """
    bits = np.uint64(max(_LEAST_INDEX_BITS, (max(count, 1) - 1).bit_length()))
    low = (np.uint64(1) << bits) - np.uint64(1)
    words = pads.words64(count, *purpose)
    words &= ~low
    words |= np.arange(count, dtype=np.uint64)
    words.sort()
    words &= low
    return words.view(np.int64)
