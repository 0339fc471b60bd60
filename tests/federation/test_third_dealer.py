"""A real deployment with one feature party and a third that deals: processes, TLS, keys."""

from contextlib import ExitStack

import dealt_project
import pandas as pd
import process_table
import pytest
from dealt_project import NODES
from sklearn.datasets import load_digits

from vfl.config import read_party_file
from vfl.config.run_folder import RunFolder
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
