"""What a session would do: the facts `vfl check` shows. Counts and names, never a cell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vfl import compression, defenses, models
from vfl.config import Experiment, read_experiment, read_party_file
from vfl.datasets import Split
from vfl.project import LabelFolder
from vfl.run import load_data
from vfl.session import Terms
from vfl.session.consent import expected_bytes
from vfl.session.own_data import own_data
from vfl.session.schedule import steps_per_epoch


def of_experiment(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Check an in-process experiment with its data.

    Raises:
        UserError: everything that would stop a training before its first step.
    """
    experiment = read_experiment(path, overrides)
    facts = check_specs(experiment)
    data = load_data(experiment)
    split = data[experiment.label.party].split
    columns = {
        name: "x".join(map(str, own.inputs.shape[1:]))
        for name, own in data.items()
        if own.inputs is not None
    }
    return facts | _rows(split) | {"inputs": columns} | _traffic(experiment, split)


def of_project(label: LabelFolder) -> dict[str, Any]:
    """Check a project at the label party: its own data and what each party will be asked for."""
    experiment = label.experiment()
    facts = check_specs(experiment)
    party = read_party_file(label.party_file)
    terms = Terms.of(experiment, "train", experiment.name)
    split = own_data(party, terms, experiment.label.task).split
    registered = sorted(key.stem for key in label.keys.glob("*.pub"))
    return facts | _rows(split) | {"keys_of": registered} | _traffic(experiment, split)


def of_party_file(path: Path) -> dict[str, Any]:
    """Check a party's own file, its table and its consent."""
    party = read_party_file(path)
    draft = Experiment.model_validate(
        {"parties": {"other" if party.data.label else party.party: {}}}
    )
    data = own_data(party, Terms.of(draft, "train", "check"), "classification")
    consent = party.consent.model_dump(mode="json")
    inputs = None if data.inputs is None else "x".join(map(str, data.inputs.shape[1:]))
    return {"party": party.party, "rows": data.rows, "inputs": inputs, "consent": consent}


def check_specs(experiment: Experiment) -> dict[str, Any]:
    """Build every plug-in the experiment names, so that a wrong spec is told before anything runs.

    Raises:
        SpecError: with the nearest known name or option, or the widths that would fit.
    """
    codec = compression.make(experiment.codec)
    for name in experiment.feature_parties:
        codec.check(experiment.parties[name].width)
    for party in experiment.parties.values():
        models.make_bottom(party.bottom)
    models.make_top(experiment.label.top)
    promises = [promise.against for promise in defenses.make(experiment.defense).privacy()]
    width = experiment.parties[experiment.feature_parties[0]].width
    return {
        "parties": ", ".join(experiment.feature_parties),
        "label_party": experiment.label.party,
        "codec": experiment.codec,
        "formula_ratio": round(codec.formula_ratio(width), 5),
        "defense": experiment.defense,
        "privacy": "; ".join(promises) or "promises nothing",
    }


def _rows(split: Split) -> dict[str, Any]:
    parts = {"train": split.train, "validation": split.validation, "test": split.test}
    return {f"{name}_rows": len(rows) for name, rows in parts.items()}


def _traffic(experiment: Experiment, split: Split) -> dict[str, Any]:
    terms = Terms.of(experiment, "train", experiment.name)
    steps = steps_per_epoch(len(split.train), experiment.train.batch_rows)
    most = {name: expected_bytes(terms, name, split) for name in experiment.feature_parties}
    return {
        "steps_per_epoch": steps,
        "epochs": experiment.train.epochs,
        "at_most_bytes": sum(most.values()),
    }
