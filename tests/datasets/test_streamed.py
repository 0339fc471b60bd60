"""A table on disk gives what the same table gives in memory."""

import gc
import os
import tracemalloc

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from vfl.core.errors import DataError, MisalignedError
from vfl.datasets import Dealing, Label, OwnTable, TableFormat, load_own, load_table
from vfl.datasets.alignment.gaps import Found
from vfl.datasets.alignment.ids import OwnIds
from vfl.datasets.alignment.positions import Agreed, Alignment, ids_digest
from vfl.datasets.files import ParquetTable
from vfl.datasets.load import load_for_prediction
from vfl.datasets.mapped_tensor import MappedTensor
from vfl.datasets.on_disk import DiskArray, MappedArray, OnDisk, Scatter, SortedIds
from vfl.datasets.party import AlignedRows, digest_of
from vfl.datasets.split import Split
from vfl.datasets.streamed import order_by_id
from vfl.datasets.table import BLOCK_ROWS

ROWS = 3 * BLOCK_ROWS + 100


class SmallPlace(OnDisk):
    """So little memory that tests need several runs, ranges and pieces."""

    def share(self, part):
        return 1 << 16


def own_ids(texts):
    keys = [text.encode() for text in texts]
    return OwnIds(keys, ids_digest(texts.to_numpy(dtype=object)))


@pytest.fixture
def place(tmp_path):
    return SmallPlace(tmp_path / "store", 1 << 20)


@pytest.fixture(scope="module")
def frame():
    draw = np.random.default_rng(3)
    numbers = draw.permutation(ROWS)
    town = draw.choice(["Ulm", "Bonn", "Kiel"], ROWS).astype(object)
    town[draw.random(ROWS) < 0.1] = None
    return pd.DataFrame(
        {
            "text": [f"c{number:07d}" for number in numbers],
            "number": numbers,
            "income": np.where(draw.random(ROWS) < 0.05, np.nan, draw.normal(1e6, 3, ROWS)),
            "children": draw.integers(0, 5, ROWS),
            "town": town,
            "owner": draw.random(ROWS) < 0.5,
            "since": pd.Timestamp("2001-01-01")
            + pd.to_timedelta(draw.integers(0, 9000, ROWS), "D"),
            "flat": 7.0,
            "paid": draw.choice(["yes", "no"], ROWS),
            "spent": draw.normal(size=ROWS),
        }
    )


COLUMNS = ["income", "children", "town", "owner", "since", "flat"]


@pytest.fixture(scope="module", params=["parquet", "csv", "frame"])
def source(request, frame, tmp_path_factory):
    if request.param == "frame":
        return frame
    path = tmp_path_factory.mktemp("table") / f"table.{request.param}"
    if request.param == "parquet":
        frame.to_parquet(path, row_group_size=10_000)
    else:
        frame.to_csv(path, index=False)
    return path


def own(source, place=None, ids="text", label="paid", task="classification", **more):
    form = more.pop("form", None) or TableFormat(
        id_type="number" if ids == "number" else "text", dates={"since": "%Y-%m-%d"}
    )
    dealing = Dealing(5, block_rows=more.pop("block_rows", 0))
    table = OwnTable(source, ids or "", COLUMNS, form=form)
    learned = label and Label("bank", label, task)
    return load_own("bank", table, learned, dealing, place=place, **more)


def same(left, right, tolerance=2e-6):
    assert isinstance(right.inputs, MappedTensor)
    torch.testing.assert_close(right.inputs[:], left.inputs, rtol=0, atol=tolerance)
    assert right.classes == left.classes
    assert right.ids_digest == left.ids_digest
    for part in ("train", "validation", "test"):
        assert np.array_equal(getattr(left.split, part), getattr(right.split, part))
    if left.labels is not None:
        assert torch.equal(left.labels, right.labels[:])
    assert left.ids is None or list(left.ids) == list(right.ids)
    assert left.unfamiliar == right.unfamiliar


@pytest.mark.parametrize("ids", ["text", "number", None])
def test_a_table_on_disk_is_the_table_in_memory(source, place, ids):
    same(own(source, ids=ids), own(source, place, ids))


def test_labels_of_a_regression_and_bins(source, place):
    form = TableFormat(dates={"since": "%Y-%m-%d"}, bins=8)
    more = {"label": "spent", "task": "regression", "form": form}
    same(own(source, **more), own(source, place, **more))


