from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from vfl.datasets import columns
from vfl.datasets.columns import LargeTable, Part, column_blocks

CELLS = {
    "real": pa.array([1.5, None, -2.0, 0.25, 9.0]),
    "whole": pa.array([1, 2**60 + 1, 3, 4, 5]),
    "gaps": pa.array([1, None, 3, 4, 5]),
    "flag": pa.array([True, None, False, True, True]),
    "text": pa.array(["a", "b", None, "a", "ä"], pa.large_string()),
}


class Blocks(LargeTable):
    """A table in blocks of two rows."""

    columns = tuple(CELLS)

    def __len__(self):
        return 5

    def blocks(self, name):
        yield from (CELLS[name][start : start + 2] for start in range(0, 5, 2))

    def type_of(self, name):
        return CELLS[name].type


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(columns, "BLOCK_ROWS", 2)


@pytest.mark.parametrize("name", CELLS)
def test_a_column_of_blocks_is_the_column_as_a_whole(name):
    whole = CELLS[name].to_pandas().rename(name)
    pd.testing.assert_series_equal(Blocks()[name], whole)
    blocks = list(column_blocks(Blocks(), name))
    assert list(map(len, blocks)) == [2, 2, 1]
    missing = [cell for block in blocks for cell in block.isna()]
    assert missing == whole.isna().tolist()
    present = [cell for block in blocks for cell in block.dropna()]
    assert present == whole.dropna().tolist()


@pytest.mark.parametrize("name", CELLS)
def test_rows_of_a_part_come_in_its_order_whatever_the_table(name):
    frame = pd.DataFrame({name: cells.to_pandas() for name, cells in CELLS.items()})
    rows = np.array([4, 0, 2, 0])
    for table in (Blocks(), frame):
        part = Part.of(table, rows)
        assert list(part.columns) == list(CELLS)
        want = frame[name].iloc[rows].reset_index(drop=True)
        pd.testing.assert_series_equal(part[name], want)
        blocks = list(column_blocks(part, name))
        assert list(map(len, blocks)) == [2, 2]
        pd.testing.assert_series_equal(pd.concat(blocks, ignore_index=True), want)


def test_a_part_of_a_part_has_its_own_columns_and_rows():
    part = Part.of(Part.of(Blocks(), np.array([3, 1, 0])), np.array([2, 0]), ["real"])
    assert list(part.columns) == ["real"]
    assert len(part) == 2
    assert part["real"].tolist() == [1.5, 0.25]
    assert part.table.__class__ is Blocks
