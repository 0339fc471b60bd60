"""What the label party's table of predictions holds, and what a spreadsheet makes of it."""

import csv

import numpy as np
import pandas as pd
import pytest
import torch

from vfl.core.text import as_written
from vfl.datasets import Dealing, Label, OwnTable, load_own
from vfl.session.label.summary import prediction_table, write_predictions

ROWS = 40


def party(folder, ids, labels, task="classification"):
    pd.DataFrame({"id": ids, "paid": labels}).to_csv(folder / "data.csv", index=False)
    return load_own(
        "lender",
        OwnTable(folder / "data.csv", "id", ()),
        Label("lender", "paid", task),
        Dealing(0, 0.1, 0.5),
    )


def written(folder, data, outputs):
    path = folder / "predictions.csv"
    classes = data.classes
    write_predictions(path, data, [outputs], classes)
    with path.open(newline="") as file:
        return path.read_text(), list(csv.reader(file))


def outputs_for(data):
    return torch.randn(len(data.split.test), 2, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("lead", ["=", "+", "-", "@", "\t=", " =", "'=", '"=', "\uff1d"])
def test_ids_and_classes_become_no_formulas_and_come_back(tmp_path, lead):
    ids = [f"{lead}cmd|{row}" for row in range(ROWS)]
    data = party(tmp_path, ids, [f"{lead}SUM(A{row % 2})" for row in range(ROWS)])
    _, (head, *rows) = written(tmp_path, data, outputs_for(data))
    table = prediction_table(data, outputs_for(data), data.classes)
    assert len(rows) == len(table) == ROWS // 2
    for cells, (_, plain) in zip(rows, table.iterrows(), strict=True):
        assert cells[0][0] == cells[1][0] == "'"
        assert [as_written(cell) for cell in cells[:2]] == [plain["id"], plain["prediction"]]
    assert not any(name[0] in "=+-@\t\r" for name in head)


@pytest.mark.parametrize(
    "ids",
    [
        list(range(ROWS)),
        [-row for row in range(ROWS)],
        [f"r{row:03}" for row in range(ROWS)],
        [f'Ann-{row}; o\'neill, "x"' for row in range(ROWS)],
        [f"{row:03}" for row in range(ROWS)],
    ],
    ids=["numbers", "negative", "text", "quotes", "zeros"],
)
def test_ordinary_ids_stay_byte_for_byte_and_join(tmp_path, ids):
    data = party(tmp_path, ids, [row % 2 for row in range(ROWS)])
    text, rows = written(tmp_path, data, outputs_for(data))
    assert text == prediction_table(data, outputs_for(data), data.classes).to_csv(index=False)
    own = pd.read_csv(tmp_path / "data.csv", dtype=str)
    found = pd.read_csv(tmp_path / "predictions.csv", dtype=str)
    assert len(own.merge(found, on="id")) == len(rows) - 1 == ROWS // 2


def test_numbers_stay_numbers(tmp_path):
    data = party(tmp_path, list(range(ROWS)), np.linspace(-9, 9, ROWS), "regression")
    outputs = torch.linspace(-5, 5, len(data.split.test)).unsqueeze(1)
    _, rows = written(tmp_path, data, outputs)
    assert [float(row[1]) for row in rows[1:]] == pytest.approx(outputs[:, 0].tolist())
