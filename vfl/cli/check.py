"""``vfl check``: every mistake at once, and what will happen if there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vfl.cli.output import Json, Set, emit
from vfl.ledger import size


def check(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="EXPERIMENT.toml|party.toml|PROJECT",
            help="An experiment file, a party's own file, or a project.",
        ),
    ],
    settings: Set = None,
    json: Json = False,
) -> None:
    """Check files and data without training, and show the plan.

    An experiment file is checked with its data and models, a party's own file with that party's
    table, a project with the label party's table.
    """
    from vfl import plan
    from vfl.config import is_party_file
    from vfl.errors import ConfigError
    from vfl.project import LabelFolder

    facts: dict[str, Any]
    if path.is_dir():
        label = LabelFolder.find(path)
        facts = plan.of_project(label, settings or [])
    elif is_party_file(path):
        if settings:
            raise ConfigError("--set changes an experiment, not a party's own file", got=str(path))
        facts = plan.of_party_file(path)
    else:
        facts = plan.of_experiment(path, settings or [])
    if json:
        emit(facts)
        return
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):<24} {_shown(name, value)}")
    print("no mistake found")


def _shown(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(key, each)}" for key, each in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return size(value) if name.endswith("bytes") else str(value)
