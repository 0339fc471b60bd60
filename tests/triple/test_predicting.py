"""Answers for new rows, which have no labels, at the party that has the others' labels."""

import numpy as np
import pandas as pd
import pytest
import torch
from sealed import reseal_json, weights_at

from vfl.config import Experiment
from vfl.core.errors import (
    BadOptionError,
    DisagreementError,
    MisalignedError,
    RunFolderError,
    TooFewRowsError,
)
from vfl.datasets import read_encoder
from vfl.mpc import Trio
from vfl.mpc.ring import decode
from vfl.triple import predict_private, train_private
from vfl.triple.kept import kept_at
from vfl.triple.own_rows import own_rows
from vfl.triple.program import play

COLUMNS = {"bank": ["income", "town"], "shop": ["orders"]}
BITS = 21


def drawn(rows, seed, prefix):
    draw = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "customer": [f"{prefix}{number:03d}" for number in draw.permutation(rows)],
            "income": draw.normal(100, 20, rows),
            "town": draw.choice(["east", "west"], rows),
            "orders": draw.normal(5, 2, rows),
        }
    )


@pytest.fixture
def loans(tmp_path):
    """An experiment of three files; the labels are a third party's, or a holder's."""

    def make(label="lender", task="classification"):
        known = drawn(120, 0, "c")
        owed = known["income"] / 20 - known["orders"]
        known["repaid"] = owed if task == "regression" else np.where(owed > 2.5, "yes", "no")
        for name in {*COLUMNS, label}:
            owns = ["repaid"] if name == label else []
            kept = known[["customer", *COLUMNS.get(name, []), *owns]]
            kept.sample(frac=1, random_state=1).to_csv(tmp_path / f"{name}.csv", index=False)
        return Experiment.model_validate(
            {
                "data": {"source": str(tmp_path / f"{label}.csv"), "id": "customer"},
                "parties": {name: {"source": str(tmp_path / f"{name}.csv")} for name in COLUMNS},
                "label": {"party": label, "column": "repaid", "task": task},
                "train": {"epochs": 2, "batch_rows": 32},
            }
        )

    return make


@pytest.fixture
def new(tmp_path):
    """The parties' tables of new rows, in orders of their own; the label party's has ids alone."""
    frame = drawn(40, 1, "n")
    tables = {}
    for seed, name in enumerate(("bank", "shop", "lender")):
        own = frame[["customer", *COLUMNS.get(name, [])]]
        tables[name] = tmp_path / f"new-{name}.csv"
        own.sample(frac=1, random_state=seed).to_csv(tables[name], index=False)
    return tables


def in_clear(run, new):
    """The outputs of the network that both shares make, for rows in order of their ids."""
    shares = [weights_at(run / name / "share.safetensors") for name in ("P0", "P1")]
    weights = {name: decode(shares[0][name] + shares[1][name], BITS) for name in shares[0]}
    inputs = []
    for role, name in enumerate(("bank", "shop")):
        encoder = read_encoder((run / f"P{role}" / "encoder.json").read_text())
        frame = pd.read_csv(new[name]).sort_values("customer", ignore_index=True)
        inputs.append(torch.from_numpy(encoder.transform(frame)).double())
    hidden = torch.relu(torch.cat(inputs, 1) @ weights["0.weight"] + weights["0.bias"])
    return hidden @ weights["1.weight"] + weights["1.bias"]


def test_new_rows_without_labels(tmp_path, loans, new):
    run = tmp_path / "run"
    train_private(loans(), run, hidden=(4,), processes=False)
    card = predict_private(run, new, processes=False)
    assert (card["task"], card["rows"]) == ("predict", 40)
    assert card["predictions"] == str(run / "P2" / "predictions.csv")
    assert not [name for name in card if name.startswith("test_")]
    told = pd.read_csv(card["predictions"])
    assert list(told["id"]) == [f"n{number:03d}" for number in range(40)]
    wanted = torch.sigmoid(in_clear(run, new))[:, 0]
    assert np.abs(told["probability_yes"] - wanted.numpy()).max() < 1e-4
    assert (told["prediction"] == np.where(wanted > 0.5, "yes", "no")).all()
    assert {leak["where"] for leak in card["leakage"] if "output" in leak["where"]} == {
        "outputs of new rows"
    }


def test_a_holder_with_the_labels_and_a_helper_that_only_follows(tmp_path, loans, new):
    run = tmp_path / "run"
    train_private(loans(label="shop"), run, hidden=(4,), processes=False)
    del new["lender"]
    card = predict_private(run, new, processes=False)
    assert card["predictions"] == str(run / "P1" / "predictions.csv")
    assert not (run / "P2" / "encoder.json").exists()


def test_numbers(tmp_path, loans, new):
    run = tmp_path / "run"
    train_private(loans(task="regression"), run, hidden=(4,), learning_rate=0.01, processes=False)
    card = predict_private(run, new, processes=False)
    told = pd.read_csv(card["predictions"])
    assert list(told) == ["id", "prediction"]
    assert np.abs(told["prediction"] - in_clear(run, new)[:, 0].numpy()).max() < 1e-3


