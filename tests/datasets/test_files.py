from __future__ import annotations

import gzip
import tempfile
from functools import partial

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from vfl.core.errors import DataError, MissingDataError
from vfl.datasets import Dealing, Label, OwnTable, TableFormat, files, load_own, read_table
from vfl.datasets.files import Spill, column_names
from vfl.datasets.on_disk import OnDisk
from vfl.datasets.table import LargeTable, kind_of, row_blocks

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


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A table of 50 rows, read 8 at a time where it is read by columns; as both kinds of file."""
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "id": [f"{number:03d}" for number in draw.permutation(50)],
            "real": draw.normal(size=50),
            "whole": draw.integers(0, 9, 50),
            "town": draw.choice(["Ulm", "Bonn"], 50),
            "flag": draw.integers(0, 2, 50) == 1,
            "late": ["7"] * 40 + ["eight"] * 10,
            "paid": draw.integers(0, 2, 50),
        }
    )
    frame.loc[[3, 30], "real"] = np.nan
    frame.loc[5:20, "town"] = None
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_parquet(tmp_path / "a.parquet")
    return tmp_path


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_a_large_table_gives_a_party_what_the_whole_frame_gives(large, monkeypatch, name):
    whole = read_table(large / name, text_columns=["id"])
    assert isinstance(whole, pd.DataFrame)

    def own(source):
        return load_own("bank", OwnTable(source, "id", ["*"]), Label("bank", "paid"), Dealing(0))

    want = own(whole)
    monkeypatch.setattr(files, "BLOCK_ROWS", 8)
    monkeypatch.setattr(files, "COLUMN_ROWS", 8)
    table = read_table(large / name, text_columns=["id"])
    assert isinstance(table, LargeTable)
    assert (list(table.columns), len(table)) == (list(whole.columns), 50)
    got = own(large / name)
    assert torch.equal(got.inputs, want.inputs)
    assert torch.equal(got.labels, want.labels)
    assert got.encoder == want.encoder
    assert got.ids.tolist() == want.ids.tolist()
    assert got.ids_digest == want.ids_digest


@pytest.mark.parametrize("tail", ["1,2,3\n", '"1,2\n'], ids=["long line", "open quote"])
def test_damage_late_in_a_csv_is_found(tmp_path, monkeypatch, tail):
    monkeypatch.setattr(files, "BLOCK_ROWS", 4)
    monkeypatch.setattr(files, "COLUMN_ROWS", 4)
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "1,2\n" * 10 + tail)
    with pytest.raises(DataError, match="cannot be read"):
        read_table(path)


def test_damage_inside_a_parquet_file_is_told_without_a_cell(large, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_ROWS", 8)
    monkeypatch.setattr(files, "COLUMN_ROWS", 8)
    path = large / "a.parquet"
    content = bytearray(path.read_bytes())
    content[4:400] = bytes(396)
    path.write_bytes(content)
    table = read_table(path)
    with pytest.raises(DataError, match="cannot be read"):
        table["id"]


def test_every_type_of_a_parquet_column_reads_as_in_the_whole(tmp_path, monkeypatch):
    frame = pd.DataFrame(
        {
            "category": pd.Categorical(["u", "b", None, "z", "u"]),
            "whole.gaps": pd.array([1, None, 3, 4, 5], dtype="Int64"),
            "flag": pd.array([True, None, False, True, True], dtype="boolean"),
            "half": np.array([0.5, 1.5, np.nan, 2, 3], dtype=np.float16),
            "byte": np.arange(5, dtype=np.uint8),
            "text": ["a", None, "b", "b", "c"],
        },
        index=pd.Index([5, 3, 4, 1, 2], name="row"),
    )
    path = tmp_path / "a.parquet"
    frame.to_parquet(path)
    monkeypatch.setattr(files, "BLOCK_ROWS", 2)
    monkeypatch.setattr(files, "COLUMN_ROWS", 2)
    table = read_table(path)
    assert isinstance(table, LargeTable)
    frame = frame.reset_index()[[*frame.columns, "row"]]
    assert list(table.columns) == list(frame.columns)
    for name in frame:
        assert kind_of(table[name]) == kind_of(frame[name])
        assert table[name].isna().tolist() == frame[name].isna().tolist()
        assert table[name].dropna().tolist() == frame[name].dropna().tolist()


def spill_of(*pieces) -> Spill:
    table = Spill(["x"])
    for cells in pieces:
        table.add(pa.record_batch([pa.array(cells, from_pandas=True)], names=["x"]))
    return table


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([1, 2], [3, 4]),
        ([1, 2], [0.5, np.nan]),
        ([None, None], [7, 8]),
        ([True, False], [True, True]),
        (["a", None], ["b", "a"]),
        ([None, None], ["b", "a"]),
        ([None, None], [None, None]),
        ([2**60 + 1, 1], [5, 6]),
    ],
)
def test_pieces_join_to_what_one_reading_gives(first, second):
    table = spill_of(first, second)
    assert table.mixed() == []
    assert len(table) == 4
    want = pd.Series(first + second, name="x")
    want = want.astype(float) if want.isna().all() else want
    want = want.where(want.notna(), np.nan)  # pandas before 3 has None beside text
    for _ in range(2):  # and again
        found = table["x"]
        pd.testing.assert_series_equal(found.where(found.notna(), np.nan), want)


def test_the_file_has_no_name(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    table = spill_of([1, 2])
    assert list(tmp_path.iterdir()) == []
    assert table["x"].tolist() == [1, 2]


def test_a_full_disk_is_told(monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", partial(open, "/dev/full", "r+b"))
    with pytest.raises(DataError, match="too full for the temporary file") as caught:
        spill_of([1, 2])
    assert "TMPDIR" in str(caught.value)


def test_a_parquet_file_in_an_object_store(frame_in_store):
    frame, source = frame_in_store
    assert column_names(source) == list(frame.columns)
    table = read_table(source)
    for name in frame.columns:
        pd.testing.assert_series_equal(table[name], frame[name], check_dtype=False)
    data, same = (
        load_own("bank", OwnTable(one, "id", ["x"]), None, Dealing(0)) for one in (source, frame)
    )
    assert torch.equal(data.inputs, same.inputs)
    assert data.ids_digest == same.ids_digest


@pytest.fixture
def frame_in_store():
    fsspec = pytest.importorskip("fsspec")
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"id": [f"c{n}" for n in range(300)], "x": draw.normal(size=300)})
    with fsspec.open("memory://loans/table.parquet", "wb") as file:
        frame.to_parquet(file)
    return frame, "memory://loans/table.parquet"


@pytest.mark.parametrize("name", ["memory://loans/none.parquet", "memory://loans/odd.parquet"])
def test_what_an_object_store_does_not_give_is_said_without_its_words(name):
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://loans/odd.parquet", "wb") as file:
        file.write(b"secret,cells\n1,2\n")
    with pytest.raises(DataError, match="object store does not return") as caught:
        read_table(name)
    assert "secret" not in str(caught.value)


def test_an_object_store_whose_package_is_missing_says_what_to_install(monkeypatch):
    import fsspec

    def none(*_):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", none)
    with pytest.raises(MissingDataError, match=r"vfl\[storage\]"):
        read_table("s3://loans/table.parquet")


@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_the_parquet_files_of_a_folder_are_one_table(tmp_path, scheme):
    frame = pd.DataFrame({"id": np.arange(25_000)[::-1], "x": np.linspace(-1, 1, 25_000)})
    folder = f"{scheme}{tmp_path}/loans.parquet"
    (tmp_path / "loans.parquet").mkdir()
    if scheme:
        fsspec = pytest.importorskip("fsspec")
    parts = {f"part-{n}.parquet": frame[n * 9000 : (n + 1) * 9000] for n in (2, 0, 1)}
    for name in ("_SUCCESS", "_metadata.parquet", "notes.txt", *parts):
        content = parts[name].to_parquet(index=False) if name in parts else b"no table"
        if scheme:
            with fsspec.open(f"{folder}/{name}", "wb") as file:
                file.write(content)
        else:
            (tmp_path / "loans.parquet" / name).write_bytes(content)
    assert column_names(folder) == ["id", "x"]
    table = read_table(folder)
    assert len(table) == len(frame)
    pd.testing.assert_series_equal(table["id"], frame["id"])
    blocks = pd.concat(row_blocks(table, ["x", "id"], 1000), ignore_index=True)
    pd.testing.assert_frame_equal(blocks, frame[["x", "id"]])
    place = OnDisk(tmp_path / "store", 1 << 20)
    form = TableFormat(id_type="number")
    data = load_own("bank", OwnTable(folder, "id", ["x"], form), None, Dealing(0), place=place)
    same = load_own("bank", OwnTable(frame, "id", ["x"], form), None, Dealing(0))
    assert data.ids_digest == same.ids_digest
    torch.testing.assert_close(data.inputs[:], same.inputs)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_folder_that_is_no_table_is_refused(tmp_path, scheme):
    if scheme:
        pytest.importorskip("fsspec")
    with pytest.raises(MissingDataError, match="no table in this folder"):
        read_table(f"{scheme}{tmp_path}")
    pd.DataFrame({"x": [1]}).to_parquet(tmp_path / "a.parquet")
    pd.DataFrame({"x": ["secret"]}).to_parquet(tmp_path / "b.parquet")
    with pytest.raises(DataError, match="different columns") as caught:
        read_table(f"{scheme}{tmp_path}")
    assert "'b.parquet' differs from 'a.parquet'" in str(caught.value)
    assert "secret" not in str(caught.value)
    (tmp_path / "b.parquet").write_bytes(b"secret")
    with pytest.raises(DataError, match="table") as caught:
        read_table(f"{scheme}{tmp_path}")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("wrong", ["ascii", "utf-16"])
def test_only_the_setting_that_is_wrong_is_named(tmp_path, wrong):
    (tmp_path / "a.csv").write_text("id;town\n1;Köln\n2;Trier\n", encoding="utf-8")
    with pytest.raises(DataError, match="cannot be read as a table") as caught:
        read_table(tmp_path / "a.csv", TableFormat(";", encoding=wrong))
    assert 'written with encoding = "utf-8": set' in str(caught.value.fix)
