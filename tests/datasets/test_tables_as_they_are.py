"""Tables as people write them: what each becomes, or which sentence refuses it."""

from __future__ import annotations

import bz2
import datetime as dt
import gzip
import io
import lzma
import zipfile
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from unittest import mock
from uuid import UUID

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vfl.core.errors import DataError, MisalignedError, VFLError
from vfl.datasets import (
    Dealing,
    Label,
    OwnTable,
    TableEncoder,
    TableFormat,
    align,
    load_for_prediction,
    load_own,
    read_table,
)
from vfl.datasets.cells import date_form, day_of, days_of_texts
from vfl.datasets.describe import describe, left_out
from vfl.datasets.repeats import Repeats
from vfl.datasets.table import as_days
from vfl.estimators import VFLClassifier
from vfl.serving.front import Rows

ROWS = 30


def table(*columns, names="id,x", sep=","):
    """A CSV of `ROWS` rows; a column repeats the cells that are given."""
    lines = [names.replace(",", sep)]
    for row in range(ROWS):
        lines.append(sep.join([str(1000 + row), *(cells[row % len(cells)] for cells in columns)]))
    return "\n".join(lines) + "\n"


def written(folder, content, name="table.csv"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read_as_described(path, label=None, **options):
    report = describe(path, label=label, **options)
    return report, read_table(path, report.form)


MONEY = {
    "euro": (["€ 75997,97", "€ 5,00"], [75997.97, 5.0]),
    "dollar": (["$5,156.91", "$12.00"], [5156.91, 12.0]),
    "german": (["73.208,40", "1.000,00"], [73208.40, 1000.0]),
    "accountant": (["(1,234.50)", "17.25"], [-1234.5, 17.25]),
    "whole thousands": (["1,234", "(5,678)"], [1234.0, -5678.0]),
    "narrow blanks": (["1\u202f234,56", "12\u202f000,00"], [1234.56, 12000.0]),
    "blanks that do not break": (["1\u00a0234,56 €", "7,00 €"], [1234.56, 7.0]),
    "swiss": (["CHF 1'234.50", "CHF 1\u2019000.00"], [1234.5, 1000.0]),
    "price with a dash": (["5,-", "1.250,-"], [5.0, 1250.0]),
    "code behind": (["1.234,50 EUR", "2,25 EUR"], [1234.5, 2.25]),
    "rupees": (["₹1,23,456.00", "₹99.50"], [123456.0, 99.5]),
    "real": (["R$ 1.234,56", "R$ 0,50"], [1234.56, 0.5]),
    "minus of typesetters": (["\u22125.5 %", "12 %"], [-0.055, 0.12]),
    "minus behind": (["5.00-", "1,000.00"], [-5.0, 1000.0]),
    "percent": (["12,5%", "100%"], [0.125, 1.0]),
    "full width": (["\uff15\uff10\uff05", "\uff17\uff05"], [0.5, 0.07]),
    "Arabic digits": (["\u0661\u066b\u0665", "\u0662\u0660"], [1.5, 20.0]),
    "Devanagari": (["\u0967\u0968.\u096b", "\u0969"], [12.5, 3]),
    "per mille": (["3‰", "4.5‰"], [0.003, 0.0045]),
    "with missing words": (["$5.00", "n/a"], [5.0, np.nan]),
    "with a dash for none": (["$5.00", "-"], [5.0, np.nan]),
    "two locales": (["1.234,50 €", "EUR 1,999.50"], [1234.5, 1999.5]),
    "none in a cell of zero": (["1.234,50 €", "0"], [1234.5, 0.0]),
}


@pytest.mark.parametrize("name", MONEY)
@pytest.mark.parametrize("kind", ["csv", "parquet", "frame"])
def test_numbers_of_people(tmp_path, name, kind):
    texts, want = MONEY[name]
    source = written(tmp_path, table(texts, names="id;x", sep=";"))
    if kind != "csv":
        source = pd.read_csv(source, sep=";", dtype={"x": str}, keep_default_na=False)
    if kind == "parquet":
        source.to_parquet(tmp_path / "table.parquet")
        source = tmp_path / "table.parquet"
    report, frame = read_as_described(source)
    assert {one.name: one.kind for one in report.columns}["x"] == "number"
    assert frame["x"].head(2).tolist() == pytest.approx(want, nan_ok=True)


@pytest.mark.parametrize(
    "texts", [["€ 5", "$ 6"], ["5 EUR", "CHF 6", "7"], ["5 kr", "SEK 6"], ["5 %", "€ 6"]]
)
@pytest.mark.parametrize("large", [False, True])
def test_a_column_of_several_currencies_is_left_out_and_has_no_sum(
    tmp_path, monkeypatch, texts, large
):
    monkeypatch.setattr("vfl.datasets.facts.COLUMN_ROWS", 1 if large else 8192)
    path = written(tmp_path, table(texts, ["1", "2"], names="id,x,y"))
    report = describe(path)
    assert report.features == ["y"]
    (line,) = report.left_out
    assert "'x' (amounts in several currencies or units" in line
    assert not any(sign in line for sign in "€$5")
    with pytest.raises(DataError, match="neither classes nor numbers") as caught:
        describe(path, label="x")
    assert "several currencies" in str(caught.value.got)
    own = OwnTable(path, "id", ["x"], form=TableFormat(numbers={"x": "."}))
    with pytest.raises(DataError, match="column 'x' mixes several currencies"):
        load_own("bank", own, None, Dealing(0))


@pytest.mark.parametrize(
    ("first", "later", "good"),
    [
        (["€ 5", "6 EUR"], "7 Euro", True),
        (["€ 5", "6 EUR"], "7", True),
        (["€ 5", "6 EUR"], "$ 7", False),
        (["$5.00", "$6"], "US$ 7", False),
        (["5 %", "6%"], "7 ‰", True),
        (["5 %", "6%"], "7", False),  # of percent, it would be a hundred times as much
    ],
)
def test_a_later_table_has_the_unit_of_the_first_one(tmp_path, first, later, good):
    report = describe(written(tmp_path, table(first)))
    path = written(tmp_path, table([later]), "later.csv")
    if good:
        assert read_table(path, report.form)["x"].iloc[0] == pytest.approx(
            0.007 if "‰" in later else 7
        )
        return
    with pytest.raises(DataError, match="not a column of numbers") as caught:
        read_table(path, report.form)
    assert f"{ROWS} cells that are no number in" in str(caught.value.got)


@pytest.mark.parametrize(
    ("texts", "note"),
    [(["€ 5", "6"], "others none"), (["5 %", "6"], "count as hundredths"), (["€ 5"], None)],
)
def test_numbers_without_the_unit_of_others_are_noted(tmp_path, texts, note):
    notes = (
        describe(
            written(tmp_path, table([*texts, "€ 7" if note != "count as hundredths" else "7 %"]))
        )
        .columns[1]
        .notes
    )
    assert [note in one for one in notes] == [True] * bool(note)


DATES = {
    "open end": (["2024-01-31", "9999-12-31"], ["2024-01-31", "9999-12-31"]),
    "year one": (["0001-01-01", "2024-01-31"], ["0001-01-01", "2024-01-31"]),
    "two ways": (["31.01.2024", "2024-02-29"], ["2024-01-31", "2024-02-29"]),
    "american": (["01/31/2024", "02/28/2024"], ["2024-01-31", "2024-02-28"]),
    "with a zone": (["2024-01-31T23:00:00-05:00", "2024-01-31"], ["2024-02-01T04", "2024-01-31"]),
    "zulu": (["2024-01-31T12:00:00Z", "2024-02-01T00:00:00Z"], ["2024-01-31T12", "2024-02-01"]),
    "month by name": (["31 Jan 2024", "01 Feb 2024"], ["2024-01-31", "2024-02-01"]),
    "short years": (["31.12.99", "01.02.24"], ["1999-12-31", "2024-02-01"]),
    "none yet": (["2024-01-31", "NULL"], ["2024-01-31", "NaT"]),
    "digits": (["20240131", "20240229"], ["2024-01-31", "2024-02-29"]),
    "of Oracle": (["31-JAN-24", "29-FEB-24"], ["2024-01-31", "2024-02-29"]),
    "of SAS": (["31JAN2024", "29FEB2024"], ["2024-01-31", "2024-02-29"]),
    "times of SAS": (["31JAN2024:12:00:00", "29FEB2024:00:00:00"], ["2024-01-31T12", "2024-02-29"]),
    "Chinese": (
        ["2024\u5e741\u670831\u65e5", "2024\u5e7402\u670829\u65e5"],
        ["2024-01-31", "2024-02-29"],
    ),
    "months": (["01/2024", "12/2023"], ["2024-01-01", "2023-12-01"]),
    "months by name": (["Jan 2024", "Dec 2023"], ["2024-01-01", "2023-12-01"]),
    "German": (["3. März 2024", "24. Dez. 2023"], ["2024-03-03", "2023-12-24"]),
    "German months": (["Mrz 2024", "Dez 2022"], ["2024-03-01", "2022-12-01"]),
    "French": (["1er janvier 2024", "12 févr. 2023"], ["2024-01-01", "2023-02-12"]),
    "Spanish": (["3 de marzo de 2024", "1 ene 2023"], ["2024-03-03", "2023-01-01"]),
    "names of two languages": (["3 May 2024", "4 Oktober 2023"], ["2024-05-03", "2023-10-04"]),
    "without accents": (["3-AOUT-2024", "31-DEC-2023"], ["2024-08-03", "2023-12-31"]),
    "letters in two parts": (
        ["3 a\u006fu\u0302t 2024", "1 f\u0065\u0301v 2024"],
        ["2024-08-03", "2024-02-01"],
    ),
    "weekdays": (
        ['"Mo., 4. März 2024"', '"vendredi, 13. déc. 2024"'],
        ["2024-03-04", "2024-12-13"],
    ),
    "of a mail": (
        ['"Mon, 04 Mar 2024 10:00:00 -0200"', '"Fri, 13 Dec 2024 12:00:00 +0000"'],
        ["2024-03-04T12", "2024-12-13T12"],
    ),
    "of C": (
        ["Mon Mar  4 12:00:00 2024", "Fri Dec 13 00:00:00 2024"],
        ["2024-03-04T12", "2024-12-13"],
    ),
    "with a.m.": (
        ['"Mar 4, 2024 12:00 PM"', '"Dec 13, 2024 12:00 AM"'],
        ["2024-03-04T12", "2024-12-13"],
    ),
    "UTC": (
        ["2024-03-04 12:00:00 UTC", "2024-12-13 00:00:00 UTC"],
        ["2024-03-04T12", "2024-12-13"],
    ),
    "ordinals": (["3rd of March 2024", "21st April 2024"], ["2024-03-03", "2024-04-21"]),
    "none in MySQL": (["2024-01-31", "0000-00-00"], ["2024-01-31", "NaT"]),
    "none in Excel": (["2024-01-31", "1900-01-00"], ["2024-01-31", "NaT"]),
}


@pytest.mark.parametrize("name", DATES)
def test_dates_of_people(tmp_path, name):
    texts, want = DATES[name]
    path = written(tmp_path, table(texts, texts[::-1], names="id,x,y"))
    report, frame = read_as_described(path)
    assert [one.kind for one in report.columns] == ["id", "date", "date"]
    days = [
        (np.datetime64(one, "us") - np.datetime64("1970-01-01")) / np.timedelta64(1, "D")
        for one in want
    ]
    found = as_days(frame["x"], report.form.dates["x"])
    assert found[:2].tolist() == pytest.approx(days, nan_ok=True)
    own = OwnTable(path, "id", report.features, form=report.form)
    inputs = load_own("bank", own, None, Dealing(0)).inputs
    assert inputs.shape[1] == sum(one.inputs for one in report.columns)
    assert np.abs(inputs.numpy()).max() < 10  # an open end does not squeeze the other days


MONTHS = {
    "English": "January February March April May June July August September October November "
    "December",
    "short English": "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec",
    "German": "Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
    "short German": "Jan. Feb. März Apr. Mai Juni Juli Aug. Sept. Okt. Nov. Dez.",
    "of Excel": "Jan Feb Mrz Apr Mai Jun Jul Aug Sep Okt Nov Dez",
    "French": "janvier février mars avril mai juin juillet août septembre octobre novembre "
    "décembre",
    "short French": "janv. févr. mars avr. mai juin juil. août sept. oct. nov. déc.",
    "SHOUTED": "JANVIER FÉVRIER MARS AVRIL MAI JUIN JUILLET AOÛT SEPTEMBRE OCTOBRE NOVEMBRE "
    "DÉCEMBRE",
}


@settings(max_examples=60, derandomize=True, deadline=timedelta(seconds=20))
@given(
    days=st.lists(st.dates(dt.date(1000, 1, 1)), min_size=1, max_size=30),
    name=st.sampled_from([*MONTHS]),
    form=st.sampled_from(["{d}. {b} {y}", "{d:02} {b} {y}", "{d}-{b}-{y}", "{b} {d}, {y}"]),
)
def test_every_day_is_read_with_the_name_of_its_month(days, name, form):
    """Whatever the locale: only numbers reach `strptime`, which knows one language."""
    names = MONTHS[name].split()
    texts = [form.format(d=one.day, b=names[one.month - 1], y=f"{one.year:04}") for one in days]
    found = date_form(texts)
    assert found is not None
    with mock.patch.object(pd, "to_datetime", wraps=pd.to_datetime) as read:
        assert days_of_texts(texts, found).tolist() == [day_of(one) for one in days]
    assert not [one for one in read.call_args_list if "%b" in one.kwargs["format"].lower()]


UNREAD = {
    "no month of that name": (["12 grudnia 2023", "13 grudnia 2023"], "30 of 30 cells look like"),
    "listopad is October or November": (["12 listopada 2023", "3 listopada 2023"], "30 of 30"),
    "both orders": (["31/12/2023", "12/31/2023"], "30 of 30"),
    "no such day": (["31.12.2023", "01.12.2023", "30.02.2023"], "30 of 30"),
    "a word among them": (["31.12.2023", "01.12.2023", "morgen"], "20 of 30"),
    "Tuesday or March": (["mar. 12 mars 2024", "mar. 5 mars 2024"], "30 of 30"),
    "zones that are not unique": (["2024-03-04 10:00:00 CST", "2024-07-05 10:00:00 CST"], "30 of"),
    "numbers where names belong": (["12 Mai 2023", "12 05 2023"], "15 of 30"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_dates_without_a_form_are_no_dates_and_the_screen_says_so(tmp_path, name):
    texts, said = UNREAD[name]
    _, column = describe(written(tmp_path, table(texts))).columns
    assert (column.kind, len(column.notes)) == ("category", 1)
    assert said in column.notes[0]
    assert not any(text in column.notes[0] for text in texts)


@pytest.mark.parametrize(
    "texts", [["1.2.3", "1.10.0"], ["10.0.0.1", "192.168.1.20"], ["1/2", "3/4"]]
)
def test_versions_and_addresses_are_not_called_dates(tmp_path, texts):
    _, column = describe(written(tmp_path, table(texts))).columns
    assert (column.kind, column.notes) == ("category", ())


@pytest.mark.parametrize(("texts", "noted"), [(["12.2023", "01.2024"], 1), (["12.5", "1.2024"], 0)])
def test_months_that_are_read_as_numbers_are_noted(tmp_path, texts, noted):
    path = written(tmp_path, table(texts))
    report = describe(path)
    assert ['dates = { "x" = "%m.%Y" }' in note for note in report.notes] == [True] * noted
    if noted:
        form = replace(report.form, dates={"x": "%m.%Y"})
        days = as_days(read_table(path, form)["x"], "%m.%Y")
        assert days[0] == day_of(dt.date(2023, 12, 1))


def test_names_of_columns_print_no_control_characters(tmp_path):
    report = describe(written(tmp_path, table(["1", "2"], ["a"], names="id,\x1b[31mred,\x1b[0m")))
    assert not [line for line in [*report.lines(), *report.left_out] if "\x1b" in line]


@pytest.mark.parametrize(
    ("texts", "ambiguous"),
    [
        (["01/02/2024", "2024-03-01"], True),
        (["01/02/2024 10:00", "2024-03-01"], True),
        (["01/02/2024", "31/02/2024", "2024-03-01", "31/01/2024"], None),
        (["01/02/2024", "31/01/2024", "2024-03-01"], False),
        (["1. Mai 2024", "2024-03-01"], False),
    ],
)
def test_the_order_of_days_and_months_of_mixed_dates_is_noted(tmp_path, texts, ambiguous):
    _, column = describe(written(tmp_path, table(texts))).columns
    if ambiguous is None:
        assert column.kind == "category"
    else:
        assert column.kind == "date"
        assert ["order of day and month" in note for note in column.notes] == [True] * ambiguous


@pytest.mark.parametrize("later", [["31.12.2023", "01.02.2023"], ["03/04/2024", "2023-02-01"]])
def test_a_form_that_appears_far_below_is_read_too(tmp_path, monkeypatch, later):
    monkeypatch.setattr("vfl.datasets.facts.COLUMN_ROWS", 16)
    cells = ["2024-01-31"] * 20 + later * 5
    report, frame = read_as_described(written(tmp_path, table(cells)))
    column = report.columns[1]
    assert column.kind == "date"
    assert len(column.notes) == ("03/04/2024" in later)
    assert not np.isnan(as_days(frame["x"], report.form.dates["x"])).any()


@pytest.mark.parametrize("last", [2**53 - 1, 2**53 + ROWS, 10**18, 2**64 - 1])
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_numbers_that_lose_digits_as_inputs_are_noted(tmp_path, kind, missing, last):
    numbers = [last - 2**44 * row for row in range(ROWS)]
    cells = [None if missing and row == 7 else one for row, one in enumerate(numbers)]
    path = tmp_path / f"table.{kind}"
    if kind == "csv":
        path.write_text(table([str(one) if one else "" for one in cells]))
    else:
        of = pa.uint64() if last > 2**63 else pa.int64()
        pq.write_table(pa.table({"id": range(ROWS), "x": pa.array(cells, of)}), path)
    column = describe(path, id_column="id").columns[1]
    assert column.inputs
    assert ["about 16 digits" in one for one in column.notes] == [True] * (last >= 2**53)


def test_numbers_that_are_rounded_in_the_file_are_not_noted(tmp_path):
    cells = [f"{1.5e20 + row * 7e15}" for row in range(ROWS)]
    assert describe(written(tmp_path, table(cells)), id_column="id").columns[1].notes == ()


@pytest.mark.parametrize("start", [2**53, 10**18, 2**63 - 100])
def test_long_ids_that_are_numbers_stay_exact(tmp_path, start):
    """As float64 each would equal its neighbours."""
    paths = {name: tmp_path / f"{name}.csv" for name in ("a", "b")}
    for shift, path in enumerate(paths.values()):
        path.write_text("id,x\n" + "".join(f"{start + shift + 2 * n},{n}\n" for n in range(20)))
    reports = {name: describe(path) for name, path in paths.items()}
    own = {
        name: read_table(path, reports[name].form, ["id"] * reports[name].form.text_ids)
        for name, path in paths.items()
    }
    with pytest.raises(MisalignedError):
        align(own, {name: "id" for name in own}, reports["a"].form.id_type)
    own["b"] = own["a"].iloc[::-1]
    assert (
        len(align(own, {name: "id" for name in own}, reports["a"].form.id_type).frames["b"]) == 20
    )


TYPES = {
    "day": (pa.array([dt.date(1, 1, 1), dt.date(9999, 12, 31)]), "date"),
    "seconds": (
        pa.array([dt.datetime(1, 1, 1), dt.datetime(9999, 1, 1)], pa.timestamp("s")),
        "date",
    ),
    "zone": (pa.array([0, 10**6], pa.timestamp("us", "Asia/Tokyo")), "date"),
    "duration": (pa.array([86400, 1], pa.duration("s")), "number"),
    "decimal": (pa.array([Decimal("1.50"), Decimal("2.25")]), "number"),
    "wide decimal": (pa.array([Decimal("1.5"), None], pa.decimal256(60, 5)), "number"),
    "uuid": (
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(16), b"\1" * 16], pa.binary(16))),
        "category",
    ),
    "clock of nanoseconds": (pa.array([1, 2], pa.time64("ns")), "other"),
    "numbers in a dictionary": (pa.array([10, 20]).dictionary_encode(), "number"),
    "list of two": (pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2)), "other"),
    "dictionary": (pa.array(["a", "b"]).dictionary_encode(), "category"),
    "null": (pa.nulls(2), "constant"),
    "list": (pa.array([[1], [2, 3]]), "other"),
    "struct": (pa.array([{"a": 1}, {"a": 2}]), "other"),
    "map": (pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())), "other"),
    "bytes": (pa.array([b"a", b"b"]), "other"),
    "clock": (pa.array([1, 2], pa.time32("s")), "other"),
    "half": (pa.array(np.array([1, 2], np.float16)), "number"),
}


