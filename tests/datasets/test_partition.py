from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vfl.datasets.partition import partition_columns, partition_image
from vfl.errors import DataError


@given(parties=st.integers(1, 64), extra=st.integers(0, 40))
def test_columns_are_covered_in_order_and_evenly(parties, extra):
    columns = [f"c{n}" for n in range(parties + extra)]
    names = [f"p{n}" for n in range(parties)]
    owned = partition_columns(columns, names)
    assert list(owned) == names
    assert [name for own in owned.values() for name in own] == columns
    sizes = [len(own) for own in owned.values()]
    assert max(sizes) - min(sizes) <= 1


@given(parties=st.integers(1, 12), extra=st.integers(0, 5))
def test_strips_side_by_side_are_the_picture(parties, extra):
    pictures = np.random.default_rng(0).random((2, 1, 3, parties + extra))
    strips = partition_image(pictures, [str(n) for n in range(parties)])
    np.testing.assert_array_equal(np.concatenate(list(strips.values()), axis=-1), pictures)


def test_two_parties_get_the_halves():
    picture = np.arange(64).reshape(1, 1, 8, 8)
    strips = partition_image(picture, ["left", "right"])
    np.testing.assert_array_equal(strips["left"], picture[..., :4])
    np.testing.assert_array_equal(strips["right"], picture[..., 4:])
    assert strips["left"].base is not None  # a view: no copy of the whole set


@pytest.mark.parametrize("parties", [["a", "b", "c"], [], ["a", "a"]])
def test_more_parties_than_columns_none_or_the_same_twice(parties):
    with pytest.raises(DataError, match="cannot share these columns"):
        partition_columns(["x", "y"], parties)
    with pytest.raises(DataError, match="cannot share these columns"):
        partition_image(np.zeros((1, 2, 2)), parties)
