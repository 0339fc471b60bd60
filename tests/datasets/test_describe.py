"""What is found of a table whose owner says nothing: how it is written, what columns are."""

import sys

import numpy as np
import pandas as pd
import pytest

from vfl.core.errors import DataError
from vfl.datasets.csv_file import sniff
from vfl.datasets.describe import describe, tells_label
from vfl.datasets.table import TableFormat

ROWS = 1000


def lent(rows=ROWS):
    draw = np.random.default_rng(0)
    income, paid = draw.normal(size=rows).round(3), draw.random(rows) < 0.1
    return pd.DataFrame(
        {
            "income": income,
            "customer": [f"{key:08d}" for key in draw.permutation(rows)],
            "town": draw.choice(["Köln", "Bonn", "Ulm"], rows),
            "since": (
                pd.Timestamp("2020-01-31") + pd.to_timedelta(draw.integers(0, 99, rows), "D")
            ).strftime("%d.%m.%Y"),
            "rating": np.where(draw.random(rows) < 0.25, np.nan, income + 1),
            "remark": [f"text {n} zq8" for n in range(rows)],
            "country": "zq8land",
            "paid again": np.where(paid, "j", "n"),
            "call": paid + draw.normal(size=rows) * 0.5,
            "paid": np.where(paid, "zq8yes", "zq8no"),
        }
    )


@pytest.fixture
def written(tmp_path):
    def write(name="loans.csv", **how):
        path = tmp_path / name
        frame = lent()
        frame.to_parquet(path) if name.endswith("parquet") else frame.to_csv(
            path, index=False, **how
        )
        return path

    return write


@pytest.mark.parametrize(
    ("how", "want"),
    [
        ({}, (",", "utf-8", ".")),
        ({"sep": ";", "decimal": ",", "encoding": "latin-1"}, (";", "latin-1", ",")),
        ({"sep": "\t", "encoding": "utf-8-sig"}, ("\t", "utf-8-sig", ".")),
        ({"sep": "|", "encoding": "utf-16", "decimal": ","}, ("|", "utf-16", ",")),
    ],
)
def test_how_a_csv_is_written(written, how, want):
    path = written(**how)
    form = sniff(path)
    assert (form.separator, form.encoding, form.decimal) == want
    report = describe(path)
    plain = describe(lent())
    assert [(one.name, one.kind) for one in report.columns if one.kind != "date"] == [
        (one.name, one.kind) for one in plain.columns if one.kind != "date"
    ]


def test_every_kind_of_column(written):
    report = describe(written(), label="paid")
    kinds = {one.name: (one.kind, one.inputs) for one in report.columns}
    assert kinds == {
        "income": ("number", 1),
        "customer": ("id", 0),
        "town": ("category", 3),
        "since": ("date", 5),
        "rating": ("number", 2),
        "remark": ("text", 0),
        "country": ("constant", 0),
        "paid again": ("category", 2),
        "call": ("number", 1),
        "paid": ("label", 0),
    }
    assert (report.id, report.form.id_type) == ("customer", "number")
    assert report.form.dates == {"since": "%d.%m.%Y"}
    gaps = {one.name: one.missing for one in report.columns}
    assert gaps["rating"] == lent()["rating"].isna().mean()
    rare = lent()["paid"].value_counts(normalize=True).min()
    assert f"2 classes, the rarest with {rare:.1%} of the rows" in report.notes
    assert "class_weight" in report.notes[1]


def test_texts_are_tokens_where_a_tokenizer_is_named():
    columns = describe(lent(), TableFormat(tokenizer="reader", length=64), "customer").columns
    found = {column.name: (column.inputs, column.becomes) for column in columns}
    assert found["remark"] == (64, "64 inputs: tokens of 'reader'")
    assert found["town"][0] == 3


def test_thousands_of_columns_are_read_in_groups(monkeypatch):
    module, read = sys.modules[describe.__module__], []
    rows = module.row_blocks
    monkeypatch.setattr(
        module, "row_blocks", lambda table, names, most: read.append(1) or rows(table, names, most)
    )
    cells = np.random.default_rng(0).normal(size=(8, 2500)).round(3)
    frame = pd.DataFrame(cells, columns=[f"x{n}" for n in range(2500)])
    frame.insert(0, "customer", [f"c{n}" for n in range(8)])
    assert len(describe(frame).columns) == 2501
    assert len(read) <= 2


def test_columns_that_tell_the_label(written):
    report = describe(written(), label="paid")
    notes = {one.name: one.notes[0] for one in report.columns if one.notes}
    assert set(notes) == {"paid again", "call"}
    assert notes["paid again"].startswith("nearly equal to the label (AUC 1.00 alone, on 500")
    assert notes["call"].startswith("predicts the label (AUC 0.")


