"""A project on breast cancer of which a third party takes the cuts, as `vfl init` writes it."""

import sys
import warnings

import numpy as np
import pandas as pd
import pytest
from dealt_project import free_ports
from sklearn.datasets import load_breast_cancer

from vfl.config import Experiment
from vfl.core.seeds import Secret
from vfl.federation.project import LabelFolder
from vfl.session.party_folder import INJECTED_SECRET
from vfl.training import run

with warnings.catch_warnings():  # importing typer uses what newer clicks deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    from vfl.cli import main

FEATURES, MARK = ("bank", "shop"), "Zq8patient"


def writer(third, *words, labels=()):
    """Writes the project with tables, free ports, and secrets that repeat.

    Args:
        third: the party that takes cuts.
        words: what `vfl init` is told of it.
        labels: of a further label party.
    """

    def write(project, settings):
        named = [word for name in FEATURES for word in ("--party", name)]
        line = ["vfl", "init", str(project), *named, "--label-party", "clinic", *words]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", line)
            with pytest.raises(SystemExit) as end:
                main()
        assert not end.value.code
        nodes = (*FEATURES, third)
        port, stream, *ports = free_ports(2 + len(nodes))
        app = project / "label" / "app" / "experiment.toml"
        text = app.read_text().replace(":8000", f":{port}").replace("= 8001", f"= {stream}")
        text = text.replace("join_timeout_s = 60.0", "join_timeout_s = 90.0")
        app.write_text(text.replace("checkpoint_every = 500", "checkpoint_every = 20"))
        cells = load_breast_cancer(as_frame=True)
        halves = np.array_split(np.array(cells.data.columns), 2)
        tables = dict(zip(FEATURES, (cells.data[list(own)] for own in halves), strict=True))
        tables["clinic"] = pd.DataFrame({"label": cells.target})
        if len(labels):
            tables[third] = pd.DataFrame({"label": labels})
        for number, name in enumerate((*nodes, "clinic")):
            own = project / ("label" if name == "clinic" else name)
            Secret.of_simulation(0, name).keep_at(own / "store" / INJECTED_SECRET)
            if name in tables:
                ids = [f"{MARK}{row:04}" for row in range(len(cells.target))]
                tables[name].assign(id=ids).to_csv(own / "data.csv", index=False)
            if name in nodes:
                text = (own / "party.toml").read_text().replace(":8000", f":{port}")
                text = text.replace(f"api_port = {9094 + number}", f"api_port = {ports[number]}")
                (own / "party.toml").write_text(text)
        return LabelFolder.find(project)

    return write


def alone(federation, folder, *settings):
    """The same training in one process; its run."""
    content = federation.label.experiment(settings).model_dump(mode="json", exclude_none=True)
    content["data"] |= {"source": str(federation.folder / "label/party.toml")}
    content["label"]["column"] = "label"
    for name in FEATURES:
        content["parties"][name]["source"] = str(federation.folder / name / "party.toml")
    for task in content.get("tasks", ()):
        source = federation.folder / task["party"] / "party.toml"
        task |= {"column": "label", "source": str(source)}
    run.train(Experiment.model_validate(content), folder, "alone")
    return folder / "alone"