def test_a_split_in_blocks_is_the_same_on_disk_and_has_its_share_of_each(frame, place):
    kept, disk = (own(frame, where, block_rows=1000) for where in (None, place))
    same(kept, disk)
    assert isinstance(disk.split.train, MappedArray)
    blocks = np.bincount(kept.split.test // 1000)[:-1]
    assert set(blocks) == {200}
    assert not np.array_equal(kept.split.test, own(frame).split.test)


def test_prediction_with_the_encoder_of_the_training(frame, place):
    encoder = own(frame).encoder
    form = TableFormat(dates={"since": "%Y-%m-%d"})
    kept, disk = (
        load_for_prediction("bank", frame, "text", encoder, form, place=where)
        for where in (None, place)
    )
    same(kept, disk, tolerance=0)


def test_one_table_for_all_parties(frame, place):
    def load(where):
        return load_table(
            OwnTable(frame, "text"), {"bank": COLUMNS[:3], "shop": COLUMNS[3:]},
            [Label("label", "paid")], Dealing(2), place=where,
        )  # fmt: skip

    for left, right in zip(load(None).values(), load(place).values(), strict=True):
        if left.inputs is None:
            assert right.inputs is None
            assert torch.equal(left.labels, right.labels[:])
        else:
            same(left, right)


@pytest.mark.parametrize("rows", ["intersection", "token"])
def test_rows_of_a_private_alignment(frame, place, rows):
    has = np.random.default_rng(0).permutation(ROWS)[:9000]
    complete, held = None, {}
    if rows == "token":
        has[8000::2] = -1
        complete, held = 8000, {"bank": has >= 0}
    found = Found(has, complete, held)
    agreed = Agreed("a", ("bank", "label"), "plain", "p", rows)
    by = Alignment.of("bank", agreed, 1, "s", own_ids(frame["text"]), found)
    kept, disk = (own(frame, where, label=None, alignment=by) for where in (None, place))
    gone = torch.from_numpy(has < 0)
    assert torch.equal(torch.isnan(disk.inputs[:]).all(1), gone)
    torch.testing.assert_close(disk.inputs[:][~gone], kept.inputs[~gone], rtol=0, atol=2e-6)
    assert disk.ids_digest == kept.ids_digest
    assert disk.unfamiliar == kept.unfamiliar
    assert kept.ids is None or list(disk.ids) == list(kept.ids)


@pytest.mark.parametrize("spoil", ["missing", "repeated", "far apart"])
def test_bad_ids_are_counted_not_shown(frame, place, spoil):
    spoilt = frame.copy()
    spoilt.loc[20_000, "text"] = None if spoil == "missing" else spoilt.loc[3, "text"]
    if spoil == "far apart":
        spoilt = spoilt.sort_values("text")
    with pytest.raises(MisalignedError) as kept:
        own(spoilt)
    with pytest.raises(MisalignedError) as disk:
        own(spoilt, place)
    assert str(disk.value) == str(kept.value)


def test_too_many_categories_end_before_they_fill_memory(frame, place):
    with pytest.raises(DataError, match="column 'text' has too many categories") as error:
        load_own("bank", OwnTable(frame, "number", ["text"]), None, Dealing(0), place=place)
    assert "c0" not in str(error.value)


def test_the_files_have_no_name_and_are_the_owners(frame, place):
    data = own(frame, place)
    assert os.stat(place.folder).st_mode & 0o777 == 0o700
    assert list(place.folder.iterdir()) == []
    rows = torch.tensor([5, 1, ROWS - 1])
    before = open_files(place.folder)
    assert before
    assert all(mode & 0o077 == 0 for mode in before)
    selected = data.inputs.index_select(0, rows)
    assert type(selected) is torch.Tensor
    assert torch.equal(selected, data.inputs[:][rows])
    del data
    gc.collect()
    assert not open_files(place.folder)


def open_files(folder):
    """Modes of this process's open files in a folder, those without a name too."""
    found = []
    for entry in os.scandir("/proc/self/fd"):
        try:
            if os.readlink(entry.path).startswith(str(folder)):
                found.append(os.stat(entry.path).st_mode)
        except FileNotFoundError:
            pass
    return found


def test_a_disk_without_room_is_said_before_anything_is_written(place, monkeypatch):
    def full(*_):
        raise OSError(28, "no space")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError, match="the disk is too full for a table"):
        DiskArray(place, (1000, 1000), np.float32)