@pytest.mark.parametrize("large", [False, True])
def test_types_of_parquet(tmp_path, monkeypatch, large):
    monkeypatch.setattr("vfl.datasets.files.BLOCK_ROWS", 8 if large else 8192)
    monkeypatch.setattr("vfl.datasets.files.COLUMN_ROWS", 8 if large else 8192)
    rows = pa.array(np.arange(ROWS) % 2)
    columns = {name: cells.take(rows) for name, (cells, _) in TYPES.items()}
    path = tmp_path / "types.parquet"
    pq.write_table(pa.table({"id": pa.array(range(ROWS)), **columns}), path)
    report = describe(path)
    kinds = {one.name: one.kind for one in report.columns}
    assert kinds == {"id": "id"} | {name: kind for name, (_, kind) in TYPES.items()}
    left = {one.name: one.becomes for one in report.columns if one.kind == "other"}
    assert set(left.values()) == {"left out: neither number, text nor date"}
    assert load_own("bank", OwnTable(path, "id", report.features), None, Dealing(0)).rows == ROWS
    with pytest.raises(DataError, match="neither number nor text"):
        load_own("bank", OwnTable(path, "id", ["struct"]), None, Dealing(0))


@pytest.mark.parametrize(
    ("index", "want"),
    [
        (pd.RangeIndex(1000, 1000 + ROWS, name="customer"), ["customer", "x"]),
        (pd.Index([*range(7, 6 + ROWS), 99], name="customer"), ["x", "customer"]),
        (pd.Index([f"c{row}" for row in range(ROWS)]), ["x", "index"]),
        (pd.RangeIndex(ROWS), ["x"]),
        (pd.Index([*range(1, ROWS), 0]), ["x"]),  # of rows that were shuffled
    ],
)
def test_an_index_that_parquet_keeps_is_a_column(tmp_path, index, want):
    frame = pd.DataFrame({"x": np.arange(ROWS) / 7}, index=index)
    frame.to_parquet(tmp_path / "a.parquet")
    read = read_table(tmp_path / "a.parquet")
    assert list(read.columns) == want
    if len(want) > 1:
        name = next(one for one in want if one != "x")
        assert read[name].tolist() == index.tolist()
        assert describe(tmp_path / "a.parquet").id == name


