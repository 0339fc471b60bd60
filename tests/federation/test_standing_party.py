"""Parties that stand: sessions are forks of their workers, and what is killed comes back."""

import time
from pathlib import Path

import process_table
import pytest
from real_deployment import Deployment, results

from vfl.federation import workers
from vfl.training import demo

pytestmark = pytest.mark.net


@pytest.fixture(scope="module")
def standing(tmp_path_factory):
    started = Deployment(tmp_path_factory.mktemp("standing") / "project", "train.epochs=3")
    try:
        yield started.start()
    finally:
        started.close()


@pytest.fixture(scope="module")
def alone(standing):
    return results(demo.run_in_process(standing.folder, standing.label, lambda record: None))


def worker_of(standing, owner, instead_of=None):
    """Process id of a party's worker, once it stands."""
    for _ in range(600):
        pid = process_table.find(standing.folder, workers.NAME, owner)
        if pid not in (None, instead_of):
            return pid
        time.sleep(0.1)
    raise AssertionError(f"no worker of {owner}")


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_the_processes_of_a_session_are_forks_of_the_workers(standing, alone):
    pids = {owner: worker_of(standing, owner) for owner in ("label", "left", "right")}
    training = standing.train("train.epochs=40")
    training.wait_for("epoch   2")
    for owner, program in (("left", "flwr-clientapp"), ("label", "flwr-serverapp")):
        process = process_table.find(standing.folder, program, owner)
        assert parent_of(process) == pids[owner]
    assert training.wait() == 0, training.said()
    assert {owner: worker_of(standing, owner) for owner in pids} == pids


@pytest.mark.parametrize("owner", ["left", "label"])
def test_a_worker_that_is_killed_is_started_again(standing, alone, owner):
    party = standing.superlink if owner == "label" else standing.nodes[owner]
    before, old = len(party.said()), worker_of(standing, owner)
    process_table.kill(standing.folder, workers.NAME, owner)
    # At once: the session that comes meanwhile starts the long way, or waits for the new one.
    assert finish(standing, standing.train()) == alone
    party.wait_for("the standing worker ended (exit -9); starting it again", after=before)
    worker_of(standing, owner, instead_of=old)
    assert finish(standing, standing.train()) == alone


def test_a_session_outlives_the_workers_it_came_from(standing):
    settings = ["train.epochs=40"]
    alone = results(
        demo.run_in_process(standing.folder, standing.label, lambda record: None, settings)
    )
    training = standing.train(*settings)
    training.wait_for("epoch   2")
    for owner in ("right", "label"):
        process_table.kill(standing.folder, workers.NAME, owner)
    assert finish(standing, training) == alone


def finish(standing, training):
    """Let a training end well at everybody, with what is said of workers between; what it gave."""
    assert training.wait() == 0, training.said()
    run = standing.run(training)
    for node in standing.nodes.values():
        node.wait_for(f"has completed its part of {run.name}")
    return results(run)


@pytest.mark.parametrize("owner", ["right", "label"])
def test_a_superexec_that_is_killed_is_started_again(standing, alone, owner):
    party = standing.superlink if owner == "label" else standing.nodes[owner]
    before = len(party.said())
    process_table.kill(standing.folder, "flower-superexe", owner)  # Linux keeps 15 letters
    party.wait_for("SuperExec ended (exit 1); starting it again", after=before)
    assert finish(standing, standing.train()) == alone


def test_train_evaluate_and_predict_are_run_by_the_label_partys_worker(standing, alone):
    """A command that finds no worker does the same, but has to import torch for it."""
    worker_of(standing, "label")
    training = standing.train()
    assert finish(standing, training) == alone
    run = standing.run(training)
    for mode in ("evaluate", "predict"):
        command = standing.command(mode, mode, run)
        highest = 0
        while command.poll() is None:
            highest = max(highest, command.resident_bytes())
            time.sleep(0.01)
        assert command.wait() == 0, command.said()
        assert 0 < highest < 100e6
