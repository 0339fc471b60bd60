"""Switching a trace on from the command line, and what is told about it."""

import json

import pytest

from vfl.core.traffic import size
from vfl.session.trace import read

EVERYTHING = """["train","validation","test"]"""


def test_a_training_with_a_trace(vfl, well, loans, tmp_path):
    settings = ("-s", f"trace.phases={EVERYTHING}", "-s", "trace.snapshots=1")
    facts = json.loads(vfl("check", loans, "--json", *settings).out)
    done = well("train", loans, "--json", *settings)
    run = tmp_path / json.loads(done.out)["run"]
    real = sum(path.stat().st_size for path in run.glob("parties/*/trace/*"))
    assert real <= facts["trace_at_most_bytes"]
    told = (
        f"the trace of bank, shop, lender takes up to {size(facts['trace_at_most_bytes'])} on disk"
    )
    assert told in done.err.splitlines()
    for party in ("bank", "shop", "lender"):
        recording = read(run / "parties" / party / "trace")
        assert recording.party == party
        assert next(recording.decoded(phase="test", direction="up"))[1].shape == (40, 4)
        assert [one.epoch for one in recording.snapshots()] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("trace.phases=training", "trace.phases.0 = training: input should be 'train'"),
        ("trace.epochs=4", "trace.epochs contains 4, but train.epochs is 3"),
        ("trace.epochs=0", "trace.epochs.0 = 0: input should be greater than or equal to 1"),
        ("trace.snapshot=1", "did you mean 'snapshots'?"),
    ],
)
def test_mistakes(refused, loans, setting, told):
    done = refused("check", loans, "-s", setting)
    assert told in done.err


@pytest.fixture
def project(vfl, table, tmp_path):
    vfl("init", "project", "--party", "bank", "--party", "shop")
    folder = tmp_path / "project"
    labels = table[["customer", "paid"]].rename(columns={"customer": "id", "paid": "label"})
    labels.to_csv(folder / "label" / "data.csv", index=False)
    return folder


def test_a_project_leaves_tracing_to_each_party(refused, project):
    assert "trace" not in (project / "label" / "app" / "experiment.toml").read_text()
    assert "phases = []" in (project / "bank" / "party.toml").read_text()
    for command in ("check", "train"):
        done = refused(command, project, "-s", "trace.phases=train")
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
