import itertools
from collections import Counter

import numpy as np
import pytest

from vfl.core.errors import ReusedPadError
from vfl.mpc.permuted import permutation
from vfl.mpc.stream import PadStream

KEY = bytes(range(32))


@pytest.mark.parametrize("count", [0, 1, 2, 32, 1000, 2**20 + 3])
def test_every_element_once(count):
    order = permutation(PadStream(KEY), count, "order", 1)
    assert order.dtype == np.int64
    assert (np.sort(order) == np.arange(count)).all()


def test_test_vector():
    """Independent of any sort of indices: compare words as Python numbers."""
    words = PadStream(KEY).elements64(40, "order", 1).tolist()
    wanted = sorted(range(40), key=lambda index: (words[index] >> 20, index))
    assert permutation(PadStream(KEY), 40, "order", 1).tolist() == wanted


def test_every_order_is_as_likely():
    pads = PadStream(KEY)
    draws = 6000
    seen = Counter(tuple(permutation(pads, 3, "order", step).tolist()) for step in range(draws))
    assert set(seen) == set(itertools.permutations(range(3)))
    chi_squared = sum((count - draws / 6) ** 2 / (draws / 6) for count in seen.values())
    assert chi_squared < 20.5  # 5 degrees of freedom, p = 0.001


def test_an_order_is_given_once():
    pads = PadStream(KEY)
    permutation(pads, 5, "order", 3)
    with pytest.raises(ReusedPadError):
        permutation(pads, 5, "order", 3)
