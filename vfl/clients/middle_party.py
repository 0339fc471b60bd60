"""The middle party, which has no data: it trains the layers between bottom models and head.

    cuts -> merge -> middle model -> output -> label party
    gradient of the output -> backward -> each feature party's gradient

This is the U-shaped configuration without label sharing of Vepakomma et al. 2018, arXiv 1812.00564.
Towards the feature parties, the middle party acts like the label party of a session without a
middle party; towards the label party, it acts like the only feature party. The middle party
therefore uses the code of `LabelEnd` and `FeatureEnd`, like these parties.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vfl import compression, models
from vfl.core.frame import Link
from vfl.core.seeds import scoped
from vfl.core.traffic import Ledger
from vfl.defenses.base import Undefended
from vfl.models.optimizers import Optimization
from vfl.session import EarlyStopping, Exchange, Terms
from vfl.session.exchange import (
    CutAggregator,
    CutReceiver,
    CutTerms,
    FeatureEnd,
    LabelEnd,
    Own,
    Stateful,
)
from vfl.session.passes import set_training


class _Model(nn.Module):
    """The modules that the middle party trains: model, merger, and parts of trained codecs."""

    def __init__(
        self, model: nn.Module, merger: nn.Module, adapters: Mapping[str, nn.Module]
    ) -> None:
        super().__init__()
        self.model, self.merger, self.adapters = model, merger, nn.ModuleDict(adapters)

    def forward(self, merged: Tensor) -> Tensor:
        """Compute the output from merged cuts, which the codecs have already decoded."""
        output: Tensor = self.model(merged)
        return output


class MiddleParty(CutReceiver):
    """Runs the middle party through the exchanges of a session.

    Args:
        terms: terms of the session, which name a middle party.
        links: network links to the feature parties, by party.
        link: network link to the label party.
        own: private state of the party; its secret determines the model's initial weights.
        model: module that maps the merged cut to the output; it replaces the model that the terms
            name.
        weights: trained weights, for an evaluation or prediction; None for a training.
        ledger: ledger that records how long this party waits for each feature party.

    Raises:
        SpecError: a codec or the model cannot be built, or does not fit the widths.

    Attributes:
        ends: this party's endpoint of the exchanges with each feature party, by party.
        end: this party's endpoint of the exchanges with the label party.
        stopping: this party's part in early stopping, with the best weights so far.
    """

    def __init__(
        self,
        terms: Terms,
        links: Mapping[str, Link],
        link: Link,
        own: Own,
        *,
        model: nn.Module | None = None,
        weights: Mapping[str, Tensor] | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        assert terms.middle is not None, "only a session with a middle party uses this class"
        asked, train = terms.middle, terms.train
        with scoped(own.secret.number("init")):
            self.ends = {
                party: LabelEnd(
                    CutTerms(
                        party,
                        terms.parties[party].width,
                        compression.make(terms.codec),
                        Undefended(),
                        train.in_flight,
                    ),
                    own,
                    links[party],
                )
                for party in terms.feature_parties
            }
            if model is None:
                recipe = models.make_bottom(asked.model)
                model = recipe.build((terms.merged_width,), asked.width)
            adapters = {n: end.adapter for n, end in self.ends.items() if end.adapter is not None}
            agreed = CutTerms(
                asked.party,
                asked.width,
                compression.make(asked.codec),
                Undefended(),
                precision=train.precision,
                compiled=train.compile,
            )
            self._steps = Optimization(train)
            build = self._steps.clipped(self._steps.build) if terms.mode == "train" else None
            self._merger = models.make_merger(terms.merge).build(terms.widths)
            whole = _Model(model, self._merger, adapters)
            self.end = FeatureEnd(agreed, whole, own, link, build)
        self.model = self.end.model
        if weights is not None:
            self.load_weights(weights)
        self.checkpoints = own.checkpoints
        self.stopping = EarlyStopping(train, self._state, self.load_weights)
        self._cuts = CutAggregator(self.ends, ledger or Ledger(), self.stopping)

    @property
    def name(self) -> str:
        return self.end.party

    def begin(self, exchange: Exchange) -> None:
        """Save a checkpoint if one is due; then receive every party's cut, and send the output."""
        if self.checkpoints is not None and exchange.saves:
            self.checkpoints.save(exchange.step, self.training_state())
        set_training(self.end.model, exchange.trains)
        merged = self._merger(*self._cuts.cuts(exchange).values())
        if exchange.trains:
            if self._steps.changes:
                self._steps.begin(exchange.epoch, exchange.trained)
            self.end.send_cut(merged, exchange.step, exchange.rows)
        else:
            self.end.send_query(merged, exchange.step)

    def answer(self, exchange: Exchange) -> None:
        """Do nothing, because the middle party relays no messages."""

    def finish(self, exchange: Exchange) -> None:
        """Receive the output's gradient; send the parties their cuts' gradients, or a receipt."""
        if not exchange.trains:
            answer = self.end.take_receipt(exchange.step)
            self.stopping.obey(answer, exchange)
            if self.stopping.judges(exchange):
                for end in self.ends.values():
                    end.confirm(exchange.step, answer)
            return
        self.end.take_gradient()
        for end in self.ends.values():
            end.send_gradient(_NO_LABELS)
            if exchange.last:
                end.drained()

    def run(self, schedule: Iterable[Exchange]) -> None:
        """Run the exchanges of a session; early stopping may shorten the schedule."""
        for exchange in schedule:
            self.begin(exchange)
            self.finish(exchange)

    def resume(self, step: int) -> None:
        """Return to the state before the exchange `step`; with 0, keep the initial state.

        Raises:
            RunFolderError: see `Checkpoints.load`.
        """
        if step and self.checkpoints is not None:
            self.load_training_state(self.checkpoints.load(step))

    def training_state(self) -> dict[str, Any]:
        """Return the state for an exact resume, with gradients that may be in transit."""
        return {
            "end": self.end.training_state(),
            "state": self._state(),
            "gradients": {name: end.sent_state() for name, end in self.ends.items()},
            "course": self.stopping.state(),
        }

    def load_training_state(self, saved: Mapping[str, Any]) -> None:
        """Restore a state that `training_state` returned."""
        self.end.load_training_state(saved["end"], _nothing_in_flight)
        self.load_weights(saved["state"])
        self.stopping.restore(saved["course"])
        for name, end in self.ends.items():
            end.send_again(saved["gradients"][name])

    def _own_states(self) -> Mapping[str, Stateful]:
        return {"codec": self.end.codec}


#: Placeholder for labels: the middle party has no labels, and no label enters a gradient here.
_NO_LABELS = torch.empty(0)


def _nothing_in_flight(step: int) -> tuple[Tensor, np.ndarray]:
    raise AssertionError("the middle party receives each gradient before it continues")
