from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from vfl.core.errors import DataError, LabelLeakError, MissingColumnError, SharedColumnError
from vfl.datasets import table
from vfl.datasets.table import (
    LargeTable,
    Part,
    check_column,
    check_features,
    check_owners,
    column_blocks,
    pick_columns,
)


def test_globs_keep_order_and_take_each_column_once():
    columns = ["id", "loan_b", "age", "loan_a", "odd[1]"]
    assert pick_columns(columns, ["age", "loan_*", "loan_a"], "x") == ["age", "loan_b", "loan_a"]
    assert pick_columns(columns, ["odd[1]"], "x") == ["odd[1]"]
    assert pick_columns(columns, ["*"], "x", leave_out=["id", "age"]) == [
        "loan_b",
        "loan_a",
        "odd[1]",
    ]
    assert pick_columns(columns, ["id"], "x", leave_out=["id"]) == ["id"]
    assert pick_columns(columns, [], "x") == []


def test_a_column_that_is_not_there_comes_with_the_nearest_name():
    with pytest.raises(MissingColumnError) as caught:
        pick_columns(["mean radius", "mean area"], ["mean radiuss"], "party 'bank'")
    assert str(caught.value).splitlines() == [
        "error[V203]: party 'bank' names a column that the table lacks",
        "  got   mean radiuss",
        "  want  one of the table's 2 columns",
        "  try   did you mean 'mean radius'?",
        "  more  vfl explain V203",
    ]
    with pytest.raises(MissingColumnError, match="the label is not a column"):
        check_column(["paid"], "payed", "the label")
    with pytest.raises(MissingColumnError) as caught:
        check_column(["age;debt"], "customer", "the id column", "data.id")
    assert (caught.value.where, caught.value.fix) == ("data.id", "is the separator right?")
    with pytest.raises(MissingColumnError) as caught:
        check_column(["age", "debt"], "customer", "the id column", "data.id")
    assert caught.value.fix is None
    with pytest.raises(MissingColumnError):
        pick_columns(["id"], ["*"], "party 'bank'", leave_out=["id"])


def test_one_owner_per_column():
    check_owners({"bank": ["a"], "shop": ["b"]})
    with pytest.raises(SharedColumnError) as caught:
        check_owners({"bank": ["mean compactness", "b"], "shop": ["b", "mean compactness"]})
    assert str(caught.value).splitlines() == [
        "error[V204]: column 'mean compactness' belongs to two parties",
        "  where parties.shop.columns",
        "  got   bank and shop, and 1 more such columns",
        "  want  one owner per column",
        "  try   leave it in the columns of one of them",
        "  more  vfl explain V204",
    ]
    with pytest.raises(SharedColumnError, match="3 parties"):
        check_owners({"a": ["x"], "b": ["x"], "c": ["x"]})


def test_neither_label_nor_id_is_a_feature():
    setting = "parties.bank.columns"
    check_features("bank", ["age"], "defaulted", "customer", setting)
    with pytest.raises(LabelLeakError) as caught:
        check_features("bank", ["age", "defaulted"], "defaulted", None, setting)
    assert str(caught.value).splitlines() == [
        "error[V205]: the label column 'defaulted' is also a feature of 'bank'",
        "  where parties.bank.columns",
        "  try   remove it from parties.bank.columns; it would make every result perfect and "
        "worthless",
        "  more  vfl explain V205",
    ]
    with pytest.raises(DataError, match="id column 'customer'"):
        check_features("bank", ["customer"], None, "customer", setting)


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
    monkeypatch.setattr(table, "COLUMN_ROWS", 2)


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
    for whole in (Blocks(), frame):
        part = Part.of(whole, rows)
        assert list(part.columns) == list(CELLS)
        want = frame[name].iloc[rows].reset_index(drop=True)
        pd.testing.assert_series_equal(part[name], want)
        blocks = list(column_blocks(part, name))
        assert list(map(len, blocks)) == [2, 2]
        pd.testing.assert_series_equal(pd.concat(blocks, ignore_index=True), want)
