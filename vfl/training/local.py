"""All parties in one process, with a federation's code and frames; links are function calls.

`vfl.training.whole_network` runs the parties of a secret-shared network in separate threads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from vfl.clients import FeatureParty
from vfl.clients.middle_party import MiddleParty
from vfl.config import Experiment
from vfl.core.errors import ConfigError, ExposedCutError
from vfl.core.frame import Link, Observer
from vfl.core.seeds import Secret
from vfl.core.storage import joint_digest
from vfl.core.traffic import Ledger
from vfl.datasets import PartyData
from vfl.datasets.augment import augmentation_of
from vfl.session import (
    CHECKPOINTS,
    Adversary,
    Checkpoints,
    Exchange,
    Mode,
    Terms,
    rules,
    secure_mode,
)
from vfl.session.consent import check_explained
from vfl.session.exchange import HONEST, Own, TrainedParty
from vfl.session.label import EpochRecord, LabelParty, Objective
from vfl.session.label.party import Beside, Records
from vfl.session.progress import SessionProgress, Tell
from vfl.session.secure_mode import FeatureRound, HelperRound, LocalStreams
from vfl.session.store.checkpoint import newest_common
from vfl.session.terms import EXPLAIN
from vfl.session.trace import Recorder, recorders_of, recording
from vfl.training.specs import check_beside_middle
from vfl.transport.link import FanOut, Observed, TransportLink, local_pair

if TYPE_CHECKING:
    from vfl.server.whole_network import WholeNetworkLabel

Weights = Mapping[str, Mapping[str, Tensor]]
States = Mapping[str, Mapping[str, Any]]
#: Function that connects the feature party with a given name; it returns the two ends of the new
#: link, the label party's end and the feature party's end.
Connect = Callable[[str], tuple[TransportLink, TransportLink]]


class Options(TypedDict, total=False):
    """Options of a session in one process: the parties' private inputs, and callbacks for results.

    Attributes:
        secrets: secret of each party, by party; the seed determines a repeatable secret for parties
            without an entry.
        bottoms: bottom modules that replace the experiment's specs, by party.
        top: top module that replaces the experiment's spec.
        weights: trained weights, by party.
        adversaries: dishonest parties (`vfl.attacks.active`), by party name.
        device: device on which all parties' models run.
        checkpoints: folder with one subfolder per party for checkpoints, and for a trace if
            requested. A training continues from the last committed checkpoint in this folder. None
            stores no checkpoints.
        observers: objects that receive every frame in addition to the ledger, for example a
            `Trace`; but no frames of further label parties.
        on_epoch: callback that receives one record per epoch.
        on_progress: callback that receives the session's progress, about once a second.
        connect: function that creates the links between parties; by default, links deliver frames
            immediately.
        carry: function that wraps the streams of a session with a secret-shared network, for
            example in simulated network connections.
        say: callback that receives a line of text: the largest possible size of a trace, before the
            training starts, or a warning about the data or a damaged checkpoint.
        serving: names of additional label parties whose tasks a service answers.
        explained: names of parties that learn the Shapley values of their columns; see `Terms`.
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
    carry: Callable[[LocalStreams], LocalStreams]
    say: Callable[[str], None]
    serving: Sequence[str]
    explained: Sequence[str]


