"""`vfl init --from`: party files of tables nobody described, which check and train as they are."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from organisations import write_organisations

from vfl.config import read_experiment, read_party_file
from vfl.training.run import load_data


def init(vfl, label, parties=3):
    tables = ["lender=lender.csv", "bank=bank.csv", "shop=shop.parquet"][:parties]
    given = [word for table in tables for word in ("--from", table)]
    return vfl("init", "project", *given, "--label-party", "lender", "--label", label)


def test_three_organisations_train_and_predict_with_no_file_edited(vfl, well, tmp_path):
    frame, label = write_organisations(tmp_path, "breast-cancer")
    done = init(vfl, label)
    assert (done.code, done.out) == (0, ""), done.err
    assert "vfl train project/trial.toml" in done.err
    done = well("train", "project/trial.toml", "-s", "train.epochs=8", "--json")
    figures = json.loads(done.out)
    assert figures["test_auc"] > 0.95
    again = json.loads(vfl("evaluate", figures["run"], "--json").out)
    assert again["test_auc"] == figures["test_auc"]
    found = json.loads(vfl("predict", figures["run"], "--json").out)
    # Each table lacks a tenth of the rows, so about 0.9 ** 3 of them meet, and a fifth is tested.
    assert found["rows"] == pytest.approx(0.9**3 * len(frame) / 5, rel=0.1)
    for name in ("lender", "bank", "shop"):
        file = "label" if name == "lender" else name
        checked = well("check", f"project/{file}/party.toml", "--json")
        assert {one["name"] for one in json.loads(checked.out)["columns"]}


def test_what_was_found_is_in_the_files(vfl, tmp_path):
    _, label = write_organisations(tmp_path, "breast-cancer")
    assert init(vfl, label).code == 0
    lender, bank, shop = (
        read_party_file(Path("project") / name / "party.toml") for name in ("label", "bank", "shop")
    )
    own = lender.table
    assert (own.separator, own.decimal, own.encoding) == (";", ",", "latin-1")
    assert (own.id, own.label) == ("Kundennummer", label)
    assert "Größe" in own.columns
    assert bank.table.dates == {"opened": "%d.%m.%Y"}
    assert {one.table.id_type for one in (lender, bank, shop)} == {"number"}
    assert "country" not in shop.table.columns  # a constant
    text = Path("project/shop/party.toml").read_text()
    assert "#| country" in text
    assert "XY" not in text  # its only cell
    trial = read_experiment(Path("project/trial.toml"))
    data = load_data(trial)
    rows = data["shop"].ids
    assert set(rows) <= set(pd.read_parquet("shop.parquet")["id"])
    for name in ("lender", "bank", "shop"):
        np.testing.assert_array_equal(data[name].ids, rows)
    table = pd.read_csv("lender.csv", sep=";", decimal=",", encoding="latin-1")
    labels = table.set_index("Kundennummer")[label].loc[rows].to_numpy()
    classes = np.array(data["lender"].classes)
    np.testing.assert_array_equal(classes[data["lender"].labels.numpy()], labels)


def test_one_organisation_describes_its_own_table(vfl, well, refused, tmp_path):
    write_organisations(tmp_path, "breast-cancer")
    well("init", "--from", "bank.csv")
    party = read_party_file(tmp_path / "party.toml")
    assert (party.party, party.table.source) == ("bank", "bank.csv")
    found = well("check", "party.toml")
    lines = [line.split() for line in found.out.splitlines()]
    assert ["opened", "date", "0.0%", "5", "inputs:"] in [line[:5] for line in lines]
    facts = json.loads(vfl("check", "party.toml", "--json").out)
    assert sum(one["inputs"] for one in facts["columns"]) == int(facts["inputs"])
    again = refused("init", "--from", "bank.csv")
    assert "a party file exists already" in again.err


def test_a_label_that_is_measured_is_checked_as_it_was_found(well, tmp_path):
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"id": range(200), "x": draw.normal(size=200)})
    frame.assign(price=3.5 * frame["x"]).to_csv("houses.csv", index=False)
    well("init", "--from", "houses.csv", "--label", "price")
    done = well("check", "party.toml")
    assert (
        "look at 'x': predicts the label (R2 0." in done.out
        or "nearly equal to the label" in done.out
    )


def test_a_label_party_alone_and_a_party_elsewhere(well, refused, tmp_path):
    _, label = write_organisations(tmp_path, "breast-cancer")
    refused("init", "loans", "--from", "lender=lender.csv", "--party", "bank", "--label", label)
    lender = ("--label-party", "lender", "--label", label)
    well("init", "loans", "--from", "lender=lender.csv", "--party", "bank", *lender)
    assert not Path("loans/trial.toml").exists()  # the bank's table is not here
    well("check", "loans/label/party.toml")
    experiment = tomllib.loads(Path("loans/label/app/experiment.toml").read_text())
    assert set(experiment["parties"]) == {"bank", "lender"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "a project needs a folder"),
        (["--from", "bank.csv", "--from", "lender.csv"], "each of several tables needs a party"),
        (["project", "--from", "label=lender.csv"], "needs a label column"),
        (["project", "--from", "bank=none.csv", "--party", "x"], "there is no such table"),
        (["--from", "bank.csv", "--id", "customer"], "did you mean 'customer_id'"),
        (["project"], "a project needs a feature party"),
    ],
)
def test_mistakes(refused, tmp_path, given, told):
    write_organisations(tmp_path, "breast-cancer", rows=50)
    done = refused("init", *given)
    assert told in done.err


def test_a_database_of_a_party(vfl, well, tmp_path):
    duckdb = pytest.importorskip("duckdb")
    write_organisations(tmp_path, "breast-cancer")
    with duckdb.connect("bank.db") as connection:
        connection.execute("CREATE TABLE bank AS SELECT * FROM 'bank.csv'")
    well("init", "--from", "bank=duckdb:bank.db", "--query", "SELECT * FROM bank")
    facts = json.loads(vfl("check", "party.toml", "--json").out)
    assert {one["name"]: one["kind"] for one in facts["columns"]}["opened"] == "date"
    assert facts["rows"] == len(pd.read_csv("bank.csv"))
    tables = ("--from", "bank=duckdb:bank.db", "--from", "lender=lender.csv")
    label = ("--label-party", "lender", "--label", "target")
    well("init", "p", *tables, "--query", "bank=SELECT * FROM bank", *label)
    data = load_data(read_experiment(Path("p/trial.toml")))
    assert data["bank"].rows == data["lender"].rows > 400


def test_unfamiliar_cells_are_told_with_a_prediction(vfl, well, tmp_path):
    draw = np.random.default_rng(0)
    bank = pd.DataFrame({"id": range(300), "code": "a"})
    bank["code"] = [f"zq8{n}" for n in draw.integers(0, 90, 300)]
    lender = pd.DataFrame({"id": range(300), "y": draw.integers(0, 2, 300)})
    bank.to_csv("bank.csv", index=False)
    lender.to_csv("lender.csv", index=False)
    tables = ("--from", "bank=bank.csv", "--from", "lender=lender.csv")
    well("init", "p", *tables, "--label-party", "lender", "--label", "y")
    trained = json.loads(vfl("train", "p/trial.toml", "-s", "train.epochs=1", "--json").out)
    found = json.loads(vfl("predict", trained["run"], "--json").out)["unfamiliar"]
    split = load_data(read_experiment(Path("p/trial.toml")))["bank"].split
    known = set(bank["code"].iloc[split.train])
    unseen = int((~bank["code"].iloc[split.test].isin(known)).sum())
    assert unseen > 0
    assert found == {"bank": {"code": {"unseen_categories": unseen}}}
    shown = vfl("predict", trained["run"]).out
    assert f"bank: column 'code': {unseen} unseen categories" in shown
    assert "zq8" not in shown
