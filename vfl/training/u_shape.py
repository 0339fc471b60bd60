"""All parties of a session with a middle in one process: the same frames over function calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

from vfl.clients import FeatureParty
from vfl.clients.middle_party import MiddleParty
from vfl.config import Experiment
from vfl.core.frame import Link, Observer
from vfl.datasets import PartyData
from vfl.server import LabelParty, Objective
from vfl.session import Exchange, Mode
from vfl.training.local import Connect, Options, PartiesSession
from vfl.training.specs import check_beside_middle
from vfl.transport.link import Observed, local_pair


class UShapedSession(PartiesSession):
    """One session of an experiment with a middle; as `LocalSession` is of others.

    Args:
        experiment: what to do; it has a middle.
        data: each party's aligned rows, by party; the middle has none.
        mode: train, evaluate or predict.
        outputs: number of classes, or 1 for a regression.
        options: as of a `LocalSession`; `bottoms` may hold the middle's model, `top` the head.

    Raises:
        SpecError: a plug-in cannot be built, does not fit, or has no place here.
    """

    clients: list[FeatureParty | MiddleParty]
    label: LabelParty

    def __init__(
        self,
        experiment: Experiment,
        data: Mapping[str, PartyData],
        *,
        mode: Mode = "train",
        outputs: int,
        **options: Unpack[Options],
    ) -> None:
        assert experiment.middle is not None, "a LocalSession is of experiments without a middle"
        check_beside_middle(experiment.defense)
        name, label = experiment.middle.party, experiment.label.party
        super().__init__(experiment, mode, [*data, name], options)
        connect: Connect = options.get("connect", lambda party: local_pair())
        watching: list[Observer] = [self.ledger, *options.get("observers", ())]
        bottoms, links = options.get("bottoms") or {}, dict[str, Link]()
        self.features: list[FeatureParty] = []
        for party in self.terms.feature_parties:
            here, there = connect(party)
            links[party] = Observed(here, party, "label", watching)
            self.features.append(self._feature(data[party], there, bottoms))
        here, there = connect(name)
        self.middle = MiddleParty(
            self.terms,
            links,
            there,
            self._own[name],
            model=bottoms.get(name),
            weights=self._weights.get(name),
            ledger=self.ledger,
        )
        self.clients = [*self.features, self.middle]
        self.label = LabelParty(
            data[label],
            self.terms.at_label(),
            {name: Observed(here, name, "label", watching)},
            self._own[label],
            Objective.of(experiment.label, outputs, options.get("top")),
            weights=self._weights.get(label),
            ledger=self.ledger,
            on_epoch=options.get("on_epoch", lambda record: None),
        )

    def run(self) -> UShapedSession:
        """Go through the whole session, or the rest of it."""
        start, split = self._start(), self.label.data.split
        self.middle.resume(start)
        self.label.resume(start)  # last, for its ledger has counted what was just sent again
        for client in self.features:
            client.resume(start, self.terms.in_flight_at(split, start))
        schedule = self._watched(self.label.stopping.follow(self.terms.schedule(split, start)))
        self.label.run(schedule, self._begin, self._finish)
        return self

    def _begin(self, exchange: Exchange) -> None:
        for client in self.clients:
            client.begin(exchange)

    def _finish(self, exchange: Exchange) -> None:
        for client in reversed(self.clients):
            client.finish(exchange)
