"""``vfl serve`` on a federation: its options, and what the label party's own file says."""

import json

import pytest

from vfl.cli import serving
from vfl.config import Experiment, PartyFile
from vfl.config.run_folder import RunFolder
from vfl.federation.project import write_project

EXPERIMENT = Experiment.model_validate({"parties": {"bank": {}}})
SERVED = {"port": 9001, "max_ids": 5, "token": "kept.token", "max_body_bytes": 4096}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of a project whose label party's own file has a [serve]; nothing serves it."""
    content = {"data": {"source": "rows.csv", "id": "id"}}
    label = content | {"party": "label", "serve": SERVED}
    label["data"] = {**content["data"], "label": "y"}
    parties = {
        "bank": PartyFile.model_validate({"party": "bank", **content}),
        "label": PartyFile.model_validate(label),
    }
    project = write_project(tmp_path / "project", EXPERIMENT, parties, "127.0.0.1")
    path = project.path / "store" / "runs" / "one"
    monkeypatch.setattr(serving, "_on_the_federation", lambda run: None)
    return RunFolder.create(path, EXPERIMENT, "federated", "vfl train PROJECT").path


def test_what_no_option_says_is_as_the_own_file_has_it(well, run):
    well("serve", run, "--port", "0")
    (file,) = run.glob("serv*.json")
    told = json.loads(file.read_text())
    assert (told["port"], told["max_ids"], told["max_body_bytes"]) == (0, 5, 4096)
    assert told["token"] == str(run.parents[2] / "kept.token")
    assert told["timeout_s"] == 5.0
