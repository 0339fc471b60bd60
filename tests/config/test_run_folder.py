import json
import re

import pytest

from vfl.config import Experiment
from vfl.config.run_folder import RunFolder, environment, new_run_name
from vfl.core.errors import LostPeerError, RunFolderError
from vfl.core.frame import Frame, Kind
from vfl.core.ledger import Ledger
from vfl.core.storage import FORMAT, read_json, read_lines, write_json
from vfl.core.version import VERSION

EXPERIMENT = Experiment.model_validate({"name": "trial", "parties": {"bank": {"width": 3}}})


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "runs" / "one", EXPERIMENT, "local", "vfl train x.toml")


def names(folder):
    return sorted(entry.name for entry in folder.path.iterdir())


def test_a_new_folder_says_what_is_run_and_with_what(folder):
    assert names(folder) == ["config.toml", "environment.json", "metrics.jsonl", "run.json"]
    about = read_json(folder.path / "run.json")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", about.pop("created"))
    assert about == {
        "format": FORMAT,
        "name": "trial",
        "vfl": VERSION,
        "mode": "local",
        "command": "vfl train x.toml",
    }
    assert folder.experiment() == EXPERIMENT
    assert RunFolder.open(folder.path).path == folder.path


def test_a_run_is_never_overwritten(folder):
    with pytest.raises(RunFolderError, match="already"):
        RunFolder.create(folder.path, EXPERIMENT, "local", "")
    assert read_json(folder.path / "run.json")["command"] == "vfl train x.toml"


def test_no_run_there(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(RunFolderError, match="there is no run here"):
            RunFolder.open(path)


@pytest.mark.parametrize("about", [{"format": 7}, {}])
def test_a_run_of_another_format(folder, about):
    write_json(folder.path / "run.json", about)
    with pytest.raises(RunFolderError, match="another format"):
        RunFolder.open(folder.path)


def test_a_run_that_goes_well(folder):
    for epoch in (1, 2):
        folder.epoch({"epoch": epoch, "train_loss": 1 / epoch})
    ledger = Ledger()
    ledger("bank", "up", Frame(Kind.CUT, 0, b"1234"))
    folder.finish({"test_accuracy": 0.5}, ledger)
    folder.evaluated({"test_accuracy": 0.25})
    assert [line["train_loss"] for line in read_lines(folder.path / "metrics.jsonl")] == [1.0, 0.5]
    assert read_json(folder.path / "summary.json") == {"test_accuracy": 0.5}
    assert read_json(folder.path / "evaluation.json") == {"test_accuracy": 0.25}
    traffic = (folder.path / "traffic.csv").read_text()
    assert traffic.splitlines()[1] == "bank,up,train,1,4,20,0.0"


def test_a_run_that_fails_says_why(folder):
    folder.fail(LostPeerError("party 'bank' went away", where="step 4"))
    failure = json.loads((folder.path / "failure.json").read_text())
    assert failure["code"] == "V405"
    assert (failure["where"], failure["exit"]) == ("step 4", 3)
    assert not (folder.path / "summary.json").exists()


def test_a_party_has_a_place_of_its_own(folder):
    assert folder.party("bank") == folder.path / "parties" / "bank"


def test_names_sort_by_time():
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d{6}-\d{3}_trial", new_run_name("trial"))


def test_the_environment_names_what_a_repetition_needs(monkeypatch):
    found = environment()
    assert found["vfl"] == VERSION
    assert {"python", "torch", "numpy", "flwr", "cores", "processor"} <= set(found)
    monkeypatch.setattr("vfl.config.run_folder._PACKAGES", ("no-such-package",))
    assert environment()["no-such-package"] == "not installed"
