"""``vfl clients``: whose requests a service answers; a token is shown once."""

import json

import pytest

from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.serving.clients import Clients


@pytest.fixture
def run(tmp_path):
    """A run of one process that nothing was trained in."""
    experiment = Experiment.model_validate({"parties": {"bank": {}}, "label": {"party": "lender"}})
    return RunFolder.create(tmp_path / "runs" / "one", experiment, "in-process", "vfl train X").path


def test_a_client_is_added_listed_and_removed(well, refused, run, tmp_path):
    assert "no client" in well("clients", run).out
    token = well("clients", run, "--add", "scoring", "--rows", "500", "--days", "90").out.strip()
    assert len(token) == 43
    well("clients", run, "--add", "batch", "--requests", "7", "--out", tmp_path / "batch.token")
    assert (tmp_path / "batch.token").stat().st_mode & 0o777 == 0o600
    known = Clients(run / "clients", "lender")
    assert known.of(token.encode()).name == "scoring"
    assert known.of((tmp_path / "batch.token").read_bytes().strip()).name == "batch"
    listed = well("clients", run).out
    assert "at most 0 used today; 500 a day" in listed
    assert "at most 0 used today; 7 a day" in listed
    assert token not in listed
    batch, scoring = json.loads(well("clients", run, "--json").out)
    assert (batch["name"], scoring["max_rows_per_day"]) == ("batch", 500)
    assert "digest" not in scoring
    assert "already" in refused("clients", run, "--add", "scoring").err
    well("clients", run, "--remove", "scoring")
    assert [each.name for each in known.entries()] == ["batch"]
    assert "no client 'scoring'" in refused("clients", run, "--remove", "scoring").err


def test_a_token_never_replaces_a_file_and_no_client_is_made_then(refused, run, tmp_path):
    (tmp_path / "kept").write_text("kept")
    done = refused("clients", run, "--add", "one", "--out", tmp_path / "kept")
    assert "this file exists already" in done.err
    assert not Clients(run / "clients", "lender").entries()


def test_a_project_and_its_label_party_have_one_list(well, bank_project):
    well("clients", bank_project, "--add", "one")
    assert "one " in well("clients", bank_project / "label" / "party.toml").out
    assert (bank_project / "label/store/clients/clients.json").exists()
