import hashlib
import json
import re

import pytest

from vfl.config import Experiment
from vfl.config.run_folder import RunFolder, environment
from vfl.core.errors import RunFolderError
from vfl.core.frame import Frame, Kind
from vfl.core.storage import FORMAT, read_json, read_lines, write_json
from vfl.core.traffic import Ledger
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
    digest = hashlib.sha256((folder.path / "config.toml").read_bytes()).hexdigest()
    assert len(about.pop("sha256")) == 64
    assert about == {
        "format": FORMAT,
        "kind": "run",
        "party": "label",
        "run": "one",
        "step": 0,
        "name": "trial",
        "vfl": VERSION,
        "mode": "local",
        "command": "vfl train x.toml",
        "config_sha256": digest,
    }
    assert folder.about()["name"] == "trial"
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


def test_a_run_of_another_format(folder):
    write_json(folder.path / "run.json", {"format": 7})
    with pytest.raises(RunFolderError, match="another format"):
        RunFolder.open(folder.path)


@pytest.fixture
def ended(folder):
    for epoch in (1, 2):
        folder.epoch({"epoch": epoch, "train_loss": 1 / epoch})
    folder.finish({"test_accuracy": 0.5, "weights_sha256": "5f" * 32}, Ledger())
    folder.evaluated({"test_accuracy": 0.25})
    return folder


RECORDS = ("run.json", "config.toml", "summary.json", "evaluations/0001.json")


def use(path):
    """Everything that is read of a run's own records."""
    folder = RunFolder.open(path)
    return folder.mode, folder.experiment(), folder.summary(), folder.evaluation()


#: Every byte when there is time; otherwise some everywhere, and all of the digest at the end.
STRIDES = pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])


def locations(whole, stride):
    return sorted({*range(0, len(whole), stride), *range(max(0, len(whole) - 80), len(whole))})


@STRIDES
@pytest.mark.parametrize("name", RECORDS)
def test_a_flip_of_any_byte_of_a_record_is_found(ended, name, stride):
    """Also one after which the file is no UTF-8, or another configuration or figure."""
    assert use(ended.path)
    whole = (ended.path / name).read_bytes()
    for place in locations(whole, stride):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        (ended.path / name).write_bytes(damaged)
        with pytest.raises(RunFolderError):
            use(ended.path)


@STRIDES
@pytest.mark.parametrize("name", RECORDS)
def test_a_cut_of_a_record_at_any_length_is_found(ended, name, stride):
    whole = (ended.path / name).read_bytes()
    for length in locations(whole, stride):
        (ended.path / name).write_bytes(whole[:length])
        with pytest.raises(RunFolderError):
            use(ended.path)


def test_a_record_of_before_they_were_sealed_is_refused_with_the_reason(ended):
    """One without a digest may as well be one whose digest was taken out."""
    for name in ("run.json", "summary.json"):
        record = json.loads((ended.path / name).read_text())
        del record["sha256"]
        before = (ended.path / name).read_bytes()
        write_json(ended.path / name, record)
        with pytest.raises(RunFolderError, match="has no SHA-256") as caught:
            use(ended.path)
        assert "train again" in caught.value.fix
        (ended.path / name).write_bytes(before)


@pytest.mark.parametrize("name", RECORDS)
def test_an_intact_record_of_another_run_is_refused(ended, tmp_path, name):
    changed = EXPERIMENT.model_copy(update={"seed": 9})
    other = RunFolder.create(tmp_path / "runs" / "two", changed, "local", "")
    other.finish({"test_accuracy": 1.0}, Ledger())
    other.evaluated({"test_accuracy": 1.0})
    (ended.path / name).write_bytes((other.path / name).read_bytes())
    with pytest.raises(RunFolderError):
        use(ended.path)


NOT_JSON = {"no UTF-8": b"\xff\xfe{", "cut": b'{"a": ', "nested": b"[" * 100_000, "empty": b""}


@pytest.mark.parametrize("content", NOT_JSON.values(), ids=NOT_JSON)
def test_what_is_no_json_is_a_typed_error(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content + b"\n")
    with pytest.raises(RunFolderError, match="not JSON") as caught:
        read_json(path)
    assert str(path) in caught.value.where
    with pytest.raises(RunFolderError, match="not JSON") as caught:
        list(read_lines(path))
    assert caught.value.where == f"{path}:1"
    with pytest.raises(RunFolderError, match="missing"):
        list(read_lines(tmp_path / "absent"))


@pytest.mark.parametrize("line", [b"[]\n", b"{}\n", b'{"epoch": "1"}\n', b"\xff\n"])
def test_an_epoch_does_not_follow_a_damaged_line(folder, line):
    (folder.path / "metrics.jsonl").write_bytes(line)
    with pytest.raises(RunFolderError, match=r"not a record|not JSON"):
        folder.epoch({"epoch": 1})


def test_a_run_that_goes_well(folder):
    for epoch in (1, 2):
        folder.epoch({"epoch": epoch, "train_loss": 1 / epoch})
    ledger = Ledger()
    ledger("bank", "up", Frame(Kind.CUT, 0, b"1234"))
    folder.finish({"test_accuracy": 0.5}, ledger)
    folder.evaluated({"test_accuracy": 0.25})
    assert [line["train_loss"] for line in read_lines(folder.path / "metrics.jsonl")] == [1.0, 0.5]
    assert folder.summary() == {"test_accuracy": 0.5, "run": str(folder.path)}
    found = folder.evaluation()
    assert found.pop("evaluated")
    assert found == {"test_accuracy": 0.25, "run": str(folder.path)}
    folder.evaluated({"test_accuracy": 0.75})
    assert [one["test_accuracy"] for one in folder.evaluations()] == [0.25, 0.75]
    assert read_json(folder.path / "summary.json")["test_accuracy"] == 0.5  # for people
    traffic = (folder.path / "traffic.csv").read_text()
    assert traffic.splitlines()[1] == "bank,up,train,1,4,20,0.0"


def test_a_moved_run_opens_and_is_where_it_is(ended, tmp_path):
    """No record of a run holds the path of the machine it was made on."""
    ended.finish({"test_accuracy": 0.5, "run": str(ended.path)}, Ledger())
    moved = ended.path.rename(tmp_path / "elsewhere")
    there = [path for path in moved.rglob("*") if path.is_file() and path.name != "run.json"]
    assert not any(str(tmp_path).encode() in path.read_bytes() for path in there)
    found = RunFolder.open(moved)
    assert {found.summary()["run"], found.evaluation()["run"]} == {str(moved)}


def test_the_environment_names_what_a_repetition_needs(monkeypatch):
    found = environment()
    assert found["vfl"] == VERSION
    assert {"python", "torch", "numpy", "flwr", "cores", "processor"} <= set(found)
    monkeypatch.setattr("vfl.config.run_folder._PACKAGES", ("no-such-package",))
    assert environment()["no-such-package"] == "not installed"