def test_pages_are_given_back(place):
    found = Scatter(place, (1 << 16, 64), np.float32)
    rows = np.arange(1 << 22, dtype=np.float32).reshape(-1, 64)
    order = np.random.default_rng(0).permutation(len(rows))
    for start in range(0, len(rows), 5000):
        found.add(order[start : start + 5000], rows[order[start : start + 5000]])
    array = found.finish().read(1 << 20)
    for start in range(0, len(rows), 1000):
        assert np.array_equal(array[start : start + 1000], rows[start : start + 1000])
    assert array.nbytes == 1 << 24
    assert resident(array) <= 2 << 20


@pytest.mark.parametrize(
    "read", [MappedTensor.__getitem__, lambda rows, at: rows.index_select(0, at)]
)
def test_a_sample_of_all_rows_does_not_stay_in_memory(place, read):
    """The bins of a column's drift read every n-th row, the best guess reads all test labels."""
    file, rows = DiskArray(place, (1 << 21, 2), np.float32), np.arange(1 << 22).reshape(-1, 2)
    file.write(0, rows)
    array = file.read(1 << 20)
    sample = torch.arange(0, len(rows), 20)
    found = read(MappedTensor.over(array), sample)
    assert torch.equal(found.long(), torch.from_numpy(rows)[sample])
    assert array.nbytes == 1 << 24
    assert resident(array) <= 2 << 20


def test_cutting_sorted_runs_leaves_none_of_them_in_memory(place):
    """Few ids are looked at, but all over each run, and the system maps much around each."""
    drawn = np.random.default_rng(0).permutation(1_000_000)
    ids = SortedIds(place, (pa.array(part) for part in np.array_split(drawn, 10)))
    splitters = ids._splitters()
    for run in ids._runs:
        cut = run.cut(splitters)
        assert resident(np.frombuffer(run.pages.map, np.uint8)) == 0
        assert np.array_equal(cut, np.searchsorted(run.ids.to_numpy(), splitters.to_numpy()))


def resident(array):
    """Bytes of an array's map that are in this process's memory."""
    address = array.__array_interface__["data"][0]
    with open("/proc/self/smaps") as maps:
        for line in maps:
            if line.startswith(f"{address:x}-"):
                for about in maps:
                    if about.startswith("Rss:"):
                        return 1024 * int(about.split()[1])
    raise AssertionError("the map is there")


def test_ids_in_no_order_are_put_in_order_in_a_quarter_of_the_memory_that_is_set(tmp_path):
    """The arrays for a range of merged ids were the peak of all loading."""
    path, memory = tmp_path / "table.parquet", 8 << 20
    pd.DataFrame({"id": np.random.default_rng(0).permutation(500_000)}).to_parquet(path)
    tracemalloc.start()
    try:
        order = order_by_id(
            ParquetTable(path), "id", "us", "number", OnDisk(tmp_path / "store", memory)
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.array_equal(order.ids[:], np.arange(500_000))
    assert peak < memory / 4


def test_the_digest_of_rows_without_ids_needs_no_array_of_all_rows():
    rows, split = 1_000_000, Split(*[np.empty(0, dtype=np.int64)] * 3)
    tracemalloc.start()
    try:
        found = AlignedRows.of(rows, split)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.digest == digest_of(np.arange(rows))
    assert peak < 4 * rows  # an array of all rows has 8 bytes per row


def test_a_sample_gives_edges_where_rows_are_more(frame, place, monkeypatch):
    """Edges and medians of a third of the rows; means, spreads and categories of all."""
    monkeypatch.setattr("vfl.datasets.encode.SAMPLE_ROWS", ROWS // 4)
    form = TableFormat(bins=4)
    kept, disk = (own(frame, where, form=form).encoder.columns for where in (None, place))
    for left, right in zip(kept, disk, strict=True):
        assert left.name == right.name
        if left.name == "income":
            assert right.edges != left.edges
            assert np.allclose(left.edges[1:-1], right.edges[1:-1], atol=0.2)
    monkeypatch.undo()
    plain, sampled = (own(frame, where).encoder.columns for where in (None, place))
    since = [column for column in (*plain, *sampled) if column.name == "since"]
    assert since[0].scale == pytest.approx(since[1].scale, rel=1e-12)


def test_no_row_of_the_session_is_here(frame, place):
    encoder = own(frame).encoder
    found = Found(np.full(5, -1), 2, {"bank": np.zeros(5, dtype=bool)})
    agreed = Agreed("a", ("bank", "label"), "plain", "p", "token")
    by = Alignment.of("bank", agreed, 1, "s", own_ids(frame["text"]), found)
    with pytest.raises(DataError, match="none of the rows"):
        load_for_prediction("bank", frame, "text", encoder, None, by, place)
