"""Scenes: which threat model an attack is tried under, and what it asks to be recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from vfl.attacks import Attack, Grant
from vfl.attacks.case import Case
from vfl.attacks.recorded_case import OWN_COLUMNS, RECEIVING, TRAINING, received_case, training_case
from vfl.attacks.victim import INFERENCE
from vfl.config import Experiment, GridSettings, TraceSettings
from vfl.datasets import PartyData
from vfl.errors import UserError
from vfl.run_folder import RunFolder
from vfl.session import PartyFolder
from vfl.trace import Replayed, read, trace_of_masked_cuts

#: "asked": a feature party once the network is in use; "heard": a feature party that recorded the
#: training; "received": a label party that recorded the last queries.
Scene = Literal["asked", "heard", "received"]
#: Rows whose columns leaked to the label party, of the validation rows.
_LEAKED_ROWS = 200
#: Where a party's recording lies in a run folder.
_TRACES = "parties/*/trace"


def scene_of(attack: Attack, spec: str, own_columns: bool = False) -> Scene:
    """The scene of an attack.

    Args:
        attack: what it needs decides.
        spec: its spec, for the message.
        own_columns: whether the label party has columns of its own.

    Raises:
        UserError: no party of a grid holds all it needs.
    """
    if attack.goal in ("labels", "clusters", "scores") and attack.needs <= INFERENCE:
        return "asked"
    if attack.goal in ("labels", "clusters", "scores") and attack.needs <= TRAINING:
        return "heard"
    received = RECEIVING | OWN_COLUMNS if own_columns else RECEIVING
    if attack.goal == "inputs" and attack.needs <= received:
        return "received"
    beyond = attack.needs - INFERENCE - TRAINING - received
    raise UserError(
        f"no attacker of a grid has what {spec} needs",
        got=", ".join(str(grant) for grant in Grant if grant in (beyond or attack.needs)),
        fix="build its case in Python: vfl.attacks.case.attempt",
    )


def recorded_phases(scenes: Iterable[Scene]) -> TraceSettings:
    """What a training records for these scenes; nothing unless they need it."""
    known = set(scenes)
    phases = ("train",) if "heard" in known else ()
    return TraceSettings(phases=(*phases, *(("validation", "test") if "received" in known else ())))


def is_recorded(path: Path, wanted: TraceSettings) -> bool:
    """Whether a run folder has recordings of all these phases."""
    found = [read(trace).settings.phases for trace in path.glob(_TRACES)]
    return bool(found) and all(set(wanted.phases) <= set(phases) for phases in found)


class Recordings:
    """The cases that the recordings of a run make; frames are decoded once.

    Args:
        folder: the run.
        data: every party's rows.
        party: the feature party.
    """

    def __init__(self, folder: RunFolder, data: Mapping[str, PartyData], party: str) -> None:
        self._folder, self._data, self._party = folder, data, party
        self._frames: dict[Scene, list[tuple[Replayed, Tensor]]] = {}

    def case(self, scene: Scene, k: int, draw: torch.Generator) -> Case:
        """The case of one leak.

        Args:
            scene: "heard" or "received".
            k: leaked labels of each class; columns that leak are always as many.
            draw: which rows leak.

        Raises:
            RunFolderError: nothing was recorded.
            TooFewRowsError: fewer rows than are to leak.
        """
        experiment = self._folder.experiment()
        if scene == "heard":
            return training_case(
                experiment, self._data, self._of(scene, experiment), self._party, k, draw
            )
        rows = len(self._data[self._party].split.validation)
        weights = {name: PartyFolder(self._folder.party(name)).weights() for name in self._data}
        frames = self._of(scene, experiment)
        leaks = min(_LEAKED_ROWS, rows)
        return received_case(experiment, self._data, frames, self._party, leaks, draw, weights)

    def _of(self, scene: Scene, experiment: Experiment) -> list[tuple[Replayed, Tensor]]:
        if scene not in self._frames:
            owner = self._party if scene == "heard" else experiment.label.party
            recording = read(self._folder.party(owner) / "trace")
            phase = "train" if scene == "heard" else None
            self._frames[scene] = list(recording.decoded(phase=phase))
        return self._frames[scene]


def check_scenes(
    experiment: Experiment, settings: GridSettings, made: Mapping[str, Attack]
) -> None:
    """Refuse attacks that no attacker of this grid could run.

    Raises:
        UserError: with the attack, and what it needs.
        ExposedCutError: it reads recorded cuts, of a training that sums them under masks.
    """
    own_columns = experiment.label.party in experiment.parties
    for spec, attack in made.items():
        scene = scene_of(attack, spec, own_columns)
        if scene != "asked" and experiment.secure != "none":
            raise trace_of_masked_cuts()
        if scene == "heard" and settings.trained_by == "owner":
            raise UserError(
                f"{spec} needs the training, and where the owner trained alone nobody saw it",
                where="grid.attacks",
                fix="trained_by = 'split'",
            )
