"""Following a run of the federation with a stand-in for Flower's processes."""

import json

import pytest

from vfl.config import Experiment, PartyFile, read_party_file
from vfl.config.run_folder import PROGRESS, RunFolder
from vfl.core.errors import LostPeerError, PeerError, ProtocolError
from vfl.federation import deployment
from vfl.federation.project import write_project
from vfl.session.progress import ProgressReport
from vfl.training import federated

OWN_WORDS = "noise\nerror[V008]: full\n  got   no space\nTraceback\n  File x\n"

RAISED_IN_TWO = (
    "Traceback\n  File x\nOSError: the engine did not start\n\nTraceback\n  File y\n"
    "RuntimeError: crashed\n\nan exception occurred\n"
)


@pytest.fixture
def label(tmp_path):
    experiment = Experiment.model_validate({"parties": {"bank": {}}})
    content = {"data": {"source": "rows.csv", "id": "id"}}
    parties = {
        name: PartyFile.model_validate({"party": name, **content}) for name in ("bank", "label")
    }
    return write_project(tmp_path / "project", experiment, parties, "127.0.0.1")


@pytest.fixture
def follow(label, monkeypatch):
    """Follows a run while `submitted` plays the label party's process."""

    def run(
        submitted, state="running", resume=False, on_progress=lambda report: None, mode="train"
    ):
        path = read_party_file(label.party_file).run_path("one")
        monkeypatch.setattr(federated, "_TICK_S", 0.0)
        monkeypatch.setattr(federated, "_ASK_FLOWER_EVERY_S", -1.0)
        monkeypatch.setattr(deployment, "wait_for_superlink", lambda *_: None)
        monkeypatch.setattr(deployment, "submit", lambda *_: submitted(path))
        monkeypatch.setattr(deployment, "run_state", state if callable(state) else lambda *_: state)
        notes, epochs = [], []
        options = {"on_note": notes.append, "on_epoch": epochs.append, "resume": resume}
        options["on_progress"] = on_progress
        try:
            return federated.run_session(label, mode, "one", **options), notes, epochs
        except PeerError as error:
            return error, notes, epochs

    return run


@pytest.mark.parametrize(
    ("mode", "overrides", "patience_s"),
    [
        ("train", ["federation.join_timeout_s=3.0"], 3.0),
        ("align", ["federation.join_timeout_s=3.0"], 3.0),
        ("evaluate", ["beside=other", "explain=bank"], 60.0),
        ("predict", ["explain=bank"], 60.0),
        ("horizontal", ["clients=1", "sampled=1"], 60.0),
    ],
)
def test_only_settings_of_the_experiment_are_read_as_such(
    label, monkeypatch, mode, overrides, patience_s
):
    waited = []

    def wait(folder, patience_s, tell):
        waited.append(patience_s)
        raise LostPeerError("not here")

    monkeypatch.setattr(deployment, "wait_for_superlink", wait)
    with pytest.raises(LostPeerError):
        federated.run_session(label, mode, "one", overrides=overrides)
    assert waited == [patience_s]


def created(path, label):
    return RunFolder.create(path, label.experiment(), "federated", "vfl train PROJECT")


def test_notes_and_epochs_are_told_as_they_come(label, follow):
    def submitted(path):
        folder = created(path, label)
        folder.note("party bank is here")
        folder.epoch({"epoch": 1})
        (path / "summary.json").write_text("{}")

    _, notes, epochs = follow(submitted, "finished:completed")
    assert notes == ["party bank is here"]
    assert epochs == [{"epoch": 1}]


def test_progress_is_told_as_it_changes_and_torn_files_are_left_out(label, follow):
    told, states = [], []
    reports = [
        ProgressReport("train", waits_for=("bank",)),
        ProgressReport("train", (), 1, 2, 3, 10, 1.5, 48.0, 4.7),
    ]

    def running(*_):
        folder = RunFolder(read_party_file(label.party_file).run_path("one"))
        states.append(1)
        if len(states) <= 2:
            folder.progress(reports[len(states) - 1].record())
        elif len(states) == 3:
            (folder.path / PROGRESS).write_text('{"mode": "tr')
        else:
            (folder.path / "summary.json").write_text("{}")
        return "running" if len(states) < 5 else "finished:completed"

    follow(lambda path: created(path, label), running, on_progress=told.append)
    assert told == reports