@pytest.mark.parametrize("kind", ["decimal", "uuid"])
def test_ids_keep_all_their_digits(tmp_path, kind):
    first = 12345678901234567890
    want = [str(first + row) for row in range(ROWS)]
    ids = pa.array([Decimal(one) for one in want], pa.decimal128(38, 0))
    if kind == "uuid":
        want = [f"00000000-0000-0000-0000-{row:012x}" for row in range(ROWS)]
        stored = [row.to_bytes(16, "big") for row in range(ROWS)]
        ids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array(stored, pa.binary(16)))
    pq.write_table(pa.table({"id": ids, "x": np.arange(ROWS) / 7}), tmp_path / "t.parquet")
    report = describe(tmp_path / "t.parquet")
    assert (report.id, report.form.id_type) == ("id", "text")
    own = OwnTable(tmp_path / "t.parquet", "id", ["x"], form=report.form)
    found = align({"a": read_table(own.source, own.form, ["id"])}, "id")
    assert sorted(found.ids.tolist()) == sorted(want)


@pytest.mark.parametrize("frame", [False, True])
def test_decimal_ids_have_no_exponent(tmp_path, frame):
    """Arrow and Python write 0E-10 and 1E-10; the other party's CSV has 0 and 0.0000000001."""
    cells = [Decimal(one) for one in ("0E-10", "1E-10", "7.0000000000", "2.5000000000")]
    table = pa.table({"id": pa.array(cells, pa.decimal128(20, 10)), "x": [1.0, 2.0, 3.0, 4.0]})
    pq.write_table(table, tmp_path / "t.parquet")
    source = table.to_pandas() if frame else tmp_path / "t.parquet"
    found = load_own("bank", OwnTable(source, "id", ["x"]), None, Dealing(0, 0.0, 0.0))
    assert sorted(found.ids) == ["0", "0.0000000001", "2.5000000000", "7"]


