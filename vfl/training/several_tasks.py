"""Several label parties over the same bottoms in one process: the same frames, a link to each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor

from vfl.clients import FeatureParty
from vfl.config import Experiment
from vfl.core.frame import Link, Observer
from vfl.core.ledger import Ledger
from vfl.core.storage import joint_digest
from vfl.datasets import PartyData
from vfl.server import LabelParty, Objective
from vfl.session import Exchange, Mode
from vfl.training.local import Connect, Options, PartiesSession
from vfl.transport.link import FanOut, Observed, local_pair


class SeveralTasksSession(PartiesSession):
    """One session of an experiment with several label parties; as `LocalSession` is of others.

    A feature party sends the same frame to each and takes the weighted sum of their gradients. Each
    label party is that of a session with one, and knows of the others only what the terms say.

    Args:
        experiment: what to do; it has tasks.
        data: each party's aligned rows, by party.
        mode: train, evaluate or predict.
        outputs: number of classes of [label], or 1 for a regression.
        options: as of a `LocalSession`; `bottoms` may hold the tops of further label parties.

    Raises:
        SpecError: a plug-in cannot be built or does not fit a task.

    Attributes:
        label: the label party that leads.
        others: the further ones, by name; while serving those whose tasks are served.
    """

    clients: list[FeatureParty]
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
        super().__init__(experiment, mode, data, options)
        names = [experiment.label.party, *self.terms.takers]
        ledgers = {name: Ledger() for name in names[1:]} | {names[0]: self.ledger}
        connect: Connect = options.get("connect", lambda party: local_pair())
        bottoms = options.get("bottoms") or {}
        links: dict[str, dict[str, Link]] = {name: {} for name in names}
        self._ends: dict[str, dict[str, Link]] = {name: {} for name in names}
        self.clients = []
        for party in self.terms.feature_parties:
            ends = []
            for name in names:
                here, there = connect(party)
                also = options.get("observers", ()) if name == names[0] else ()
                watching: list[Observer] = [ledgers[name], *also]
                links[name][party] = Observed(here, party, "label", watching)
                ends.append(there)
                self._ends[name][party] = there
            self.clients.append(self._feature(data[party], FanOut(ends), bottoms))
        self.label = LabelParty(
            data[names[0]],
            self.terms,
            links[names[0]],
            self._own[names[0]],
            Objective.of(experiment.label, outputs, options.get("top")),
            own_bottom=bottoms.get(names[0]),
            weights=self._weights.get(names[0]),
            ledger=self.ledger,
            on_epoch=options.get("on_epoch", lambda record: None),
        )
        self.others = {
            name: LabelParty(
                data[name],
                self.terms.at_label(name),
                links[name],
                self._own[name],
                Objective.of(experiment.task_of(name), data[name].outputs, bottoms.get(name)),
                weights=self._weights.get(name),
                ledger=ledgers[name],
            )
            for name in names[1:]
        }

    def leads(self, name: str) -> LabelParty:
        """A label party whom alone the feature parties answer from now on."""
        for client in self.clients:
            client.end.link = self._ends[name][client.name]
        return self.label if name == self.label.data.name else self.others[name]

    def run(self) -> SeveralTasksSession:
        """Go through the whole session, or the rest of it."""
        start, split = self._start(), self.label.data.split
        for party in (self.label, *self.others.values()):
            party.resume(start)
        for client in self.clients:
            client.resume(start, self.terms.in_flight_at(split, start))
        others = [one.steps(self.terms.schedule(split, start)) for one in self.others.values()]
        schedule = self._watched(self.terms.schedule(split, start))
        for exchange in self.label.steps(schedule, self._begin):
            for steps in others:
                next(steps)
            for client in self.clients:
                client.finish(exchange)
        for steps in others:
            next(steps, None)  # the record of the last epoch
        return self

    def weights(self) -> dict[str, dict[str, Tensor]]:
        """Everybody's weights by party, those of every label party included."""
        return super().weights() | {name: one.weights() for name, one in self.others.items()}

    def weights_digest(self) -> str:
        """One digest of the parties' own digests in name order."""
        digests = [(client.name, client.weights_digest()) for client in self.clients]
        for one in (self.label, *self.others.values()):
            digests.append((one.data.name, one.weights_digest()))
        return joint_digest(digests)

    def whole_ledger(self) -> Ledger:
        """What crossed every link, those to further label parties under a name that says so."""
        rows: list[Mapping[str, Any]] = [*self.ledger.state()]
        for name, one in self.others.items():
            rows += [row | {"party": f"{row['party']} to {name}"} for row in one.ledger.state()]
        whole = Ledger()
        whole.restore(rows)
        return whole

    def _begin(self, exchange: Exchange) -> None:
        for client in self.clients:
            client.begin(exchange)
