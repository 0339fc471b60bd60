"""All parties in one process: the same parties, the same frames, a function call as the link."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from torch import Tensor, nn

from vfl.clients import FeatureParty, build_feature_party
from vfl.config import Experiment
from vfl.core.errors import ExposedCutError
from vfl.core.frame import Link, Observer
from vfl.core.ledger import Ledger
from vfl.core.seeds import Secret
from vfl.core.storage import joint_digest
from vfl.datasets import PartyData
from vfl.server import EpochRecord, LabelParty, Objective, build_label_party
from vfl.session import CHECKPOINTS, Adversary, Checkpoints, Exchange, Mode, Terms, secure
from vfl.session.checkpoint import newest_common
from vfl.session.exchange import HONEST, Own
from vfl.session.secure import FeatureRound, HelperRound
from vfl.session.trace import Recorder, recorders_of, recording
from vfl.transport.link import Observed, TransportLink, local_pair

Weights = Mapping[str, Mapping[str, Tensor]]
States = Mapping[str, Mapping[str, Any]]
#: Two ends for a feature party's name: the label party's, and its own.
Connect = Callable[[str], tuple[TransportLink, TransportLink]]


class LocalSession:
    """One session of an experiment with every party in this process.

    Args:
        experiment: what to do.
        data: each party's aligned rows, by party, the label party's included.
        mode: train, evaluate or predict.
        outputs: number of classes, or 1 for a regression.
        secrets: each party's secret; parties left out get a repeatable stand-in from the seed.
        bottoms: modules to use instead of the experiment's specs, by party.
        top: a module to use instead of the experiment's spec.
        weights: trained weights by party.
        checkpoints: folder with a folder for each party's checkpoints, and its trace if the
            experiment asks for one; training goes on from the last checkpoint that was committed
            there. None saves nothing.
        adversaries: dishonest parties, by name.
        observers: told about every frame (a `Trace`, for example), besides the ledger.
        on_epoch: told one record an epoch.
        device: where everybody's models run.
        connect: makes the links; frames are handed over at once if not given.
        say: told how large a trace may get, before it starts.
    """

    def __init__(
        self,
        experiment: Experiment,
        data: Mapping[str, PartyData],
        *,
        mode: Mode = "train",
        outputs: int,
        secrets: Mapping[str, Secret] | None = None,
        bottoms: Mapping[str, nn.Module] | None = None,
        top: nn.Module | None = None,
        weights: Weights | None = None,
        checkpoints: Path | None = None,
        adversaries: Mapping[str, Adversary] | None = None,
        observers: Sequence[Observer] = (),
        on_epoch: Callable[[EpochRecord], None] = lambda record: None,
        device: str = "cpu",
        connect: Connect = lambda party: local_pair(),
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.terms = Terms.of(experiment, mode, experiment.name)
        if secure.make(self.terms.secure).whole_network:
            raise ExposedCutError(
                "nobody has a model here, not even in parts that go on by themselves",
                got=f"secure = '{self.terms.secure}'",
                want="vfl train on an experiment file, or secure = 'none', 'sum' or 'beaver'",
            )
        self.ledger, self.next_step = Ledger(), 0
        label = experiment.label.party
        bottoms, weights, adversaries = bottoms or {}, weights or {}, adversaries or {}
        secrets = secrets_of(self.terms, data, secrets or {})
        kept, self._recorders = self._keepers(experiment, data, checkpoints)
        self._kept = kept
        self._say, self._secrets = say, secrets
        self._mode, self._session, self._attempt = secure.make(self.terms.secure), token_hex(16), 0
        links, ends, self.helper = self._links(connect, observers)
        own = {
            name: Own(secrets[name], adversaries.get(name, HONEST), device, kept[name])
            for name in data
        }
        self.clients: list[FeatureParty] = [
            build_feature_party(
                data[name],
                self.terms,
                end,
                own[name],
                bottom=bottoms.get(name),
                weights=weights.get(name),
            )
            for name, end in ends.items()
        ]
        self.label: LabelParty = build_label_party(
            data[label],
            self.terms,
            links,
            own[label],
            Objective.of(experiment.label, outputs, top),
            own_bottom=bottoms.get(label),
            weights=weights.get(label),
            ledger=self.ledger,
            on_epoch=on_epoch,
        )

    def run(self) -> LocalSession:
        """Go through the whole session, or the rest of it."""
        self.begin()
        start = self._start()
        self.label.resume(start)
        split = self.label.data.split
        for client in self.clients:
            client.resume(start, self.terms.in_flight_at(split, start))
        schedule = self.label.stopping.follow(self.terms.schedule(split, start))
        weights = {client.name: client.weights for client in self.clients}
        weights[self.label.data.name] = self.label.weights
        recorders = [one for own in self._recorders.values() for one in own]
        with recording(recorders, schedule, start, weights, self._say) as exchanges:
            self.label.run(exchanges, self._begin, self._finish, self._answer)
        return self

    def begin(self) -> None:
        """Begin an attempt: new keys where a mode needs any, agreed on by everybody's own part."""
        if not self._mode.needs_keys:
            return
        keys = self._mode.simulated_keys(self._secrets, self.terms, self._session, self._attempt)
        self._attempt += 1
        everybody: list[FeatureRound | HelperRound] = [client.end for client in self.clients]
        everybody += [] if self.helper is None else [self.helper]
        for end in everybody:
            self._mode.offer(end, keys[end.party])
        self.label.aggregator.begin()
        for end in everybody:
            self._mode.accept(end, keys[end.party], self.terms)

    def _start(self) -> int:
        """The exchange to go on with: the newest checkpoint that all parties have intact."""
        kept = [one for one in self._kept.values() if one is not None]
        if not kept:
            return 0
        committed = self._kept[self.terms.label_party]
        assert committed is not None, "either all parties save, or none"
        most = committed.committed()
        start = newest_common(kept, most)
        if start < most:
            self._say(f"checkpoint {most} is damaged; the training goes on from {start}")
        return start

    def go_on(self, states: States | None, schedule: Iterable[Exchange]) -> LocalSession:
        """Train through `schedule` from what an earlier session's `training_states` gave.

        Args:
            states: of sessions on other rows as well; None starts anew.
            schedule: exchanges numbered on from `next_step` of that session.
        """
        self.begin()
        if states is not None:
            self.label.load_training_state(states[self.label.data.name])
        for client in self.clients:
            if states is None:
                client.start()
            else:
                client.load_training_state(states[client.name])
        self.label.run(schedule, self._begin, self._finish, self._answer)
        return self

    def training_states(self) -> dict[str, dict[str, Any]]:
        """What each party needs to go on: weights, optimiser, and what was counted."""
        everybody = {client.name: client.training_state() for client in self.clients}
        return everybody | {self.label.data.name: self.label.training_state()}

    def weights(self) -> dict[str, dict[str, Tensor]]:
        """Everybody's weights, by party."""
        everybody = {client.name: client.weights() for client in self.clients}
        return everybody | {self.label.data.name: self.label.weights()}

    def weights_digest(self) -> str:
        """One digest of the parties' own digests in name order."""
        digests = [(client.name, client.weights_digest()) for client in self.clients]
        return joint_digest([*digests, (self.label.data.name, self.label.weights_digest())])

    def outputs(self) -> Tensor:
        """What a prediction session gave, in row order; axes (rows, outputs)."""
        return torch.cat(self.label.outputs)

    def _keepers(
        self, experiment: Experiment, data: Mapping[str, PartyData], folder: Path | None
    ) -> tuple[dict[str, Checkpoints | None], dict[str, list[Recorder]]]:
        """What saves and what records each party's side, by party."""
        kept = {name: self._checkpoints(folder, name) for name in data}
        recorders = {
            name: recorders_of(experiment.trace, folder, self.terms, own, kept[name])
            for name, own in data.items()
        }
        return kept, recorders

    def _checkpoints(self, folder: Path | None, party: str) -> Checkpoints | None:
        if folder is None:
            return None
        every = self.terms.train.checkpoint_every
        terms = self.terms
        return Checkpoints(folder / party / CHECKPOINTS, party, terms.run, terms.digest(), every)

    def _links(
        self, connect: Connect, observers: Sequence[Observer]
    ) -> tuple[dict[str, Link], dict[str, Link], HelperRound | None]:
        """The label party's ends, watched, by party; feature parties' own; and who only helps."""
        links, ends = dict[str, Link](), dict[str, Link]()
        for name in self.terms.feature_parties:
            here, ends[name] = connect(name)
            links[name] = Observed(here, name, "label", self._observers(name, observers))
        if (dealer := self.terms.dealer) is None:
            return links, ends, None
        here, there = connect(dealer)
        links[dealer] = Observed(here, dealer, "label", [self.ledger, *observers])
        return links, ends, self._mode.helper_round(self.terms, there)

    def _observers(self, party: str, observers: Sequence[Observer]) -> list[Observer]:
        """Who is told about a party's frames; both its ends are here and see the same."""
        own = self._recorders[party] + self._recorders[self.terms.label_party]
        return [self.ledger, *observers, *own]

    def _begin(self, exchange: Exchange) -> None:
        for client in self.clients:
            client.begin(exchange)

    def _answer(self, exchange: Exchange) -> None:
        if self.helper is not None:
            self.helper.serve()
        for client in self.clients:
            client.answer(exchange)

    def _finish(self, exchange: Exchange) -> None:
        self.next_step = exchange.step + 1
        for client in self.clients:
            client.finish(exchange)


def secrets_of(
    terms: Terms, parties: Iterable[str], given: Mapping[str, Secret]
) -> dict[str, Secret]:
    """Each party's secret: the given one, or a repeatable stand-in from the seed."""
    everybody = dict.fromkeys([*parties, *terms.peers])
    stand_ins = {name: Secret.of_simulation(terms.seed, name) for name in everybody}
    return stand_ins | dict(given)