def test_an_id_that_cannot_be_read_is_named(tmp_path):
    ids = pa.array([row.to_bytes(16, "big") for row in range(ROWS)], pa.binary(16))
    pq.write_table(pa.table({"key": ids, "x": np.arange(ROWS) % 3}), tmp_path / "t.parquet")
    with pytest.raises(DataError) as caught:
        describe(tmp_path / "t.parquet")
    assert "'key' contains neither texts nor numbers" in str(caught.value.got)
    assert "str(uuid.UUID(bytes=cell))" in str(caught.value.fix)
    with pytest.raises(DataError, match="'key' contains neither texts nor numbers"):
        describe(tmp_path / "t.parquet", id_column="key")
    frame = pd.DataFrame({"x": np.arange(ROWS) / 7}, index=pd.Index(range(ROWS), name="key"))
    with pytest.raises(DataError, match=r"reset_index"):
        describe(frame)


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary(3)])
@pytest.mark.parametrize("frame", [False, True])
def test_ids_that_are_bytes_are_never_compared_as_python_shows_them(tmp_path, kind, frame):
    ids = pa.array([b"c%02d" % row for row in range(ROWS)], kind)
    table = pa.table({"id": ids, "x": np.arange(ROWS) / 7})
    pq.write_table(table, tmp_path / "t.parquet")
    own = OwnTable(table.to_pandas() if frame else tmp_path / "t.parquet", "id", ["x"])
    with pytest.raises(DataError, match="ids of a table are bytes") as caught:
        load_own("bank", own, None, Dealing(0))
    assert "cell.decode()" in str(caught.value.fix)


