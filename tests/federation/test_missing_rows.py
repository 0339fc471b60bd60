"""Rows that some party lacks, on a real federation: aligned, trained on, predicted, served.

Meanwhile a party's processes are killed: an alignment ends with the party's name, and a service
goes on without it until it is back.
"""

import time

import pandas as pd
import pytest
from initialised import initialise
from organisations import write_organisations
from real_deployment import Deployment
from served import Client, predicted, same

from vfl.core.storage import read_json

pytestmark = pytest.mark.net

OTHERS = ("bank", "shop")


@pytest.fixture
def federation(tmp_path, data_root):
    _, label = write_organisations(tmp_path, "bank-marketing", 1500, overlap=0.8)
    words = ["--label-party", "lender", "--label", label, "--gaps", "--serve"]
    for name in ("lender.csv", "bank.csv", "shop.parquet"):
        words += ["--from", f"{name.partition('.')[0]}={tmp_path / name}"]

    def write(project, settings):
        return initialise(project, OTHERS, *words)

    started = Deployment(tmp_path / "project", sides=OTHERS, write=write)
    try:
        yield started.start()
    finally:
        started.close()


def owners(folder):
    """Who has which row, by the number that is its id."""
    how = {"sep": ";", "dtype": str, "encoding": "latin-1"}
    ids = {
        "lender": pd.read_csv(folder / "lender.csv", **how)["Kundennummer"],
        "bank": pd.read_csv(folder / "bank.csv")["customer_id"],
        "shop": pd.read_parquet(folder / "shop.parquet")["id"],
    }
    return {party: set(own.astype(float).astype(int)) for party, own in ids.items()}


def answered(client, row, missing, timeout_s=150.0):
    """The answer for a row once these parties are missing; until then a 503 that names the bank."""
    deadline = time.monotonic() + timeout_s
    while True:
        status, told = client.predict(row)
        if status == 200 and told["predictions"][0]["missing"] == missing:
            return told["predictions"][0]
        assert status == 200 or (status, told["party"]) == (503, "bank"), told
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_from_tables_with_gaps_to_answers_without_a_party(federation, tmp_path, measured):
    measured()
    cut = federation.ask("align", federation.folder)
    cut.wait_for("party bank is here")
    federation.kill("flwr-clientapp", "bank")
    assert cut.wait() != 0
    assert cut.last_words().startswith("error[V4"), cut.said()
    measured("an alignment that lost a party")

    aligned = federation.done("align", federation.folder)
    own = owners(tmp_path)
    rows = own["lender"] & (own["bank"] | own["shop"])
    assert f"session rows     {len(rows)}; bank lacks {len(rows - own['bank'])}" in aligned.said()
    training = federation.trained("train.epochs=5")
    run = federation.run(training)
    summary = read_json(run / "summary.json")
    assert summary["test_complete_auc"] > 0.6  # of others there are few, other ones each time
    lacking = len(rows - (own["bank"] & own["shop"]))
    assert 0.1 * lacking < summary["test_missing_rows"] < 0.4 * lacking
    federation.done("evaluate", run)
    assert read_json(run / "evaluations/0001.json")["test_loss"] == summary["test_loss"]
    federation.done("predict", run)
    expected = predicted(run)
    assert {int(row) for row in expected} == rows
    measured("aligned, trained, evaluated, predicted")

    serving = federation.ask("serve", run, "--port", "0", "--probability-decimals", "off")
    serving.wait_for("listens at")
    token = (run / "serve.token").read_text().strip()
    client = Client(read_json(run / "serving.json")["address"], token)
    client.wait_ready(timeout_s=90.0)
    everybody = own["lender"] & own["bank"] & own["shop"]
    complete = next(row for row in expected if int(row) in everybody)
    lacking = next(row for row in expected if int(row) not in own["bank"])
    for row, missing in ((complete, []), (lacking, ["bank"])):
        assert same(answered(client, row, missing), expected[row])

    federation.kill("flwr-clientapp", "bank")
    replaced = answered(client, complete, ["bank"])
    assert not same(replaced, expected[complete])
    assert same(answered(client, lacking, ["bank"]), expected[lacking])
    measured("the bank's process killed, until the vector stands for it")
    assert same(answered(client, complete, []), expected[complete])
    measured("until the bank answers again")

    federation.nodes["bank"].stop()
    assert answered(client, complete, ["bank"]) == replaced
    measured("the bank stopped, until the vector stands for it")
    federation.start_supernode("bank")
    assert same(answered(client, complete, []), expected[complete])
    measured("the bank started, until it answers again")
    (run / "serving.stop").touch()
    assert serving.wait() == 0, serving.said()
