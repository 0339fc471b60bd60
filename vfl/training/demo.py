"""The demo: a real federation; two parties hold halves of digit images, a third the labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vfl.config import Experiment, PartyFile, read_party_file, with_overrides
from vfl.config.run_folder import new_run_name
from vfl.core.processes import Service
from vfl.core.seeds import Secret, permutation
from vfl.core.storage import write_bytes
from vfl.datasets.sources.scikit_learn import read_digits
from vfl.federation import deployment
from vfl.federation.project import LabelFolder, write_project
from vfl.session.store.party_folder import INJECTED_SECRET
from vfl.training import federated, run
from vfl.transport.probe import free_ports

_SIDES = ("left", "right")
Say = Callable[[str], None]


def write_demo(folder: Path, overrides: Sequence[str] = ()) -> LabelFolder:
    """Write the demo's project: a folder for every party, with the party's data and party file.

    Each party's table has the rows in a different order; rows are matched by id.
    """
    label_port, stream_port, *node_ports = free_ports(2 + len(_SIDES))
    superlink = f"127.0.0.1:{label_port}"
    draft = Experiment.model_validate(
        {
            "name": "digits",
            "parties": {
                side: {"width": 32, "bottom": "mlp:hidden=128,dropout=0.2"} for side in _SIDES
            },
            "label": {"party": "label", "column": "digit", "top": "mlp:hidden=64"},
            "train": {"epochs": 25, "learning_rate": 0.002, "weight_decay": 0.001},
            "federation": {"superlink": superlink, "stream_port": stream_port},
        }
    )
    experiment = with_overrides(draft, overrides)
    own: dict[str, dict[str, Any]] = {
        side: {
            "node": {"superlink": superlink, "api_port": port},
            "consent": {"modes": ["train", "evaluate", "predict", "serve"]},
        }
        for side, port in zip(_SIDES, node_ports, strict=True)
    }
    own["label"] = {"data": {"label": "digit"}}
    parties = {
        name: PartyFile.model_validate(
            {
                "party": name,
                **settings,
                "data": {"source": "digits.parquet", "id": "id"} | settings.get("data", {}),
            }
        )
        for name, settings in own.items()
    }
    label = write_project(folder, experiment, parties, "127.0.0.1")
    for name, table in _tables().items():
        write_bytes(folder / name / "digits.parquet", table.to_parquet(index=False))
        # The seed determines the secret, so that the demo is repeatable; real parties let vfl
        # generate their secrets.
        Secret.of_simulation(experiment.seed, name).keep_at(
            folder / name / "store" / INJECTED_SECRET
        )
    return label


def run_federated(folder: Path, label: LabelFolder, say: Say, on_epoch: Any) -> Path:
    """Start SuperLink and SuperNodes, train, and then stop these processes."""
    with ExitStack() as services:
        say("starting the SuperLink (TLS, node authentication, database file)")
        services.callback(deployment.start_superlink(label).stop)
        deployment.register_nodes(label)
        say(f"starting the SuperNodes of parties {' and '.join(_SIDES)}")

        together = services.enter_context(ThreadPoolExecutor(len(_SIDES)))
        nodes = list[Service]()
        services.callback(lambda: list(together.map(Service.stop, nodes)))

        def start(side: str) -> None:
            file = folder / side / "party.toml"
            nodes.append(deployment.start_supernode(read_party_file(file), file))

        list(together.map(start, _SIDES))
        say("submitting the run")
        run = federated.run_session(label, "train", new_run_name("digits"), on_epoch=on_epoch)
        say("stopping the SuperNodes and the SuperLink")
        return run


def run_in_process(
    folder: Path, label: LabelFolder, on_epoch: Any, overrides: Sequence[str] = ()
) -> Path:
    """Run the same experiment on the same files with all parties in this process."""
    experiment = label.experiment(overrides)
    parties = {
        side: party.model_copy(update={"source": str(folder / side / "digits.parquet")})
        for side, party in experiment.parties.items()
    }
    data = experiment.data.model_copy(
        update={"source": str(folder / "label" / "digits.parquet"), "id": "id"}
    )
    whole = experiment.model_copy(update={"parties": parties, "data": data})
    name = new_run_name("digits")
    run.train(whole, folder / "runs", name, command="vfl demo --in-process", on_epoch=on_epoch)
    return folder / "runs" / name


def _tables() -> dict[str, pd.DataFrame]:
    """Return left halves, right halves and labels of the digits, in different row orders."""
    pictures, digits = read_digits()
    rows = len(digits)
    ids = [f"image-{row:04d}" for row in range(rows)]
    halves = {"left": range(4), "right": range(4, 8)}
    tables: Mapping[str, dict[str, np.ndarray]] = {
        side: {f"pixel_{y}_{x}": pictures[:, y, x] for y in range(8) for x in columns}
        for side, columns in halves.items()
    } | {"label": {"digit": digits}}
    return {
        name: pd.DataFrame({"id": ids, **columns}).iloc[permutation(0, rows, "demo", name)]
        for name, columns in tables.items()
    }
