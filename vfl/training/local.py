"""All parties in one process: the same parties, the same frames, a function call as the link."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from vfl.clients import FeatureParty
from vfl.config import Experiment
from vfl.core.errors import ExposedCutError
from vfl.core.frame import Link, Observer
from vfl.core.ledger import Ledger
from vfl.core.seeds import Secret
from vfl.core.storage import joint_digest
from vfl.datasets import PartyData
from vfl.server import EpochRecord, LabelParty, Objective
from vfl.session import CHECKPOINTS, Adversary, Checkpoints, Exchange, Mode, Terms, secure
from vfl.session.checkpoint import newest_common
from vfl.session.exchange import HONEST, Own
from vfl.session.progress import SessionProgress, Tell
from vfl.session.secure import FeatureRound, HelperRound
from vfl.session.trace import recorders_of, recording
from vfl.transport.link import Observed, TransportLink, local_pair

if TYPE_CHECKING:
    from vfl.clients.middle_party import MiddleParty
    from vfl.clients.whole_network import WholeNetworkParty
    from vfl.server.whole_network import WholeNetworkLabel

Weights = Mapping[str, Mapping[str, Tensor]]
States = Mapping[str, Mapping[str, Any]]
#: Two ends for a feature party's name: the label party's, and its own.
Connect = Callable[[str], tuple[TransportLink, TransportLink]]


class Options(TypedDict, total=False):
    """What the parties bring to a session in one process, and where its results go.

    Attributes:
        secrets: each party's secret; parties left out get a repeatable stand-in from the seed.
        bottoms: modules to use instead of the experiment's specs, by party.
        top: a module to use instead of the experiment's spec.
        weights: trained weights by party.
        adversaries: dishonest parties, by name.
        device: where everybody's models run.
        checkpoints: folder with a folder for each party's checkpoints, and its trace if the
            experiment asks for one; training goes on from the last checkpoint that was committed
            there. None saves nothing.
        observers: told about every frame (a `Trace`, for example), besides the ledger.
        on_epoch: told one record an epoch.
        on_progress: told how far the session is, about once a second.
        connect: makes the links; frames are handed over at once if not given.
        say: told how large a trace may get before it starts, and when a checkpoint is damaged.
        serving: further label parties whose tasks are served.
    """

    secrets: Mapping[str, Secret] | None
    bottoms: Mapping[str, nn.Module] | None
    top: nn.Module | None
    weights: Weights | None
    adversaries: Mapping[str, Adversary] | None
    device: str
    checkpoints: Path | None
    observers: Sequence[Observer]
    on_epoch: Callable[[EpochRecord], None]
    on_progress: Tell
    connect: Connect
    say: Callable[[str], None]
    serving: Sequence[str]


class PartiesSession:
    """What every session with all parties in this process has, whoever holds which weights.

    Args:
        experiment: what to do.
        mode: train, evaluate or predict.
        parties: everybody with something of its own: a secret, a model, checkpoints.
        options: what they bring.
    """

    clients: Sequence[FeatureParty | MiddleParty | WholeNetworkParty]
    label: LabelParty | WholeNetworkLabel

    def __init__(
        self, experiment: Experiment, mode: Mode, parties: Collection[str], options: Options
    ) -> None:
        terms = Terms.of(experiment, mode, experiment.name)
        self.terms = terms.served_with(options.get("serving", ()))
        self.ledger, self._mode = Ledger(), secure.make(self.terms.secure)
        self._say: Callable[[str], None] = options.get("say", lambda line: None)
        self._tell = options.get("on_progress")
        self._weights = options.get("weights") or {}
        given, adversaries = options.get("secrets") or {}, options.get("adversaries") or {}
        everybody = dict.fromkeys([*parties, *self.terms.peers])
        stand_ins = {name: Secret.of_simulation(self.terms.seed, name) for name in everybody}
        self._secrets = {**stand_ins, **given}
        self.terms = self.terms.keyed(self._secrets[self.terms.label_party])
        self._own = {
            name: Own(
                self._secrets[name],
                adversaries.get(name, HONEST),
                options.get("device", "cpu"),
                self._checkpoints(options.get("checkpoints"), name),
            )
            for name in parties
        }

    def _feature(
        self, data: PartyData, link: Link, bottoms: Mapping[str, nn.Module]
    ) -> FeatureParty:
        """A feature party with what it brings."""
        return FeatureParty(
            data,
            self.terms,
            link,
            self._own[data.name],
            bottom=bottoms.get(data.name),
            weights=self._weights.get(data.name),
        )

    def _checkpoints(self, folder: Path | None, party: str) -> Checkpoints | None:
        if folder is None or self.terms.mode != "train":
            return None
        terms = self.terms
        return Checkpoints(folder / party / CHECKPOINTS, party, terms.run, terms.digest())

    def _start(self) -> int:
        """The exchange to go on with: the newest checkpoint that all parties have intact."""
        committed = self._own[self.terms.label_party].checkpoints
        if committed is None:
            return 0
        most = committed.committed()
        kept = [own.checkpoints for own in self._own.values() if own.checkpoints is not None]
        start = newest_common(kept, most)
        if start < most:
            self._say(f"checkpoint {most} is damaged; the training goes on from {start}")
        return start

    def _watched(self, schedule: Iterable[Exchange]) -> Iterator[Exchange]:
        """The same exchanges; how far they are is told where somebody wants to know."""
        if self._tell is None:
            return iter(schedule)
        progress = SessionProgress(self.terms, self.label.split, self._tell)
        return progress.through(schedule)

    def weights(self) -> dict[str, dict[str, Tensor]]:
        """Everybody's weights, or shares of them, by party."""
        everybody = {client.name: client.weights() for client in self.clients}
        return everybody | {self.label.data.name: self.label.weights()}

    def weights_digest(self) -> str:
        """One digest of the parties' own digests in name order."""
        digests = [(client.name, client.weights_digest()) for client in self.clients]
        return joint_digest([*digests, (self.label.data.name, self.label.weights_digest())])

    def outputs(self) -> Tensor:
        """What a prediction session gave, in row order; axes (rows, outputs)."""
        return torch.cat(self.label.outputs)


