"""Training a victim with what its attacks need recorded; once more if that is all that is missing.

A training recorded anew gives the same weights, so scores stay. They lie in a run folder that makes
room for the new one: it is put aside whole, and given back what it is worth once that is trained.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from vfl.config import GridSettings, TraceSettings
from vfl.datasets import PartyData
from vfl.grid.cells import Cell, GridFolder
from vfl.grid.gallery import GALLERY
from vfl.grid.outcomes import begun
from vfl.grid.scenes import is_recorded, recorded_phases, scene_of_trial
from vfl.grid.scores_file import SCORES, ScoresFile
from vfl.grid.train import recording, train_cell
from vfl.grid.trials import Trial
from vfl.grid.victims import attacker_of, attempts_of, run_ground
from vfl.run_folder import RunFolder
from vfl.storage import write_bytes


def train_recorded(
    cell: Cell,
    folder: GridFolder,
    data: Mapping[str, PartyData],
    settings: GridSettings,
    device: str,
) -> None:
    """Train a victim, or go on with it, so that every trial without a score can be tried.

    Args:
        cell: the victim.
        folder: of its grid.
        data: every party's rows.
        settings: who attacks, with what.
        device: where the model is trained.
    """
    path, aside = folder.cells_path / cell.name, folder.aside(cell)
    trials = attempts_of(settings, cell.adversary).on_victim()

    def lacking(run: Path) -> list[Trial]:
        scores = ScoresFile(run)
        scores.mend()
        return run_ground(RunFolder(run), data, settings, cell.adversary).lacking(trials, scores)

    if _is_trained(path):
        _give_back(aside, path)
        trace = _recorded(lacking(path))
        if is_recorded(path, trace):
            return
        aside.parent.mkdir(exist_ok=True)
        path.rename(aside)
    else:
        trace = _recorded(lacking(aside) if aside.exists() else trials)
    if _is_begun(path) and RunFolder(path).experiment().trace != trace:
        shutil.rmtree(path)  # what it recorded so far is not what is wanted now
    plain = replace(cell, experiment=recording(cell.experiment, TraceSettings()))
    party = attacker_of(cell.experiment, settings)
    adversaries = begun(cell.adversary, plain.experiment, data, party, settings)
    train_cell(plain, folder, data, device, trace, adversaries)
    _give_back(aside, path)


def _recorded(trials: Iterable[Trial]) -> TraceSettings:
    """What these trials need to have been recorded."""
    return recorded_phases({scene_of_trial(one.attack, one.bottom) for one in trials} - {None})


def _is_trained(path: Path) -> bool:
    return (path / "summary.json").exists()


def _is_begun(path: Path) -> bool:
    return (path / "metrics.jsonl").exists() and not _is_trained(path)


def _give_back(aside: Path, path: Path) -> None:
    """What attacks left in a folder that was put aside."""
    for file in [aside / SCORES, *(aside / GALLERY).glob("*")]:
        if file.exists():
            write_bytes(path / file.relative_to(aside), file.read_bytes())
    shutil.rmtree(aside, ignore_errors=True)
