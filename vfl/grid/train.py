"""One cell: trained or gone on with, measured, and tidied up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vfl.config import Experiment
from vfl.datasets import PartyData
from vfl.errors import TooFewRowsError, VFLError
from vfl.grid.cells import CODEC, FAILURE, Cell
from vfl.grid.measure import measure_cell
from vfl.run import load_data, train
from vfl.run_folder import RunFolder
from vfl.session import CHECKPOINTS
from vfl.storage import write_json


class Rows:
    """The rows of the last experiment, for the next one that is about the same."""

    def __init__(self) -> None:
        self._about = ""
        self._data: Mapping[str, PartyData] = {}

    def of(self, experiment: Experiment) -> Mapping[str, PartyData]:
        """Every party's rows; see `vfl.run.load_data`."""
        about = _about_rows(experiment)
        if about != self._about:
            self._data = {}  # let go of the old ones first
            self._data = load_data(experiment)
            self._about = about
        return self._data


def do_cell(cell: Cell, cells_path: Path, rows: Rows, command: str, device: str = "cpu") -> None:
    """Bring a cell to its end, from wherever an earlier call left it.

    Whatever goes wrong is written to the cell's failure.json, and nothing is raised: one cell does
    not stop the others.

    Args:
        cell: what is trained.
        cells_path: where the run folders lie.
        rows: where data come from.
        command: how to repeat it, for the record.
        device: where the models run.
    """
    path = cells_path / cell.name
    try:
        _advance(cell, path, rows, command, device)
    except VFLError as error:
        _fail(path, error.record() | {"exit": error.exit_code})
    except Exception as bug:  # its text may quote a cell of a table
        _fail(path, {"what": f"this is a bug of vfl: {type(bug).__name__}", "exit": 1})


def _advance(cell: Cell, path: Path, rows: Rows, command: str, device: str) -> None:
    if path.exists() and not (path / "metrics.jsonl").exists():
        shutil.rmtree(path)  # ended before its folder was whole
    (path / FAILURE).unlink(missing_ok=True)
    data = rows.of(cell.experiment)
    if not len(data[cell.experiment.label.party].split.test):
        raise TooFewRowsError(
            "nothing can be compared without test rows", where="data.test", want="data.test > 0"
        )
    if not (path / "summary.json").exists():
        train(
            cell.experiment,
            path.parent,
            path.name,
            command=command,
            resume=path.exists(),
            data=data,
            device=device,
        )
    for checkpoints in path.glob(f"parties/*/{CHECKPOINTS}"):
        shutil.rmtree(checkpoints)
    if not (path / CODEC).exists():
        write_json(path / CODEC, measure_cell(RunFolder(path), data, device))


def _fail(path: Path, record: Mapping[str, Any]) -> None:
    write_json(path / FAILURE, record)


def _about_rows(experiment: Experiment) -> str:
    """All that `load_data` looks at, as text."""
    own = {"width", "bottom"}
    parties = {name: one.model_dump(exclude=own) for name, one in experiment.parties.items()}
    label = experiment.label.model_dump(exclude={"top", "class_weight"})
    about = [experiment.seed, experiment.data.model_dump(), parties, label]
    return json.dumps(about, sort_keys=True)
