from __future__ import annotations

import datetime
import decimal
import json

import numpy as np
import pandas as pd
import pytest
import torch

from vfl.core.errors import DataError, MissingColumnError
from vfl.datasets import Dealing, Label, OwnTable, TableFormat, load_table
from vfl.datasets.encode import (
    PictureEncoder,
    TableEncoder,
    Unfamiliar,
    encode_labels,
    read_encoder,
    token_encoder,
)
from vfl.datasets.on_disk import OnDisk


def test_a_missing_number_is_the_training_mean_and_has_an_indicator():
    training = pd.DataFrame({"x": [1.0, 3.0, None], "y": [1.0, 2.0, 3.0]})
    encoder = TableEncoder.fit(training)
    got = encoder.transform(pd.DataFrame({"x": [2.0, None], "y": [None, 2.0]}))
    # mean 2, spread 1 of x; y had no missing cell in training, so it gets no indicator
    np.testing.assert_array_equal(got, [[0, 0, 0], [0, 1, 0]])
    np.testing.assert_array_equal(encoder.transform(training)[:, :2], [[-1, 0], [1, 0], [0, 1]])


def test_a_missing_text_is_no_category():
    encoder = TableEncoder.fit(pd.DataFrame({"x": ["a", None, "b"]}))
    got = encoder.transform(pd.DataFrame({"x": ["b", "a", None, "c"]}))
    np.testing.assert_array_equal(got, [[0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 0, 0]])


@pytest.mark.parametrize(
    ("column", "want"),
    [
        (pd.Series([True, False]), [[1], [0]]),
        (pd.Series([True, None], dtype="boolean"), [[1, 0], [0, 1]]),
        (pd.Series([True, None], dtype=object), [[1, 0], [0, 1]]),
        (pd.Series([4, 4]), [[0], [0]]),
        (pd.Series([None, None], dtype=object), [[0, 1], [0, 1]]),
        (pd.Series([1, 3], dtype="Int64"), [[-1], [1]]),
        (pd.Series([decimal.Decimal("1.5"), decimal.Decimal("2.5")]), [[-1], [1]]),
        (pd.Series(["7", "b"], dtype="category"), [[1, 0], [0, 1]]),
        (pd.Series([7, "b"], dtype=object), [[1, 0], [0, 1]]),
    ],
)
def test_every_type_of_column(column, want):
    frame = column.to_frame("x")
    np.testing.assert_array_equal(TableEncoder.fit(frame).transform(frame), want)


@pytest.mark.parametrize(
    "column",
    [
        pd.Series([b"x"]),
        pd.Series([[1]]),
        pd.Series([1j]),
    ],
)
def test_odd_things_are_refused_by_name(column):
    with pytest.raises(DataError, match="neither number nor text"):
        TableEncoder.fit(column.to_frame("when"))
    with pytest.raises(DataError, match="'when'"):
        TableEncoder.fit(pd.DataFrame({"when": [1, 2]})).transform(column.to_frame("when"))


def test_infinite_numbers_and_later_text_are_refused_with_counts():
    with pytest.raises(DataError, match="'x' is not a column of finite numbers") as caught:
        TableEncoder.fit(pd.DataFrame({"x": [1.0, np.inf, -np.inf]}))
    assert "0 cells of another kind, 2 infinite ones" in str(caught.value)
    encoder = TableEncoder.fit(pd.DataFrame({"x": [1.0, 2.0]}))
    with pytest.raises(DataError, match="finite numbers") as caught:
        encoder.transform(pd.DataFrame({"x": ["1", None, "one", "two"]}))
    assert "2 cells of another kind" in str(caught.value)


def test_too_many_categories_are_counted():
    frame = pd.DataFrame({"city": [f"c{n}" for n in range(101)]})
    with pytest.raises(DataError, match="column 'city' has too many categories") as caught:
        TableEncoder.fit(frame)
    assert "101 different texts in 101 training rows" in str(caught.value)


