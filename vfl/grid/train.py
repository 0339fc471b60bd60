"""Training a cell, and the rows it is trained on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping

from vfl.config import Experiment, TraceSettings
from vfl.datasets import PartyData
from vfl.exchange import Adversary
from vfl.grid.cells import Cell, GridFolder
from vfl.run import load_data, train
from vfl.session import CHECKPOINTS


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


def train_cell(
    cell: Cell,
    folder: GridFolder,
    data: Mapping[str, PartyData],
    device: str = "cpu",
    trace: TraceSettings | None = None,
    adversaries: Mapping[str, Adversary] | None = None,
) -> None:
    """Train a cell, or go on from its last checkpoint, unless it is trained; then tidy up.

    Args:
        cell: what is trained.
        folder: of its grid.
        data: every party's rows.
        device: where the models run.
        trace: what is recorded meanwhile, which changes no weight; None is what the cell says.
        adversaries: dishonest parties that have begun, by name.
    """
    experiment = cell.experiment if trace is None else recording(cell.experiment, trace)
    path = folder.cells_path / cell.name
    if path.exists() and not (path / "metrics.jsonl").exists():
        shutil.rmtree(path)  # ended before its folder was whole
    if not (path / "summary.json").exists():
        train(
            experiment,
            path.parent,
            path.name,
            command=str(folder.words("command")),
            resume=path.exists(),
            data=data,
            adversaries=adversaries,
            device=device,
        )
    for checkpoints in path.glob(f"parties/*/{CHECKPOINTS}"):
        shutil.rmtree(checkpoints)


def recording(experiment: Experiment, trace: TraceSettings) -> Experiment:
    """The same training with something else recorded."""
    return experiment.model_copy(update={"trace": trace})


def _about_rows(experiment: Experiment) -> str:
    """All that `load_data` looks at, as text."""
    own = {"width", "bottom"}
    parties = {name: one.model_dump(exclude=own) for name, one in experiment.parties.items()}
    label = experiment.label.model_dump(exclude={"top", "class_weight"})
    about = [experiment.seed, experiment.data.model_dump(), parties, label]
    return json.dumps(about, sort_keys=True)