class PartiesSession:
    """Base class of sessions in one process, with or without secret sharing.

    Args:
        experiment: the experiment to run.
        mode: train, evaluate, predict or serve.
        parties: private inputs of each party, such as a secret, a model, or a checkpoint folder, by
            party.
        options: options of the session; see `Options`.
    """

    label: LabelParty | WholeNetworkLabel

    @property
    def beside(self) -> Sequence[TrainedParty]:
        """Return all parties with weights or shares of weights, except the leading label party."""
        raise NotImplementedError

    def __init__(
        self, experiment: Experiment, mode: Mode, parties: Collection[str], options: Options
    ) -> None:
        terms = Terms.of(experiment, mode, experiment.name)
        terms = terms.served_with(options.get("serving", ()))
        self.terms = terms.asked_with([f"{EXPLAIN}{one}" for one in options.get("explained", ())])
        check_explained(self.terms)
        self.ledger, self._mode = Ledger(), secure_mode.make(self.terms.secure)
        self._say: Callable[[str], None] = options.get("say", lambda line: None)
        self._tell = options.get("on_progress")
        self._weights = options.get("weights") or {}
        if mode == "train" and terms.train.warm_start is not None and not self._weights:
            raise ConfigError(
                "this training does not continue an earlier run",
                where=f"train.warm_start = '{terms.train.warm_start}'",
                fix="vfl train EXPERIMENT.toml --from RUN does; leave the setting out elsewhere",
            )
        given, adversaries = options.get("secrets") or {}, options.get("adversaries") or {}
        everybody = dict.fromkeys([*parties, *rules.peers(self.terms)])
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

    def _checkpoints(self, folder: Path | None, party: str) -> Checkpoints | None:
        if folder is None or self.terms.mode != "train":
            return None
        terms = self.terms
        return Checkpoints(folder / party / CHECKPOINTS, party, terms.run, terms.digest())

    def _start(self) -> int:
        """Return the exchange after the newest checkpoint that all parties have intact."""
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
        """Yield the exchanges of a schedule; report progress if the caller asked for it."""
        if self._tell is None:
            return iter(schedule)
        progress = SessionProgress(self.terms, self.label.split, self._tell)
        return progress.through(schedule)

    def weights(self) -> dict[str, dict[str, Tensor]]:
        """Return the weights, or shares of weights, of all parties, by party."""
        return {one.name: one.weights() for one in (*self.beside, self.label)}

    def weights_digest(self) -> str:
        """Return one joint digest of all parties' weights, from the parties' digests by name."""
        return joint_digest(
            [(one.name, one.weights_digest()) for one in (*self.beside, self.label)]
        )

    def whole_ledger(self) -> Ledger:
        """Return a ledger of the traffic on all links."""
        return self.ledger

    def outputs(self) -> Tensor:
        """Return the predictions of a prediction session by row; axes (rows, outputs)."""
        return torch.cat(self.label.outputs)


