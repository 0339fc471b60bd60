"""`vfl status`: every state a run can be in, with its exit code and what to type next."""

import json
import os
import shlex
import subprocess
import sys

import numpy as np
import pytest

from vfl.config import DataSettings, Experiment, PartyFile
from vfl.config.run_folder import RunFolder
from vfl.core.errors import DisagreementError, LostPeerError
from vfl.core.storage import Seal, locked, write_json, write_sealed_json
from vfl.core.traffic import Ledger
from vfl.datasets.alignment.positions import Agreed, Alignment
from vfl.federation import deployment
from vfl.federation.project import ONE_MACHINE, write_project
from vfl.session.progress import ProgressReport

EXPERIMENT = Experiment.model_validate({"name": "trial", "parties": {"bank": {}, "shop": {}}})
EPOCH = {"epoch": 1, "train_loss": 0.5, "seconds": 1.0, "bytes_up": 700, "bytes_down": 300}
SUMMARY = {
    "test_accuracy": 0.9,
    "bytes_up": {"bank": 700, "shop": 1},
    "bytes_down": {"bank": 300, "shop": 2},
}


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "one", EXPERIMENT, "in-process", "vfl train x.toml -s a=1")


@pytest.fixture
def status(vfl):
    def ask(path):
        shown, told = vfl("status", path), vfl("status", path, "--json")
        assert shown.code == told.code
        lines = dict(line.split(None, 1) for line in shown.out.splitlines() if "  " in line)
        return lines, json.loads(told.out), told.code

    return ask


def test_a_run_at_work(run, status):
    run.epoch(EPOCH)
    with locked(run.path):
        run.progress(ProgressReport("train", (), 2, 20, 300, 2000, 250.0, 16e3, 6.8).record())
        lines, told, code = status(run.path)
    assert (lines["state"], code) == ("training", 4)
    assert (
        lines["progress"]
        == "train, epoch 2 of 20: 15 %, 250 steps/s, 16 000 rows/s, about 7 s left"
    )
    assert told["progress"]["left_s"] == 6.8
    assert told["epochs"] == 1
    assert told["figures"] == {"train_loss": 0.5}
    assert told["bytes"] == {"all": 1000}
    assert told["then"] == []


@pytest.mark.parametrize("mode", ["train", "evaluate", "predict", "align"])
def test_who_is_waited_for(project, status, monkeypatch, mode):
    stored = project.path / "store" / "runs" / "one"
    run = RunFolder.create(stored, EXPERIMENT, "federated", "vfl train x.toml")
    with locked(run.path):
        run.progress(ProgressReport(mode, waits_for=("shop",)).record())
        lines, told, code = status(run.path)
        assert (lines["state"], code) == ("waiting", 4)
        assert told["then"] == [f"vfl up {project.path}"]  # the SuperLink is gone
        assert lines["progress"] == f"{mode}: waiting for shop"
        monkeypatch.setattr(deployment, "connected", lambda folder: {"bank": True, "shop": False})
        assert status(run.path)[1]["then"] == ["vfl up shop   # at shop"]


def test_progress_of_an_earlier_process_is_not_that_of_this_one(run, status):
    by_another = "import sys; from vfl.config.run_folder import RunFolder; from pathlib import Path"
    by_another += "; RunFolder(Path(sys.argv[1])).progress({'mode': 'train'})"
    subprocess.run([sys.executable, "-c", by_another, run.path], check=True)
    with locked(run.path):
        lines, told, code = status(run.path)
    assert (lines["state"], told["progress"], code) == ("starting", None, 4)


def test_a_run_whose_process_is_gone(run, status):
    run.progress(ProgressReport("train", (), 1, 2, 3, 10, 1.0, 1.0, 7.0).record())
    lines, told, code = status(run.path)
    assert (lines["state"], code) == ("interrupted", 5)
    assert told["then"] == [f"vfl train x.toml --resume {run.path}"]


