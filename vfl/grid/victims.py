"""A victim of a grid: who attacks it, with what, and where they meet."""

from __future__ import annotations

from collections.abc import Mapping

from vfl import attacks
from vfl.attacks import Grant
from vfl.attacks.victim import Setting, Victim
from vfl.config import Experiment, GridSettings, TraceSettings
from vfl.datasets import PartyData
from vfl.errors import ConfigError
from vfl.grid.ground import Ground
from vfl.grid.identity import data_digest, experiment_digest
from vfl.grid.scenes import Recordings, check_scenes, scene_of
from vfl.grid.scores_file import Scored, ScoresFile
from vfl.grid.train import recording
from vfl.grid.trials import Attempts, Trial
from vfl.run_folder import RunFolder
from vfl.storage import read_json


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
        RunFolderError: the run has not ended, its weights are not there, or an attack needs what
            was not recorded.
    """
    ground = run_ground(folder, data, settings)
    return list(ground.go_through(trials, ScoresFile(folder.path)))


def run_ground(folder: RunFolder, data: Mapping[str, PartyData], settings: GridSettings) -> Ground:
    """Where attacks meet the feature party of a finished run; see `attack_run`."""
    experiment = folder.experiment()
    party = attacker_of(experiment, settings)
    victim = Victim.of_run(folder, data, party)
    weights = read_json(folder.path / "summary.json")["weights_sha256"]
    recordings = Recordings(folder, data, party)
    return ground_of(victim, experiment, data, settings, weights, recordings)


def ground_of(
    victim: Victim,
    experiment: Experiment,
    data: Mapping[str, PartyData],
    settings: GridSettings,
    weights: str = "",
    recordings: Recordings | None = None,
) -> Ground:
    """Where attacks meet a victim of this experiment with these weights."""
    party = attacker_of(experiment, settings)
    setting = Setting("test", settings.leaks_from, settings.unlabelled, settings.trained_by)
    about = {
        "experiment": experiment_digest(recording(experiment, TraceSettings())),
        "data": data_digest(data),
        "weights": weights,
        "party": party,
    }
    width = experiment.parties[party].width
    return Ground(victim, experiment.seed, setting, width, about, recordings)


def attempts_of(settings: GridSettings) -> Attempts:
    """The attacks of a grid, and how often each is tried.

    Raises:
        SpecError: an attack cannot be built.
    """
    made = {spec: attacks.make(spec) for spec in settings.attack_specs}
    leaking = [spec for spec, attack in made.items() if Grant.LEAKED in attack.needs]
    once = [spec for spec in made if spec not in leaking]
    alone = [spec for spec, one in made.items() if scene_of(one, spec, own_columns=True) != "asked"]
    return Attempts(leaking, once, settings.leaks, settings.draws, frozenset(alone))


def check_attacks(experiment: Experiment, settings: GridSettings) -> None:
    """Refuse what could not be tried, before anything is trained.

    Raises:
        ConfigError: no feature party has that name.
        SpecError: an attack cannot be built.
        UserError: no attacker of this grid has what an attack needs.
    """
    attacker_of(experiment, settings)
    made = {spec: attacks.make(spec) for spec in settings.attack_specs}
    check_scenes(experiment, settings, made)


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
