"""Switching a trace on from the command line, and what is told about it."""

import json
import shutil
from types import SimpleNamespace

import pytest

from vfl.core.traffic import size
from vfl.session.trace import read

EVERYTHING = """["train","validation","test"]"""


def test_a_training_with_a_trace(vfl, loans, tmp_path):
    settings = ("-s", f"trace.phases={EVERYTHING}", "-s", "trace.snapshots=1")
    facts = json.loads(vfl("check", loans, "--json", *settings).out)
    done = vfl("train", loans, "--json", *settings)
    assert done.code == 0, done.err
    run = tmp_path / json.loads(done.out)["run"]
    real = sum(path.stat().st_size for path in run.glob("parties/*/trace/*"))
    assert real <= facts["trace_at_most_bytes"]
    told = f"the trace of bank, shop, lender takes up to {size(facts['trace_at_most_bytes'])}"
    assert told in done.err.splitlines()
    for party in ("bank", "shop", "lender"):
        recording = read(run / "parties" / party / "trace")
        assert recording.party == party
        assert next(recording.decoded(phase="test", direction="up"))[1].shape == (40, 4)
        assert [one.epoch for one in recording.snapshots()] == [0, 1, 2, 3]


def test_one_phase_and_one_epoch_need_no_list(vfl, loans, tmp_path):
    assert "trace" not in vfl("check", loans).out
    done = vfl("train", loans, "--json", "-s", "trace.phases=train", "-s", "trace.epochs=2")
    run = tmp_path / json.loads(done.out)["run"]
    frames = list(read(run / "parties" / "bank" / "trace").frames())
    assert {(frame.phase, frame.epoch) for frame in frames} == {("train", 2)}


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_disk_without_room(vfl, loans, monkeypatch, command):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    done = vfl(command, loans, "-s", "trace.phases=train")
    assert done.code == 2
    assert "the disk has no room for the trace" in done.err
    assert "got   1.00 kB free" in done.err


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("trace.phases=training", "trace.phases.0 = training: input should be 'train'"),
        ("trace.epochs=4", "trace.epochs has 4, and train.epochs 3"),
        ("trace.epochs=0", "trace.epochs.0 = 0: input should be greater than or equal to 1"),
        ("trace.snapshot=1", "did you mean 'snapshots'?"),
    ],
)
def test_mistakes(vfl, loans, setting, told):
    done = vfl("check", loans, "-s", setting)
    assert done.code == 2
    assert told in done.err


@pytest.fixture
def project(vfl, table, tmp_path):
    vfl("init", "project", "--party", "bank", "--party", "shop")
    folder = tmp_path / "project"
    labels = table[["customer", "paid"]].rename(columns={"customer": "id", "paid": "label"})
    labels.to_csv(folder / "label" / "data.csv", index=False)
    return folder


def test_a_project_leaves_tracing_to_each_party(vfl, project):
    assert "trace" not in (project / "label" / "app" / "experiment.toml").read_text()
    assert "phases = []" in (project / "bank" / "party.toml").read_text()
    for command in ("check", "train"):
        done = vfl(command, project, "-s", "trace.phases=train")
        assert done.code == 2
        assert "party.toml of the party that wants to record" in done.err


def test_the_label_partys_own_trace_is_in_its_plan(vfl, project):
    without = json.loads(vfl("check", project, "--json").out)
    assert "trace_at_most_bytes" not in without
    own = project / "label" / "party.toml"
    text = own.read_text()
    sizes = []
    for more in ("snapshots = 0", "snapshots = 1"):
        own.write_text(
            text.replace("phases = []", 'phases = ["train"]').replace("snapshots = 0", more)
        )
        sizes.append(json.loads(vfl("check", project, "--json").out)["trace_at_most_bytes"])
    assert 0.9 * without["at_most_bytes"] < sizes[0] < sizes[1]


def test_a_feature_partys_plan_shows_what_it_records(vfl, tmp_path, table):
    path = tmp_path / "party.toml"
    path.write_text(
        """party = "bank"
[data]
source = "loans.csv"
id = "customer"
columns = ["income"]
[trace]
phases = ["train", "test"]
"""
    )
    done = vfl("check", path)
    assert "trace                    phases train test, epochs -, snapshots 0" in done.out
