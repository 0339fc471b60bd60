"""A real deployment with one feature party and a third that deals: processes, TLS, keys."""

import socket
from contextlib import ExitStack

import pandas as pd
import pytest
from sklearn.datasets import load_digits

from vfl import deployment, federated, run
from vfl.config import Experiment, PartyFile, read_party_file
from vfl.project import write_project
from vfl.seeds import Secret
from vfl.session.own_data import INJECTED_SECRET
from vfl.storage import read_json, read_lines

NODES = ("bank", "notary")


def free_ports(count):
    with ExitStack() as held:
        found = []
        for _ in range(count):
            listener = held.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            found.append(listener.getsockname()[1])
    return found


@pytest.fixture(scope="module")
def experiment():
    port, stream_port = free_ports(2)
    return Experiment.model_validate(
        {
            "name": "notary",
            "merge": "sum",
            "secure": "beaver:dealer=notary",
            "parties": {"bank": {"width": 16, "bottom": "mlp:hidden=none"}},
            "label": {"party": "lender", "column": "digit"},
            "train": {"epochs": 3, "optimizer": "sgd", "momentum": 0, "learning_rate": 0.3},
            "federation": {
                "superlink": f"127.0.0.1:{port}",
                "stream_port": stream_port,
                "join_timeout_s": 180.0,
            },
        }
    )


@pytest.fixture(scope="module")
def deployed(tmp_path_factory, experiment):
    """The project with everything running."""
    folder = tmp_path_factory.mktemp("third-dealer") / "project"
    superlink, ports = experiment.federation.superlink, free_ports(len(NODES))
    table = {"source": "digits.parquet", "id": "id"}
    own = {"bank": {"data": table}, "notary": {"role": "dealer"}}
    for name, port in zip(NODES, ports, strict=True):
        own[name]["node"] = {"superlink": superlink, "api_port": port}
    own["lender"] = {"data": table | {"label": "digit"}}
    files = {
        name: PartyFile.model_validate({"party": name, **content}) for name, content in own.items()
    }
    label = write_project(folder, experiment, files, "127.0.0.1")
    digits = load_digits()
    ids = [f"image-{row:04d}" for row in range(len(digits.images))]
    pixels = {f"pixel_{place}": digits.data[:, place] for place in range(64)}
    for at, columns in ((folder / "bank", pixels), (label.path, {"digit": digits.target})):
        pd.DataFrame({"id": ids, **columns}).to_parquet(at / "digits.parquet", index=False)
        name = "bank" if at.name == "bank" else "lender"
        Secret.of_simulation(experiment.seed, name).keep_at(at / "store" / INJECTED_SECRET)
    with ExitStack() as services:
        services.callback(deployment.start_superlink(label).stop)
        assert deployment.register_nodes(label) == sorted(NODES)
        for name in NODES:
            file = folder / name / "party.toml"
            services.callback(deployment.start_supernode(read_party_file(file), file).stop)
        yield folder, label


@pytest.mark.net
def test_a_third_party_deals_what_one_process_computes(deployed, experiment, tmp_path):
    folder, label = deployed
    epochs = []
    path = federated.run_session(label, "train", "dealt", on_epoch=epochs.append)
    summary = federated.summary_of(path, "train")
    alone = experiment.model_dump(exclude_none=True)
    alone["data"] |= {"source": str(folder / "label" / "digits.parquet"), "id": "id"}
    alone["parties"]["bank"]["source"] = str(folder / "bank" / "digits.parquet")
    run.train(Experiment.model_validate(alone), tmp_path, "alone")
    same = read_json(tmp_path / "alone" / "summary.json")
    losses = [one["train_loss"] for one in read_lines(tmp_path / "alone" / "metrics.jsonl")]
    assert [one["train_loss"] for one in epochs] == losses
    for fact in ("test_loss", "test_accuracy", "bytes_up", "bytes_down"):
        assert summary[fact] == same[fact]
    assert summary["test_accuracy"] > 0.5
    assert not list((folder / "notary").rglob("*.safetensors")), "the dealer keeps nothing"
    federated.run_session(label, "evaluate", "dealt")
    assert federated.summary_of(path, "evaluate")["test_loss"] == summary["test_loss"]
    federated.run_session(label, "predict", "dealt")
    assert len(pd.read_csv(path / "predictions.csv")) == len(load_digits().target)
