"""Provenance of results: versions, hardware, and digests of code and data.

`results.json` of every study has these keys in addition to the study's own keys;
`results.schema.json` describes them (JSON Schema, draft 2020-12).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vfl.experiments.cells import Cell
from vfl.experiments.results import LoadedGrid
from vfl.experiments.scores import BASELINES, OF_CELL
from vfl.experiments.staleness import made_of

#: Name and version of the format of `results.json`; the version number increases when a key changes
#: its meaning.
FORM = "vfl results 1"


def results_schema() -> dict[str, Any]:
    """Return the JSON schema of `results.json`.

    >>> results_schema()["properties"]["form"]["const"]
    'vfl results 1'
    """
    found: dict[str, Any] = json.loads((Path(__file__).parent / "results.schema.json").read_text())
    return found


def provenance(grid: LoadedGrid) -> dict[str, Any]:
    """Return the keys that every `results.json` has.

    Returns:
        Entries: `form`, `kind`, `name`, `created` and `command` of the study; the different
            `environments` of its runs; `cells` with their digests; `records`, which are the rows of
            `results.csv`.
    """
    environments: list[Mapping[str, Any]] = []
    cells = [_cell_record(cell, grid, environments) for cell in grid.cells]
    head = {name: grid.folder.head(name) for name in ("name", "created", "command")}
    return {
        "form": FORM,
        "kind": grid.folder.kind,
        **head,
        "environments": environments,
        "cells": cells,
        "records": [one.row() for one in grid.records],
    }


def _cell_record(
    cell: Cell, grid: LoadedGrid, environments: list[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the record of a cell: description, status, and digests of the cell's code and data."""
    run, state = grid.runs.get(cell.name), "open"
    if cell.title in grid.failures:
        state = "failed"
    elif run is not None or (grid.path_of(cell) / OF_CELL).exists():
        state = "done"
    found = {
        "cell": cell.name,
        "title": cell.title,
        "about": dict(cell.about),
        "seed": cell.experiment.seed,
        "state": state,
        "trained": cell.victim != BASELINES,
        "made_of": {
            key: text for key, text in made_of(cell, grid.folder).items() if key != "checked"
        },
    }
    if run is not None:
        if run.environment not in environments:
            environments.append(run.environment)
        found["environment"] = environments.index(run.environment)
        found["config_sha256"] = run.folder.about().get("config_sha256")
        found["weights_sha256"] = run.summary.get("weights_sha256")
    return found