class LocalSession(PartiesSession):
    """One session of an experiment with every party in this process.

    Args:
        experiment: what to do.
        data: each party's aligned rows, by party, the label party's included.
        mode: train, evaluate or predict.
        outputs: number of classes, or 1 for a regression.
        options: what the parties bring, and where results go; see `Options`.
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
        experiment.refuse_roles("this session")
        super().__init__(experiment, mode, data, options)
        if self._mode.whole_network:
            raise ExposedCutError(
                "nobody has a model here, not even in parts that go on by themselves",
                got=f"secure = '{self.terms.secure}'",
                want="vfl train on an experiment file, or secure = 'none', 'sum' or 'beaver'",
            )
        self.next_step, self._session, self._attempt = 0, token_hex(16), 0
        folder, label = options.get("checkpoints"), experiment.label.party
        self._recorders = {
            name: recorders_of(
                experiment.trace, folder, self.terms, own, self._own[name].checkpoints
            )
            for name, own in data.items()
        }
        connect = options.get("connect", lambda party: local_pair())
        links, ends, self.helper = self._links(connect, options.get("observers", ()))
        bottoms = options.get("bottoms") or {}
        self.clients = [self._feature(data[name], end, bottoms) for name, end in ends.items()]
        self.label = LabelParty(
            data[label],
            self.terms,
            links,
            self._own[label],
            Objective.of(experiment.label, outputs, options.get("top")),
            own_bottom=bottoms.get(label),
            weights=self._weights.get(label),
            ledger=self.ledger,
            on_epoch=options.get("on_epoch", lambda record: None),
        )

    def run(self) -> LocalSession:
        """Go through the whole session, or the rest of it."""
        self.begin()
        start = self._start()
        self.label.resume(start)
        split = self.label.data.split
        for client in self.clients:
            client.resume(start, self.terms.in_flight_at(split, start))
        schedule = self._watched(self.label.stopping.follow(self.terms.schedule(split, start)))
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

    def _links(
        self, connect: Connect, observers: Sequence[Observer]
    ) -> tuple[dict[str, Link], dict[str, Link], HelperRound | None]:
        """The label party's ends, watched, by party; feature parties' own; and who only helps."""
        links, ends = dict[str, Link](), dict[str, Link]()
        for name in self.terms.feature_parties:
            here, ends[name] = connect(name)
            # Both ends of a feature party's link are here, and its recorders see the same frames.
            recorders = self._recorders[name] + self._recorders[self.terms.label_party]
            watching: list[Observer] = [self.ledger, *observers, *recorders]
            links[name] = Observed(here, name, "label", watching)
        if (dealer := self.terms.dealer) is None:
            return links, ends, None
        here, there = connect(dealer)
        links[dealer] = Observed(here, dealer, "label", [self.ledger, *observers])
        return links, ends, self._mode.helper_round(self.terms, there)

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
