"""Rows that a feature party lacks, with trees: cells that are missing, at that party's splits."""

import numpy as np
import pandas as pd
import pytest
from served import Serving, predicted, same, settings

from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.core.storage import read_json
from vfl.serving.local import serve
from vfl.session import PartyFolder
from vfl.training.run import evaluate, predict, train

ROWS, SHARES = 400, {"bank": 0.7, "shop": 0.8}


@pytest.fixture
def table():
    """Who is no customer of the bank pays less often, so that the gap itself says something."""
    draw = np.random.default_rng(0)
    table = pd.DataFrame({"id": [f"r{row:03}" for row in range(ROWS)]})
    table["income"], table["basket"], table["age"] = draw.normal(size=(3, ROWS))
    held = {name: draw.random(ROWS) < share for name, share in SHARES.items()}
    held["shop"] |= ~held["bank"]  # somebody has each row
    score = table.income.where(held["bank"], -1.5) + table.basket + draw.normal(size=ROWS) / 2
    return table.assign(paid=(score > 0).astype(int)), held


def experiment(folder, table, rows, held, **more):
    """Three tables; each party has the rows of `held` alone."""
    folder.mkdir()
    columns = {"bank": ["income"], "shop": ["basket"], "lender": ["age", "paid"]}
    for name, own in columns.items():
        part = table[["id", *own]]
        (part[held[name]] if name in held else part).to_csv(folder / f"{name}.csv", index=False)
    content = {
        "model": "trees:max_depth=3",
        "data": {"source": str(folder / "lender.csv"), "id": "id", "missing_rows": rows} | more,
        "parties": {name: {"source": str(folder / f"{name}.csv")} for name in SHARES}
        | {"lender": {"columns": ["age"]}},
        "label": {"column": "paid", "party": "lender"},
        "train": {"epochs": 8},
    }
    return Experiment.model_validate(content)


def forest_of(run):
    kept = PartyFolder(run / "parties" / "lender").weights()
    return {name: kept[f"share.{name}"].numpy() for name in ("columns", "missing_left", "values")}


def test_a_row_that_a_party_lacks_has_missing_cells(table, tmp_path):
    whole, held = table
    train(
        experiment(tmp_path / "gaps", whole, "token", held, test=0.0, validation=0.0),
        tmp_path,
        "one",
    )
    blank = whole.assign(
        income=whole.income.where(held["bank"]), basket=whole.basket.where(held["shop"])
    )
    train(
        experiment(tmp_path / "cells", blank, "intersection", {}, test=0.0, validation=0.0),
        tmp_path,
        "other",
    )
    one, other = forest_of(tmp_path / "one"), forest_of(tmp_path / "other")
    assert np.array_equal(one["columns"], other["columns"])
    assert np.array_equal(one["missing_left"], other["missing_left"])
    assert np.allclose(one["values"], other["values"], atol=1e-6)


def test_a_served_row_is_the_predicted_one_and_says_who_lacked_it(table, tmp_path):
    whole, held = table
    summary = train(experiment(tmp_path / "gaps", whole, "token", held, test=0.3), tmp_path, "run")
    assert summary["test_missing_rows"] > 20
    assert summary["test_missing_accuracy"] > 0.75
    run = RunFolder.open(tmp_path / "run")
    evaluate(run)
    assert read_json(run.path / "evaluations/0001.json")["test_loss"] == summary["test_loss"]
    predict(run)
    expected, owned = predicted(run.path), {n: set(whole.id[held[n]]) for n in SHARES}
    lacked = [row for row in expected if row not in owned["bank"]]
    serving = Serving(run.path, lambda: serve(run.path, settings()))
    try:
        serving.client.wait_ready()
        for batch in (list(expected), lacked[:3], lacked[:1]):
            status, told = serving.client.predict(*batch)
            assert status == 200
            for answer, row in zip(told["predictions"], batch, strict=True):
                assert same(answer, expected[row])
                assert answer["missing"] == [n for n in SHARES if row not in owned[n]]
    finally:
        serving.stop()
