"""Plan of a session or a training: facts that `vfl check` prints.

The facts are counts and names; they contain no values of a table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from vfl import compression, defenses
from vfl.config import (
    Experiment,
    Locations,
    PartyFile,
    TraceSettings,
    read_party_file,
    validate,
)
from vfl.config.toml import mistakes_of, raise_mistakes
from vfl.core.errors import DataError
from vfl.core.frame import Frame
from vfl.core.seeds import Secret
from vfl.datasets import PartyData, Split
from vfl.datasets.alignment.positions import last_version
from vfl.datasets.describe import TableReport, describe
from vfl.datasets.doubts import doubts
from vfl.federation.project import LabelFolder
from vfl.models.losses import make_loss
from vfl.server.whole_network import WholeNetworkLabel
from vfl.session import Terms, advice, rules, secure_mode
from vfl.session.consent import dealt_bytes, expected_bytes, frame_limits
from vfl.session.dp_plan import PrivacyPlan
from vfl.session.exchange import Own
from vfl.session.label import LabelParty, Objective
from vfl.session.ranges import ranges_of
from vfl.session.secure_mode import Layers, promise, shares_weights, third_party
from vfl.session.store.identity import keys_of
from vfl.session.store.party_folder import own_data, table_format
from vfl.session.trace import check_room
from vfl.session.trace import expected_bytes as trace_bytes
from vfl.training import specs
from vfl.training.run import data_doubts, load_data, session_of
from vfl.transport import local_pair

#: Default folder in which `vfl train` stores runs of an experiment file.
_RUNS = Path("runs")

#: Assumed compute time of one exchange at both parties, for a small network; with a larger network,
#: the real speedup is smaller than the advice says.
_STEP_S = 0.001
#: With fewer validation rows than this number, the difference between two epochs is mostly noise.
_FEW_ROWS = 100


def of_experiment(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Check an experiment, including its data, for a training in one process.

    Raises:
        UserError: a setting would stop the training before its first step.
    """
    experiment, locations = specs.read_checked(path, overrides)
    facts = _plugins(experiment)
    with locations.located(Experiment):
        data = load_data(experiment)
    label = data[experiment.label.party]
    # a model may not support its columns, and a defense may not support the labels
    with locations.located(Experiment):
        session = session_of(experiment, data, "train")
    split = label.split
    columns = {
        name: "x".join(map(str, own.inputs.shape[1:]))
        for name, own in data.items()
        if own.inputs is not None
    }
    facts |= _rows(split) | _labels(experiment, label) | {"inputs": columns}
    facts |= _judges(experiment, split)
    facts |= _gaps(label) | {"look_at": data_doubts(experiment, data)}
    facts |= _traffic(experiment, split, _shared(experiment, data))
    facts |= comparison_facts(experiment, locations) | attack_facts(experiment, data, locations)
    facts["privacy"] = _privacy(experiment, label)
    return facts | _trace(experiment.trace, session.terms, split, session.weights(), _RUNS)


