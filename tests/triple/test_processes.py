"""Three real processes over TLS: the same figures, and a typed end when one is killed."""

import json
import subprocess
import sys
import time

import pytest

from vfl.core.errors import (
    LostPeerError,
    MissingDataError,
    PeerFailedError,
    RingRangeError,
    RunFolderError,
)
from vfl.triple import crew, train_private
from vfl.triple import run as runs

pytestmark = pytest.mark.net


def test_processes_train_what_threads_train(tmp_path, experiment):
    cards = [
        train_private(
            experiment(),
            tmp_path / str(processes),
            hidden=(8,),
            processes=processes,
            weights_seed=0,
        )
        for processes in (False, True)
    ]
    threads, processes = cards
    assert processes["test_accuracy"] == threads["test_accuracy"]
    assert abs(processes["bytes_online"] - threads["bytes_online"]) < 500  # index lists differ
    assert processes["bytes_setup"] == threads["bytes_setup"]
    assert runs.infer_private(tmp_path / "True")["test_accuracy"] == threads["test_accuracy"]


@pytest.mark.parametrize("role", [0, 1, 2])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_party_that_is_gone_or_silent_ends_the_training(
    tmp_path, experiment, monkeypatch, role, how
):
    crews = []

    class Watched(runs.Crew):
        def __init__(self, jobs):
            super().__init__(jobs)
            crews.append(self)

    monkeypatch.setattr(runs, "Crew", Watched)
    when = []

    def first_epoch(figures):
        if not when:
            when.append(time.monotonic())
            process = crews[0].processes[role]
            process.kill() if how == "kill" else process.send_signal(19)  # SIGSTOP

    with pytest.raises(LostPeerError) as caught:
        train_private(experiment(epochs=10_000), tmp_path / "run", timeout_s=4, tell=first_epoch)
    did = "ended early" if how == "kill" else "neither goes on nor ends"
    assert caught.value.what == f"the process of P{role} {did}"
    assert caught.value.got == ("exit status -9" if how == "kill" else None)
    assert time.monotonic() - when[0] < 45
    assert all(process.poll() is not None for process in crews[0].processes)


@pytest.fixture
def started_as(tmp_path, monkeypatch):
    """Start the parties' processes by a script of one's own, which has Python's arguments."""

    def start(script):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(path))

    return start


def test_lines_of_somebody_else_are_passed_over(tmp_path, experiment, started_as):
    started_as(f"echo loading; printf '\\377 3%%\\n'; exec {sys.executable} \"$@\"")
    card = train_private(experiment(rows=100, epochs=1), tmp_path / "run")
    assert len(card["history"]) == 1


def test_what_a_library_prints_does_not_get_between_the_lines():
    program = """
import os, sys
from vfl.triple import worker
from vfl.triple.program import Outcome
def work(*arguments):
    print("half a line", end="")
    os.system("echo of a child")
    return Outcome()
worker.work = work
sys.exit(worker.main())
"""
    settings = {"parties": {"bank": {}, "shop": {}}, "label": {"party": "lender"}}
    job = {"role": 1, "join_s": 1, "experiment": settings | {"data": {"source": "breast_cancer"}}}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(job | {"terms": None, "timeout_s": 1}) + "\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert list(json.loads(ended.stdout)) == ["outcome"]
    assert "of a child" in ended.stderr


def test_a_process_that_only_closes_its_output_is_not_waited_for(
    tmp_path, experiment, monkeypatch, started_as
):
    started_as("exec >&-\nexec sleep 60")
    monkeypatch.setattr(crew, "_END_S", 0.5)
    started = time.monotonic()
    with pytest.raises(LostPeerError, match="ended early") as caught:
        train_private(experiment(), tmp_path / "run")
    assert caught.value.got == "no word more, while it still runs"
    assert time.monotonic() - started < 20


def test_a_slow_loader_is_waited_for_as_long_as_agreed(tmp_path, experiment, started_as):
    """One of the three takes longer than the others wait, or not."""
    slow = f"mkdir {tmp_path}/late && sleep 12"
    started_as(f'{slow}; exec {sys.executable} "$@"')
    with pytest.raises((LostPeerError, PeerFailedError)):
        train_private(experiment(rows=100, epochs=1), tmp_path / "short", join_s=2)
    (tmp_path / "late").rmdir()
    card = train_private(experiment(rows=100, epochs=1), tmp_path / "long", join_s=60)
    assert len(card["history"]) == 1


def test_parties_that_never_say_a_word_end_the_training(tmp_path, experiment, started_as):
    started_as("exec sleep 30")
    started = time.monotonic()
    with pytest.raises(LostPeerError, match="P0 and P1 and P2 neither goes on nor ends"):
        train_private(experiment(), tmp_path / "run", join_s=0.5)
    assert time.monotonic() - started < 20


def test_a_value_that_is_too_large_is_named_across_processes(tmp_path, experiment):
    with pytest.raises(RingRangeError) as caught:
        train_private(experiment(), tmp_path / "run", hidden=(8,), learning_rate=90.0)
    assert caught.value.where.startswith("layer") or caught.value.where.startswith("slope")


def test_what_a_process_cannot_read_is_told_as_threads_tell_it(tmp_path, experiment):
    asked = experiment(str(tmp_path / "gone.csv"))
    label = asked.label.model_copy(update={"column": "y"})
    with pytest.raises(MissingDataError):
        train_private(asked.model_copy(update={"label": label}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_there_is_no_place_for_a_run(tmp_path, experiment):
    with pytest.raises(RunFolderError, match="already") as caught:
        train_private(experiment(), tmp_path, processes=False)
    assert "--out" in caught.value.fix
