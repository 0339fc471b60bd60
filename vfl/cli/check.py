"""``vfl check``: every mistake at once, and what will happen if there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vfl.cli.output import Json, Set, emit, size


def check(
    path: Annotated[
        Path, typer.Argument(help="An experiment file, a party's own file, or a project.")
    ],
    settings: Set = None,
    json: Json = False,
) -> None:
    """Check files and data without training, and show the plan."""
    from vfl import plan
    from vfl.project import LabelFolder

    facts: dict[str, Any]
    if path.is_dir():
        label = LabelFolder.find(path)
        facts = plan.of_project(label)
    elif path.name.startswith("party"):
        facts = plan.of_party_file(path)
    else:
        facts = plan.of_experiment(path, settings or [])
    if json:
        emit(facts)
        return
    for name, value in facts.items():
        shown = size(value) if name.endswith("bytes") or "bytes_" in name else value
        print(f"{name.replace('_', ' '):<24} {shown}")
    print("no mistake found")
