"""A forest leaves vfl as JSON with which XGBoost computes the same."""

import ast
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.core.errors import RunFolderError, SpecError
from vfl.core.storage import read_json
from vfl.training.export import export_half
from vfl.training.run import evaluate, predict, train

ROOT = Path(__file__).parents[2]
ROWS = 500
COLUMNS = {"bank": ["income", "since"], "shop": ["city", "basket"], "lender": ["age"]}
LABELS = {
    "two": lambda score, draw: np.where(score > 0, "yes", "no"),
    "three": lambda score, draw: np.array(["low", "mid", "top"])[np.digitize(score, [-1, 1])],
    "number": lambda score, draw: 1000 + 50 * score,
    "count": lambda score, draw: draw.poisson(np.exp(score / 2)),
}
XGBOOST = pytest.importorskip("xgboost")


def table_of(kind):
    draw = np.random.default_rng(0)
    table = pd.DataFrame({name: draw.normal(size=ROWS) for name in ("income", "basket", "age")})
    table["basket"] *= 1e6
    table["since"] = draw.integers(0, 3, ROWS)
    table["city"] = draw.choice(["Köln", "ulm", "jena", "bonn"], ROWS)
    table.loc[draw.random(ROWS) < 0.2, ["income", "city"]] = None
    effect = table.city.map({"Köln": 2.0, "ulm": -2.0, "jena": 1.0}).fillna(0)
    score = 2 * table.income.fillna(1) + effect + table.age + 0.3 * draw.normal(size=ROWS)
    return table.assign(id=[f"r{row:03}" for row in range(ROWS)], paid=LABELS[kind](score, draw))


def run_of(folder, kind, model="trees:max_depth=4", **columns):
    """A run of three parties with tables of their own, and all their cells by id."""
    table, parties = table_of(kind), {}
    for name, own in (COLUMNS | columns).items():
        (folder / name).mkdir(parents=True)
        label = ["paid"] if name == "lender" else []
        table[["id", *own, *label]].to_csv(folder / name / "data.csv", index=False)
        text = f'party = "{name}"\n[data]\nsource = "data.csv"\nid = "id"\n'
        text += 'label = "paid"\n' if label else ""
        (folder / name / "party.toml").write_text(text)
        parties[name] = {"source": str(folder / name / "party.toml")}
    task = "regression" if kind in ("number", "count") else "classification"
    content = {
        "model": model,
        "parties": parties,
        "label": {"party": "lender", "column": "paid", "task": task},
        "train": {"epochs": 8},
    }
    train(Experiment.model_validate(content), folder, "run")
    return folder / "run", table.set_index("id")


def cells_of(booster, table):
    """A frame as a user of XGBoost has it, texts as categories in an order of its own."""
    frame = table[booster.feature_names].copy()
    for name, kind in zip(booster.feature_names, booster.feature_types, strict=True):
        if kind == "c":
            frame[name] = pd.Categorical(frame[name], categories=["ulm", "jena", "bonn", "Köln"])
    return XGBOOST.DMatrix(frame, enable_categorical=True)