def test_stored_and_read_again_it_encodes_the_same():
    frame = pd.DataFrame({"x": [0.1, 1 / 3, None], "y": ["ä", "b", None], "z": [True, False, True]})
    encoder = TableEncoder.fit(frame)
    again = read_encoder(encoder.to_json())
    assert again == encoder
    assert again.names == ("x", "y", "z")
    np.testing.assert_array_equal(again.transform(frame), encoder.transform(frame))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"encoder": "trees"}',
        '{"encoder": []}',
        '{"encoder": "table", "columns": [{"name": "x"}]}',
        '{"encoder": "table", "columns": 3}',
        '{"encoder": "pictures"}',
    ],
)
def test_other_text_is_no_encoder(text):
    with pytest.raises(DataError, match="not a stored encoder"):
        read_encoder(text)


def test_a_column_that_went_missing_is_named():
    encoder = TableEncoder.fit(pd.DataFrame({"age": [1, 2]}))
    with pytest.raises(MissingColumnError, match="'age'") as caught:
        encoder.transform(pd.DataFrame({"agee": [1, 2]}))
    assert "did you mean 'agee'?" in str(caught.value)


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
    with pytest.raises(DataError, match="does not fit its columns"):
        PictureEncoder.fit(frame_of(np.zeros((2, 3))), shape)


def test_a_stored_picture_encoder_encodes_the_same():
    frame = frame_of(np.random.default_rng(1).normal(size=(5, 4)))
    encoder = PictureEncoder.fit(frame, (1, 2, 2))
    again = read_encoder(encoder.to_json())
    assert again == encoder
    np.testing.assert_array_equal(again.transform(frame), encoder.transform(frame))
    with pytest.raises(MissingColumnError, match="pixel_3"):
        again.transform(frame.drop(columns="pixel_3"))


@pytest.mark.parametrize(
    ("column", "classes"),
    [
        (pd.Series([4, 2, 4]), (2, 4)),
        (pd.Series([4.0, 2.0, 4.0]), (2, 4)),
        (pd.Series([True, False, True]), (0, 1)),
        (pd.Series(["b", "a", "b"], dtype="category"), ("a", "b")),
        (pd.Series([10, 9, 10], dtype="Int64"), (9, 10)),
    ],
)
def test_classes_are_text_or_whole_numbers(column, classes):
    codes, found = encode_labels(column.rename("y"), "classification")
    assert found == classes
    assert codes.tolist() == [1, 0, 1]
    assert tuple(json.loads(json.dumps(found))) == classes


@pytest.mark.parametrize(
    ("column", "task", "message"),
    [
        (["a", None], "classification", "missing cells"),
        (["a", "a"], "classification", "too few classes"),
        ([0.5, 1.0], "classification", "real numbers, not classes"),
        (["a", "b"], "regression", "finite numbers"),
    ],
)
def test_labels_that_do_not_fit_the_task(column, task, message):
    with pytest.raises(DataError, match=message) as caught:
        encode_labels(pd.Series(column, name="paid"), task)
    assert "'paid'" in str(caught.value)


def test_dates_become_days_month_and_weekday():
    """Against the calendar of the standard library."""
    days = [datetime.date(2020, 1, 31), datetime.date(2021, 7, 4), datetime.date(2019, 12, 2)]
    frame = pd.DataFrame({"since": [day.strftime("%d.%m.%Y") for day in days]})
    encoder = TableEncoder.fit(frame, dates={"since": "%d.%m.%Y"})
    got = encoder.transform(frame)
    ordinals = np.array([day.toordinal() for day in days])
    months = np.array([2 * np.pi * (day.month - 1) / 12 for day in days])
    weekdays = np.array([2 * np.pi * day.weekday() / 7 for day in days])
    want = [
        (ordinals - np.median(ordinals)) / ordinals.std(),
        np.sin(months),
        np.cos(months),
        np.sin(weekdays),
        np.cos(weekdays),
    ]
    np.testing.assert_allclose(got, np.stack(want, axis=1), atol=1e-6)
    for cells in (days, pd.to_datetime(days), pd.to_datetime(days).tz_localize("UTC")):
        own = TableEncoder.fit(pd.DataFrame({"since": cells}))
        np.testing.assert_allclose(own.transform(pd.DataFrame({"since": cells})), got, atol=1e-6)
    assert read_encoder(encoder.to_json()) == encoder
    assert "2020" not in repr(encoder)


