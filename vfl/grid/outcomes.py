"""What an adversary itself reached, beside the same where nobody tampered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from vfl.attacks import Attack, Grant, ThreatModel
from vfl.attacks.active import ActiveAdversary, Backdoor, make_adversary
from vfl.attacks.active.begin import begin
from vfl.attacks.case import Score
from vfl.config import Experiment, GridSettings
from vfl.datasets import PartyData
from vfl.errors import ConfigError
from vfl.grid.cells import HONEST
from vfl.grid.recordings import Recordings, answers
from vfl.grid.scores_file import Scored, key_of
from vfl.grid.trials import OUTCOME
from vfl.grid.tried import Tried, tried
from vfl.run import load_adversary
from vfl.run_folder import RunFolder
from vfl.seeds import generator
from vfl.storage import read_json

#: The measure of a victim whose training a party stopped.
FOUND = "found_out"


def begun(
    spec: str,
    experiment: Experiment,
    data: Mapping[str, PartyData],
    party: str,
    settings: GridSettings,
) -> dict[str, ActiveAdversary]:
    """The adversary of one training by the party that plays it; nobody for "none".

    Args:
        spec: of the adversary.
        experiment: what is trained.
        data: every party's rows.
        party: the feature party that tampers, or is the victim of the label party.
        settings: of the grid.
    """
    if spec == HONEST:
        return {}
    adversary = make_adversary(spec)
    draw = generator(experiment.seed, "adversary")
    begin(adversary, experiment, data, party, settings.known, draw)
    return {player_of(adversary, experiment, party): adversary}


def player_of(adversary: ActiveAdversary, experiment: Experiment, party: str) -> str:
    """The party that plays an adversary."""
    return party if adversary.who == "feature party" else experiment.label.party


def outcomes_of(settings: GridSettings, adversary: str) -> list[str]:
    """Specs of the adversaries whose own success is measured on a victim of `adversary`.

    On an honest victim those are measured that need no part in the training, as the reference.
    """
    if adversary == HONEST:
        others = [spec for spec in settings.trainings if spec != HONEST]
        return [spec for spec in others if _needs_no_part(make_adversary(spec))]
    made = make_adversary(adversary)
    return [adversary] if _needs_no_part(made) or isinstance(made, Attack) else []


def found_out(adversary: str, settings: GridSettings) -> Scored:
    """In the place of scores: a party found out that it was tampered with, and stopped."""
    made = make_adversary(adversary)
    threat = ThreatModel(made.who, "training", made.holds, behaviour="malicious")
    about = {"adversary": adversary, "known": settings.known}
    return Scored(
        key=key_of(about), attack=adversary, bottom=OUTCOME, k=0, draw=0, measure=FOUND,
        value=1.0, guess=0.0, threat=threat.sentence(), seconds=0.0,
    )  # fmt: skip


def _needs_no_part(adversary: ActiveAdversary) -> bool:
    return isinstance(adversary, Backdoor) or adversary.spoils


class Outcomes:
    """What adversaries reached with one victim.

    Args:
        folder: of its run.
        data: every party's rows.
        party: the feature party.
        settings: of the grid.
        recordings: of the run.
    """

    def __init__(
        self,
        folder: RunFolder,
        data: Mapping[str, PartyData],
        party: str,
        settings: GridSettings,
        recordings: Recordings,
    ) -> None:
        self._folder, self._data, self._party = folder, data, party
        self._settings, self._recordings = settings, recordings

    def of(self, spec: str, draw: torch.Generator) -> Tried:
        """What one adversary reached.

        "backdoor": share of the test rows of other classes that are answered with its class once
        they bear the trigger; the guess is the same share without the trigger. "error": share of
        the test rows that are answered wrongly; the guess is that of the best constant answer. Of
        an adversary that is an attack, the measures of that.
        """
        adversary = make_adversary(spec)
        if isinstance(adversary, Backdoor):
            held = frozenset({Grant.INPUTS})
            threat = ThreatModel("feature party", "inference", held, behaviour="malicious")
            return Tried([self._backdoor(adversary)], threat)
        if isinstance(adversary, Attack):
            return self._decoded(spec, draw)
        held = frozenset({Grant.LABELS})
        threat = ThreatModel(adversary.who, "training", held, behaviour="malicious")
        return Tried([self._spoiled()], threat)

    def _backdoor(self, adversary: Backdoor) -> Score:
        label, own = self._data[self._folder.experiment().label.party], self._data[self._party]
        assert label.labels is not None
        assert label.classes is not None
        assert own.inputs is not None
        if not 0 <= adversary.target < len(label.classes):
            raise ConfigError(
                "a backdoor's class is none of the task's",
                where="grid.adversaries",
                got=f"target={adversary.target}",
                want=f"0 to {len(label.classes) - 1}",
            )
        test = torch.from_numpy(label.split.test)
        others = test[label.labels[test] != adversary.target]
        stamped = replace(own, inputs=adversary.triggered(own.inputs))
        shares = [
            float(
                (answers(self._folder, rows, others).argmax(1) == adversary.target).double().mean()
            )
            for rows in ({**self._data, self._party: stamped}, self._data)
        ]
        return Score("backdoor", *shares)

    def _decoded(self, spec: str, draw: torch.Generator) -> Tried:
        """What an adversary that is an attack too makes of the cuts of the test rows."""
        experiment = self._folder.experiment()
        (player, adversary), *_ = begun(
            spec, experiment, self._data, self._party, self._settings
        ).items()
        assert isinstance(adversary, Attack)
        load_adversary(self._folder, player, adversary)
        case = self._recordings.case("received", 0, generator(experiment.seed, "leak", 0))
        return tried(case, adversary, draw)

    def _spoiled(self) -> Score:
        label = self._data[self._folder.experiment().label.party]
        assert label.labels is not None
        accuracy = read_json(self._folder.path / "summary.json")["test_accuracy"]
        counts = label.labels[torch.from_numpy(label.split.test)].bincount()
        return Score("error", 1 - accuracy, 1 - float(counts.max() / counts.sum()))
