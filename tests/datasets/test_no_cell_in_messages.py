"""No message, traceback or repr of this room holds a cell's value or a row's id."""

from __future__ import annotations

import traceback

import numpy as np
import pandas as pd
import pytest

from vfl.core.errors import VFLError
from vfl.datasets import (
    Dealing,
    Label,
    OwnTable,
    TableEncoder,
    TableFormat,
    align,
    encode_labels,
    load_own,
    load_table,
    read_encoder,
    read_table,
)
from vfl.datasets.table import as_numbers

SECRET = "Zq8sentinel"
NUMBER = 918273645.5


def column(*cells) -> pd.Series:
    return pd.Series(list(cells), name="x")


def frame(*ids) -> pd.DataFrame:
    return pd.DataFrame({"id": list(ids), "x": range(len(ids))})


def csv(folder, text: str):
    (folder / "a.csv").write_text(text)
    return folder / "a.csv"


CASES = {
    "numbers": lambda _: as_numbers(column(1.0, SECRET)),
    "infinite": lambda _: as_numbers(column(NUMBER, np.inf)),
    "categories": lambda _: TableEncoder.fit(
        pd.DataFrame({"x": [f"{SECRET}{n}" for n in range(200)]})
    ),
    "odd cells": lambda _: TableEncoder.fit(pd.DataFrame({"x": [[SECRET], [NUMBER]]})),
    "text later": lambda _: TableEncoder.fit(frame(1, 2)[["x"]]).transform(
        column(SECRET).to_frame()
    ),
    "one class": lambda _: encode_labels(column(SECRET, SECRET), "classification"),
    "missing label": lambda _: encode_labels(column(SECRET, None), "classification"),
    "text regression": lambda _: encode_labels(column(SECRET, "1"), "regression"),
    "real classes": lambda _: encode_labels(column(NUMBER, 1.0), "classification"),
    "repeated id": lambda _: align({"a": frame(SECRET, SECRET)}, "id"),
    "missing id": lambda _: align({"a": frame(SECRET, None)}, "id"),
    "text id": lambda _: align({"a": frame("1", SECRET)}, "id", "number"),
    "no match": lambda _: align({"a": frame(SECRET), "b": frame(str(NUMBER))}, "id"),
    "long line": lambda path: read_table(csv(path, f"a,b\n1,2\n{SECRET},{NUMBER},3,4\n")),
    "no header": lambda path: read_table(csv(path, f"{SECRET},{SECRET}\n1,2\n")),
    "wide lines": lambda path: read_table(csv(path, f"a\n{SECRET},{NUMBER}\n")),
    "open quote": lambda path: read_table(csv(path, f'a,b\n1,2\n"{SECRET},{NUMBER}\n')),
    "own file": lambda path: load_own(
        "bank",
        OwnTable(csv(path, f"id,x\n{SECRET},1\n{SECRET},2\n"), "id", ["x"]),
        None,
        Dealing(0),
    ),
    "few rows": lambda _: load_table(
        OwnTable(frame(SECRET), "id"), {"bank": ["*"]}, [Label("bank", "x")], Dealing(0)
    ),
    "stored encoder": lambda _: read_encoder(f'{{"encoder": "{SECRET}"}}'),
}


@pytest.mark.parametrize("case", CASES)
def test_no_cell_in_a_traceback(case, tmp_path):
    with pytest.raises(VFLError) as caught:
        CASES[case](tmp_path)
    frames_and_messages = traceback.format_exception(caught.value)  # with what it was raised from
    messages = [text for text in frames_and_messages if not text.startswith("  File ")]
    for text in (*messages, str(caught.value.record())):
        assert "Zq8" not in text
        assert "918273645" not in text


def test_no_cell_in_a_repr(tmp_path):
    rows = pd.DataFrame(
        {
            "id": [f"{SECRET}{n}" for n in range(40)],
            "x": [NUMBER, NUMBER + 1] * 20,
            "y": [f"{SECRET}a", f"{SECRET}b"] * 20,
            "z": [f"{SECRET}a", f"{SECRET}b"] * 20,
        }
    )
    data = load_own(
        "bank", OwnTable(rows, "id", ["x", "y"], form=TableFormat()), Label("bank", "z"), Dealing(0)
    )
    assert data.ids[0].startswith(SECRET)
    for thing in (data, data.encoder, data.split, align({"a": rows}, "id")):
        assert "Zq8" not in repr(thing)
        assert "918273645" not in repr(thing)