@pytest.mark.parametrize("rows", [3000, 200_000])
def test_a_noisy_copy_of_a_rare_class_is_nearly_the_label(rows):
    draw = np.random.default_rng(5)
    labels = (draw.random(rows) < 0.01).astype(int)
    columns = {"up": labels + draw.normal(0, 0.05, rows), "noise": draw.normal(size=rows)}
    columns["down"] = -columns["up"]
    frame = pd.DataFrame({"id": range(rows), **columns, "y": labels})
    notes = {one.name: one.notes for one in describe(frame, label="y").columns if one.notes}
    assert all(notes[name][0].startswith("nearly equal to the label") for name in ("up", "down"))
    assert "noise" not in notes


def test_a_copy_of_skewed_numbers_is_nearly_the_label():
    draw = np.random.default_rng(6)
    incomes = draw.pareto(1.2, 4000)
    columns = {"copy": 2 * incomes + 1, "noise": draw.pareto(1.2, 4000)}
    frame = pd.DataFrame({"id": range(4000), **columns, "y": incomes})
    notes = {one.name: one.notes for one in describe(frame, label="y").columns if one.notes}
    assert notes["copy"][0].startswith("nearly equal to the label (R2 1.00")
    assert "noise" not in notes


def test_a_column_of_noise_never_tells_the_label():
    """Fitted and scored on the same rows, a text of many categories would tell it by heart."""
    draw = np.random.default_rng(1)
    for seed in range(5):
        frame = pd.DataFrame({"id": range(300), "y": draw.integers(0, 2, 300)})
        frame["code"] = [f"c{n}" for n in draw.integers(0, 150, 300)]
        frame["number"] = draw.normal(size=300)
        report = describe(frame, label="y")
        assert [one.name for one in report.columns if one.notes] == [], seed
        assert all(0.35 < one.score < 0.65 for one in report.columns if one.score is not None)


def test_another_partys_columns_tell_the_label_too():
    frame = lent()
    ids = frame["customer"].astype(int)
    lender = frame[["customer", "town", "paid"]]
    shop = pd.DataFrame({"id": ids, "call": frame["call"], "since": pd.to_datetime("2020-01-01")})
    shop = shop.sample(frac=0.8, random_state=0)
    reports = describe(lender, label="paid"), describe(shop)
    (line,) = tells_label((lender, reports[0]), (shop, reports[1]), "shop")
    assert line.startswith("look at 'call' of shop: predicts the label (AUC 0.")


def test_signs_of_a_missing_cell(tmp_path):
    lines = [f"{n},{'?' if n % 3 else 'a'},{'-' if n % 5 == 0 else n / 7},-x" for n in range(50)]
    (tmp_path / "odd.csv").write_text("\n".join(["id,kind,size,sign", *lines]) + "\n50,b,1,-\n")
    report = describe(tmp_path / "odd.csv")
    assert report.form.missing == {"size": ("-",), "*": ("?",)}
    assert {one.name: one.kind for one in report.columns}["size"] == "number"


def test_dates_that_two_readings_fit_are_told():
    frame = pd.DataFrame({"id": range(3), "day": ["01/02/2020", "03/04/2020", "05/06/2021"]})
    (_, day) = describe(frame).columns
    assert (day.kind, "is ambiguous" in day.notes[0]) == ("date", True)
    frame["day"] = ["21/02/2020", "03/04/2020", "05/06/2021"]
    assert describe(frame).columns[1].notes == ()
    frame["day"] = [20200221, 20200403, 20210605]
    assert describe(frame).form.dates == {"day": "%Y%m%d"}


def test_no_cell_is_told(written):
    path = written()
    report = describe(path, label="paid")
    told = "\n".join(report.lines()) + repr(report.settings())
    assert "zq8" not in told
    assert "Bonn" not in told
    assert "00000017" not in told


def test_a_first_line_of_data_is_refused_without_it(tmp_path):
    (tmp_path / "pima.csv").write_text("6,148,72.918\n1,85,66\n")
    with pytest.raises(DataError, match="contains no column names") as caught:
        describe(tmp_path / "pima.csv")
    assert "918" not in str(caught.value).replace(str(tmp_path), "")
    (tmp_path / "years.csv").write_text("id,2019,2020\na,1,2\nb,3,4\n")
    assert describe(tmp_path / "years.csv").id == "id"


def test_a_table_whose_ids_repeat_is_refused_with_counts():
    frame = pd.DataFrame({"customer_id": [1, 1, 2, None], "x": [0.5, 0.5, 0.5, 0.1]})
    with pytest.raises(DataError, match="no column of this table identifies its rows") as caught:
        describe(frame)
    assert caught.value.got == (
        "'customer_id' comes closest: 2 different ids in 4 rows; "
        "1 rows repeat another row's id, 1 have none"
    )
    assert "row number" not in str(caught.value)