def test_uuids_of_a_frame_are_ids():
    ids = [UUID(int=row) for row in range(ROWS)]
    frame = pd.DataFrame({"id": ids, "x": np.arange(ROWS) / 7})
    assert describe(frame).id == "id"
    found = align({"a": frame, "b": frame.assign(id=frame["id"].astype(str))}, "id")
    assert found.ids.tolist() == [*map(str, ids)]


@pytest.mark.parametrize("letter", ["a", "\u00e4"])
@pytest.mark.parametrize("cell", ["1.5\0", "\x001.5", "1\0.5"])
def test_zero_bytes_far_below_the_first_rows_are_refused(tmp_path, letter, cell):
    lines = ["id,x,t", *(f"{row},{cell if row == 1900 else 1.5},{letter}" for row in range(2000))]
    with pytest.raises(DataError) as caught:
        describe(written(tmp_path, "\n".join(lines)))
    assert caught.value.got == "line 1902: text with zero bytes (NUL) in it"
    assert "tr -d" in str(caught.value.fix)


@pytest.mark.parametrize("written_as", ["1.{:02d}E+10", "1.{:02d}E+15", "1.0{:d}e+07"])
@pytest.mark.parametrize("rows", [1, 7])
def test_ids_that_a_spreadsheet_has_rounded_are_refused(tmp_path, written_as, rows):
    lines = [f"{written_as.format(1 + row // rows)},{row}.5" for row in range(ROWS)]
    with pytest.raises(DataError, match="a spreadsheet has rounded the ids") as caught:
        describe(written(tmp_path, "\n".join(["id,x", *lines])))
    assert f"{ROWS} of {ROWS} cells of 'id'" in str(caught.value.got)


@pytest.mark.parametrize(
    ("labels", "want"),
    [
        (["2024-01-01", "2024-02-01"], "the label column 'y' contains neither classes nor numbers"),
        (["1"], "the label column 'y' has only one class"),
        (["a", ""], "the label column 'y' has missing cells"),
    ],
)
def test_a_label_that_cannot_be_learnt_is_refused_at_once(tmp_path, labels, want):
    path = written(tmp_path, table(["1.5", "2", "7"], labels, names="id,x,y"))
    with pytest.raises(DataError, match=want) as caught:
        describe(path, label="y")
    assert caught.value.where == "data.label"
    assert caught.value.fix


@pytest.mark.parametrize(
    ("labels", "many"),
    [
        (["Ja", "nein", "JA", "Nein"], 2),
        (["True", "0", "1", "False"], 2),
        (["yes", "no", "Yes"], 1),
        (["True", "FALSE", "true"], 0),
        (["1", "2"], 0),
        (["\u662f", "\u5426"], 0),
    ],
)
def test_classes_that_differ_in_spelling_are_noted(tmp_path, labels, many):
    path = written(tmp_path, table(["1.5", "2", "7", "8", "9"], labels, names="id,x,y"))
    told = [note for note in describe(path, label="y").notes if "in its spelling" in note]
    assert [note.split()[0] for note in told] == [str(many)] * bool(many)


@pytest.mark.parametrize(
    "cells", [["Infinity", "1"], ["1e400", "2"], ["-inf", "3.5"], ["1.8e308", "-1e300", "5"]]
)
def test_infinite_numbers_are_noted_before_training(tmp_path, cells):
    path = written(tmp_path, table(cells, ["1", "2"], names="id,x,y"))
    report = describe(path)
    assert "infinite" in report.columns[1].notes[0]
    with pytest.raises(DataError, match="replace infinite numbers, and those beyond"):
        load_own("bank", OwnTable(path, "id", ["x"], form=report.form), None, Dealing(0))


def test_a_frame_has_names_and_spans_of_time():
    for name in ("", None, float("nan")):
        with pytest.raises(DataError, match="columns without a name"):
            describe(pd.DataFrame({name: range(ROWS), "x": range(ROWS)}))
    frame = pd.DataFrame({"id": range(ROWS), "x": pd.to_timedelta(np.arange(ROWS), "h")})
    report = describe(frame)
    assert report.columns[1].kind == "number"
    assert read_table(frame, report.form)["x"].tolist()[:3] == pytest.approx([0, 1 / 24, 1 / 12])