class LocalSession(PartiesSession):
    """One session of an experiment in this process; every party runs in its role.

    A feature party sends the same frame to all receivers of its cuts, and uses the weighted sum of
    the gradients that the receivers return. The receivers are one or more label parties, or the
    party in the middle.

    Args:
        experiment: experiment of the session.
        data: aligned rows of each party, by party, including label parties.
        mode: train, evaluate, predict or serve.
        outputs: number of classes of [label], or 1 for a regression.
        options: options of the session; see `Options`. The option `bottoms` may also contain the
            middle party's model, and the top models of additional label parties.

    Raises:
        SpecError: a plug-in cannot be built, does not fit the data or the cut, or has no effect in
            this session.

    Attributes:
        clients: the feature parties.
        middle: the party between bottom models and label party; None if there is no such party.
        label: the label party that leads the session.
        others: additional label parties by name; in a service, only those whose tasks the service
            answers.
        helper: a helper party without columns; None if there is no helper.
    """

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
        label, asked = experiment.label.party, experiment.middle
        between = [] if asked is None else [asked.party]
        if asked is not None:
            check_beside_middle(experiment.defense)
        super().__init__(experiment, mode, [*data, *between], options)
        for name, party in experiment.parties.items():
            if (inputs := data[name].inputs) is not None:
                augment = augmentation_of(party.augment, inputs.shape[1:])
                self._own[name] = replace(self._own[name], augment=augment)
        if self._mode.whole_network:
            raise ExposedCutError(
                "no party has a model here, because the network is secret-shared",
                got=f"secure = '{self.terms.secure}'",
                want="vfl train on an experiment file, or secure = 'none', 'sum' or 'beaver'",
            )
        self._session, self._attempt = token_hex(16), 0
        self._recorders = self._recorders_of(experiment, data, options.get("checkpoints"))
        further = [] if between else self.terms.takers
        self._ledgers = {name: Ledger() for name in further}
        connect: Connect = options.get("connect", lambda party: local_pair())
        observers, bottoms = options.get("observers", ()), options.get("bottoms") or {}
        links = self._links(between or [label, *further], connect, observers)
        self.clients = [
            FeatureParty(
                data[name],
                self.terms,
                self._link_of(name),
                self._own[name],
                bottom=bottoms.get(name),
                weights=self._weights.get(name),
            )
            for name in self.terms.feature_parties
        ]
        self.middle: MiddleParty | None = None
        if between:
            (name,) = between
            here, there = connect(name)
            cuts = links.pop(name)
            links[label] = {name: Observed(here, name, "label", [self.ledger, *observers])}
            self.middle = MiddleParty(
                self.terms,
                cuts,
                there,
                self._own[name],
                model=bottoms.get(name),
                weights=self._weights.get(name),
                ledger=self.ledger,
            )
        self.helper: HelperRound | None = None
        if (dealer := rules.dealer(self.terms)) is not None:
            here, there = connect(dealer)
            links[label][dealer] = Observed(here, dealer, "label", [self.ledger, *observers])
            self.helper = self._mode.helper_round(self.terms, there)
        self.label = LabelParty(
            data[label],
            self.terms.at_label(),
            links[label],
            self._own[label],
            Objective.of(experiment.label, outputs, options.get("top"), bottoms.get(label)),
            weights=self._weights.get(label),
            records=Records(self.ledger, options.get("on_epoch", lambda record: None)),
        )
        self.others = {
            name: LabelParty(
                data[name],
                self.terms.at_label(name),
                links[name],
                self._own[name],
                Objective.of(experiment.task_of(name), data[name].outputs, bottoms.get(name)),
                weights=self._weights.get(name),
                records=Records(self._ledgers[name]),
            )
            for name in further
        }

    @property
    def beside(self) -> Sequence[FeatureParty | MiddleParty | LabelParty]:
        between = [] if self.middle is None else [self.middle]
        return [*self.clients, *between, *self.others.values()]

    @property
    def next_step(self) -> int:
        """Return the number of the next exchange."""
        return self.label.next_step

    def run(self) -> LocalSession:
        """Run the whole session, or the exchanges that a resumed session still has to run."""
        self.begin()
        start, split = self._start(), self.label.split
        if self.middle is not None:
            self.middle.resume(start)
        for party in self.others.values():
            party.resume(start)
        # the ledger is read only here, so that it includes frames that the parties have just sent
        # again
        self.label.resume(start)
        for client in self.clients:
            client.resume(start, rules.in_flight_at(self.terms, split, start))
        schedule = rules.schedule(self.terms, split, start)
        schedule = self._watched(self.label.stopping.follow(schedule))
        weights = {client.name: client.weights for client in self.clients}
        weights[self.label.name] = self.label.weights
        recorders = [one for own in self._recorders.values() for one in own]
        further = [_Follower(one, start) for one in self.others.values()]
        with recording(recorders, schedule, start, weights, self._say) as exchanges:
            self.label.run(exchanges, [*self._players(), *further])
        for one in further:
            one.end()
        return self

    def begin(self) -> None:
        """Begin an attempt of the session; in modes with keys, parties agree on new keys."""
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
        """Train on `schedule`, starting from the `training_states` of an earlier session.

        Args:
            states: training states of an earlier session, which may have had other rows; None
                starts with new weights.
            schedule: exchanges to run; their numbers continue from `next_step` of the earlier
                session.
        """
        assert not self.terms.takers, "only if the label party alone receives cuts"
        self.begin()
        if states is not None:
            self.label.load_training_state(states[self.label.name])
        for client in self.clients:
            if states is None:
                client.start()
            else:
                client.load_training_state(states[client.name])
        self.label.run(schedule, self._players())
        return self

    def training_states(self) -> dict[str, dict[str, Any]]:
        """Return the state from which each party resumes: weights, optimiser and counters."""
        return {one.name: one.training_state() for one in (*self.beside, self.label)}

    def leads(self, name: str) -> LabelParty:
        """Return a label party; feature parties then answer only this party's requests."""
        for client in self.clients:
            client.end.link = self._ends[name][client.name]
        return self.label if name == self.label.name else self.others[name]

    def whole_ledger(self) -> Ledger:
        """Return the ledger of all links; links to additional label parties have own names."""
        rows: list[Mapping[str, Any]] = [*self.ledger.state()]
        for name, own in self._ledgers.items():
            rows += [row | {"party": f"{row['party']} to {name}"} for row in own.state()]
        whole = Ledger()
        whole.restore(rows)
        return whole

    def _recorders_of(
        self, experiment: Experiment, data: Mapping[str, PartyData], folder: Path | None
    ) -> dict[str, list[Recorder]]:
        """Return trace recorders by party; a session with several label parties has no trace."""
        if self.terms.takers:
            return {}
        return {
            name: recorders_of(
                experiment.trace, folder, self.terms, own, self._own[name].checkpoints
            )
            for name, own in data.items()
        }

    def _links(
        self, takers: Sequence[str], connect: Connect, observers: Sequence[Observer]
    ) -> dict[str, dict[str, Link]]:
        """Return observed link ends of all receivers of cuts, by receiver and feature party."""
        links = {taker: dict[str, Link]() for taker in takers}
        self._ends = {taker: dict[str, Link]() for taker in takers}
        for party in self.terms.feature_parties:
            # Both ends of a feature party's link are in this process, so the trace recorders of
            # both parties see the same frames.
            recorders = [
                one
                for name in (party, self.terms.label_party)
                for one in self._recorders.get(name, ())
            ]
            for taker in takers:
                here, self._ends[taker][party] = connect(party)
                watching: Sequence[Observer] = [self.ledger, *observers, *recorders]
                if taker in self._ledgers:
                    watching = [self._ledgers[taker]]
                links[taker][party] = Observed(here, party, "label", watching)
        return links

    def _link_of(self, party: str) -> Link:
        """Return a feature party's link end, which sends to all receivers of this party's cuts."""
        ends = [own[party] for own in self._ends.values()]
        return ends[0] if len(ends) == 1 else FanOut(ends)

    def _players(self) -> list[Beside]:
        """Return all parties other than the label party, in the order in which they send."""
        helping = [] if self.helper is None else [_Helper(self.helper)]
        between = [] if self.middle is None else [self.middle]
        return [*helping, *self.clients, *between]


class _Helper:
    """A helper party without columns, which serves other parties' requests in each exchange."""

    def __init__(self, end: HelperRound) -> None:
        self._end = end

    def begin(self, exchange: Exchange) -> None:
        """Do nothing, because the helper waits for requests."""

    def answer(self, exchange: Exchange) -> None:
        """Serve the request of this exchange."""
        self._end.serve()

    def finish(self, exchange: Exchange) -> None:
        """Do nothing, because the helper has already served the request."""


class _Follower:
    """An additional label party, which takes part in the same exchanges."""

    def __init__(self, label: LabelParty, start: int) -> None:
        self._steps = label.steps(rules.schedule(label.terms, label.split, start))

    def begin(self, exchange: Exchange) -> None:
        """Do nothing, because this party sends nothing before the cuts arrive."""

    def answer(self, exchange: Exchange) -> None:
        """Do nothing, because this party relays nothing."""

    def finish(self, exchange: Exchange) -> None:
        """Receive the cuts of the exchange, and send their gradients."""
        next(self._steps)

    def end(self) -> None:
        """Make the record of the last epoch."""
        next(self._steps, None)
