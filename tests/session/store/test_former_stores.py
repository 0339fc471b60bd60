"""Stores that earlier versions wrote are read: what they hold is what their own reports say.

`tests/stores/VERSION` is a label party's and a feature party's folder after `vfl align` and a short
`vfl train`, without keys, certificates and what Flower kept; paths of the machine were taken out. A
version whose format differs brings a command that rewrites a store, and this test runs it first.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest

from vfl.config import read_experiment, read_party_file
from vfl.core.storage import Seal, joint_digest, load_weights, read_json, read_lines, weights_digest
from vfl.datasets.alignment.positions import Alignment
from vfl.experiments.loaded_run import LoadedRun
from vfl.session import Checkpoints
from vfl.session.store.run_rows import RunRows
from vfl.session.store.session_ledger import SessionLedger

STORES = sorted(path for path in (Path(__file__).parents[2] / "stores").iterdir() if path.is_dir())
PARTIES = {"lender": "label", "shop": "shop"}


@pytest.fixture(params=STORES, ids=lambda path: path.name)
def project(request, tmp_path):
    """A copy, for reading may lock and tidy."""
    return Path(shutil.copytree(request.param, tmp_path / "project"))


@pytest.fixture
def run(project):
    (found,) = (
        path for path in (project / "label/store/runs").iterdir() if "align" not in path.name
    )
    return found


def own_folder(project, run, party):
    return project / PARTIES[party] / "store" / "runs" / run.name / "parties" / party


def test_the_folders_carry_the_version_that_wrote_them(project, run):
    assert read_json(run / "run.json")["vfl"] == read_json(run / "environment.json")["vfl"]
    head = (own_folder(project, run, "shop") / "rows.sealed").read_bytes()[:200]
    assert f'"vfl": "{read_json(run / "run.json")["vfl"]}"'.encode() in head


def test_settings_are_read(project):
    assert read_experiment(project / "label/app/experiment.toml").label.party == "lender"
    for party, folder in PARTIES.items():
        assert read_party_file(project / folder / "party.toml").party == party


def test_weights_are_those_of_the_report(project, run):
    digests = []
    for party in PARTIES:
        path = own_folder(project, run, party) / "weights.safetensors"
        digests.append(
            (party, weights_digest(load_weights(path, Seal("weights", party, run.name))))
        )
    assert joint_digest(digests) == read_json(run / "summary.json")["weights_sha256"]


def test_the_report_is_read(run):
    loaded, summary = LoadedRun(run), read_json(run / "summary.json")
    assert loaded.head["name"] == "project"
    assert len(list(read_lines(run / "metrics.jsonl"))) == 4
    assert 0.5 < summary["test_auc"] <= 1


def test_ledgers_are_read(project, run):
    for party, folder in PARTIES.items():
        (entry,) = SessionLedger(project / folder / "store" / "sessions", party).entries()
        assert entry.run == run.name


def test_rows_and_alignments_are_read(project, run):
    kept = []
    for party, folder in PARTIES.items():
        aligned = Alignment.newest(project / folder / "store/alignments/alignment/source", party)
        rows = RunRows.load(
            own_folder(project, run, party) / "rows.sealed", Seal("rows", party, run.name)
        )
        parts = [rows.split.train, rows.split.validation, rows.split.test]
        assert sorted(np.concatenate(parts).tolist()) == list(range(len(aligned.positions)))
        kept.append((aligned.key, [part.tolist() for part in parts]))
    assert kept[0] == kept[1]


def test_checkpoints_are_whole(project, run):
    checkpoints = Checkpoints(
        own_folder(project, run, "shop") / "checkpoints", "shop", run.name, ""
    )
    assert checkpoints.intact() == checkpoints.steps() != []