def test_the_block_of_the_page_on_trees(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "trees.md").read_text(encoding="utf-8")
    (sample,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    plain = table_of("two").replace({"city": {"Köln": "Kiel"}})  # the page asks for ASCII
    monkeypatch.setitem(globals(), "table_of", lambda kind: plain)
    run, table = run_of(tmp_path, "two")
    export_half(run, "lender", "xgboost", tmp_path)
    monkeypatch.chdir(tmp_path)
    *steps, last = ast.parse(sample).body
    found = {"xgboost": XGBOOST, "table": table}
    exec(compile(ast.Module(steps, []), "trees.md", "exec"), found)
    answers = eval(compile(ast.Expression(last.value), "trees.md", "eval"), found)
    predict(RunFolder.open(run))
    predicted = pd.read_csv(run / "predictions.csv", index_col="id").probability_yes
    wanted = answers[table.index.get_indexer(predicted.index)]
    np.testing.assert_allclose(predicted, wanted, atol=1e-5)


@pytest.mark.parametrize("kind", LABELS)
def test_xgboost_answers_what_vfl_predicts(tmp_path, kind):
    objective = ",objective=poisson" if kind == "count" else ""
    run, table = run_of(tmp_path, kind, f"trees:max_depth=4{objective}")
    made = export_half(run, "lender", "xgboost", None)
    assert made["inputs"] == "age, income, since, city, basket"
    assert made["difference"] < 1e-5
    predict(RunFolder.open(run))
    ours = pd.read_csv(run / "predictions.csv").set_index("id")
    booster = XGBOOST.Booster(model_file=made["half"])
    theirs = booster.predict(cells_of(booster, table.loc[ours.index]))
    if kind in ("number", "count"):
        assert np.allclose(theirs, ours["prediction"], rtol=1e-6)
    elif kind == "two":
        assert np.allclose(theirs, ours["probability_yes"], atol=1e-6)
    else:
        names = [f"probability_{one}" for one in ("low", "mid", "top")]
        assert np.allclose(theirs, ours[names], atol=1e-6)


@pytest.mark.parametrize("kind", LABELS)
def test_parties_learn_the_shapley_values_that_xgboost_computes(tmp_path, kind):
    objective = ",objective=poisson" if kind == "count" else ""
    run, table = run_of(tmp_path, kind, f"trees:max_depth=4{objective}")
    booster = XGBOOST.Booster(model_file=export_half(run, "lender", "xgboost", None)["half"])
    predict(RunFolder.open(run), explained=COLUMNS)
    evaluate(RunFolder.open(run), explained=COLUMNS)
    ids = pd.read_csv(run / "predictions.csv").id
    wanted = booster.predict(cells_of(booster, table.loc[ids]), pred_contribs=True)
    wanted = wanted.reshape(len(ids), -1, len(booster.feature_names) + 1)
    places, outputs = booster.feature_names, range(1, 1 + wanted.shape[1])
    for party, columns in COLUMNS.items():
        told = pd.read_csv(run / "parties" / party / "explanations.csv").set_index("id")
        assert told.index.equals(pd.Index(ids))
        many = [""] if len(outputs) == 1 else [f"_{output}" for output in outputs]
        assert list(told) == [f"shapley_{name}{one}" for name in columns for one in many]
        own = wanted[..., [places.index(name) for name in columns]].transpose(0, 2, 1)
        scale = np.abs(wanted).max()
        assert np.allclose(told, own.reshape(len(ids), -1), atol=1e-5 * scale)
        means = read_json(run / "parties" / party / "explained.json")["shapley"]
        assert list(means) == columns
        assert np.allclose(list(means.values()), np.abs(own).mean(0).sum(1), rtol=1e-4)


def test_a_label_party_exports_what_splits_on_its_own_columns_alone(tmp_path):
    run, table = run_of(tmp_path, "two", bank=["since"], shop=["basket"])
    for name in ("bank", "shop"):
        shutil.rmtree(run / "parties" / name)
    with pytest.raises(RunFolderError, match=r"on columns of 'bank'.*on columns of 'shop'"):
        export_half(run, "lender", "xgboost", None)
    model = "trees:max_depth=2,min_child_weight=20,gamma=6"
    run, table = run_of(tmp_path / "again", "two", model, bank=["since"], shop=["basket"])
    predict(RunFolder.open(run))
    ours = pd.read_csv(run / "predictions.csv").set_index("id")["probability_yes"]
    for name in ("bank", "shop"):
        shutil.rmtree(run / "parties" / name)
    made = export_half(run, "lender", "xgboost", tmp_path / "out")
    assert made["inputs"] == "age"
    booster = XGBOOST.Booster(model_file=tmp_path / "out" / "forest.json")
    theirs = booster.predict(cells_of(booster, table.loc[ours.index]))
    assert np.allclose(theirs, ours, atol=1e-6)
    assert np.ptp(theirs) > 0.1


def test_what_two_parties_call_alike_gets_their_names(tmp_path):
    content = {"model": "trees", "data": {"source": "breast_cancer"}, "train": {"epochs": 2}}
    content |= {"parties": {"a": {}, "b": {}}, "label": {"party": "a"}}
    train(Experiment.model_validate(content), tmp_path, "run")
    made = export_half(tmp_path / "run", "a", "xgboost", None)
    names = made["inputs"].split(", ")
    assert len(set(names)) == len(names) == 30


def test_other_forms_and_other_parties_are_refused(tmp_path):
    run, _ = run_of(tmp_path, "two")
    for party, to, told in (("bank", "xgboost", "no tree"), ("lender", "onnx", "xgboost")):
        with pytest.raises(SpecError, match=told):
            export_half(run, party, to, None)
    weights = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(weights | {"weights_sha256": "0" * 64}))
    with pytest.raises(RunFolderError):
        export_half(run, "lender", "xgboost", None)