@pytest.mark.net
@pytest.mark.parametrize("label", ["lender", "shop"])
def test_by_processes(tmp_path, loans, new, label):
    run = tmp_path / "run"
    train_private(loans(label), run, hidden=(4,), processes=False)
    if label == "shop":
        del new["lender"]
    card = predict_private(run, new)
    told = pd.read_csv(card["predictions"])
    predict_private(run, new, processes=False)
    again = pd.read_csv(card["predictions"])
    assert np.abs(told["probability_yes"] - again["probability_yes"]).max() < 1e-4


def test_tables_of_the_wrong_parties(tmp_path, loans, new):
    run = tmp_path / "run"
    train_private(loans(), run, processes=False)
    with pytest.raises(BadOptionError, match="not those of the parties") as caught:
        predict_private(run, {"bank": new["bank"], "shop": new["shop"]}, processes=False)
    assert caught.value.fix == "--rows lender=FILE"
    with pytest.raises(BadOptionError) as caught:
        predict_private(run, {**new, "shopp": new["shop"]}, processes=False)
    assert "shop" in caught.value.fix


def test_tables_of_different_rows(tmp_path, loans, new):
    run = tmp_path / "run"
    train_private(loans(), run, processes=False)
    frame = pd.read_csv(new["shop"])
    frame["customer"] = frame["customer"].str.replace("n", "m")
    frame.to_csv(new["shop"], index=False)
    with pytest.raises(MisalignedError) as caught:
        predict_private(run, new, processes=False)
    assert "m0" not in str(caught.value)
    assert not (run / "P2" / "predictions.csv").exists()


def test_tables_of_their_own_are_joined_by_ids_alone(tmp_path, new):
    drawn(120, 0, "c").assign(repaid=["yes", "no"] * 60).to_csv(tmp_path / "all.csv", index=False)
    settings = {
        "data": {"source": str(tmp_path / "all.csv")},
        "parties": {name: {"columns": columns} for name, columns in COLUMNS.items()},
        "label": {"party": "lender", "column": "repaid"},
        "train": {"epochs": 1, "batch_rows": 32},
    }
    run = tmp_path / "run"
    train_private(Experiment.model_validate(settings), run, processes=False)
    with pytest.raises(BadOptionError, match="which rows of these tables belong together"):
        predict_private(run, new, processes=False)
    drawn(9, 1, "n").to_csv(tmp_path / "new.csv", index=False)
    card = predict_private(run, tmp_path / "new.csv", processes=False)
    assert list(pd.read_csv(card["predictions"])["id"]) == list(range(9))


def test_a_table_without_rows(tmp_path, loans, new):
    run = tmp_path / "run"
    train_private(loans(), run, processes=False)
    pd.read_csv(new["shop"])[:0].to_csv(new["shop"], index=False)
    with pytest.raises(TooFewRowsError, match="nothing to predict"):
        predict_private(run, new, processes=False)


def test_one_holder_asks_for_figures_and_the_other_for_predictions(tmp_path, loans, new):
    run = tmp_path / "run"
    asked = loans(label="shop")
    train_private(asked, run, processes=False)
    tasks, tables = ("predict", "infer", "infer"), (str(new["bank"]), "", "")
    kept = [kept_at(run / f"P{role}", role, task) for role, task in enumerate(tasks)]
    data = [own_rows(asked, kept[role], role, tables[role]) for role in range(3)]
    with (
        Trio(kept[0].terms.rules, agreed=False) as trio,
        pytest.raises(DisagreementError) as caught,
    ):
        trio.run(lambda one: play(one, kept[one.role].terms, data[one.role], kept[one.role].shares))
    assert caught.value.where == "task"


@pytest.mark.parametrize("at", [0, 1])
def test_an_encoder_of_another_training(tmp_path, loans, new, at):
    for name in ("run", "other"):
        train_private(loans(), tmp_path / name, processes=False)
        drawn(120, 2, "c").to_csv(tmp_path / "bank.csv", index=False)
    path = tmp_path / "run" / f"P{at}" / "encoder.json"
    path.write_text((tmp_path / "other" / f"P{1 - at}" / "encoder.json").read_text())
    with pytest.raises(RunFolderError, match="another training") as caught:
        predict_private(tmp_path / "run", new, processes=False)
    assert caught.value.where == str(path)


@pytest.mark.parametrize("classes", [None, 3, ["yes"]])
def test_what_the_outputs_stand_for_is_lost(tmp_path, loans, new, classes):
    run = tmp_path / "run"
    train_private(loans(), run, processes=False)
    reseal_json(run / "P2" / "party.json", lambda record: record.update(classes=classes))
    with pytest.raises(RunFolderError, match="what the outputs stand for"):
        predict_private(run, new, processes=False)


def test_only_its_owner_reads_an_encoder(tmp_path, loans):
    train_private(loans(), tmp_path / "run", processes=False)
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.glob("run/P*/encoder.json")}
    assert modes == {0o600}


def test_a_part_without_an_encoder(tmp_path, loans, new):
    run = tmp_path / "run"
    train_private(loans(), run, processes=False)
    (run / "P1" / "encoder.json").unlink()
    with pytest.raises(RunFolderError, match="P1 kept nothing that turns a table into columns"):
        predict_private(run, new, processes=False)
