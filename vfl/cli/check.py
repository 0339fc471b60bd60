"""``vfl check``: every mistake at once, and what will happen if there is none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vfl.cli.output import Json, Set, emit
from vfl.ledger import size

if TYPE_CHECKING:
    from vfl.config import Experiment


def check(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="EXPERIMENT.toml|party.toml|PROJECT",
            help="An experiment file, a party's own file, or a project.",
        ),
    ],
    settings: Set = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the round trip to the SuperLink.")
    ] = False,
    round_trip_ms: Annotated[
        float | None, typer.Option(help="What a feature party measured, for advice on speed.")
    ] = None,
    mbps: Annotated[
        float | None, typer.Option(help="Bandwidth of the label party, for that advice.")
    ] = None,
    json: Json = False,
) -> None:
    """Check files and data without training, and show the plan.

    An experiment file is checked with its data and models, a party's own file with that party's
    table, a project with the label party's table. A party far away measures the round trip with
    --measure; the label party gets advice for it with --round-trip-ms.
    """
    from vfl import plan
    from vfl.errors import ConfigError
    from vfl.transport import round_trip_s

    facts, experiment, address = _plan_of(path, settings or [])
    if measure:
        if not address:
            raise ConfigError("an experiment in one process has no link", got=f"--measure {path}")
        round_trip_ms = 1000 * round_trip_s(address)
    if round_trip_ms is not None:
        facts |= (
            plan.link_advice(experiment, facts["train_rows"], round_trip_ms / 1000, mbps)
            if experiment
            else _measured(round_trip_ms)
        )
    if json:
        emit(facts)
        return
    advice = facts.pop("advice", [])
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):<24} {_shown(name, value)}")
    for line in advice:
        print(f"{'advice':<24} {line}")
    print("no mistake found")


def _plan_of(path: Path, settings: list[str]) -> tuple[dict[str, Any], Experiment | None, str]:
    """The facts of a path; its experiment, and the address of its SuperLink, where it has them."""
    from vfl import plan
    from vfl.config import is_party_file, read_experiment, read_party_file
    from vfl.errors import ConfigError
    from vfl.project import LabelFolder

    if path.is_dir():
        label = LabelFolder.find(path)
        facts = plan.of_project(label, settings)
        experiment = label.experiment(settings)
        return facts, experiment, experiment.federation.superlink
    if is_party_file(path):
        if settings:
            raise ConfigError("--set changes an experiment, not a party's own file", got=str(path))
        return plan.of_party_file(path), None, read_party_file(path).node.superlink
    return plan.of_experiment(path, settings), read_experiment(path, settings), ""


def _measured(round_trip_ms: float) -> dict[str, Any]:
    """What a feature party can say: the settings are the label party's."""
    command = f"vfl check PROJECT --round-trip-ms {round_trip_ms:.0f}"
    return {
        "round_trip_ms": round(round_trip_ms, 1),
        "advice": [f"the label party gets advice with: {command}"],
    }


def _shown(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(key, each)}" for key, each in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return size(value) if name.endswith("bytes") else str(value)