@pytest.mark.parametrize(
    ("write", "id_type", "whole"),
    [
        (lambda row: f"{10**17 + row}", "number", True),
        (lambda row: f"{10**17 + row}.0", "text", True),
        (lambda row: f"{2**63 + row}", "text", True),
        (lambda row: f"{10**21 + row}", "text", True),
        (lambda row: f"{10**21 + row}x", "text", False),
    ],
)
def test_ids_that_float64_cannot_tell_apart_are_read_letter_by_letter(
    tmp_path, write, id_type, whole
):
    columns = {"a": np.arange(60) / 7, "worth": 1e20 * np.arange(60)}
    frame = pd.DataFrame({"id": [write(row) for row in range(60)], **columns})
    frame.to_csv(tmp_path / "table.csv", index=False)
    report = describe(tmp_path / "table.csv")
    assert (report.id, report.form.id_type, report.whole_ids) == ("id", id_type, whole)
    assert report.features == ["a", "worth"]  # which is a number still


def scored_by_loops(cells, fitted, labels):
    """Mean label of each bin, one row of the overall mean added; AUC by comparing all pairs."""
    known = np.array([not pd.isna(cell) for cell in cells])
    bins = [*cells]
    if len({*cells[known]}) > 20 and cells.dtype != object:
        edges = np.quantile(cells[known & fitted], [0.01, *np.linspace(0, 1, 21)[1:-1], 0.99])
        bins = [sum(edge < cell for edge in edges) for cell in cells]
    bins = [one if there else "none" for one, there in zip(bins, known, strict=True)]
    mean, guesses = labels[fitted].mean(), []
    for one in (bins[row] for row in np.flatnonzero(~fitted)):
        own = [labels[row] for row in np.flatnonzero(fitted) if bins[row] == one]
        guesses.append((sum(own) + mean) / (len(own) + 1))
    actual = labels[~fitted]
    pairs = [
        (up > down) + (up == down) / 2
        for up in np.array(guesses)[actual == 1]
        for down in np.array(guesses)[actual == 0]
    ]
    return np.mean(pairs), 1 - ((actual - guesses) ** 2).mean() / ((actual - mean) ** 2).mean()


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_scores_of_many_columns_are_those_of_one_column_by_loops(task):
    draw, rows = np.random.default_rng(2), 160
    labels = draw.integers(0, 2, rows)
    many = {f"real {n}": labels * n / 4 + draw.normal(size=rows).round(2) for n in range(5)}
    many |= {f"whole {n}": draw.integers(0, 5 + n, rows) + labels * n for n in range(4)}
    many["gaps"] = np.where(draw.random(rows) < 0.3, np.nan, many["real 3"])
    many["few gaps"] = np.where(draw.random(rows) < 0.1, np.nan, draw.integers(0, 9, rows) * 1.0)
    many["flag"] = labels.astype(bool) ^ (draw.random(rows) < 0.2)
    many["town"] = np.where(labels == 1, "a", draw.choice(["a", "b", "c"], rows)).astype(object)
    frame = pd.DataFrame({"id": range(rows), **many, "y": labels})
    report = describe(frame, label="y", task=task)
    truth_draw = np.random.default_rng(0)
    truth_draw.choice(rows, rows, replace=False, shuffle=False)
    fitted = truth_draw.permutation(rows) < rows // 2
    for column in report.columns[1:-1]:
        cells = frame[column.name].to_numpy()
        auc, r2 = scored_by_loops(cells, fitted, labels)
        if task == "regression":
            assert column.score == pytest.approx(r2, abs=1e-3), column.name
        else:  # each class against the other one has the same AUC
            assert column.score == pytest.approx(auc, abs=1e-3), column.name


def test_a_description_does_not_depend_on_how_columns_and_rows_are_grouped(tmp_path, monkeypatch):
    frame, rows = lent(), 9000  # two blocks of rows
    frame = frame.iloc[np.arange(rows) % len(frame)].reset_index(drop=True)
    frame["customer"] = [f"{key:08d}" for key in range(rows)]
    frame["count"] = pd.array(np.arange(rows) % 4500, "Int64")  # repeats in the other block
    frame.loc[3, "count"] = pd.NA
    frame.to_parquet(tmp_path / "large.parquet")
    whole = describe(tmp_path / "large.parquet", label="paid")
    monkeypatch.setattr("vfl.datasets.facts._GROUP_CELLS", 3 * rows)
    assert describe(tmp_path / "large.parquet", label="paid") == whole
    assert describe(frame, label="paid") == whole
    with pytest.raises(DataError) as caught:
        describe(frame[["count", "country"]])
    assert "4 500 different ids in 9 000 rows; 4 499 rows repeat" in str(caught.value.got)


def test_progress_of_a_wide_table_is_told():
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(30, 4100))).add_prefix("c")
    frame.insert(0, "id", range(30))
    frame["y"] = [0, 1] * 15
    told = []
    describe(frame, label="y", say=told.append)
    assert told[:2] == ["read 2 000 of 4 102 columns", "read 4 000 of 4 102 columns"]
    assert told[2:] == ["compared 2 000 of 4 100 columns", "compared 4 000 of 4 100 columns"]