WORDS = ["None", "NA", "null", "n/a", "NaN"]


@pytest.mark.parametrize("word", WORDS)
def test_a_class_and_a_column_may_be_called_as_a_missing_cell(tmp_path, word):
    path = written(tmp_path, table(["0.5", word], ["low", word], names=f"id,{word},y"))
    report = describe(path, label="y")
    assert report.columns[1].missing == 0.5
    own = OwnTable(path, "id", [word], form=report.form)
    data = load_own("bank", own, Label("bank", "y"), Dealing(0))
    assert data.classes == tuple(sorted(["low", word]))


def test_a_word_among_classes_that_are_numbers_is_a_class(tmp_path):
    path = written(tmp_path, table(["0", "1", "NA"], names="id,y"))
    report = describe(path, label="y")
    assert report.form.missing == {"y": ()}
    assert "3 classes" in report.notes[0]


def test_missing_words_are_switched_by_column(tmp_path):
    path = written(tmp_path, table(["1", "?"], ["1", "NA"], ["a", "x"], names="id,p,q,r"))
    form = describe(path).form
    assert form.missing == ("?",)
    frame = read_table(path, form)
    assert [float(frame[name].isna().mean()) for name in "pqr"] == [0.5, 0.5, 0.0]


LAYOUTS = {
    "sep line": ("sep=;\n" + table(["1,5"], sep=";"), [";", 1]),
    "preamble": ("Report of May\n\nmade by us\n" + table(["1"]), [",", 3]),
    "separators at the end": (table(["1,"]).replace("id,x", "id,x,"), [",", 0]),
    "blank lines": (table(["1"]).replace("\n", "\n\n"), [",", 0]),
    "rows of separators": (table(["1"]) + ",\n,\n", [",", 0]),
    "carriage returns": (table(["1"]).replace("\n", "\r"), [",", 0]),
    "byte order mark": ("\ufeff" + table(["1"]), [",", 0]),
    "windows": (table(["€ 5,00"], sep=";").encode("cp1252"), [";", 0]),
    "two bytes": (table(["1"]).encode("utf-16-le"), [",", 0]),
    "index of a frame": (table(["1"], names=",x"), [",", 0]),
    "packed": (gzip.compress(table(["1"]).encode()), [",", 0]),
    "lines in quotes": (table(['"1"', '"2"'], ['"a\nb, c"'], names="id,x,t"), [",", 0]),
    "blanks": (table([" 1 ", " 2"]), [",", 0]),
}


@pytest.mark.parametrize(
    ("cells", "sep", "noted"),
    [
        (["1.234", "999", "12.500", "7.251"], ";", True),
        (["1.234", "-12.500", "NA", "7.251"], "\t", True),
        (["1.234", "999", "12.500", "7.251"], ",", False),  # commas would group thousands here
        (["1.234", "0.999", "12.500", "7.251"], ";", False),
        (["1.234", "12.5", "7.251"], ";", False),
        (["1.234", "1500", "12.500", "7.251"], ";", False),
        (["1.234", "5"], ";", False),
    ],
)
def test_points_that_may_group_thousands_are_noted(tmp_path, cells, sep, noted):
    path = written(tmp_path, table(cells, names="id,x", sep=sep))
    report = describe(path)
    assert ['numbers = { "x" = "," }' in note for note in report.notes] == [True] * noted
    form = replace(report.form, numbers={"x": ","})
    if noted:
        assert {*read_table(path, form)["x"]} >= {1234.0, 7251.0}


def test_a_column_that_begins_without_cells_hides_no_grouped_thousands(tmp_path):
    lines = [f"{row};{1 + row % 900}.{row % 1000:03};" for row in range(400)]
    path = written(tmp_path, "\n".join(["id;x;y", *lines, "400;1.500;12.25", ""]))
    assert any('numbers = { "x" = ","' in note for note in describe(path).notes)


