"""`vfl status` and the line of progress of a real federation, from nobody there to the end."""

import json
import subprocess
import sys
import time

import pytest
from real_deployment import Deployment

pytestmark = pytest.mark.net


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    started = Deployment(tmp_path_factory.mktemp("status") / "project", "train.epochs=100")
    try:
        yield started
    finally:
        started.close()


def status(path):
    """What it says for machines, and its exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "vfl", "status", str(path), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout), done.returncode


def until(path, state, timeout_s=90.0):
    """The status of a run once it is in that state."""
    deadline = time.monotonic() + timeout_s
    while True:
        told, code = status(path)
        if told["state"] == state and (state != "training" or told["progress"]["per_second"]):
            return told, code
        assert told["state"] != "failed", told
        assert time.monotonic() < deadline, told


def test_a_federation_is_visible_from_its_start_to_its_end(federation):
    assert status(federation.folder)[1] == 3
    training = federation.train()
    training.wait_for("waiting up to 90 s for the SuperLink, which vfl up ")  # it comes later
    federation.start_superlink()
    federation.start_supernode("left")
    federation.nodes["left"].wait_for("is connected")
    told, code = status(federation.folder)
    assert (told["parties"], code) == ({"left": True, "right": False}, 3)
    training.wait_for("ing run ")
    run = federation.run(training)
    while not run.exists():
        time.sleep(0.1)
    told, code = until(run, "waiting")
    assert (told["progress"]["waits_for"], code) == (["right"], 4)
    federation.start_supernode("right")
    told, code = until(run, "training")
    assert code == 4
    assert 0 < told["progress"]["done"] < told["progress"]["total"]
    assert told["progress"]["left_s"] > 0
    assert "train: waiting for " in training.said() or "of 100:" in training.said()
    (only,) = status(federation.folder)[0]["runs"]
    assert only["state"] == "training"
    federation.kill("flwr-serverapp", "label")
    told, code = until(run, "interrupted")
    assert code == 5
    assert told["then"] == [f"vfl train {federation.label.path} --resume {run}"]
