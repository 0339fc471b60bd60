"""The label party's Flower app: one run of `flwr run` is one session."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from vfl.config import Experiment, PartyFile, read_experiment, read_party_file
from vfl.datasets import PartyData
from vfl.errors import ConfigError, VFLError
from vfl.frame import Frame, Kind
from vfl.ledger import Ledger
from vfl.run_folder import RunFolder
from vfl.server.build import build_label_party
from vfl.server.federation import Federation
from vfl.server.label_party import LabelParty
from vfl.server.predictions import write_predictions
from vfl.server.summary import summarise
from vfl.session import PartyFolder, PartyReport, Terms
from vfl.session.own_data import own_data, own_folder, own_secret, run_path
from vfl.storage import joint_digest

PARTY_FILE_VARIABLE = "VFL_PARTY_FILE"
_COLLECT_S = 10.0


def server_app(folder: Path) -> ServerApp:
    """The ServerApp of a project.

    Args:
        folder: where the bundled ``experiment.toml`` lies.

    The label party's own file is named by the environment variable VFL_PARTY_FILE of the
    SuperLink, so that no path of the label party travels with the run.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        torch.set_num_threads(1)
        config = context.run_config
        overrides = json.loads(str(config["overrides"]))
        experiment = read_experiment(folder / "experiment.toml", overrides)
        party = read_party_file(_own_file(str(config["label-file"])))
        terms = Terms.of(experiment, str(config["mode"]), str(config["run"]))  # type: ignore[arg-type]
        run_session(grid, experiment, party, terms)

    return app


def run_session(grid: Grid, experiment: Experiment, party: PartyFile, terms: Terms) -> None:
    """One session at the label party, its run folder included.

    Raises:
        VFLError: told to every party that is still there, and left in the run folder.
    """
    path = run_path(party, terms)
    if terms.mode == "train":
        folder = RunFolder.create(path, experiment, "federated", "vfl train PROJECT")
    else:
        folder = RunFolder.open(path)
    try:
        data = own_data(party, terms, experiment.label.task)
        with Federation(grid, terms, experiment.federation, data, say=_say) as federation:
            label, reports = _play(federation, experiment, party, data, folder)
        federation.collect(_COLLECT_S)
        _conclude(folder, own_folder(party, terms), label, reports)
    except VFLError as problem:
        folder.fail(problem)
        _say(str(problem))
        raise


def _play(
    federation: Federation,
    experiment: Experiment,
    party: PartyFile,
    data: PartyData,
    folder: RunFolder,
) -> tuple[LabelParty, list[PartyReport]]:
    terms = federation.terms
    trains = terms.mode == "train"
    own = own_folder(party, terms)
    classes = data.classes if trains else own.classes()
    ledger = Ledger()
    label = build_label_party(
        data,
        terms,
        federation.join([ledger]),
        own_secret(party, terms),
        top=experiment.label.top,
        task=experiment.label.task,
        outputs=1 if classes is None else len(classes),
        ledger=ledger,
        weights=None if trains else own.weights(),
        on_epoch=folder.epoch if trains else lambda record: None,
    )
    label.run(terms.schedule(data.split))
    return label, _farewell(label)


def _own_file(named: str) -> Path:
    path = named or os.environ.get(PARTY_FILE_VARIABLE, "")
    if not path:
        raise ConfigError(
            "the label party's own file is not known",
            want=f"{PARTY_FILE_VARIABLE} in the environment of the SuperLink",
            fix="start it with: vfl superlink PROJECT",
        )
    return Path(path)


def _farewell(label: LabelParty) -> list[PartyReport]:
    """Every party's last word, and ours to them."""
    reports = [PartyReport.of(half.link.receive(), name) for name, half in label.halves.items()]
    for half in label.halves.values():
        half.link.send(Frame(Kind.DONE))
    return reports


def _conclude(
    folder: RunFolder, own: PartyFolder, label: LabelParty, reports: list[PartyReport]
) -> None:
    terms = label.terms
    digests = [(report.party, report.weights_sha256) for report in reports]
    weights = joint_digest([*digests, (label.data.name, label.weights_digest())])
    summary = summarise(label, weights, str(folder.path))
    if terms.mode == "predict":
        write_predictions(folder.path / "predictions.csv", label.data, label.outputs, own.classes())
        return
    if terms.mode == "evaluate":
        folder.evaluated(summary)
        return
    own.save(label.data, terms, label.weights())
    folder.finish(summary, label.ledger)


def _say(line: str) -> None:
    print(line, flush=True)