def test_a_run_that_failed_ends_as_its_command_did(run, status):
    error = LostPeerError("party 'bank' went away", fix="start it again")
    run.fail(error)
    lines, told, code = status(run.path)
    assert (lines["state"], code) == ("failed", error.exit_code)
    assert told["failure"]["code"] == error.code
    assert told["failure"]["fix"] == "start it again"
    assert told["then"] == [f"vfl train x.toml --resume {run.path}"]


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_training_whose_settings_were_refused_is_not_resumed_with_them(run, status, epochs):
    for epoch in range(epochs):
        run.epoch({"epoch": epoch, "bytes_up": 1, "bytes_down": 1})
    run.fail(DisagreementError("a training starts from a run that has a different network"))
    resume = f" --resume {run.path}" if epochs else ""
    assert status(run.path)[1]["then"] == [f"vfl train x.toml{resume}"]


def test_a_run_that_ended_well(run, status):
    run.epoch(EPOCH)
    run.finish(SUMMARY, Ledger())
    lines, told, code = status(run.path)
    assert (lines["state"], code) == ("ended", 0)
    assert told["figures"] == {"test_accuracy": 0.9}
    assert told["bytes"] == {"bank": 1000, "shop": 3}
    assert f"vfl serve {run.path}" in told["then"]


def test_a_run_that_is_served_until_its_process_is_gone(run, status):
    run.finish(SUMMARY, Ledger())
    served = {"address": "http://127.0.0.1:8080", "process": os.getpid()}
    write_json(run.path / "serving.json", served)
    lines, _, code = status(run.path)
    assert (lines["state"], lines["address"], code) == ("serving", served["address"], 0)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    run.progress(ProgressReport("predict", waits_for=("shop",)).record())  # beside the service
    assert status(run.path)[0]["state"] == "serving"
    write_json(run.path / "serving.json", served | {"process": gone.pid})
    assert status(run.path)[0]["state"] == "ended"


def test_a_folder_without_a_run_is_said_to_be_none(refused, tmp_path):
    done = refused("status", tmp_path)
    assert "this is not a project's label folder" in done.err
    refused("status", tmp_path / "no")


@pytest.fixture
def project(tmp_path):
    """A project of three hosts as it was written: nobody has joined."""
    experiment = EXPERIMENT.model_copy(update={"data": DataSettings(alignment="ours")})
    content = {"data": {"source": "rows.csv", "id": "id"}}
    parties = {
        name: PartyFile.model_validate({"party": name, **content})
        for name in ("bank", "shop", "label")
    }
    return write_project(tmp_path / "project", experiment, parties, "lender.example")


