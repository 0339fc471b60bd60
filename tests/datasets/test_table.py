from __future__ import annotations

import gzip

import pandas as pd
import pytest

from vfl.datasets.table import (
    TableFormat,
    check_column,
    check_features,
    check_owners,
    pick_columns,
    read_table,
)
from vfl.errors import (
    DataError,
    LabelLeakError,
    MissingColumnError,
    MissingDataError,
    SharedColumnError,
)

TEXT = "id,age,city\n007,31,Ulm\n008,,Bonn\n"


def test_the_same_table_from_every_kind_of_file(tmp_path):
    (tmp_path / "a.csv").write_text(TEXT)
    (tmp_path / "b.csv").write_text(TEXT.replace(",", ";"))
    with gzip.open(tmp_path / "a.csv.gz", "wt") as file:
        file.write(TEXT)
    plain = read_table(tmp_path / "a.csv")
    plain.to_parquet(tmp_path / "a.parquet")
    assert plain["age"].isna().tolist() == [False, True]
    pd.testing.assert_frame_equal(read_table(tmp_path / "a.csv.gz"), plain)
    pd.testing.assert_frame_equal(read_table(str(tmp_path / "a.parquet")), plain)
    pd.testing.assert_frame_equal(read_table(tmp_path / "b.csv", TableFormat(separator=";")), plain)


def test_ids_keep_their_leading_zeros_and_own_signs_of_missing_cells_are_read(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id, age\n007, ?\n008, 4\n")
    frame = read_table(path, TableFormat(missing=("?",)), text_columns=["id"])
    assert frame["id"].tolist() == ["007", "008"]
    assert frame["age"].isna().tolist() == [True, False]


def test_a_frame_passes_with_its_names_as_text():
    assert list(read_table(pd.DataFrame([[1, 2]])).columns) == ["0", "1"]
    frame = pd.DataFrame({"a": [1]})
    assert read_table(frame) is frame


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(MissingDataError, match="no such table") as caught:
        read_table(tmp_path / "loans.csv")
    assert "loans.csv" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "a,a\n1,2\n",
        "a,\n1,2\n",
        "a,b\n0,2,3\n1,5,6\n",
        "a,b\n1,2\n1,2,3,4\n",
        "",
    ],
    ids=["name twice", "no name", "more cells than names", "one long line", "empty"],
)
def test_a_table_that_cannot_be_read_is_refused(tmp_path, text):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(DataError, match="table"):
        read_table(path)


@pytest.mark.parametrize("name", ["a.csv.gz", "a.parquet", "a.csv"])
def test_bytes_that_are_no_table_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x1f\x8b\x08\xff\xfe\x00\x81")
    with pytest.raises(DataError, match="cannot be read"):
        read_table(tmp_path / name)


def test_two_columns_of_one_name_in_a_frame_are_refused():
    with pytest.raises(DataError, match="same name"):
        read_table(pd.DataFrame([[1, 2]], columns=["a", "a"]))


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


def test_a_column_without_a_name_is_told_as_that(tmp_path):
    """pandas writes such a file when its index goes along."""
    file = tmp_path / "with_index.csv"
    pd.DataFrame({"age": [1, 2]}).to_csv(file)
    with pytest.raises(DataError, match="name") as caught:
        read_table(file)
    assert "cannot be read as a table" not in str(caught.value)
