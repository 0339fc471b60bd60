"""A real deployment with one feature party and a third that deals: processes, TLS, keys."""

import time
from contextlib import ExitStack

import dealt_project
import pandas as pd
import process_table
import pytest
from dealt_project import NODES
from sklearn.datasets import load_digits

from vfl.config import read_party_file
from vfl.config.run_folder import RunFolder
from vfl.core.errors import PeerError
from vfl.federation import deployment
from vfl.training import federated

pytestmark = pytest.mark.net


@pytest.fixture(scope="module")
def experiment():
    return dealt_project.settings()


@pytest.fixture(scope="module")
def deployed(tmp_path_factory, experiment):
    """The project with everything running."""
    folder = tmp_path_factory.mktemp("third-dealer") / "project"
    label = dealt_project.write(folder, experiment)
    with ExitStack() as services:
        environment = services.enter_context(pytest.MonkeyPatch.context())
        environment.setenv(process_table.MARK, str(folder))
        services.callback(deployment.start_superlink(label).stop)
        assert deployment.register_nodes(label) == sorted(NODES)
        for name in NODES:
            file = folder / name / "party.toml"
            services.callback(deployment.start_supernode(read_party_file(file), file).stop)
        yield folder, label


def test_a_third_party_deals_what_one_process_computes(deployed, experiment, tmp_path):
    folder, label = deployed
    epochs = []
    path = federated.run_session(label, "train", "dealt", on_epoch=epochs.append)
    summary = RunFolder.open(path).summary()
    same, losses = dealt_project.alone(folder, experiment, tmp_path)
    assert [one["train_loss"] for one in epochs] == losses
    for fact in ("test_loss", "test_accuracy", "bytes_up", "bytes_down", "trust", "revealed"):
        assert summary[fact] == same[fact]
    assert summary["test_accuracy"] > 0.5
    assert not list((folder / "notary").rglob("*.safetensors")), "the dealer keeps nothing"
    federated.run_session(label, "evaluate", "dealt")
    assert RunFolder.open(path).evaluation()["test_loss"] == summary["test_loss"]
    federated.run_session(label, "predict", "dealt")
    assert len(pd.read_csv(path / "predictions.csv")) == len(load_digits().target)


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_dealer_killed_in_the_middle(deployed, restarts):
    """It is named, and nothing hangs; where it may come back, training goes on with new keys."""
    folder, label = deployed
    killed, notes, epochs = [], [], []
    overrides = ["train.epochs=40", f"federation.max_restarts={restarts}",
                 "federation.rejoin_window_s=2.0"]  # fmt: skip

    def kill(record):
        epochs.append(record)
        if not killed and record["epoch"] >= 3:
            killed.append(time.monotonic())
            process_table.kill(folder, "flwr-clientapp", "notary")

    def trained():
        name = f"killed-{restarts}"
        return federated.run_session(
            label, "train", name, overrides=overrides, on_epoch=kill, on_note=notes.append
        )

    if restarts:
        summary = RunFolder.open(trained()).summary()
        assert "party 'notary' went away and did not come back; restart 1 of 1" in "\n".join(notes)
        assert summary["epochs"] == 40
        assert summary["test_accuracy"] > 0.9
    else:
        with pytest.raises(PeerError, match="party 'notary' went away") as caught:
            trained()
        assert caught.value.code == "V405"
        assert time.monotonic() - killed[0] < 60
        assert len(epochs) < 40
