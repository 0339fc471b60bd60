"""A private training or inference of an experiment, and the card of what happened."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vfl.config import Experiment
from vfl.datasets import PartyData
from vfl.errors import BadOptionError, RunFolderError
from vfl.mpc import Rules, Trio
from vfl.mpc.rules import NAMES, Mode
from vfl.mpc.traffic import PHASES
from vfl.options import require_range
from vfl.run import load_data
from vfl.storage import load_weights, pack_weights, read_json, stamp, write_bytes, write_json
from vfl.triple.crew import Crew
from vfl.triple.messages import Job
from vfl.triple.plan import Part, Plan, seats
from vfl.triple.program import Outcome, follow

CARD = "mpc.json"
_SHARE = "share.safetensors"
Tell = Callable[[dict[str, float]], None]


def train_private(
    experiment: Experiment,
    folder: Path,
    *,
    mode: Mode = "fast",
    hidden: tuple[int, ...] = (),
    learning_rate: float = 0.5,
    processes: bool = True,
    timeout_s: float = 60.0,
    magnitude_bits: int = 8,
    weights_seed: int | None = None,
    tell: Tell = lambda figures: None,
) -> dict[str, Any]:
    """Train a fully connected network that nobody holds.

    Args:
        experiment: two parties with columns, which are P0 and P1; a label party of its own is P2,
            and otherwise P2 has no data. Epochs, rows of a batch and the seed are used; models,
            codec and defense are not.
        folder: new; the card goes there, and each holder's share into a folder of its own.
        mode: see `vfl.mpc.Rules`.
        hidden: widths of hidden layers; none is logistic or linear regression.
        learning_rate: of plain gradient descent.
        processes: three processes with TLS between each two, or three threads of this one.
        timeout_s: how long a party waits for another.
        magnitude_bits: see `vfl.mpc.Rules`.
        weights_seed: for comparisons only: first weights that anybody can repeat.
        tell: told the figures of every epoch.

    Returns:
        The card: figures, bytes, seconds, who is who, and what each party saw.

    Raises:
        ConfigError: not exactly two parties with columns.
        PeerFailedError, LostPeerError: a party stopped.
    """
    data = load_data(experiment)
    names = seats(experiment)
    plan = _plan(
        experiment,
        data,
        names,
        Rules(mode, magnitude_bits=magnitude_bits),
        hidden,
        learning_rate,
        weights_seed,
    )
    folder.mkdir(parents=True, exist_ok=False)
    outcomes = _run(plan, experiment, data, names, {}, folder, processes, timeout_s, tell)
    card = _card(plan, names, outcomes, processes)
    write_json(
        folder / CARD,
        {**stamp(), **card, "experiment": experiment.model_dump(mode="json", exclude_none=True)},
    )
    return card


def infer_private(
    folder: Path, *, processes: bool = True, timeout_s: float = 60.0
) -> dict[str, Any]:
    """Answer the test rows with a network of `train_private`, from the holders' shares.

    Raises:
        RunFolderError: there is no such network.
        PeerFailedError, LostPeerError: a party stopped.
    """
    if not (folder / CARD).is_file():
        raise RunFolderError("no private network is here", where=str(folder), want=CARD)
    kept = read_json(folder / CARD)
    experiment = Experiment.model_validate(kept["experiment"])
    plan = Plan.model_validate(kept["plan"] | {"task": "infer"})
    shares = {role: folder / NAMES[role] / _SHARE for role in (0, 1)}
    data = load_data(experiment)
    names = seats(experiment)
    outcomes = _run(
        plan, experiment, data, names, shares, None, processes, timeout_s, lambda figures: None
    )
    return _card(plan, names, outcomes, processes)


def _plan(
    experiment: Experiment,
    data: Mapping[str, PartyData],
    names: list[str],
    rules: Rules,
    hidden: tuple[int, ...],
    learning_rate: float,
    weights_seed: int | None,
) -> Plan:
    label = data[experiment.label.party]
    classes = len(label.classes) if label.classes else 0
    columns = [_width(data[name]) for name in names[:2]]
    outputs = classes if classes > 2 else 1
    rows = len(label.split.train)
    require_range("learning_rate", learning_rate, 1e-9, 100)
    if experiment.train.batch_rows > rows:
        raise BadOptionError(
            "a batch has more rows than there are",
            where="train.batch_rows",
            got=str(experiment.train.batch_rows),
            want=f"at most {rows}",
        )
    return Plan(
        task="train",
        mode=rules.mode,
        bits=rules.bits,
        magnitude_bits=rules.magnitude_bits,
        widths=(sum(columns), *hidden, outputs),
        columns=(columns[0], columns[1]),
        label_role=names.index(experiment.label.party),
        train_rows=rows,
        test_rows=len(label.split.test),
        classes=classes,
        epochs=experiment.train.epochs,
        batch_rows=experiment.train.batch_rows,
        learning_rate=learning_rate,
        seed=experiment.seed,
        weights_seed=weights_seed,
    )


def _width(data: PartyData) -> int:
    assert data.inputs is not None, "a holder has columns"
    return data.inputs[0].numel()


def _run(
    plan: Plan,
    experiment: Experiment,
    data: Mapping[str, PartyData],
    names: list[str],
    shares: Mapping[int, Path],
    folder: Path | None,
    processes: bool,
    timeout_s: float,
    tell: Tell,
) -> list[Outcome]:
    keep = {role: folder / NAMES[role] / _SHARE for role in (0, 1)} if folder else {}
    if processes:
        return _as_processes(plan, experiment, names, shares, keep, timeout_s, tell)
    empty = Part(None, None, None, None)
    parts = [
        Part.of(data[name], plan, role) if name in data else empty
        for role, name in enumerate(names)
    ]
    kept = {role: load_weights(path) for role, path in shares.items()}
    with Trio(plan.rules, plan.model_dump(mode="json"), timeout_s) as trio:
        outcomes = trio.run(
            lambda party: follow(party, plan, parts[party.role], kept.get(party.role, {}), tell)
        )
    for role, path in keep.items():
        write_bytes(path, pack_weights(outcomes[role].shares), mode=0o600)
    return outcomes


def _as_processes(
    plan: Plan,
    experiment: Experiment,
    names: list[str],
    shares: Mapping[int, Path],
    keep: Mapping[int, Path],
    timeout_s: float,
    tell: Tell,
) -> list[Outcome]:
    session = secrets.token_hex(16)
    tokens = {pair: secrets.token_urlsafe(32) for pair in ("01", "02", "12")}
    jobs = [
        Job(
            role=role,
            party=name,
            plan=plan,
            experiment=experiment,
            session=session,
            tokens={pair: token for pair, token in tokens.items() if str(role) in pair},
            timeout_s=timeout_s,
            shares=str(shares.get(role, "")),
            keep=str(keep.get(role, "")),
        )
        for role, name in enumerate(names)
    ]
    with Crew(jobs) as crew:
        return [Outcome(**(told.outcome or {})) for told in crew.run(tell)]


def _card(plan: Plan, names: list[str], outcomes: list[Outcome], processes: bool) -> dict[str, Any]:
    """What happened, in one record; figures are those of the last epoch."""
    traffic = [row for outcome in outcomes for row in outcome.traffic]
    totals = {
        f"bytes_{phase}": sum(row["wire_bytes"] for row in traffic if row["phase"] == phase)
        for phase in PHASES
    }
    history = outcomes[plan.label_role].history
    return {
        "task": plan.task,
        "mode": plan.mode,
        "parties": dict(zip(NAMES, names, strict=True)),
        "labels": names[plan.label_role],
        "trust": "semi-honest; no two of the three collude; see docs/mpc.md",
        "processes": processes,
        "plan": plan.model_dump(mode="json"),
        **{f"test_{name}": value for name, value in (history[-1] if history else {}).items()},
        "history": history,
        **totals,
        "seconds": max(outcome.seconds for outcome in outcomes),
        "traffic": traffic,
        "leakage": [leak for outcome in outcomes for leak in outcome.leaks],
    }