def test_numbers_whose_first_digits_are_equal_are_not_called_equal(tmp_path):
    path = written(tmp_path, table([str(2**64 - 1 - row) for row in range(ROWS)], names="id,x"))
    assert (
        describe(path).columns[1].becomes
        == "left out: the first 15 digits of all numbers are equal"
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(tmp_path, name):
    content, want = LAYOUTS[name]
    path = written(tmp_path, content)
    report, frame = read_as_described(path)
    assert [report.form.separator, report.form.skip_lines] == want
    assert len(frame) == ROWS
    assert report.id == ("index" if name.startswith("index") else "id")
    assert pd.api.types.is_numeric_dtype(frame["x"])


def _workbook():
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("xl/workbook.xml", "<workbook/>")
    return packed.getvalue()


def _zipped(**files):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in files.items():
            archive.writestr(name.replace("__", "."), text)
    return content.getvalue()


PLAIN = table(["1.5", "2.25"])
REFUSED = {
    "long row": (table(["1"]) + "5,6,7\n", "line 32: 3 cells, where 2 columns have a name"),
    "short row": (table(["1"], ["2"], names="id,x,y") + "5,6\n", "line 32: 2 cells, where 3"),
    "below a cell of two lines": ('id,x\n1,"a\nb"\n3,4,5\n', "line 4: 3 cells, where 2"),
    "quote that closes later": ('id,x\n1,"a\n2,3\n4,b"c\n5,"6,7\n', "line 5: a quotation mark"),
    "decimal comma": ("id,x\n1,2\n2,1,5\n", "line 3: 3 cells"),
    "workbook": (_workbook(), "an Excel workbook"),
    "old workbook": (b"\xd0\xcf\x11\xe0" + bytes(100), "an old Excel workbook"),
    "json": ('{"id": 1}', "JSON"),
    "page": ("<html></html>", "HTML"),
    "nothing but blanks": ("\n\n\n", "blank lines"),
    "spreadsheet": (_zipped(mimetype="", content__xml=""), "an OpenDocument file (.ods)"),
    "two tables": (_zipped(a__csv=PLAIN, b__csv=PLAIN), "a zip archive of 2 files"),
    "half an archive": (_zipped(a__csv=PLAIN)[:60], "a damaged zip archive"),
    "archive of archives": (gzip.compress(bytes(257) + b"ustar" + bytes(99)), "a tar archive"),
    "Zstandard": (b"\x28\xb5\x2f\xfd" + bytes(9), "Zstandard"),
    "pickle": (b"\x80\x04\x95\x10\x00\x00\x00", "binary data"),
    "measurements of SAS": (bytes(12) + b"\xc2\xea\x81\x60", "binary data"),
    "arff": ("@relation a\n@data\n1,2\n", "Weka"),
    "dump": ("INSERT INTO t VALUES (1, 2);\n", "SQL"),
    "two encodings": (
        "id,x\n1,\u00fc\n".encode() + "2,\u00fc\n".encode("latin-1"),
        "line 2 is UTF-8",
    ),
    "footer": (PLAIN + "(30 rows)\n", "line 32: 1 cells"),
    "a cell without an end": (PLAIN + "9," + "x" * (1 << 24) + "x\n", "line 32: a cell of more"),
    "half of a packed file": (gzip.compress(PLAIN.encode())[:-20], "ends too early"),
    "twice": ("a,a\n1,2\n", "1 different names"),
    "a second table": (
        f"{PLAIN}\nid,z\n1,2\n",
        "line 33: further column names, different from those above",
    ),
    "a second table, wider": (f"{PLAIN}\nid,z,w\n1,2,3\n", "line 33: further column names"),
    "zero bytes in cells": (PLAIN.replace("1.5", "1.5\0").encode(), "zero bytes (NUL)"),
    "names with another separator": (
        PLAIN.replace(",", "\t").replace("\t", " ", 1),
        "1 name, and 2",
    ),
    "a remark among rows": (PLAIN.replace("1007,", "# later\n1007,"), "line 9: 1 cells"),
}


ODD = {
    "zip of one table": _zipped(t__csv=PLAIN, __MACOSX="").replace(b"__MACOSX", b"._MACOSX"),
    "bzip2": bz2.compress(PLAIN.encode()),
    "xz": lzma.compress(PLAIN.encode()),
    "tabs, packed": gzip.compress(table(["1.5", "2.25"], sep="\t").encode()),
    "blanks between cells": table(["1.5", "2.25"], sep="   "),
    "unit separators": table(["1.5", "2.25"], sep="\x1f"),
    "carets": table(["1.5", "2.25"], sep="^"),
    "colons": table(["1.5", "2.25"], sep=":"),
    "remarks with separators": "# ours, 2024, all\n# of them\n" + PLAIN,
    "names twice": "id,x\n" + PLAIN,
    "two files joined": PLAIN.replace("1015,", "\ufeffid,x\n1015,"),
    "marks in cells": PLAIN.replace("\n1", "\n\ufeff1"),
    "blanks without width": PLAIN.replace("\n1", "\u200b\n1") + "\u200b",
    "nulls behind": PLAIN.encode() + bytes(100),
    "end of file of CP/M": PLAIN + "\x1a",
    "table of a client": PLAIN.replace(",", " | ").replace("\n", "\n-----+----\n", 1),
    "page of notes": "".join(
        f"| {line.replace(',', ' | ')} |\n" + "|---|---|\n" * (line == "id,x")
        for line in PLAIN.splitlines()
    ),
    "texts of Excel": table(['="1.5"', '="2.25"']),
    "ids after an apostrophe": PLAIN.replace("\n1", "\n'1"),
    "separators at the end": PLAIN.replace("\n", ",,\n"),
    "name of two lines": PLAIN.replace("id,x", 'id,"x\n"'),
    "unit": table(["1.5 kg", "2.25 kg"]),
    "unit without a blank": table(["1.5cm", "2.25cm"]),
    "degrees": table(["1,5 °C", "2,25 °C"], names="id;x", sep=";"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_files_are_read(tmp_path, name):
    report, frame = read_as_described(written(tmp_path, ODD[name]))
    kinds = {one.name: one.kind for one in report.columns}
    assert (kinds["id"], kinds["x"], report.rows) == ("id", "number", ROWS)
    assert frame["x"].head(2).tolist() == [1.5, 2.25]
    assert report.form.id_type == "number"


@pytest.mark.parametrize("word", ["#DIV/0!", "#REF!", "\\N", "k.A.", "*", "n/a", "-"])
def test_words_of_programs_and_people_mean_a_missing_cell(tmp_path, word):
    report, frame = read_as_described(written(tmp_path, table(["1.5", word, "2.5"])))
    assert report.columns[1].kind == "number"
    assert frame["x"].isna().sum() == ROWS // 3


def test_lines_that_are_no_rows_are_noted(tmp_path):
    report = describe(written(tmp_path, PLAIN + "Total,56.25\n"))
    assert report.columns[0].notes[0].startswith("1 of 31 ids are no numbers")
    report = describe(written(tmp_path, PLAIN.replace("\n", "\n[-],[kg]\n", 1)))
    assert report.columns[1].notes[0].startswith("30 of 31 cells are numbers")
    with pytest.raises(DataError) as caught:
        describe(written(tmp_path, PLAIN.replace("\n", "\n,EUR\n", 1)))
    assert "'id' comes closest: 30 different ids in 31 rows" in str(caught.value.got)
    assert "delete the rows without an id" in str(caught.value.fix)


def test_codes_that_end_with_a_letter_are_ids(tmp_path):
    path = written(tmp_path, "\n".join(["code,x", *(f"{n}X,{n / 7:.2f}" for n in range(ROWS))]))
    assert describe(path).id == "code"


def test_a_frame_of_texts_is_read_as_a_file_with_the_same_cells(tmp_path):
    frame = pd.DataFrame({"id": range(ROWS), "day": ["31.01.2024", "NA", "-"] * 10})
    frame["x"] = ["1 kg", "2 kg", "?"] * 10
    frame["y"] = [0, 1] * 15
    frame.to_csv(tmp_path / "t.csv", index=False)
    of_frame, of_file = describe(frame, label="y"), describe(tmp_path / "t.csv", label="y")
    assert of_frame.columns == of_file.columns
    assert [one.kind for one in of_frame.columns] == ["id", "date", "number", "label"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_refused_says_where_and_why(tmp_path, name):
    content, want = REFUSED[name]
    with pytest.raises(VFLError) as caught:
        describe(written(tmp_path, content))
    assert want in str(caught.value.got)


REPEATED = """customer_id,amount,day,town,paid
007,1.5,03.01.2024,Ulm,1
8,2.5,,Bonn,0
7,4.5,05.02.2024,,1
8,3.5,01.01.2024,,0
9,,01.01.2024,Ulm,1
"""


@pytest.mark.parametrize(
    ("how", "amounts", "towns"),
    [
        ("first", [1.5, 2.5, None], ["Ulm", "Bonn", "Ulm"]),
        ("latest:day", [4.5, 3.5, None], [None, None, "Ulm"]),
        ("latest:amount", [4.5, 3.5, None], [None, None, "Ulm"]),
        ("mean", [3.0, 3.0, None], ["Ulm", "Bonn", "Ulm"]),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "frame", "large"])
def test_rows_of_one_id_become_one(tmp_path, how, amounts, towns, kind):
    source = written(tmp_path, REPEATED)
    if kind == "frame":
        source = pd.read_csv(source)
    if kind == "large":  # more than one block of rows, in a file
        more = [f"{row},1,01.01.2020,Ulm,1" for row in range(10, 9010)]
        source = written(tmp_path, REPEATED + "\n".join(more))
    report = describe(source, id_column="customer_id", repeats=how)
    assert report.settings()["repeats"] == how
    found = read_table(source, report.form)
    assert report.rows == len(found) == 3 + 9000 * (kind == "large")
    assert [one.kind for one in report.columns][2] == "date"
    for name, want in (("amount", amounts), ("town", towns)):
        first = found[name].head(3).tolist()
        assert [None if pd.isna(cell) else cell for cell in first] == want
    joined = align({"bank": found}, "customer_id", report.form.id_type)
    assert joined.ids[:3].tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("latest:town", "needs a column of dates or numbers"),
        ("latest:dya", "the column of the latest row is not a column of the table"),
        (None, "do not identify its rows uniquely"),
    ],
)
def test_repeated_ids_that_stay_are_refused_with_the_setting(tmp_path, how, what):
    path = written(tmp_path, REPEATED)

    def loaded():
        report = describe(path, id_column="customer_id", repeats=how)
        load_own("bank", OwnTable(path, "customer_id", form=report.form), None, Dealing(0))

    with pytest.raises(VFLError, match=what) as caught:
        loaded()
    assert caught.value.fix is not None
    with pytest.raises(DataError) as caught:
        describe(path)
    assert "3 different ids in 5 rows; 2 rows repeat another row's id" in str(caught.value.got)
    assert '"--id customer_id --repeats latest:day" keeps the latest' in str(caught.value.fix)


def test_repeated_numbers_are_those_that_the_join_compares_as_equal():
    ids = ["7", "+7", "007.0", "-0", "0", "A007", "A7"]
    form = TableFormat(id_type="number", repeats=Repeats("id", "first"))
    found = read_table(pd.DataFrame({"id": ids, "x": range(7)}), form)
    assert found["id"].tolist() == ["7", "-0", "A007", "A7"]


def test_one_letter_in_two_normal_forms_is_one_id():
    composed, apart = "M\u00fcller", "Mu\u0308ller"
    left = pd.DataFrame({"id": [composed, "Ulm"], "x": [1, 2]})
    right = pd.DataFrame({"id": [apart, "Ulm"], "y": [3, 4]})
    aligned = align({"a": left, "b": right}, "id")
    assert len(aligned.ids) == 2
    with pytest.raises(VFLError, match="do not identify its rows"):
        align({"a": pd.DataFrame({"id": [composed, apart]})}, "id")


@pytest.mark.parametrize(
    ("ids", "id_type", "asked"),
    [
        ([15775678, 7], "number", ["0015775678", 15775678, "15775678.0"]),
        (["M\u00fcller", "b"], "text", ["Mu\u0308ller", " M\u00fcller"]),
    ],
)
def test_a_service_takes_every_spelling_that_joining_takes(ids, id_type, asked):
    frame = pd.DataFrame({"id": ids, "x": [0.5, 1.5]})
    form = TableFormat(id_type=id_type)
    encoder = TableEncoder.fit(frame[["x"]])
    rows = Rows(load_for_prediction("bank", frame, "id", encoder, form))
    (one,) = {*rows.positions(asked)}
    assert rows.positions([ids[0]]) == [one]
    assert rows.positions(["unknown"]) is None


def test_columns_that_are_left_out_are_all_named_with_why(tmp_path):
    texts = [f"remark {row}" for row in range(ROWS)]
    path = written(tmp_path, table(["1"], texts, ["2.5", "3"], names="id,same,remark,x"))
    own = OwnTable(path, "id", form=describe(path).form)
    lines = left_out(own, [], "bank leaves out")
    assert lines == [
        "bank leaves out 'same' (all cells are equal)",
        "bank leaves out 'remark' (30 different texts are too many categories)",
        "bank leaves out 'x': add them to some 'columns', or leave them unread",
    ]


def test_an_estimator_takes_rows_and_names_as_they_are():
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(draw.normal(size=(40, 3)))
    frame.columns = pd.MultiIndex.from_tuples([("sum", 1), ("sum", 2), ("age", "")])
    labels = draw.integers(0, 2, 40)
    with pytest.warns(UserWarning, match="no party is given 'age'"):
        model = VFLClassifier({"a": ["sum_1"], "b": ["sum_2"]}, epochs=1).fit(frame, labels)
    with pytest.warns(UserWarning, match="valid feature names"):
        found = model.predict(frame.to_numpy())
    assert (found == model.predict(frame)).all()
    with pytest.raises(DataError, match="no rows or no columns"):
        VFLClassifier(2).fit(frame[:0], labels[:0])
    dated = pd.DataFrame({"x": range(30), "day": [f"{n % 28 + 1:02d}.01.2024" for n in range(30)]})
    with pytest.warns(UserWarning, match=r'they are dates.*format="%d.%m.%Y"'):
        VFLClassifier(2, epochs=1).fit(dated, labels[:30])
