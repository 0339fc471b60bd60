"""A federation of three hosts that share nothing but a link, and an attacker on a fourth.

It goes by the README's commands alone, from `vfl init` to a prediction.
"""

import json
import sys
import time

import hosts as machines
import pandas as pd
import pytest
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score

from vfl.transport import fingerprint

pytestmark = pytest.mark.net

ATTACKS = machines.REPOSITORY / "scripts" / "attack_front_door"


@pytest.fixture(scope="module")
def table():
    """Real rows: what each owner has of them, in an order of its own."""
    data, target = load_breast_cancer(return_X_y=True, as_frame=True)
    ids = pd.Series([f"patient-{row:04d}" for row in range(len(data))], name="id")
    first = [name for name in data if name.startswith("mean ")]
    parts = {
        "bank": pd.concat([ids, data[first]], axis=1),
        "shop": pd.concat([ids, data.drop(columns=first)], axis=1),
        "lender": pd.concat([ids, target.rename("label")], axis=1),
    }
    return {name: part.sample(frac=1, random_state=7) for name, part in parts.items()}


@pytest.fixture(scope="module")
def network():
    if (reason := machines.why_not()) is not None:
        pytest.skip(reason)
    with machines.hosts("lender", "bank", "shop", "attacker") as made:
        done = made[0].run(sys.executable, "-c", "import torch, flwr, vfl")
        if done.returncode:
            pytest.skip(f"other users cannot use this environment: {done.stderr[-200:]}")
        yield made


@pytest.fixture(scope="module")
def federation(network, table):
    """Everything running, as the README says it."""
    lender, bank, shop, _ = network
    lender.vfl("init", "project", "--party", "bank", "--party", "shop",
               "--label-party", "lender", "--host", lender.address)  # fmt: skip
    project = lender.folder / "project"
    for host in (bank, shop):  # each owner takes its own folder to its own machine
        host.take(project / host.name, host.name)
        (project / host.name).rename(lender.folder / f"given-{host.name}")
    for host, place in ((lender, project / "label"), (bank, bank.folder / "bank"),
                        (shop, shop.folder / "shop")):  # fmt: skip
        table[host.name].to_csv(place / "data.csv", index=False)
        (place / "data.csv").chmod(0o644)
    lender.vfl("join", "project", "--table", "project/label/data.csv", "--label", "label")
    for host, other in ((bank, shop), (shop, bank)):
        host.vfl("join", host.name, "--table", f"{host.name}/data.csv")
        sent = host.folder / host.name / f"{host.name}.pub"
        shown = fingerprint(sent.read_bytes())
        for taker, folder in ((lender, "project"), (other, other.name)):
            taker.take(sent, f"{host.name}.pub")
            words = (f"{host.name}.pub", folder, "--fingerprint", shown)
            taker.vfl("party", "accept", *words)
    lender.start("listens on", "up", "project/label")
    bank.start("is connected", "up", "bank/party.toml")
    shop.start("is connected", "up", "shop/party.toml")
    return network


@pytest.fixture(scope="module")
def trained(federation):
    lender = federation[0]
    said = lender.vfl("train", "project/label", "-s", "train.epochs=20", "--json")
    return json.loads(said[said.index("{") : said.rindex("}") + 1])


def test_three_hosts_train_evaluate_and_predict(federation, trained, table):
    lender = federation[0]
    assert trained["test_auc"] > 0.97
    said = lender.vfl("evaluate", trained["run"], "--json")
    again = json.loads(said[said.index("{") : said.rindex("}") + 1])
    assert again["test_auc"] == trained["test_auc"]
    lender.vfl("predict", trained["run"])
    found = pd.read_csv(f"{trained['run']}/predictions.csv").set_index("id")
    truth = table["lender"].set_index("id")["label"]
    assert set(found.index) == set(truth.index)
    assert roc_auc_score(truth[found.index], found["probability_1"]) > 0.97


def test_each_party_remembers_what_it_took_part_in(federation, trained):
    _, bank, shop, _ = federation
    for host in (bank, shop):
        said = host.vfl("sessions", f"{host.name}/party.toml", "--json")
        (entry,) = json.loads(said[said.index("[") : said.rindex("]") + 1])
        assert entry["run"] == trained["run"].rpartition("/")[2]
        assert entry["spent"]["train"]["rows"] > 0


def test_only_two_ports_face_the_link(federation):
    lender, bank, shop, _ = federation
    both = {f"{lender.address}:{port}" for port in (8000, 8001)}  # SuperLink and streams
    assert set(lender.ports()) == both
    training = lender.start("submitting run", "train", "project/label", "-s", "train.epochs=40")
    deadline = time.monotonic() + 300
    while training.poll() is None:
        assert set(lender.ports()) == both
        assert bank.ports() == shop.ports() == []
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert training.returncode == 0


def test_the_attacker_gets_nothing(federation, trained):
    lender, bank, shop, attacker = federation
    done = attacker.run(
        sys.executable, ATTACKS, "--target", f"{lender.address}:8000", "--json", timeout=300
    )
    results = json.loads(done.stdout)
    assert len(results) == 4
    assert [one["succeeded"] for one in results] == [False] * 4, results
    assert done.returncode == 0
    for owner in (lender, bank, shop):
        table = next(owner.folder.rglob("data.csv"))
        assert attacker.run("cat", table).returncode != 0
        assert attacker.run("ls", owner.folder).returncode != 0
        assert owner.run("cat", table).returncode == 0