def test_every_state_of_a_project_names_the_next_step(vfl, project, monkeypatch, tmp_path):
    """From a folder that was just written to a run that is served."""
    asked, here = str(project.path), {"bank": False, "shop": False}

    def then(code):
        done = vfl("status", project.path.parent, "--json")
        assert done.code == code, done.err
        return json.loads(done.out)["then"]

    def run(name, finish=None, outcome=None):
        stored = project.path / "store" / "runs" / name
        made = RunFolder.create(stored, EXPERIMENT, "federated", f"vfl {name} {asked}")
        if finish is not None:
            made.finish(finish, Ledger())
        if outcome is not None:
            write_json(made.path / "alignment.json", outcome)
        return made

    assert then(3) == [f"vfl join {asked} --table TABLE"]
    (project.path / "rows.csv").write_text("id,label\n")
    joins = then(3)
    for name, told in zip(here, joins, strict=True):
        assert told.startswith(f"vfl join {name} --table TABLE")
        assert told.endswith(f"here: vfl party accept {name}.pub {asked}")
        (project.keys / f"{name}.pub").write_text("ecdsa-sha2-nistp384 AAAA")
    for name, told in zip(here, then(3), strict=True):
        key = project.keys / f"{name}.pub"
        assert told.startswith(f"vfl party accept {key} {asked} --fingerprint TEXT")
        project.accept_key(name, key.read_bytes())
    assert then(3) == [f"vfl up {asked}"]
    monkeypatch.setattr(deployment, "connected", lambda folder: here)
    assert then(3) == ["vfl up bank   # at bank", "vfl up shop   # at shop"]
    here["bank"] = True
    assert then(3) == ["vfl up shop   # at shop"]
    here["shop"] = True
    assert then(0) == [f"vfl align {asked}"]
    folder = project.path / "store" / "alignments" / "ours" / "source"
    own = project.experiment().label.party
    for version, parties in ((1, ("bank", own)), (2, ("bank", "shop", own))):
        assert then(0) == [f"vfl align {asked}"]  # version 1 is of a time without the shop
        agreed = Agreed("ours", parties, "plain", "ecdh")
        Alignment(own, agreed, version, "00" * 32, "", 0, np.arange(0)).keep(folder)
    outcome = {"bytes": {}, "common": 3}
    run("align", outcome=outcome)
    assert then(0) == [f"vfl train {asked}"]
    training = run("train")
    assert then(0) == [f"vfl train {asked} --resume {training.path}"]
    with locked(training.path):
        training.progress(ProgressReport("train", (), 2, 20, 300, 2000, 250.0, 16e3, 6.8).record())
        assert then(0) == []  # it is at work
        training.progress(ProgressReport("train", waits_for=("shop",)).record())
        joins = "vfl doctor shop/party.toml   # at shop, which is connected but takes no part yet"
        assert then(0) == [joins]
    training.fail(LostPeerError("party 'bank' went away"))
    assert then(0) == [f"vfl train {asked} --resume {training.path}"]
    (training.path / "failure.json").unlink()
    training.finish(SUMMARY, Ledger())
    run("align-2", outcome=outcome)  # of a new month
    assert then(0)[:2] == [f"vfl predict {training.path}", f"vfl serve {training.path}"]
    training.progress(ProgressReport("serve").record())
    served = {"address": "http://127.0.0.1:8080", "process": os.getpid()}
    write_json(training.path / "serving.json", served)
    assert then(0) == []
    training.progress(ProgressReport("serve", waits_for=("shop",)).record())
    assert then(0) == [joins]
    here["shop"] = False
    assert then(3) == ["vfl up shop   # at shop"]
    assert vfl("status", training.path).out.endswith("vfl up shop   # at shop\n")

    def gone(folder):
        raise LostPeerError("the SuperLink is gone, too")

    monkeypatch.setattr(deployment, "connected", gone)
    assert then(3) == [f"vfl up {asked}"]
    assert vfl("status", training.path).out.endswith(f"vfl up {asked}\n")


@pytest.mark.parametrize("name", ["bank", "shop"])
def test_a_party_of_this_machine_is_started_by_its_folder(vfl, monkeypatch, tmp_path, name):
    content = {"data": {"source": "rows.csv", "id": "id"}}
    parties = {
        name: PartyFile.model_validate({"party": name, **content})
        for name in ("bank", "shop", "label")
    }
    project = write_project(tmp_path / "all of us", EXPERIMENT, parties, ONE_MACHINE)
    (project.path / "rows.csv").write_text("id,label\n")
    here = {"bank": True, "shop": True}
    monkeypatch.setattr(deployment, "connected", lambda folder: here | {name: False})
    told = json.loads(vfl("status", project.path, "--json").out)["then"]
    command = ["vfl", "up", str(project.path.parent / name)]
    assert [shlex.split(one) for one in told] == [command]


def test_every_state_of_a_party_names_the_next_step(vfl, project, monkeypatch):
    folder = project.path.parent / "bank"

    def then(code):
        done = vfl("status", folder, "--json")
        assert done.code == code, done.err
        return json.loads(done.out)["then"]

    assert then(3) == [f"vfl join {folder} --table TABLE"]
    assert vfl("status", folder / "party.toml").code == 3
    (folder / "rows.csv").write_text("id,x\n" + "".join(f"a{n},{n % 7}\n" for n in range(9)))
    assert then(3) == [f"vfl join {folder}"]
    joined = vfl("join", folder, "--json")
    assert joined.code == 0, joined.err
    assert then(3) == [f"vfl up {folder}"] == [json.loads(joined.out)["then"]]
    monkeypatch.setattr(deployment, "supernode_runs", lambda party: True)
    assert then(0) == [f"vfl sessions {folder}/party.toml"]


