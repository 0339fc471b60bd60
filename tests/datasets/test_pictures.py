from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from vfl.datasets.pictures import PictureEncoder
from vfl.errors import DataError, MissingColumnError


def frame_of(cells: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame(cells, columns=[f"pixel_{n}" for n in range(cells.shape[1])])


def test_one_mean_and_one_spread_for_the_block_of_training_rows():
    cells = np.random.default_rng(0).uniform(0, 16, (12, 6))
    encoder = PictureEncoder.fit(frame_of(cells[:8]), (1, 2, 3))
    got = encoder.transform(frame_of(cells))
    assert got.dtype == np.float32
    want = (cells - cells[:8].mean()) / cells[:8].std()
    for row in range(12):
        for pixel in range(6):
            assert got[row, 0, pixel // 3, pixel % 3] == pytest.approx(want[row, pixel], abs=1e-6)


def test_missing_pixels_are_the_mean_and_an_empty_picture_is_zero():
    cells = np.array([[1.0, np.nan], [3.0, 2.0]])
    got = PictureEncoder.fit(frame_of(cells), (1, 1, 2)).transform(frame_of(cells))
    assert got[0, 0, 0, 1] == 0
    assert got[1, 0, 0, 1] == 0  # 2 is the mean of 1, 3 and 2
    same = frame_of(np.full((2, 2), 5.0))
    assert not PictureEncoder.fit(same, (1, 1, 2)).transform(same).any()
    nothing = frame_of(np.full((2, 2), np.nan))
    assert not PictureEncoder.fit(nothing, (1, 1, 2)).transform(nothing).any()


@pytest.mark.parametrize("shape", [(1, 2, 2), (1, 0, 3), (-1, -1, 3)])
def test_the_shape_holds_the_columns(shape):
    with pytest.raises(DataError, match="does not hold its columns"):
        PictureEncoder.fit(frame_of(np.zeros((2, 3))), shape)


def test_stored_and_read_again_it_encodes_the_same():
    frame = frame_of(np.random.default_rng(1).normal(size=(5, 4)))
    encoder = PictureEncoder.fit(frame, (1, 2, 2))
    again = PictureEncoder.from_json(encoder.to_json())
    assert again == encoder
    np.testing.assert_array_equal(again.transform(frame), encoder.transform(frame))
    with pytest.raises(MissingColumnError, match="pixel_3"):
        again.transform(frame.drop(columns="pixel_3"))
    with pytest.raises(DataError, match="not a stored picture encoder"):
        PictureEncoder.from_json("{}")
