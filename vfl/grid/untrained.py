"""What stands in the place of a victim where nothing is trained: its rows, leaks and partners."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vfl.attacks.case import Case, seeking
from vfl.attacks.victim import Setting, Victim
from vfl.config import Experiment
from vfl.datasets import PartyData
from vfl.grid.scenes import Scene
from vfl.run import session_of


class Untrained:
    """Feature parties as they begin; baselines put label-free bottoms in the place of theirs.

    Args:
        experiment: what would be trained.
        data: every party's rows.
        party: the feature party that attacks.
        setting: which rows play which part.

    Attributes:
        victim: that party.
    """

    def __init__(
        self, experiment: Experiment, data: Mapping[str, PartyData], party: str, setting: Setting
    ) -> None:
        weights = session_of(experiment, data, "predict").weights()
        self._setting, self._own = setting, weights[party]
        self.victim, *self._partners = (
            Victim(experiment, data, name, weights[name])
            for name in (party, *(one for one in experiment.feature_parties if one != party))
        )

    def case(self, scene: Scene, k: int, draw: torch.Generator) -> Case:
        """The case of one leak; with a bottom of one epoch, or with partners, as the scene has."""
        kept = [self._own] if scene == "kept" else []
        partners = self._partners if scene == "pooled" else []
        return seeking(self.victim.case(k, draw, self._setting, snapshots=kept, partners=partners))
