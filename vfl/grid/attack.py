"""The cells of a grid of attacks: a victim for each defense and seed, and its baselines."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

import torch

from vfl.attacks.victim import Victim
from vfl.config import Experiment, GridSettings
from vfl.datasets import PartyData
from vfl.errors import HijackError
from vfl.grid.cells import (
    FAILURE,
    FOUND_OUT,
    HONEST,
    PICTURES,
    Cell,
    GridFolder,
    grid_settings_of,
)
from vfl.grid.misfits import check_attempts
from vfl.grid.outcomes import found_out
from vfl.grid.pictures import pictures_of
from vfl.grid.recorded_training import train_recorded
from vfl.grid.scores_file import OF_CELL, Scored, ScoresFile, write_scores
from vfl.grid.trials import BASELINES, setting_words
from vfl.grid.victims import (
    attack_run,
    attacker_of,
    attempts_of,
    check_attacks,
    free_ground,
)
from vfl.run_folder import RunFolder
from vfl.storage import read_json, stamp, write_json


def grid_cells(experiment: Experiment) -> list[Cell]:
    """The cells of an experiment with a `grid` table; one seed is whole before the next.

    Raises:
        ConfigError: there is no such table, or it names no feature party.
        SpecError: a defense or an attack cannot be built.
    """
    settings = grid_settings_of(experiment)
    check_attacks(experiment, settings)
    plain = experiment.model_copy(update={"compare": None, "grid": None})
    found = []
    for seed in settings.seeds:
        seeded = plain.model_copy(update={"seed": seed})
        found.append(_cell(seeded, BASELINES))
        for victim in settings.victims:
            defended = seeded.model_copy(update=settings.differs(victim))
            found += [_cell(defended, victim, one, settings) for one in settings.trainings]
    return found


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
    check_attempts(cell.experiment, settings, data)
    path = folder.cells_path / cell.name
    if cell.called == BASELINES:
        trials = attempts_of(settings).baselines(settings.baselines)
        ground = free_ground(cell.experiment, data, settings)
        scores = list(ground.go_through(trials, ScoresFile(path)))
    else:
        scores = attack_victim(cell, folder, data, settings, device)
    write_scores(path / OF_CELL, setting_words(settings), scores)


def attack_victim(
    cell: Cell,
    folder: GridFolder,
    data: Mapping[str, PartyData],
    settings: GridSettings,
    device: str,
) -> list[Scored]:
    """The scores of every trial on a victim, trained before; see `attack_cell`."""
    path, trials = folder.cells_path / cell.name, attempts_of(settings, cell.adversary).on_victim()
    if (path / FOUND_OUT).exists():
        return [found_out(cell.adversary, settings)]
    try:
        train_recorded(cell, folder, data, settings, device)
    except HijackError as error:
        if cell.adversary == HONEST:
            raise
        write_json(path / FOUND_OUT, stamp() | error.record())
        (path / FAILURE).unlink(missing_ok=True)
        return [found_out(cell.adversary, settings)]
    scores = attack_run(RunFolder(path), data, settings, trials, cell.adversary)
    if cell.experiment.seed == settings.seeds[0] and settings.pictures:
        draw_pictures(RunFolder(path), data, settings)
    for trace in path.glob("parties/*/trace"):
        shutil.rmtree(trace)  # large, and a training can be recorded again
    return scores


def draw_pictures(folder: RunFolder, data: Mapping[str, PartyData], settings: GridSettings) -> None:
    """Keep what the cut of a run's test rows looks like, unless that is there; see `pictures_of`.

    Args:
        folder: the run.
        data: every party's rows.
        settings: how many rows, and whose.
    """
    experiment, path = folder.experiment(), folder.path / PICTURES
    party = attacker_of(experiment, settings)
    about = {"rows": settings.pictures, "party": party}
    if path.exists() and about.items() <= read_json(path).items():
        return
    victim = Victim.of_run(folder, data, party)
    rows = torch.from_numpy(data[experiment.label.party].split.test)[: settings.pictures]
    drawn = pictures_of(victim.cuts(rows), victim.labels[rows])
    write_json(path, stamp() | about | drawn)


def _cell(
    experiment: Experiment,
    called: str,
    adversary: str = HONEST,
    settings: GridSettings | None = None,
) -> Cell:
    about: dict[str, Any] = {"defense": called, "seed": str(experiment.seed)}
    title = f"{called} seed={experiment.seed}"
    if settings is None or adversary == HONEST:
        return Cell(experiment, title, about, called)
    about |= {"adversary": adversary, "known": str(settings.known)}
    about["party"] = attacker_of(experiment, settings)
    return Cell(experiment, f"{called} against {adversary} seed={experiment.seed}", about, called,
                adversary)  # fmt: skip
