"""Rows that nobody shows on a real deployment: three holders and a dealer, processes, TLS, keys.

Noise and masks are new in every session, so that two trainings differ by noise, which is little
here, and by units of the fixed point.
"""

from contextlib import ExitStack

import pandas as pd
import process_table
import pytest
import torch
from dealt_project import free_ports
from safetensors.torch import load_file
from sklearn.datasets import load_digits

from vfl.config import Experiment, PartyFile, read_party_file
from vfl.config.run_folder import RunFolder
from vfl.core.seeds import Secret
from vfl.core.storage import read_json
from vfl.federation import deployment
from vfl.federation.project import write_project
from vfl.session.store.party_folder import INJECTED_SECRET
from vfl.training import federated, run

pytestmark = pytest.mark.net

HOLDERS = ("north", "east", "south")
NODES = ("east", "south", "notary")
SOURCE = "digits.parquet"


def settings():
    port, stream_port = free_ports(2)
    return Experiment.model_validate(
        {
            "name": "pea",
            "secure": "pea:dealer=notary",
            "data": {"validation": 0},
            "parties": {name: {"bottom": "identity"} for name in HOLDERS},
            "label": {"party": "north", "top": "linear", "column": "digit"},
            "train": {
                "epochs": 4,
                "batch_size": 256,
                "optimizer": "sgd",
                "momentum": 0,
                "learning_rate": 0.5,
                "checkpoint_every": 4,
            },
            "dp": {"noise": 0.01, "clip": 2.0, "delta": 1e-5},
            "federation": {
                "superlink": f"127.0.0.1:{port}",
                "stream_port": stream_port,
                "join_timeout_s": 180.0,
            },
        }
    )


@pytest.fixture(scope="module")
def experiment():
    return settings()


@pytest.fixture(scope="module")
def deployed(tmp_path_factory, experiment):
    """The project with everything running, and each holder's rows in its own folder."""
    folder = tmp_path_factory.mktemp("pea") / "project"
    superlink, table = experiment.federation.superlink, {"source": SOURCE, "id": "id"}
    own = {name: {"data": table | {"label": "digit"}} for name in HOLDERS}
    own["notary"] = {"role": "dealer"}
    for name, port in zip(NODES, free_ports(len(NODES)), strict=True):
        own[name]["node"] = {"superlink": superlink, "api_port": port}
    files = {
        name: PartyFile.model_validate({"party": name, **content}) for name, content in own.items()
    }
    label = write_project(folder, experiment, files, "127.0.0.1")
    digits = load_digits()
    rows = pd.DataFrame(digits.data, columns=[f"pixel_{place}" for place in range(64)])
    rows.insert(0, "id", [f"image-{row:04d}" for row in range(len(rows))])
    rows["digit"] = digits.target
    places = {"north": label.path, "east": folder / "east", "south": folder / "south"}
    for start, name in enumerate(HOLDERS):
        rows[start::3].to_parquet(places[name] / SOURCE, index=False)
    # Rows are drawn by the label party's secret and the name of the run.
    Secret.of_simulation(experiment.seed, "north").keep_at(label.path / "store" / INJECTED_SECRET)
    with ExitStack() as services:
        environment = services.enter_context(pytest.MonkeyPatch.context())
        environment.setenv(process_table.MARK, str(folder))
        services.callback(deployment.start_superlink(label).stop)
        assert deployment.register_nodes(label) == sorted(NODES)
        for name in NODES:
            file = folder / name / "party.toml"
            services.callback(deployment.start_supernode(read_party_file(file), file).stop)
        yield folder, label, places


def models(path, places):
    """What each holder keeps of a run."""
    stores = [at / "store" / "runs" / path.name / "parties" / name for name, at in places.items()]
    stores[0] = path / "parties" / "north"
    return [model for at in stores for model in load_file(at / "weights.safetensors").values()]


def test_holders_train_what_one_process_trains(deployed, experiment, tmp_path):
    folder, label, places = deployed
    path = federated.run_session(label, "train", experiment.name)
    summary = RunFolder.open(path).summary()
    content = experiment.model_dump(exclude_none=True)
    content["data"] |= {"source": str(places["north"] / SOURCE), "id": "id"}
    for name, at in places.items():
        content["parties"][name]["source"] = str(at / SOURCE)
    run.train(Experiment.model_validate(content), tmp_path, "joint")
    same = read_json(tmp_path / "joint" / "summary.json")
    assert summary["test_accuracy"] == pytest.approx(same["test_accuracy"], abs=0.01)
    assert summary["test_accuracy"] > 0.8
    for fact in ("trust", "privacy", "steps"):
        assert summary[fact] == same[fact]
    for way in ("bytes_up", "bytes_down"):  # but for the text of seconds in last words
        assert summary[way] == pytest.approx(same[way], abs=20)
    sent = {each["receiver"]: each["frames"] for each in summary["traffic"]}
    assert sent == {
        each["receiver"]: each["frames"] for each in same["traffic"] if each["party"] == "north"
    }
    found = models(path, places)
    assert all(torch.equal(other, found[0]) for other in found[1:]), "the model of all, bit by bit"
    alone = load_file(tmp_path / "joint" / "parties" / "east" / "weights.safetensors")["weight"]
    assert (found[0] - alone).abs().max() < 0.02 * alone.abs().max()
    assert not list((folder / "notary").rglob("*.safetensors")), "the dealer keeps nothing"
    federated.run_session(label, "evaluate", experiment.name)
    assert RunFolder.open(path).evaluation()["test_loss"] == summary["test_loss"]
    federated.run_session(label, "predict", experiment.name)
    assert len(pd.read_csv(path / "predictions.csv")) == 599