def test_a_text_that_is_no_date_is_refused_with_counts():
    encoder = TableEncoder.fit(pd.DataFrame({"d": ["2020-01-31"]}), dates={"d": "%Y-%m-%d"})
    with pytest.raises(DataError, match="'d' is not a column of dates") as caught:
        encoder.transform(pd.DataFrame({"d": ["31.12.2020", None, "2020-02-30"]}))
    assert caught.value.got.startswith("2 cells")
    assert "31.12" not in str(caught.value)
    dated = pd.DataFrame({"x": pd.to_datetime(["2020-01-31"])})
    numbers = TableEncoder.fit(pd.DataFrame({"x": [1.0, 2.0]}))
    with pytest.raises(DataError, match="neither number nor text"):
        numbers.transform(dated)


def test_what_no_training_row_held_is_zeros_and_counted():
    training = pd.DataFrame(
        {
            "town": ["Ulm", "Bonn", "Ulm"],
            "job": ["a", None, "b"],
            "age": [20.0, 30.0, 40.0],
            "since": ["2020-01-01", "2020-02-01", "2020-03-01"],
        }
    )
    encoder = TableEncoder.fit(training, dates={"since": "%Y-%m-%d"})
    later = pd.DataFrame(
        {
            "town": ["Jena", None, "Jena"],
            "job": [None, "c", "a"],
            "age": [None, 30.0, None],
            "since": [None, "2020-02-01", "2020-02-01"],
        }
    )
    counter = Unfamiliar()
    got = encoder.transform(later, counter)
    assert counter.counts == {
        "town": {"unseen_categories": 2, "new_missing": 1},
        "job": {"unseen_categories": 1},
        "age": {"new_missing": 2},
        "since": {"new_missing": 1},
    }
    assert not got[:, :2].any()  # town
    assert not got[0, 6:].any()  # since
    assert got[0, 5] == got[2, 5] == 0  # age: as the mean
    some = Unfamiliar(np.array([False, True, False]))
    encoder.transform(later, some)
    assert some.counts == {"town": {"new_missing": 1}, "job": {"unseen_categories": 1}}
    none = Unfamiliar()
    encoder.transform(training, none)
    assert none.counts == {}


@pytest.mark.parametrize("bins", [0, 2])
def test_every_input_of_dates_has_a_name(bins):
    training = pd.DataFrame({"until": ["2020-01-01", "2021-05-01", "9999-12-31", None]})
    encoder = TableEncoder.fit(training, {"until": "%Y-%m-%d"}, bins)
    got = encoder.transform(training)
    assert len(encoder.labels) == got.shape[1]
    assert got[:, encoder.labels.index("until: open end")].tolist() == [0, 0, 1, 0]


def test_bins_are_what_the_paper_writes():
    """Gorishniy et al. 2022, equation 1, on training rows; the edges are quantiles of them."""
    cells = np.random.default_rng(0).gamma(1.0, 3.0, 200)
    frame = pd.DataFrame({"x": np.concatenate([cells, cells + 1000])})
    encoder = TableEncoder.fit(frame.iloc[:200], bins=8)  # a fit on all rows would show
    edges = encoder.columns[0].edges
    assert edges == tuple(np.quantile(cells, np.linspace(0, 1, 9), method="higher"))
    got = encoder.transform(frame.iloc[:200])
    assert got.dtype == np.float32
    assert got.shape == (200, 8)
    for row, x in enumerate(cells):
        for place in range(8):
            low, high = edges[place], edges[place + 1]
            if x < low and place > 0:
                want = 0.0
            elif x >= high and place < 7:
                want = 1.0
            else:
                want = (x - low) / (high - low)
            assert got[row, place] == pytest.approx(want, abs=1e-6)
    assert (encoder.transform(frame.iloc[200:]) == 1).all()  # beyond: as the largest


def test_a_missing_number_in_bins_is_the_training_median():
    training = pd.DataFrame({"x": [1.0, 2.0, 9.0, None], "y": [1.0, 2.0, 3.0, 4.0]})
    encoder, counter = TableEncoder.fit(training, bins=2), Unfamiliar()
    got = encoder.transform(pd.DataFrame({"x": [2.0, None], "y": [2.5, None]}), counter)
    np.testing.assert_array_equal(got[:, 2], [0, 1])
    np.testing.assert_array_equal(got[0, :2], got[1, :2])
    np.testing.assert_array_equal(got[0, 3:], got[1, 3:])
    assert counter.counts == {"y": {"new_missing": 1}}


