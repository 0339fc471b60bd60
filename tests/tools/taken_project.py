"""A project on breast cancer of which a third party takes the cuts, as `vfl init` writes it."""

import numpy as np
import pandas as pd
from initialised import initialise
from sklearn.datasets import load_breast_cancer

from vfl.config import Experiment
from vfl.core.seeds import Secret
from vfl.session.store.party_folder import INJECTED_SECRET
from vfl.training import run

FEATURES, MARK = ("bank", "shop"), "Zq8patient"


def writer(third, *words, labels=()):
    """Writes the project with tables, free ports, and secrets that repeat.

    Args:
        third: the party that takes cuts.
        words: arguments of `vfl init` about it.
        labels: labels of a further label party.
    """

    def write(project, settings):
        named = [word for name in FEATURES for word in ("--party", name)]
        nodes = (*FEATURES, third)
        made = initialise(project, nodes, *named, "--label-party", "clinic", *words)
        app = project / "label" / "app" / "experiment.toml"
        text = app.read_text()
        app.write_text(text.replace("checkpoint_every = 500", "checkpoint_every = 20"))
        cells = load_breast_cancer(as_frame=True)
        halves = np.array_split(np.array(cells.data.columns), 2)
        tables = dict(zip(FEATURES, (cells.data[list(own)] for own in halves), strict=True))
        tables["clinic"] = pd.DataFrame({"label": cells.target})
        if len(labels):
            tables[third] = pd.DataFrame({"label": labels})
        for name in (*nodes, "clinic"):
            own = project / ("label" if name == "clinic" else name)
            Secret.of_simulation(0, name).keep_at(own / "store" / INJECTED_SECRET)
            if name in tables:
                ids = [f"{MARK}{row:04}" for row in range(len(cells.target))]
                tables[name].assign(id=ids).to_csv(own / "data.csv", index=False)
        return made

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
