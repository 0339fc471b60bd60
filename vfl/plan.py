"""What a session would do: the facts `vfl check` shows. Counts and names, never a cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vfl import compression, defenses, models
from vfl.config import (
    Experiment,
    PartyFile,
    read_experiment,
    read_party_file,
    with_overrides,
)
from vfl.datasets import PartyData, Split
from vfl.errors import ConfigError, DataError, SpecError
from vfl.project import LabelFolder
from vfl.run import load_data, session_of
from vfl.session import Terms, advice
from vfl.session.consent import expected_bytes
from vfl.session.own_data import own_data
from vfl.session.schedule import steps_per_epoch

#: Compute of an exchange, both sides: a small network's; a larger one gains less than is told.
_STEP_S = 0.001


def of_experiment(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Check an in-process experiment with its data.

    Raises:
        UserError: everything that would stop a training before its first step.
    """
    experiment = read_experiment(path, overrides)
    facts = check_specs(experiment)
    data = load_data(experiment)
    session_of(experiment, data, "train")  # a model may not fit the rows it gets
    split = data[experiment.label.party].split
    columns = {
        name: "x".join(map(str, own.inputs.shape[1:]))
        for name, own in data.items()
        if own.inputs is not None
    }
    return facts | _rows(split) | {"inputs": columns} | _traffic(experiment, split)


def of_project(label: LabelFolder, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Check a project at the label party: its own data and what each party will be asked for.

    Raises:
        UserError: everything of the label party's that would stop a session.
    """
    experiment = with_overrides(label.experiment(), overrides)
    facts = check_public(experiment)
    party = read_party_file(label.party_file)
    terms = Terms.of(experiment, "train", experiment.name)
    split = _own_data(party, label.party_file, terms, experiment.label.task).split
    registered = sorted(key.stem for key in label.keys.glob("*.pub"))
    return facts | _rows(split) | {"keys_of": registered} | _traffic(experiment, split)


def of_party_file(path: Path) -> dict[str, Any]:
    """Check a party's own file, its table and its consent; the label party's with its project."""
    folder = path.resolve().parent
    if (folder / "app" / "experiment.toml").exists():
        return of_project(LabelFolder(folder))
    party = read_party_file(path)
    draft = Experiment.model_validate(
        {"parties": {"other" if party.data.label else party.party: {}}}
    )
    data = _own_data(party, path, Terms.of(draft, "train", "check"), "classification")
    consent = party.consent.model_dump(mode="json")
    inputs = None if data.inputs is None else "x".join(map(str, data.inputs.shape[1:]))
    return {"party": party.party, "rows": data.rows, "inputs": inputs, "consent": consent}


def link_advice(
    experiment: Experiment, train_rows: int, round_trip_s: float, mbps: float | None
) -> dict[str, Any]:
    """What a slow link to the feature parties asks for, as facts.

    Args:
        experiment: as it would be trained now.
        train_rows: of its table.
        round_trip_s: to the party that is furthest away.
        mbps: bandwidth of the label party's link in each direction; None is no limit.
    """
    train, codec = experiment.train, compression.make(experiment.codec)
    widths = [experiment.parties[name].width for name in experiment.feature_parties]
    sizes = [codec.payload_limit(train.batch_rows, codec.wire_width(width)) for width in widths]
    cost = advice.LinkCost(
        round_trip_s,
        _STEP_S,
        sum(sizes) / train.batch_rows,
        None if mbps is None else mbps * 1e6 / 8,
    )
    choices = advice.advise(cost, train.batch_rows, train.in_flight, train_rows)
    lines = [
        f"-s train.batch_rows={choice.batch_rows}"
        f" -s train.learning_rate={train.learning_rate * choice.rate_factor:.3g}"
        f" -s train.in_flight={choice.in_flight}"
        f"   about {choice.speedup:.1f} times as many rows a second"
        for choice in choices
    ]
    return {
        "round_trip_ms": round(1000 * round_trip_s, 1),
        "exchanges_per_second": round(1 / cost.period_s(train.batch_rows, train.in_flight), 1),
        "advice": lines + advice.warnings(train.batch_rows, train.in_flight),
    }


def _own_data(party: PartyFile, file: Path, terms: Terms, task: str) -> PartyData:
    try:
        return own_data(party, terms, task)
    except DataError as mistake:
        mistake.fix = mistake.fix or f"[data] in {file} says which table and columns"
        raise


def check_specs(experiment: Experiment) -> dict[str, Any]:
    """Build every plug-in the experiment names, so that a wrong spec is told before anything runs.

    Raises:
        SpecError: with the nearest known name or option, or the widths that would fit.
        ConfigError: several specs are wrong; all of them are told.
    """
    _raise_all(list(_wrong_specs(experiment)))
    codec = compression.make(experiment.codec)
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


def _wrong_specs(experiment: Experiment) -> Iterator[SpecError]:
    checks: list[tuple[str, Callable[[], object]]] = [
        ("codec", lambda: _check_codec(experiment)),
        ("defense", lambda: defenses.make(experiment.defense)),
        ("label.top", lambda: models.make_top(experiment.label.top)),
    ]
    checks += [
        (f"parties.{name}.bottom", partial(models.make_bottom, party.bottom))
        for name, party in experiment.parties.items()
    ]
    for setting, check in checks:
        try:
            check()
        except SpecError as mistake:
            mistake.where = f"{setting}, {mistake.where}" if mistake.where else setting
            yield mistake


def _check_codec(experiment: Experiment) -> None:
    codec = compression.make(experiment.codec)
    for name in experiment.feature_parties:
        codec.check(experiment.parties[name].width)


def check_public(experiment: Experiment) -> dict[str, Any]:
    """`check_specs` for the experiment of a project, which every party will read.

    Raises:
        ConfigError: it says what a session on Flower does not look at and its owner keeps.
    """
    found = [
        f"parties.{name}.{setting}"
        for name, party in experiment.parties.items()
        for setting in ("columns", "source", "shape")
        if getattr(party, setting) is not None
    ]
    if found:
        raise ConfigError(
            "a project's experiment.toml names no party's table",
            got=", ".join(found),
            fix="put them in [data] of that party's own party.toml",
        )
    return check_specs(experiment)


def _raise_all(mistakes: Sequence[SpecError]) -> None:
    if len(mistakes) > 1:
        lines = [
            f"  {mistake.where}: {mistake.what}; {mistake.fix or f'want {mistake.want}'}"
            for mistake in mistakes
        ]
        raise ConfigError(f"{len(mistakes)} specs cannot be used\n" + "\n".join(lines))
    for mistake in mistakes:
        raise mistake


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
