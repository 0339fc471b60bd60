"""A victim of a grid: who attacks it, with what, and where they meet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vfl import attacks
from vfl.attacks import Grant
from vfl.attacks.active import make_adversary
from vfl.attacks.victim import Victim
from vfl.config import Experiment, GridSettings, TraceSettings
from vfl.datasets import PartyData
from vfl.errors import ConfigError, UserError
from vfl.grid.cells import HONEST
from vfl.grid.gallery import Gallery
from vfl.grid.ground import Ground
from vfl.grid.identity import data_digest, experiment_digest
from vfl.grid.outcomes import Outcomes, outcomes_of
from vfl.grid.recordings import Recordings, setting_of
from vfl.grid.scenes import ATTACKERS, BY_CUTS, check_scenes, scene_of
from vfl.grid.scores_file import Scored, ScoresFile
from vfl.grid.train import recording
from vfl.grid.trials import Attempts, Trial
from vfl.grid.untrained import Untrained
from vfl.run_folder import RunFolder
from vfl.storage import read_json


def attack_run(
    folder: RunFolder,
    data: Mapping[str, PartyData],
    settings: GridSettings,
    trials: list[Trial],
    adversary: str = HONEST,
) -> list[Scored]:
    """Attack the feature party of a finished run; each score is kept in its folder.

    Args:
        folder: the run.
        data: every party's rows.
        settings: who attacks, with what.
        trials: what is tried.
        adversary: spec of the one that it was trained against.

    Raises:
        ConfigError: no feature party has that name.
        RunFolderError: the run has not ended, its weights are not there, or an attack needs what
            was not recorded.
    """
    ground = run_ground(folder, data, settings, adversary)
    return list(ground.go_through(trials, ScoresFile(folder.path)))


def run_ground(
    folder: RunFolder,
    data: Mapping[str, PartyData],
    settings: GridSettings,
    adversary: str = HONEST,
) -> Ground:
    """Where attacks meet the feature party of a finished run; see `attack_run`."""
    experiment = folder.experiment()
    party = attacker_of(experiment, settings)
    victim = Victim.of_run(folder, data, party)
    weights = read_json(folder.path / "summary.json")["weights_sha256"]
    recordings = Recordings(folder, data, party, settings)
    outcomes = Outcomes(folder, data, party, settings, recordings)
    about = _about(experiment, data, party, weights) | {"columns": settings.known_columns}
    if settings.attribute is not None:
        about |= {"attribute": settings.attribute}
    if adversary != HONEST:
        about |= {"adversary": adversary, "known": settings.known}
    draws = settings.draws_rows(experiment.is_table) and experiment.seed == settings.seeds[0]
    return Ground(
        victim,
        experiment.seed,
        setting_of(settings),
        experiment.parties[party].width,
        about,
        recordings.case,
        outcomes,
        adversary,
        Gallery(folder.path) if draws else None,
    )


def free_ground(
    experiment: Experiment, data: Mapping[str, PartyData], settings: GridSettings
) -> Ground:
    """Where attacks meet what needs no training: the baselines of a seed."""
    party = attacker_of(experiment, settings)
    setting, about = setting_of(settings), _about(experiment, data, party)
    untrained = Untrained(experiment, data, party, setting)
    width = experiment.parties[party].width
    return Ground(untrained.victim, experiment.seed, setting, width, about, untrained.case)


def _about(
    experiment: Experiment, data: Mapping[str, PartyData], party: str, weights: str = ""
) -> dict[str, Any]:
    """What every value depends on besides the trial."""
    return {
        "experiment": experiment_digest(recording(experiment, TraceSettings())),
        "data": data_digest(data),
        "weights": weights,
        "party": party,
    }


def attempts_of(settings: GridSettings, adversary: str = HONEST) -> Attempts:
    """The attacks of a grid, and how often each is tried.

    Args:
        settings: of the grid.
        adversary: spec of the one that the victim was trained against, which limits them to those
            of the party that played it.

    Raises:
        SpecError: an attack cannot be built.
    """
    made = {spec: attacks.make(spec) for spec in settings.attack_specs}
    scenes = {spec: scene_of(one, spec, own_columns=True) for spec, one in made.items()}
    if adversary != HONEST:
        who = make_adversary(adversary).who
        made = {spec: one for spec, one in made.items() if ATTACKERS[scenes[spec]] == who}
    leaking = [spec for spec, attack in made.items() if Grant.LEAKED in attack.needs]
    once = [spec for spec in made if spec not in leaking]
    alone = frozenset(spec for spec in made if scenes[spec] not in BY_CUTS)
    outcomes = outcomes_of(settings, adversary)
    unseen = frozenset(made) - frozenset(settings.baseline_specs)
    return Attempts(leaking, once, settings.leaks, settings.draws, alone, outcomes, unseen)


def check_attacks(experiment: Experiment, settings: GridSettings) -> None:
    """Refuse what could not be tried, before anything is trained.

    Raises:
        ConfigError: no feature party has that name.
        SpecError: an attack or an adversary cannot be built.
        UserError: no attacker of this grid has what an attack needs.
    """
    party = attacker_of(experiment, settings)
    made = {spec: attacks.make(spec) for spec in settings.attack_specs}
    check_scenes(experiment, settings, made, party)
    active = [spec for spec in settings.trainings if spec != HONEST]
    for spec in active:
        make_adversary(spec)
    if active and settings.trained_by == "owner":
        raise UserError(
            f"{active[0]} tampers with the training, and where the owner trained alone nobody can",
            where="grid.adversaries",
            fix="trained_by = 'split'",
        )


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
