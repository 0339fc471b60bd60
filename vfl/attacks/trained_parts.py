"""The halves of a trained network, made again from everybody's weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vfl import compression, defenses, models
from vfl.attacks.features import through
from vfl.attacks.recorded import Frames, last_cuts
from vfl.compression import Moment
from vfl.config import Experiment
from vfl.datasets import PartyData
from vfl.seeds import scoped
from vfl.session import Terms

Weights = Mapping[str, Mapping[str, Tensor]]


class TrainedParts:
    """The parts of one trained network.

    Args:
        experiment: what was trained.
        data: every party's aligned rows.
        weights: everybody's trained weights, as `LocalSession.weights` gives them.
    """

    def __init__(
        self, experiment: Experiment, data: Mapping[str, PartyData], weights: Weights
    ) -> None:
        self._data, self._weights = data, weights
        self._top_spec = experiment.label.top
        self._terms = Terms.of(experiment, "predict", experiment.name)

    def bottom(self, party: str) -> nn.Module:
        """A party's bottom, with what defense and codec put around it."""
        asked, codec = self._terms.parties[party], compression.make(self._terms.codec)
        shape = tuple(self._inputs(party, torch.zeros(1, dtype=torch.int64)).shape[1:])
        with scoped(0):  # whatever is drawn is overwritten
            bottom = models.make_bottom(asked.bottom).build(shape, asked.width)
            made = nn.ModuleDict({"bottom": self._defense().wrap_bottom(bottom, asked.width)})
            if party != self._terms.label_party and (adapter := codec.client_module(asked.width)):
                made["codec"] = adapter
        self._load(made, party)
        return nn.Sequential(*made.values()).eval()

    def top(self) -> nn.Module:
        """The label party's top."""
        classes, width = self._data[self._terms.label_party].classes, self._terms.merged_width
        assert classes is not None
        with scoped(0):
            top = models.make_top(self._top_spec).build(width, len(classes))
            made = nn.ModuleDict({"top": self._defense().wrap_top(top, width)})
        self._load(made, self._terms.label_party)
        return made["top"].eval()

    def outputs(self, queries: Frames, rows: Tensor) -> Tensor:
        """What the network answers for rows whose cuts were recorded, axes (rows, classes).

        Args:
            queries: recorded frames of every feature party; gone through once a party.
            rows: positions among the aligned rows, int64.

        Raises:
            DataError: some rows' cuts were not recorded.
        """
        cuts = [self._cuts(name, queries, rows) for name in self._terms.parties]
        merged = torch.cat(cuts, 1) if self._terms.merge == "concat" else sum(cuts[1:], cuts[0])
        return self._defense().logits(through(self.top(), merged), Moment())

    def _cuts(self, party: str, queries: Frames, rows: Tensor) -> Tensor:
        """What the top is given of one party."""
        if party == self._terms.label_party:
            return through(self.bottom(party), self._inputs(party, rows))
        cuts, width = last_cuts(queries, party, rows), self._terms.parties[party].width
        with scoped(0):
            adapter = compression.make(self._terms.codec).server_module(width)
        if adapter is None:
            return cuts
        self._load(nn.ModuleDict({f"codec-{party}": adapter}), self._terms.label_party)
        return through(adapter, cuts)

    def _inputs(self, party: str, rows: Tensor) -> Tensor:
        inputs = self._data[party].inputs
        assert inputs is not None
        return inputs.index_select(0, rows)

    def _defense(self) -> defenses.Defense:
        return defenses.make(self._terms.defense)

    def _load(self, parts: nn.ModuleDict, party: str) -> None:
        """Load the weights of these parts out of a party's."""
        weights = self._weights[party].items()
        parts.load_state_dict({k: value for k, value in weights if k.split(".")[0] in parts})
