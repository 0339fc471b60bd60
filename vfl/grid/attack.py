"""The cells of a grid of attacks: a victim for each defense and seed, and its baselines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vfl import attacks
from vfl.attacks import Grant
from vfl.attacks.victim import Setting, Victim
from vfl.config import Experiment, GridSettings
from vfl.datasets import PartyData
from vfl.errors import ConfigError
from vfl.grid.cells import PICTURES, Cell, GridFolder, grid_settings_of
from vfl.grid.ground import Ground
from vfl.grid.identity import data_digest, experiment_digest
from vfl.grid.pictures import pictures_of
from vfl.grid.scores_file import OF_CELL, Scored, ScoresFile, write_scores
from vfl.grid.train import train_cell
from vfl.grid.trials import BASELINES, Attempts, Trial, setting_words
from vfl.run import session_of
from vfl.run_folder import RunFolder
from vfl.storage import read_json, stamp, write_json


def grid_cells(experiment: Experiment) -> list[Cell]:
    """The cells of an experiment with a `grid` table; one seed is whole before the next.

    Raises:
        ConfigError: there is no such table, or it names no feature party.
        SpecError: a defense or an attack cannot be built.
    """
    settings = grid_settings_of(experiment)
    attacker_of(experiment, settings)
    attempts_of(settings)
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
        trials = attempts.baselines(settings.baselines)
        scores = go_at(victim, cell.experiment, data, settings, trials, path)
    else:
        train_cell(cell, folder, data, device)
        scores = attack_run(RunFolder(path), data, settings, attempts.on())
        if cell.experiment.seed == settings.seeds[0] and settings.pictures:
            draw_pictures(RunFolder(path), data, settings)
    write_scores(path / OF_CELL, setting_words(settings), scores)


def attack_run(
    folder: RunFolder, data: Mapping[str, PartyData], settings: GridSettings, trials: list[Trial]
) -> list[Scored]:
    """Attack the feature party of a finished run; each score is kept in its folder.

    Args:
        folder: the run.
        data: every party's rows.
        settings: who attacks, with what.
        trials: what is tried.

    Raises:
        ConfigError: no feature party has that name.
        RunFolderError: the run has not ended, or its weights are not there.
    """
    experiment = folder.experiment()
    victim = Victim.of_run(folder, data, attacker_of(experiment, settings))
    weights = read_json(folder.path / "summary.json")["weights_sha256"]
    return go_at(victim, experiment, data, settings, trials, folder.path, weights)


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


def go_at(
    victim: Victim,
    experiment: Experiment,
    data: Mapping[str, PartyData],
    settings: GridSettings,
    trials: list[Trial],
    path: Path,
    weights: str = "",
) -> list[Scored]:
    """Go through trials against a victim and keep the scores in a folder; see `attack_run`."""
    party = attacker_of(experiment, settings)
    setting = Setting("test", settings.leaks_from, settings.unlabelled, settings.trained_by)
    about = {
        "experiment": experiment_digest(experiment),
        "data": data_digest(data),
        "weights": weights,
        "party": party,
    }
    ground = Ground(victim, experiment.seed, setting, experiment.parties[party].width, about)
    return list(ground.go_through(trials, ScoresFile(path)))


def attempts_of(settings: GridSettings) -> Attempts:
    """The attacks of a grid, and how often each is tried.

    Raises:
        SpecError: an attack cannot be built.
    """
    made = {spec: attacks.make(spec) for spec in settings.attack_specs}
    leaking = [spec for spec, attack in made.items() if Grant.LEAKED in attack.needs]
    once = [spec for spec in made if spec not in leaking]
    return Attempts(leaking, once, settings.leaks, settings.draws)


def attacker_of(experiment: Experiment, settings: GridSettings) -> str:
    """The feature party that attacks.

    Raises:
        ConfigError: there is none of that name.
    """
    known = experiment.feature_parties
    party = settings.party or known[0]
    if party not in known:
        raise ConfigError(
            "no feature party has that name", where="grid.party", got=party, want=", ".join(known)
        )
    return party


def _cell(experiment: Experiment, called: str) -> Cell:
    about: dict[str, Any] = {"defense": called, "seed": str(experiment.seed)}
    return Cell(experiment, f"{called} seed={experiment.seed}", about, called)
