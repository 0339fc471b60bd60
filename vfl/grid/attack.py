"""The cells of a grid of attacks: a victim for each defense and seed, and its baselines."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from vfl import attacks
from vfl.attacks.victim import Victim
from vfl.config import Experiment, GridSettings, TraceSettings
from vfl.datasets import PartyData
from vfl.grid.cells import PICTURES, Cell, GridFolder, grid_settings_of
from vfl.grid.pictures import pictures_of
from vfl.grid.scenes import (
    is_recorded,
    recorded_phases,
    scene_of,
)
from vfl.grid.scores_file import OF_CELL, SCORES, ScoresFile, write_scores
from vfl.grid.train import recording, train_cell
from vfl.grid.trials import BASELINES, Trial, setting_words
from vfl.grid.victims import (
    attack_run,
    attacker_of,
    attempts_of,
    check_attacks,
    ground_of,
    run_ground,
)
from vfl.run import session_of
from vfl.run_folder import RunFolder
from vfl.storage import read_json, stamp, write_bytes, write_json


def grid_cells(experiment: Experiment) -> list[Cell]:
    """The cells of an experiment with a `grid` table; one seed is whole before the next.

    Raises:
        ConfigError: there is no such table, or it names no feature party.
        SpecError: a defense or an attack cannot be built.
    """
    settings = grid_settings_of(experiment)
    check_attacks(experiment, settings)
    plain = experiment.model_copy(update={"compare": None, "grid": None})
    return [
        _cell(plain.model_copy(update={"seed": seed, "defense": defense}), called)
        for seed in settings.seeds
        for defense, called in [
            ("none", BASELINES),
            *((spec, spec) for spec in settings.victims),
        ]
    ]


def attack_cell(
    cell: Cell, folder: GridFolder, data: Mapping[str, PartyData], device: str = "cpu"
) -> None:
    """Train a victim unless it is trained, and go through every trial that has no score yet.

    Args:
        cell: the victim, or the baselines of its seed.
        folder: of the grid.
        data: every party's rows.
        device: where the model is trained; attacks run on the CPU.
    """
    settings = grid_settings_of(folder.experiment())
    path, attempts = folder.cells_path / cell.name, attempts_of(settings)
    if cell.called == BASELINES:
        party = attacker_of(cell.experiment, settings)
        untrained = session_of(cell.experiment, data, "predict").weights()[party]
        victim = Victim(cell.experiment, data, party, untrained)
        ground = ground_of(victim, cell.experiment, data, settings)
        scores = list(ground.go_through(attempts.baselines(settings.baselines), ScoresFile(path)))
    else:
        train_recorded(cell, folder, data, settings, device)
        scores = attack_run(RunFolder(path), data, settings, attempts.on())
        if cell.experiment.seed == settings.seeds[0] and settings.pictures:
            draw_pictures(RunFolder(path), data, settings)
        for trace in path.glob("parties/*/trace"):
            shutil.rmtree(trace)  # large, and a training can be recorded again
    write_scores(path / OF_CELL, setting_words(settings), scores)


def train_recorded(
    cell: Cell,
    folder: GridFolder,
    data: Mapping[str, PartyData],
    settings: GridSettings,
    device: str,
) -> None:
    """Train a victim with what its attacks need recorded; again, if that is all that is missing."""
    path, trials = folder.cells_path / cell.name, attempts_of(settings).on()
    plain = recording(cell.experiment, TraceSettings())
    if (path / "summary.json").exists():
        scores = ScoresFile(path)
        scores.mend()
        trials = run_ground(RunFolder(path), data, settings).lacking(trials, scores)
        trace = _recorded(trials)
        if trace.enabled and not is_recorded(path, trace):
            kept = (path / SCORES).read_bytes() if (path / SCORES).exists() else b""
            shutil.rmtree(path)
            train_cell(replace(cell, experiment=plain), folder, data, device, trace)
            write_bytes(path / SCORES, kept)
        return
    train_cell(replace(cell, experiment=plain), folder, data, device, _recorded(trials))


def draw_pictures(folder: RunFolder, data: Mapping[str, PartyData], settings: GridSettings) -> None:
    """Keep what the cut of a run's test rows looks like, unless that is there; see `pictures_of`.

    Args:
        folder: the run.
        data: every party's rows.
        settings: how many rows, and whose.
    """
    experiment, path = folder.experiment(), folder.path / PICTURES
    if path.exists() and read_json(path)["rows"] == settings.pictures:
        return
    victim = Victim.of_run(folder, data, attacker_of(experiment, settings))
    rows = torch.from_numpy(data[experiment.label.party].split.test)[: settings.pictures]
    drawn = pictures_of(victim.cuts(rows), victim.labels[rows])
    write_json(path, stamp() | {"rows": settings.pictures} | drawn)


def _recorded(trials: Iterable[Trial]) -> TraceSettings:
    """What these trials need to have been recorded."""
    specs = {trial.attack for trial in trials}
    return recorded_phases(scene_of(attacks.make(one), one, own_columns=True) for one in specs)


def _cell(experiment: Experiment, called: str) -> Cell:
    about: dict[str, Any] = {"defense": called, "seed": str(experiment.seed)}
    return Cell(experiment, f"{called} seed={experiment.seed}", about, called)
