from __future__ import annotations

import tempfile
from functools import partial

import numpy as np
import pandas as pd
import pytest

from vfl.datasets.spill import Spill
from vfl.errors import DataError


def spill_of(*frames) -> Spill:
    table = Spill(list(frames[0].columns))
    for frame in frames:
        table.add(frame)
    return table


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([1, 2], [3, 4]),
        ([1, 2], [0.5, np.nan]),
        ([np.nan, np.nan], [7, 8]),
        ([True, False], [True, True]),
        (["a", None], ["b", "a"]),
        ([np.nan, np.nan], ["b", "a"]),
        ([np.nan, np.nan], [np.nan, np.nan]),
        ([2**60 + 1, 1], [5, 6]),
    ],
)
def test_pieces_join_to_what_one_reading_gives(first, second):
    table = spill_of(pd.DataFrame({"x": first}), pd.DataFrame({"x": second}))
    assert table.mixed() == []
    assert len(table) == 4
    want = pd.Series([*first, *second], name="x")
    pd.testing.assert_series_equal(table["x"], want)
    pd.testing.assert_series_equal(table["x"], want)  # and again


def test_missing_flags_stay_flags():
    table = spill_of(pd.DataFrame({"x": [True, None]}), pd.DataFrame({"x": [np.nan, np.nan]}))
    assert table["x"].tolist() == [True, None, None, None]


def test_pieces_of_other_kinds_are_named():
    table = spill_of(
        pd.DataFrame({"a": [1, 2], "b": [True, False], "c": [1.0, 2.0]}),
        pd.DataFrame({"a": ["x", "y"], "b": [1, 2], "c": [3, 4]}),
    )
    assert table.mixed() == ["a", "b"]


def test_the_file_has_no_name(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    table = spill_of(pd.DataFrame({"x": [1, 2]}))
    assert list(tmp_path.iterdir()) == []
    assert table["x"].tolist() == [1, 2]


def test_a_full_disk_is_told(monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", partial(open, "/dev/full", "r+b"))
    with pytest.raises(DataError, match="no room for the temporary file") as caught:
        spill_of(pd.DataFrame({"x": [1, 2]}))
    assert "TMPDIR" in str(caught.value)
