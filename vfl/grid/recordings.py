"""Cases made of what a finished run left: its recordings, and its answers to further queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from vfl.attacks.attribute_case import attribute_case
from vfl.attacks.case import Case
from vfl.attacks.queried_case import Queried, queried_case
from vfl.attacks.recorded_case import received_case, training_case
from vfl.config import GridSettings
from vfl.datasets import PartyData
from vfl.errors import TooFewRowsError
from vfl.grid.scenes import Scene
from vfl.run import trained
from vfl.run_folder import RunFolder
from vfl.session import PartyFolder
from vfl.trace import Replayed, read

#: Training rows whose membership is asked about, and as many test rows.
_MEMBERS = 1000


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
        self._settings = settings
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
            experiment = self._folder.experiment()
            return training_case(experiment, self._data, frames, self._party, k, draw)
        if scene == "queried":
            return self._queried(draw)
        received = self._received(draw)
        if scene == "received":
            return received
        own = self._data[self._party]
        assert own.inputs is not None
        train = own.inputs[torch.from_numpy(own.split.train)]
        return attribute_case(received, train, self._settings.attribute)

    def _received(self, draw: torch.Generator) -> Case:
        experiment = self._folder.experiment()
        rows = len(self._data[self._party].split.validation)
        weights = {name: PartyFolder(self._folder.party(name)).weights() for name in self._data}
        if not rows:
            raise TooFewRowsError(
                "a label party knows columns of validation rows, and there are none",
                where="data.validation",
                want="data.validation > 0",
            )
        leaks = min(self._settings.known_columns, rows)
        frames = self._of(experiment.label.party, None)
        return received_case(experiment, self._data, frames, self._party, leaks, draw, weights)

    def _queried(self, draw: torch.Generator) -> Case:
        split = self._data[self._party].split
        train, others, own = map(torch.from_numpy, (split.train, split.test, split.validation))
        count = min(_MEMBERS, len(train), len(others))
        members = train[torch.randperm(len(train), generator=draw)[:count]]
        others = others[torch.randperm(len(others), generator=draw)[:count]]
        rows = Queried(members, others, own)
        outputs = answers(self._folder, self._data, rows.targets)
        return queried_case(self._folder.experiment(), self._data, rows, outputs)

    def _of(self, owner: str, phase: str | None) -> list[tuple[Replayed, Tensor]]:
        if owner not in self._frames:
            recording = read(self._folder.party(owner) / "trace")
            self._frames[owner] = list(recording.decoded(phase=phase))
        return self._frames[owner]


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
