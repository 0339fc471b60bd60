"""A project on digits with one feature party and a third that deals, every party's folder in it."""

import socket
from contextlib import ExitStack

import pandas as pd
from sklearn.datasets import load_digits

from vfl.config import Experiment, PartyFile
from vfl.core.seeds import Secret
from vfl.core.storage import read_json, read_lines
from vfl.federation.project import write_project
from vfl.session.store.party_folder import INJECTED_SECRET
from vfl.training import run

NODES = ("bank", "notary")


def free_ports(count):
    with ExitStack() as held:
        found = []
        for _ in range(count):
            listener = held.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            found.append(listener.getsockname()[1])
    return found


def settings():
    """The experiment, at addresses that are free."""
    port, stream_port = free_ports(2)
    return Experiment.model_validate(
        {
            "name": "notary",
            "merge": "sum",
            "secure": "beaver:dealer=notary",
            "parties": {"bank": {"width": 16, "bottom": "mlp:hidden=none"}},
            "label": {"party": "lender", "column": "digit"},
            "train": {
                "epochs": 3,
                "optimizer": "sgd",
                "momentum": 0,
                "learning_rate": 0.3,
                "checkpoint_every": 20,
            },
            "federation": {
                "superlink": f"127.0.0.1:{port}",
                "stream_port": stream_port,
                "join_timeout_s": 180.0,
            },
        }
    )


def write(folder, experiment):
    """The label party's part of the project."""
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
    return label


def alone(folder, experiment, runs):
    """Summary and losses of the same training in one process."""
    content = experiment.model_dump(exclude_none=True)
    content["data"] |= {"source": str(folder / "label" / "digits.parquet"), "id": "id"}
    content["parties"]["bank"]["source"] = str(folder / "bank" / "digits.parquet")
    run.train(Experiment.model_validate(content), runs, "alone")
    losses = [one["train_loss"] for one in read_lines(runs / "alone" / "metrics.jsonl")]
    return read_json(runs / "alone" / "summary.json"), losses
