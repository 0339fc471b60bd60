"""Parties enter, leave and are renamed while a real federation runs; then it trains."""

import json
import subprocess
import sys

import pytest
from initialised import initialise
from organisations import write_organisations
from ports import free_ports
from real_deployment import Deployment

from vfl.config import read_party_file
from vfl.core.storage import read_json
from vfl.datasets.alignment.positions import last_versions
from vfl.session.store.identity import Identity
from vfl.session.store.session_log import verified
from vfl.transport import fingerprint

pytestmark = pytest.mark.net


@pytest.fixture
def vfl():
    """Runs a command; what it printed as JSON."""

    def run(*words, code=0):
        command = [sys.executable, "-m", "vfl", *map(str, words), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout) if not code else done.stderr

    return run


@pytest.fixture
def federation(tmp_path):
    """The lender and the bank, whose service runs; the shop's table lies beside."""
    _, label = write_organisations(tmp_path, "breast-cancer")

    def write(project, settings):
        tables = [f"lender={tmp_path / 'lender.csv'}", f"bank={tmp_path / 'bank.csv'}"]
        words = [part for table in tables for part in ("--from", table)]
        words += ["--label-party", "lender", "--label", label]
        return initialise(project, ["bank"], *words)

    started = Deployment(tmp_path / "project", sides=["bank"], write=write)
    yield started.start()
    started.close()


def log_of(folder):
    """Events of a party's log, which holds."""
    party = read_party_file(folder / "party.toml")
    own = Identity.kept_at(party.beside(party.identity.key))
    found = verified(party.store_path / "sessions" / "log.jsonl", [own.public])
    assert found.holds, found.problems
    return [(line.event, line.parties) for line in found.lines if line.event != "consent"]


def parties_of(run):
    return list(read_json(run / "summary.json")["bytes_up"])


def accept(vfl, public, folder):
    return vfl("party", "accept", public, folder, "--fingerprint", fingerprint(public.read_bytes()))


def test_a_party_enters_and_one_leaves_a_running_federation(federation, vfl, tmp_path):
    project, label = federation.folder, federation.label.path
    federation.done("align", project)
    first = federation.run(federation.trained("train.epochs=2"))

    told = vfl("party", "add", "shop", project, "--table", tmp_path / "shop.parquet")
    file = project / "shop" / "party.toml"
    (port,) = free_ports(1)
    own = read_party_file(file).node.api_port
    file.write_text(file.read_text().replace(f"api_port = {own}", f"api_port = {port}"))
    assert [who for who, _ in told["then"]] == ["bank", "shop", "lender", "lender"]
    federation.start_supernode("shop")
    federation.nodes["shop"].wait_for("is connected")
    assert vfl("status", project)["then"] == [f"vfl align {label}"]

    refused = federation.ask("align", project)  # the bank has not consented to the shop
    assert refused.wait() != 0
    assert "does not consent" in refused.last_words()
    accept(vfl, project / "shop" / "shop.pub", project / "bank")
    federation.done("align", project)
    second = federation.run(federation.trained("train.epochs=2"))
    assert {*parties_of(second)} - {*parties_of(first)} == {"shop"}
    federation.done("predict", first)  # by the order that it was trained with
    federation.done("predict", second)
    warm = federation.ask("train", project, "--from", first)
    assert warm.wait() != 0
    assert "starts from a run that has a different network" in warm.said()

    vfl("party", "remove", "shop", project)
    shop = federation.nodes.pop("shop")
    assert shop.wait(60) == 3
    assert "error[V404]: the label party has withdrawn the key of 'shop'" in shop.last_words()
    gone = federation.ask("predict", second)
    assert gone.wait() == 3
    assert "error[V401]: party 'shop' has left this project" in gone.last_words()
    third = federation.run(federation.trained("train.epochs=2"))  # by the alignment of before
    assert parties_of(third) == parties_of(first)
    federation.done("predict", first)
    events = log_of(label)
    assert ("added", ("shop",)) in events
    assert ("removed", ("shop",)) in events
    assert ("accepted", ("shop",)) in log_of(project / "bank")
    (own,) = [
        one.agreed.parties
        for one in last_versions(label / "store/alignments/alignment/source", "lender")
    ]
    assert {*own} == {"bank", "lender"}


def test_a_party_is_renamed(federation, vfl):
    project = federation.folder
    federation.done("align", project)
    first = federation.run(federation.trained("train.epochs=2"))
    identity = (project / "bank" / "identity.key").read_bytes()
    words = ("party", "rename", "bank", "house")
    assert "service is running" in vfl(*words, project / "bank", code=2)
    vfl(*words, project)
    federation.nodes.pop("bank").stop()
    vfl(*words, project / "bank")
    assert (project / "bank" / "identity.key").read_bytes() == identity
    (project / "bank").rename(project / "house")
    accept(vfl, project / "house" / "house.pub", project)
    federation.superlink.wait_for("the key of house is registered")
    federation.start_supernode("house")
    federation.nodes["house"].wait_for("is connected", timeout_s=120)
    second = federation.run(federation.trained("train.epochs=2"))
    assert {*parties_of(second)} ^ {*parties_of(first)} == {"bank", "house"}
    federation.done("predict", second)
    assert vfl("status", first)["state"] == "ended"
    assert vfl("log", project / "house" / "party.toml")["holds"]
    assert ("renamed", ("bank", "house")) in log_of(project / "house")
    entries = vfl("sessions", project / "house" / "party.toml")
    assert [entry["run"] for entry in entries] == [first.name, second.name]
    gone = federation.ask("predict", first)
    assert gone.wait() == 3
    assert "party 'bank' has left this project" in gone.last_words()