def test_bins_are_of_numbers_alone_and_stay_in_the_encoder():
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"x": rng.normal(77.125, 1, 40), "b": rng.random(40) > 0.5, "c": 5.0})
    frame["t"] = ["a", "b"] * 20
    encoder = TableEncoder.fit(frame, bins=4)
    assert [column.width for column in encoder.columns] == [4, 1, 1, 2]
    assert not encoder.transform(frame)[:, 5].any()  # alike in every row
    again = read_encoder(encoder.to_json())
    assert again == encoder
    assert again.transform(frame).tobytes() == encoder.transform(frame).tobytes()
    assert "77." not in repr(encoder)


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A model 'reader' of which nothing but a tokenizer of whole words is read."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    monkeypatch.setenv("VFL_MODELS", str(tmp_path))
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "good": 4, "film": 9}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path / "reader"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("memory", [False, True])
def test_texts_of_a_table_become_tokens(reader, tmp_path, memory):
    texts = ["good film", "film", "", "bad film good film"]
    frame = pd.DataFrame({"id": range(8), "text": texts * 2, "age": range(8), "y": [0, 1] * 4})
    frame.to_csv(tmp_path / "films.csv", index=False)
    place = OnDisk(tmp_path, 1 << 24) if memory else None
    form = TableFormat(tokenizer="reader", length=3)
    data = load_table(
        OwnTable(tmp_path / "films.csv", "id", form=form),
        {"texts": ["text"], "shop": ["age"]},
        [Label("label", "y")],
        Dealing(0),
        place=place,
    )
    rows = np.asarray(data["texts"].inputs[torch.arange(4)])
    assert rows.tolist() == [[5, 10, 0], [10, 0, 0], [0, 0, 0], [1, 10, 5]]
    assert data["shop"].inputs[torch.arange(4)].shape == (4, 1)  # numbers are as ever
    encoder = read_encoder(data["texts"].encoder.to_json())
    again = encoder.transform(pd.DataFrame({"text": texts}))
    assert again.tolist() == rows.tolist()
    (reader / "tokenizer.json").write_text((reader / "tokenizer.json").read_text() + "\n")
    with pytest.raises(DataError, match="tokenizer 'reader'"):
        encoder.transform(frame)


@pytest.mark.parametrize("memory", [False, True])
def test_a_party_with_texts_and_other_columns_has_tokens_and_inputs(reader, tmp_path, memory):
    frame = pd.DataFrame({"id": range(8), "y": [0, 1] * 4, "age": range(8), "income": range(8)})
    frame["town"] = ["a", "b"] * 4
    frame["fax"] = None
    frame["review"] = [f"good film {number}" for number in range(8)]
    frame.to_csv(tmp_path / "films.csv", index=False)
    place = OnDisk(tmp_path, 1 << 24) if memory else None
    own, plain = (
        load_table(
            OwnTable(tmp_path / "films.csv", "id", form=form),
            {"shop": columns, "bank": ["income"]},
            [Label("label", "y")],
            Dealing(0),
            place=place,
        )["shop"]
        for form, columns in (
            (TableFormat(tokenizer="reader", length=3), ["age", "review", "town", "fax"]),
            (TableFormat(), ["age", "town", "fax"]),
        )
    )
    rows = torch.arange(8)
    found, beside = (np.asarray(each.inputs[rows]) for each in (own, plain))
    assert found[:, :3].tolist() == [[5, 10, 1]] * 8
    assert np.array_equal(found[:, 3:], beside)
    again = read_encoder(own.encoder.to_json())
    assert np.array_equal(again.transform(frame), found)
    assert len(again.labels) == found.shape[1]


def test_dates_beside_texts_are_no_texts(reader):
    frame = pd.DataFrame({"review": ["good film 1", "film 2"]})
    frame["seen"] = pd.to_datetime(["2020-01-31", "2021-01-31"])
    form = TableFormat(tokenizer="reader", length=3)
    encoder = token_encoder(
        [frame], ["review", "seen"], form, lambda names: TableEncoder.fit(frame[names])
    )
    assert (encoder.texts.names, encoder.others.names) == (("review",), ("seen",))