def of_project(label: LabelFolder, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Check a project at the label party: its data, and the consent needed from others.

    Raises:
        UserError: a setting of the label party would stop a session.
    """
    experiment = label.experiment(overrides, specs.spec_mistakes)
    party = label.party()
    facts = check_public(experiment, label.locations(overrides), party)
    terms = Terms.of(experiment, "train", experiment.name)
    waiting = {}
    if terms.alignment and not last_version(party.alignment_path(terms.alignment)):
        # Before the first alignment, all rows of the label party's table count.
        terms = terms.model_copy(update={"alignment": None})
        waiting = {"alignment": f"none yet: vfl align {label.path}"}
    data = _own_data(party, label.party_file, terms, experiment.label.task)
    with label.locations(overrides).located(Experiment):
        split, owners = data.split, {party.party: _label_weights(experiment, terms, data)}
    registered = sorted(key.stem for key in label.keys.glob("*.pub"))
    facts |= _rows(split) | {"keys_of": registered} | _traffic(experiment, split)
    facts |= _judges(experiment, split) | _gaps(data)
    facts |= waiting | {"columns": _columns(_described(party), data)}
    facts |= {"look_at": doubts({party.party: data}) + _not_found_out(party, label.path)}
    facts["privacy"] = _privacy(experiment, data)
    return facts | _trace(party.trace, terms, split, owners, party.store_path)


def of_party_file(path: Path) -> dict[str, Any]:
    """Check a party file with its table and consent; for a label party, also its project."""
    folder = path.resolve().parent
    if (folder / "app" / "experiment.toml").exists():
        return of_project(LabelFolder(folder))
    party = read_party_file(path)
    with party.locations.located(PartyFile):
        ranges = {name: list(ends) for name, ends in ranges_of(party.consent).items()}
    consent = party.consent.model_dump(mode="json", exclude={"ranges"})
    facts: dict[str, Any] = {"party": party.party, "consent": consent, "ranges": ranges}
    if party.role != "data":
        return facts | {"role": party.role, "secure_sum": keys_of(party)}
    draft = Experiment.model_validate(
        {"parties": {"other" if party.table.label else party.party: {}}}
    )
    found = None
    task = "classification"
    if party.table.label:  # the project states the purpose, and its files are not on this host
        found = _described(party)
        task = found.task or task
    data = _own_data(party, path, Terms.of(draft, "train", "check"), task)
    inputs = None if data.inputs is None else "x".join(map(str, data.inputs.shape[1:]))
    facts |= {"rows": data.rows, "inputs": inputs, "secure_sum": keys_of(party)}
    facts |= {"columns": _columns(found or _described(party), data)}
    facts |= {"look_at": doubts({party.party: data}) + _not_found_out(party, folder)}
    # The size of the trace depends on the session's terms; the session prints the size when it
    # starts.
    return facts | ({"trace": party.trace.model_dump(mode="json")} if party.trace.enabled else {})


def link_advice(
    experiment: Experiment, train_rows: int, round_trip_s: float, mbps: float | None
) -> dict[str, Any]:
    """Return advice for slow network connections to the feature parties, as facts.

    Args:
        experiment: the experiment with its current settings.
        train_rows: number of training rows.
        round_trip_s: longest round-trip time to a feature party, in seconds.
        mbps: bandwidth in Mbit/s of the label party's network connection in each direction; None
            means no limit.
    """
    if shares_weights(experiment):
        return advice.of_shared_layers(round_trip_s, _STEP_S, 1 if third_party(experiment) else 2)
    train, codec = experiment.train, compression.make(experiment.codec)
    widths = [experiment.parties[name].width for name in experiment.feature_parties]
    sizes = [codec.payload_limit(train.batch_size, codec.wire_width(width)) for width in widths]
    cost = advice.LinkCost(
        round_trip_s,
        _STEP_S,
        sum(sizes) / train.batch_size,
        None if mbps is None else mbps * 1e6 / 8,
    )
    choices = advice.advise(cost, train.batch_size, train.in_flight, train_rows)
    lines = [
        f"-s train.batch_size={choice.batch_size}"
        f" -s train.learning_rate={train.learning_rate * choice.rate_factor:.3g}"
        f" -s train.in_flight={choice.in_flight}"
        f"   about {choice.speedup:.1f} times as many rows a second"
        for choice in choices
    ]
    return {
        "round_trip_ms": round(1000 * round_trip_s, 1),
        "exchanges_per_second": round(1 / cost.period_s(train.batch_size, train.in_flight), 1),
        "advice": lines + advice.warnings(train.batch_size, train.in_flight),
    }


def _gaps(label: PartyData) -> dict[str, Any]:
    """Return how many rows each feature party lacks, whose cuts a learned vector replaces."""
    lacking = {name: int((~own).sum()) for name, own in label.held.items()}
    return {"rows_without_a_cut": lacking} if lacking else {}


def _judges(experiment: Experiment, split: Split) -> dict[str, Any]:
    """Return a warning if few validation rows select the epoch, so that a lucky epoch may win."""
    train, rows = experiment.train, len(split.validation)
    if rows >= _FEW_ROWS or not (train.patience or train.keep == "best"):
        return {}
    cure = 'a larger data.validation, or train.keep = "last" without patience'
    return {"chosen_by_few_rows": f"only {rows} validation rows select the best epoch; try {cure}"}


def _own_data(party: PartyFile, file: Path, terms: Terms, task: str) -> PartyData:
    try:
        return own_data(party, terms, task)
    except DataError as mistake:
        mistake.fix = mistake.fix or f"set the table and its columns in [data] of {file}"
        if _not_found_out(party, file.parent):
            mistake.fix += f"; or vfl join {file.parent}, which finds the table's format"
        raise


def _not_found_out(party: PartyFile, folder: Path) -> list[str]:
    """Return a warning about a table of which the party file has no format settings yet."""
    found_out = {"columns", "separator", "encoding", "decimal", "dates", "missing"}
    if found_out & party.table.model_fields_set:
        return []
    return [f"party.toml lacks the table's format: vfl join {folder} finds it"]


def _described(party: PartyFile) -> TableReport:
    own = party.table
    with party.locations.located(PartyFile):
        return describe(party.source_path, table_format(own), own.id, own.label)


def _columns(found: TableReport, data: PartyData) -> list[dict[str, Any]]:
    """Return a description of each column of a party's table, with its count of inputs."""
    widths = data.encoder.widths if data.encoder else {}
    return [asdict(column.as_used(widths.get(column.name, 0))) for column in found.columns]


def _label_weights(experiment: Experiment, terms: Terms, data: PartyData) -> dict[str, Tensor]:
    """Return the label party's initial weights; raise an error if a model does not fit."""
    links = {name: local_pair()[0] for name in rules.peers(terms)}
    own = Own(Secret.of_simulation(experiment.seed, data.name))
    objective = Objective.of(experiment.label, 1 if data.classes is None else len(data.classes))
    if secure_mode.make(terms.secure).whole_network:
        WholeNetworkLabel(data, terms, ("check", 0), links, _nobody, own, objective)
        return {}
    return LabelParty(data, terms, links, own, objective).weights()


def _nobody() -> tuple[str, Frame]:
    raise AssertionError("nothing is sent to check an experiment")


def _trace(
    settings: TraceSettings,
    terms: Terms,
    split: Split,
    owners: Mapping[str, Mapping[str, Tensor]],
    folder: Path,
) -> dict[str, Any]:
    if not settings.enabled:
        return {}
    each = [trace_bytes(settings, terms, name, split, own) for name, own in owners.items()]
    check_room(folder, sum(each))
    return {"trace_at_most_bytes": sum(each)}


def check_specs(experiment: Experiment, locations: Locations | None = None) -> dict[str, Any]:
    """Return facts about an experiment's plug-ins; errors are as in `vfl.training.specs`."""
    specs.check_specs(experiment, locations)
    return _plugins(experiment)


def _plugins(experiment: Experiment) -> dict[str, Any]:
    codec = compression.make(experiment.codec)
    width = experiment.parties[experiment.feature_parties[0]].width
    return {
        "parties": ", ".join(experiment.feature_parties),
        "label_party": experiment.label.party,
        "codec": experiment.codec,
        "formula_ratio": round(codec.formula_ratio(width), 5),
        "defense": experiment.defense,
        "secure": promise(experiment),
        "privacy": _privacy(experiment),
    }


def _privacy(experiment: Experiment, data: PartyData | None = None) -> str:
    """Return the defense's privacy statements; an epsilon may depend on the class count."""
    defense = defenses.make(experiment.defense)
    if data is not None:
        classes = None if data.classes is None else len(data.classes)
        weighted = experiment.label.class_weight != "none"
        label, train = experiment.label, experiment.train
        calibrated = label.calibration != "none"
        loss = None if label.loss is None else make_loss(label.loss, label.task)
        kind = defenses.LabelKind(
            classes, weighted, train.epochs, calibrated, loss, train.local_steps, classes is None
        )
        defense.prepare(kind)
    stated = list(map(str, defense.privacy()))
    apart = secure_mode.make(experiment.secure).divides_rows
    if experiment.dp is not None and data is not None and not apart:
        terms = Terms.of(experiment, "train", experiment.name)
        if (plan := PrivacyPlan.of(terms, len(data.split.train))) is not None:
            stated.append(
                f"{plan.statement(plan.steps)}; joint sensitivity {plan.sensitivity(terms):.4g};"
                f" total noise {plan.noise:.4g}"
            )
    elif experiment.dp is not None:
        whose = "training rows of all parties" if apart else "training rows"
        stated.append(f"[dp] promises an epsilon that follows from the {whose}")
    return "; ".join(stated) or "promises nothing"


def check_public(
    experiment: Experiment, locations: Locations | None = None, party: PartyFile | None = None
) -> dict[str, Any]:
    """Run `check_specs` on a project's experiment, which all parties will read.

    Args:
        experiment: experiment to check.
        locations: file and line of each setting, for error messages.
        party: the party file of the label party.

    Raises:
        ConfigError, SpecError: the experiment has mistakes; the error lists all mistakes.
    """
    locations = locations or Locations()
    wrong = [
        *specs.mistakes_in(experiment, locations),
        *mistakes_of(validate.of_project(experiment)),
    ]
    if party is not None:
        wrong += mistakes_of(validate.of_leading_party(experiment, party))
    raise_mistakes(wrong, locations)
    return _plugins(experiment)


def _rows(split: Split) -> dict[str, Any]:
    parts = {"train": split.train, "validation": split.validation, "test": split.test}
    return {f"{name}_rows": len(rows) for name, rows in parts.items()}


def _labels(experiment: Experiment, label: PartyData) -> dict[str, Any]:
    classes, folds = label.classes, experiment.data.folds
    facts: dict[str, Any] = {} if classes is None else {"classes": len(classes)}
    return facts | ({"fold": f"{experiment.data.fold} of {folds}"} if folds else {})


def _traffic(
    experiment: Experiment, split: Split, shared: Mapping[str, Layers] | None = None
) -> dict[str, Any]:
    terms = Terms.of(experiment, "train", experiment.name)
    steps, epochs = rules.steps_per_epoch(terms, len(split.train)), terms.train.epochs
    if (plan := PrivacyPlan.of(terms, len(split.train))) is not None:
        steps, epochs = plan.a_epoch, plan.epochs
    if secure_mode.make(
        experiment.secure
    ).divides_rows:  # the numbers of rows of other parties are not known yet
        return {"epochs": terms.train.epochs}
    facts = {"steps_per_epoch": steps, "epochs": epochs}
    if shares_weights(experiment) and shared is None:
        return facts  # the bytes depend on columns of other parties, which are not known yet
    own, names = shared or {}, terms.feature_parties
    most = sum(expected_bytes(terms, name, split, own.get(name)) for name in names)
    most *= 1 + len(terms.tasks)
    if terms.middle is not None:
        most += expected_bytes(terms.at_label(), terms.middle.party, split)
    window = rules.window_frames(terms)
    held = [frame_limits(terms, name, split, shared).held_bytes(window) for name in names]
    facts["held_bytes_per_party"] = max(held)
    return facts | {"at_most_bytes": most + dealt_bytes(terms, own.values(), split)}


def _shared(experiment: Experiment, data: Mapping[str, PartyData]) -> Mapping[str, Layers] | None:
    """Return the layers that all feature parties share; empty if each party has a separate bottom.

    The result is None if the number of bytes depends on values; a party then counts the bytes as it
    sends them.
    """
    mode = secure_mode.make(experiment.secure)
    if mode.whole_network:
        return None
    inputs = {name: data[name].inputs for name in experiment.feature_parties}
    columns = {
        name: math.prod(own.shape[1:]) + 1 for name, own in inputs.items() if own is not None
    }
    width = experiment.parties[next(iter(columns))].width
    return mode.layers(columns, width, experiment.label.party)


def comparison_facts(experiment: Experiment, locations: Locations) -> dict[str, Any]:
    """Return facts about the trainings of `vfl compare`; empty without a [compare] table."""
    if experiment.compare is None:
        return {}
    # imported late, because a plain training does not need the imported module
    from vfl.experiments.comparison import comparison_of

    comparison = comparison_of(experiment, locations)
    codecs = dict.fromkeys(cell.experiment.codec for cell in comparison.cells)
    facts: dict[str, Any] = {"compared": list(codecs), "trainings": len(comparison.cells)}
    return facts | ({"left_out": list(comparison.notes)} if comparison.notes else {})


def attack_facts(
    experiment: Experiment, data: Mapping[str, PartyData], locations: Locations
) -> dict[str, Any]:
    """Return facts about trainings and attacks of `vfl grid`; empty without a [grid] table.

    Args:
        experiment: the experiment to check.
        data: data of every party.
        locations: file and line of each setting, for error messages.

    Raises:
        UserError: the grid cannot run on these data; the error lists all mistakes.
    """
    if experiment.grid is None:
        return {}
    from vfl.experiments.attack_grid import attack_plan, grid_cells
    from vfl.experiments.checks import grid_mistakes
    from vfl.experiments.scores import BASELINES

    with locations.located(Experiment):
        victims = sum(cell.victim != BASELINES for cell in grid_cells(experiment))
        wrong = list(grid_mistakes(experiment, experiment.grid, data))
    raise_mistakes(wrong, locations)
    jobs = len(attack_plan(experiment.grid).on_victim())
    facts = {"attacked": list(experiment.grid.victims), "victims": victims, "attacks_each": jobs}
    tampering = list(experiment.grid.trainings[1:])
    return facts | ({"adversaries": tampering} if tampering else {})