def test_a_resumed_run_tells_only_what_is_new(label, follow):
    def lost(path):
        folder = created(path, label)
        folder.note("party bank is here")
        folder.epoch({"epoch": 1})
        folder.fail(LostPeerError("party 'bank' disconnected and did not reconnect"))

    error, _, _ = follow(lost, "finished:failed")
    assert "party 'bank' disconnected" in str(error)
    assert error.fix.startswith("vfl train PROJECT --resume ")

    def again(path):
        folder = RunFolder.reopen(path)
        folder.note("party bank is back")
        folder.epoch({"epoch": 2})
        (path / "summary.json").write_text("{}")

    _, notes, epochs = follow(again, "finished:completed", resume=True)
    assert notes == ["party bank is back"]
    assert epochs == [{"epoch": 2}]


def test_a_superlink_that_is_gone_ends_it_with_what_to_do(label, follow):
    def gone(*_):
        raise LostPeerError("the SuperLink cannot be reached", fix="start it")

    error, _, _ = follow(lambda path: created(path, label), gone)
    assert error.what == "the SuperLink cannot be reached"
    assert "with the SuperLink running: vfl train PROJECT --resume" in error.fix


@pytest.mark.parametrize(
    ("log", "where"),
    [
        (OWN_WORDS, "error[V008]: full | got   no space"),
        ("one\ntwo\nthree\nfour\n", "two | three | four"),
        (RAISED_IN_TWO, "OSError: the engine did not start"),
        ("", None),
    ],
)
def test_a_run_that_died_without_a_word_tells_the_end_of_its_log(
    label, follow, monkeypatch, log, where
):
    monkeypatch.setattr(deployment, "run_log", lambda *_: log)
    error, _, _ = follow(lambda path: created(path, label), "finished:failed")
    assert error.what == "the run ended without a result"
    assert error.where == where
    assert error.got == "Flower says finished:failed"
    kept = label.state / "run.log"
    assert str(kept) in error.fix
    assert kept.read_text() == log
    assert kept.stat().st_mode & 0o777 == 0o600


def test_hostile_text_of_a_run_is_one_harmless_line_each(label, follow):
    def failed(path):
        folder = created(path, label)
        folder.note("party \x1b[2J\nerror[V000]: \u202eall well")
        folder.fail(LostPeerError("gone\x1b[31m", got="\x9b" * 9000))

    error, notes, _ = follow(failed, "finished:failed")
    assert notes == ["party ?[2J error[V000]: ?all well"]
    assert error.what == "gone?[31m"
    assert all(line.isprintable() for line in str(error).split("\n"))
    assert len(str(error)) < 3000


def test_a_prediction_that_fails_does_not_end_a_service(label, follow):
    def serving(path):
        folder = created(path, label)
        folder.fail(LostPeerError("a party left the service"), "serve")
        folder.fail(LostPeerError("a party left the prediction"), "predict")

    error, _, _ = follow(serving, "finished:failed", mode="serve")
    assert error.what == "a party left the service"


@pytest.mark.parametrize(
    "text", ['{"code": 7}', "[]", '{"what": "x"}', '{"code": "V405", "what": "x", "got": {}}']
)
def test_a_failure_of_another_form_is_a_typed_error(label, follow, text):
    def failed(path):
        created(path, label)
        (path / "failure.json").write_text(text)

    error, _, _ = follow(failed, "finished:failed")
    assert isinstance(error, ProtocolError)
    assert error.where.endswith("failure.json")


@pytest.mark.parametrize("given", [None, "3", 0, -1, 10**9, 2.5])
def test_an_exit_code_that_is_none_becomes_1(label, follow, given):
    def failed(path):
        record = {"code": "V405", "what": "x", "exit": given}
        created(path, label)
        (path / "failure.json").write_text(json.dumps(record))

    error, _, _ = follow(failed, "finished:failed")
    assert error.exit_code == 1