@pytest.mark.parametrize(("shop", "code"), [(True, 0), (False, 3)])
def test_a_project_with_a_superlink_says_who_is_connected(vfl, project, monkeypatch, shop, code):
    monkeypatch.setattr(deployment, "connected", lambda folder: {"bank": True, "shop": shop})
    folder = RunFolder.create(
        project.path / "store" / "runs" / "one", EXPERIMENT, "federated", "vfl train PROJECT"
    )
    done = vfl("status", project.path, "--json")
    told = json.loads(done.out)
    assert (done.code, told["exit_code"]) == (code, code)
    assert told["parties"] == {"bank": True, "shop": shop}
    assert [run["run"] for run in told["runs"]] == [str(folder.path)]
    again = f"vfl train {project.path} --resume {folder.path}"
    assert told["runs"][0]["then"] == [again]
    assert "SuperLink            not running" not in vfl("status", project.path).out


GRID = """
name = "tiny"
data.rows = 400
label = { top = "linear" }
train = { epochs = 1 }
parties.client = { width = 8, bottom = "mlp:hidden=none" }
compare = { codecs = ["none", "topk:k=2"], seeds = [0] }
"""


@pytest.fixture
def compared(well, tmp_path):
    """A comparison of which one of two cells is trained."""
    (tmp_path / "tiny.toml").write_text(GRID)
    asked = ("compare", tmp_path / "tiny.toml", "--out", tmp_path / "runs/tiny")
    well(*asked, "--only", "topk:k=2")
    return tmp_path / "runs/tiny", asked


def test_a_grid_that_was_interrupted_and_goes_on(compared, status, well):
    path, asked = compared
    lines, told, code = status(path)
    assert (lines["state"], lines["cells"], code) == ("interrupted", "1 of 2 done", 5)
    assert lines["then"].startswith("vfl compare ")
    with locked(path):
        assert status(path)[2] == 4
    well(*asked)
    lines, told, code = status(path)
    assert (lines["state"], told["done"], told["kind"], code) == ("ended", 2, "comparison", 0)


def test_runs_of_a_folder_are_listed_with_a_page(compared, run, vfl, well, refused):
    path, _ = compared
    run.path.rename(path.parent / "one")
    (path.parent / "torn").mkdir()
    (path.parent / "torn/run.json").write_text("{")
    done = well("runs", path.parent)
    assert "tiny\n    comparison, interrupted, 1 of 2" in done.out
    assert "one\n    training, interrupted" in done.out
    assert "torn\n    training, damaged" in done.out
    page = (path.parent / "index.html").read_text()
    assert '<a href="tiny/report.html">tiny</a>' in page
    assert "one</a>" not in page  # it has no page
    told = json.loads(vfl("runs", path.parent, "--json").out)
    assert [one["name"] for one in told["runs"]][-1] == "torn"
    assert (told["promoted"], told["before"]) == (None, None)
    listed = [{"run": name, "at": ""} for name in ("tiny", "one")]
    seal = Seal("promoted runs", "label", "all")
    write_sealed_json(path.parent / "promoted.json", {"promoted": listed}, seal)
    done = well("runs", path.parent)
    marked = [line for line in done.out.splitlines() if "promoted" in line]
    assert [line.partition(", promoted")[2] for line in marked] in (
        ["", " before (vfl rollback)"], [" before (vfl rollback)", ""],
    )  # fmt: skip
    told = json.loads(vfl("runs", path.parent, "--json").out)
    assert (told["promoted"], told["before"]) == ("one", "tiny")
    refused("runs", path.parent / "nowhere")
