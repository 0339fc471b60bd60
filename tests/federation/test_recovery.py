"""Processes that die: the training goes on from its last checkpoint, to the same weights."""

import os
import signal
import time
from pathlib import Path

import pytest

from vfl import federated
from vfl.demo import run_in_process
from vfl.errors import PeerError
from vfl.storage import read_json

LONG = ["train.epochs=60", "train.checkpoint_every=200"]


def processes():
    """(process id, parent's id, command line) of everything that runs."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = entry.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode()
            status = entry.joinpath("stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        yield int(entry.name), int(status[1]), command


def client_app_of(folder, party):
    """Process id of the ClientApp below a party's SuperNode."""
    table = list(processes())
    parent = {pid: above for pid, above, _ in table}
    file = str((folder / party / "party.toml").resolve())
    (node,) = [
        pid for pid, _, command in table if "flower-supernode" in command and file in command
    ]
    for pid, _, command in table:
        ancestor = pid if "flwr-clientapp" in command else 0
        while ancestor in parent and ancestor != node:
            ancestor = parent[ancestor]
        if ancestor == node:
            return pid
    raise AssertionError(f"no ClientApp of {party} is running")


class Killing:
    """Kills a party's ClientApp at the end of some epochs."""

    def __init__(self, folder, party, epochs):
        self.folder, self.party, self.epochs = folder, party, set(epochs)
        self.killed = 0
        self.at = None

    def __call__(self, record):
        if record["epoch"] in self.epochs:
            self.epochs.discard(record["epoch"])
            os.kill(client_app_of(self.folder, self.party), signal.SIGKILL)
            self.killed += 1
            self.at = time.monotonic()


@pytest.mark.net
def test_a_killed_client_app_comes_back_and_changes_nothing(deployed):
    folder, label = deployed
    killing = Killing(folder, "right", [20])
    path = federated.run_session(label, "train", "killed", overrides=LONG, on_epoch=killing)
    assert killing.killed == 1
    alone = run_in_process(folder, label, lambda record: None, overrides=LONG)
    recovered, same = (read_json(run / "summary.json") for run in (path, alone))
    assert recovered["weights_sha256"] == same["weights_sha256"]
    assert recovered["bytes_up"] == same["bytes_up"]


@pytest.mark.net
def test_a_run_that_gave_up_is_resumed(deployed):
    folder, label = deployed
    never = [*LONG, "federation.max_restarts=0"]
    killing = Killing(folder, "left", [20])
    with pytest.raises(PeerError, match="left"):
        federated.run_session(label, "train", "given-up", overrides=never, on_epoch=killing)
    time.sleep(60)  # Flower frees the node when the dead process's token lapses
    path = federated.run_session(
        label, "train", "given-up", overrides=never, extra={"resume": True}
    )
    alone = run_in_process(folder, label, lambda record: None, overrides=LONG)
    resumed, same = (read_json(run / "summary.json") for run in (path, alone))
    assert resumed["weights_sha256"] == same["weights_sha256"]
