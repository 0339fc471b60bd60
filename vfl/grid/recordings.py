"""Cases made of what a finished run left: its recordings, and its answers to further queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from vfl.attacks.attribute_case import attribute_case
from vfl.attacks.case import Case, seeking
from vfl.attacks.evidence import Sent
from vfl.attacks.queried_case import Queried, queried_case
from vfl.attacks.recorded_case import recalled_case, received_case, training_case
from vfl.attacks.summed_case import summed_case
from vfl.attacks.victim import Setting, Victim
from vfl.config import GridSettings
from vfl.datasets import PartyData, Split
from vfl.errors import TooFewRowsError
from vfl.grid.scenes import Scene
from vfl.run import trained
from vfl.run_folder import RunFolder
from vfl.seeds import generator
from vfl.session import PartyFolder
from vfl.trace import Replayed, read

#: How often a label party asks for the same rows.
_TIMES = 16
#: Training rows whose membership is asked about, and as many test rows.
_MEMBERS = 1000


def setting_of(settings: GridSettings) -> Setting:
    """Which rows play which part where a feature party attacks."""
    return Setting("test", settings.leaks_from, settings.unlabelled, settings.trained_by)


class Recordings:
    """The cases of a run whose attackers heard, received or asked; frames are decoded once.

    Args:
        folder: the run.
        data: every party's rows.
        party: the feature party.
        settings: what attackers know of it, and which column of it they look for.
    """

    def __init__(
        self,
        folder: RunFolder,
        data: Mapping[str, PartyData],
        party: str,
        settings: GridSettings,
    ) -> None:
        self._folder, self._data, self._party = folder, data, party
        self._settings, self._experiment = settings, folder.experiment()
        self._frames: dict[str, list[tuple[Replayed, Tensor]]] = {}

    def case(self, scene: Scene, k: int, draw: torch.Generator) -> Case:
        """The case of one leak.

        Args:
            scene: any but "asked".
            k: leaked labels of each class; columns that leak are always as many.
            draw: which rows leak, or are asked about.

        Raises:
            RunFolderError: nothing was recorded.
            TooFewRowsError: fewer rows than are to leak.
            ConfigError: the party has no such attribute.
        """
        if scene == "heard":
            frames = self._of(self._party, "train")
            return training_case(self._experiment, self._data, frames, self._party, k, draw)
        if scene == "queried":
            return self._queried(draw)
        if scene in ("kept", "pooled"):
            return self._of_labels(scene, k, draw)
        if scene == "summed":
            return self._summed(draw)
        columns = self._recalled(draw) if "recalled" in scene else self._received(draw)
        if "attribute" not in scene:
            return columns
        own = self._data[self._party]
        assert own.inputs is not None
        train = own.inputs[torch.from_numpy(own.split.train)]
        return attribute_case(columns, train, self._settings.attribute)

    def _of_labels(self, scene: Scene, k: int, draw: torch.Generator) -> Case:
        """Of a feature party in use, with its bottoms of every epoch or with partners."""
        own, setting = self._victim(self._party), setting_of(self._settings)
        if scene == "kept":
            return seeking(own.case(k, draw, setting, snapshots=self._snapshots()))
        partners = [self._victim(name) for name in self._others()]
        return seeking(own.case(k, draw, setting, partners=partners))

    def _snapshots(self) -> list[dict[str, Tensor]]:
        recording = read(self._folder.party(self._party) / "trace")
        return [one.weights for one in recording.snapshots() if one.epoch > 0]

    def _received(self, draw: torch.Generator) -> Case:
        orders = generator(self._experiment.seed, "again")

        def again(rows: Tensor) -> list[Sent]:
            return self._victim(self._party).asked_again(rows, _TIMES, orders.clone_state())

        frames, leaks = self._of(self._experiment.label.party, None), self._leaks()
        return received_case(self._experiment, self._data, frames, self._party, leaks, draw,
                             self._weights(), again)  # fmt: skip

    def _recalled(self, draw: torch.Generator) -> Case:
        rows = len(self._data[self._party].split.train)
        leaks = min(self._settings.known_columns, rows // 2)
        frames = self._of(self._experiment.label.party, None)
        return recalled_case(self._experiment, self._data, frames, self._party, leaks, draw,
                             self._weights())  # fmt: skip

    def _summed(self, draw: torch.Generator) -> Case:
        leaks = self._leaks()
        return summed_case(self._experiment, self._data, self._party, self._others(), leaks, draw,
                           self._weights())  # fmt: skip

    def _others(self) -> list[str]:
        return [name for name in self._experiment.feature_parties if name != self._party]

    def _leaks(self) -> int:
        """How many of the validation rows a label party knows."""
        rows = known_rows(self._data[self._party].split, "a label party")
        return min(self._settings.known_columns, rows)

    def _weights(self) -> dict[str, dict[str, Tensor]]:
        return {name: PartyFolder(self._folder.party(name)).weights() for name in self._data}

    def _victim(self, party: str) -> Victim:
        return Victim.of_run(self._folder, self._data, party)

    def _queried(self, draw: torch.Generator) -> Case:
        split = self._data[self._party].split
        train, others, own = map(torch.from_numpy, (split.train, split.test, split.validation))
        count = min(_MEMBERS, len(train), len(others))
        members = train[torch.randperm(len(train), generator=draw)[:count]]
        others = others[torch.randperm(len(others), generator=draw)[:count]]
        rows = Queried(members, others, own)
        outputs = answers(self._folder, self._data, rows.targets)
        return queried_case(self._experiment, self._data, rows, outputs)

    def _of(self, owner: str, phase: str | None) -> list[tuple[Replayed, Tensor]]:
        if owner not in self._frames:
            recording = read(self._folder.party(owner) / "trace")
            self._frames[owner] = list(recording.decoded(phase=phase))
        return self._frames[owner]


def known_rows(split: Split, who: str) -> int:
    """How many rows an attacker may know that are neither attacked nor trained on.

    Args:
        split: of the rows.
        who: the attacker, for the message.

    Raises:
        TooFewRowsError: none.
    """
    if not len(split.validation):
        raise TooFewRowsError(
            f"{who} knows columns of validation rows, and there are none",
            where="data.validation",
            want="data.validation > 0",
        )
    return len(split.validation)


def answers(folder: RunFolder, data: Mapping[str, PartyData], rows: Tensor) -> Tensor:
    """What a finished network answers when it is asked about these rows, axes (rows, outputs).

    Args:
        folder: the run, with everybody's weights.
        data: every party's rows.
        rows: positions among the aligned rows, int64.
    """
    asked = {
        name: replace(own, split=replace(own.split, test=rows.numpy()))
        for name, own in data.items()
    }
    return trained(folder, asked, "predict").run().outputs()
