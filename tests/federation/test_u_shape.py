"""A party in the middle on a real federation: `vfl init --middle`, then each party's command."""

import sys
import warnings

import numpy as np
import pandas as pd
import pytest
from dealt_project import free_ports
from real_deployment import Deployment, results
from sklearn.datasets import load_breast_cancer

from vfl.config import Experiment
from vfl.core.seeds import Secret
from vfl.core.storage import read_json
from vfl.federation.project import LabelFolder
from vfl.session.party_folder import INJECTED_SECRET
from vfl.training import run

with warnings.catch_warnings():  # importing typer uses what newer clicks deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    from vfl.cli import main

pytestmark = pytest.mark.net

FEATURES, NODES = ("bank", "shop"), ("bank", "shop", "compute")


def write(project, settings):
    """A project as `vfl init` writes it, with tables, free ports and secrets that repeat."""
    named = [word for name in FEATURES for word in ("--party", name)]
    words = ["vfl", "init", str(project), *named, "--label-party", "clinic", "--middle", "compute"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            main()
    assert not end.value.code
    port, stream, *nodes = free_ports(2 + len(NODES))
    app = project / "label" / "app" / "experiment.toml"
    text = app.read_text().replace(":8000", f":{port}").replace("= 8001", f"= {stream}")
    text = text.replace("join_timeout_s = 60.0", "join_timeout_s = 90.0")
    app.write_text(text.replace("checkpoint_every = 500", "checkpoint_every = 20"))
    cells, ids = load_breast_cancer(as_frame=True), [f"Zq8patient{n:04}" for n in range(569)]
    halves = np.array_split(np.array(cells.data.columns), 2)
    tables = dict(zip(FEATURES, (cells.data[list(own)] for own in halves), strict=True))
    tables["clinic"] = pd.DataFrame({"label": cells.target})
    for number, name in enumerate((*NODES, "clinic")):
        own = project / ("label" if name == "clinic" else name)
        Secret.of_simulation(0, name).keep_at(own / "store" / INJECTED_SECRET)
        if name in tables:
            tables[name].assign(id=ids).to_csv(own / "data.csv", index=False)
        if name in NODES:
            text = (own / "party.toml").read_text().replace(":8000", f":{port}")
            text = text.replace(f"api_port = {9094 + number}", f"api_port = {nodes[number]}")
            (own / "party.toml").write_text(text)
    return LabelFolder.find(project)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    started = Deployment(tmp_path_factory.mktemp("middle") / "project", sides=NODES, write=write)
    try:
        yield started.start()
    finally:
        started.close()


def alone(federation, folder):
    """The same training in one process."""
    experiment = federation.label.experiment(["train.epochs=3"])
    content = experiment.model_dump(mode="json", exclude_none=True)
    content["data"] |= {"source": str(federation.folder / "label/party.toml")}
    content["label"]["column"] = "label"
    for name in FEATURES:
        content["parties"][name]["source"] = str(federation.folder / name / "party.toml")
    run.train(Experiment.model_validate(content), folder, "alone")
    return folder / "alone"


def test_it_trains_evaluates_and_predicts_as_one_process_does(federation, tmp_path):
    checked = federation.ask("check", federation.folder)
    assert checked.wait() == 0, checked.said()
    assert "compute sees every cut and no label" in checked.said()
    training = federation.train("train.epochs=3")
    assert training.wait() == 0, training.said()
    done = federation.run(training)
    losses, weights, *_ = results(done)
    same = results(alone(federation, tmp_path))
    assert (losses, weights) == same[:2]
    summary = read_json(done / "summary.json")
    assert summary["test_accuracy"] > 0.85
    for what in ("evaluate", "predict"):
        asked = federation.ask(what, done)
        assert asked.wait() == 0, asked.said()
    assert read_json(done / "evaluation.json")["test_loss"] == summary["test_loss"]
    ids = pd.read_csv(done / "predictions.csv")["id"]
    assert len(ids) == 569
    own = federation.folder / "compute" / "store" / "runs" / done.name / "parties"
    card = read_json(own / "compute" / "card.json")
    assert card["role"] == "party in the middle"
    marked = [path for path in (federation.folder / "compute").rglob("*") if path.is_file()]
    assert not any(b"Zq8patient" in path.read_bytes() for path in marked)
    refused = federation.ask("serve", done)
    assert refused.wait() != 0
    assert "not served row by row" in refused.said()


def test_a_middle_that_dies_is_named_and_the_training_goes_on_later(federation):
    quick = ("train.epochs=60", "federation.max_restarts=0", "federation.rejoin_window_s=2.0")
    training = federation.train(*quick)
    training.wait_for("epoch 3")
    federation.kill("flwr-clientapp", "compute")
    assert training.wait() == 3, training.said()
    assert "party 'compute' went away" in training.last_words(), training.said()
    again = federation.train("train.epochs=60", resume=training)
    assert again.wait() == 0, again.said()
    assert read_json(federation.run(training) / "summary.json")["epochs"] == 60
