"""All parties of a secret-shared network in one process, one thread per party."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from secrets import token_hex
from typing import Any, Unpack

from vfl.clients.whole_network import WholeNetworkParty
from vfl.config import Experiment
from vfl.core.errors import ConfigError
from vfl.core.frame import Frame, Link, Observer
from vfl.datasets import PartyData
from vfl.server.whole_network import WholeNetworkLabel
from vfl.session import Mode, Terms, rules
from vfl.session.label import Objective
from vfl.session.label.party import Records
from vfl.session.secure_mode import LocalStreams, Revealed, SharedLink
from vfl.session.trace import recorders_of
from vfl.training.local import Options, PartiesSession
from vfl.transport.link import Observed, local_pair


class WholeNetworkSession(PartiesSession):
    """One session of an experiment with a secret-shared network, with all parties in this process.

    Args:
        experiment: experiment of the session.
        data: aligned rows of each party, by party, including the label party.
        mode: train, evaluate, predict or serve.
        outputs: number of classes, or 1 for a regression.
        options: options of the session, see `LocalSession`; the secure mode creates the links of
            the network. Adversaries and bottom modules are rejected, because no party has a whole
            model.
    """

    clients: list[WholeNetworkParty]
    label: WholeNetworkLabel

    def __init__(
        self,
        experiment: Experiment,
        data: Mapping[str, PartyData],
        *,
        mode: Mode = "train",
        outputs: int,
        **options: Unpack[Options],
    ) -> None:
        peers = rules.peers(Terms.of(experiment, mode, experiment.name))
        super().__init__(experiment, mode, dict.fromkeys([*data, *peers]), options)
        self._mode.refuse(self.terms)
        for own_rows in data.values():
            recorders_of(experiment.trace, options.get("checkpoints"), self.terms, own_rows, None)
        bottoms, label, session = (
            options.get("bottoms") or {},
            experiment.label.party,
            token_hex(16),
        )
        carry: Callable[[LocalStreams], LocalStreams] = options.get("carry", lambda one: one)
        self._streams = carry(self._mode.local_streams(self.terms))
        outer: Mapping[str, Link] = self._streams.outer
        inner: Mapping[str, SharedLink] = self._streams.inner
        if mode == "serve":  # in one thread, a party answers each request immediately
            pairs = {name: local_pair() for name in peers}
            outer = {name: there for name, (_, there) in pairs.items()}
            inner = {name: here for name, (here, _) in pairs.items()}
        keys = self._mode.simulated_keys(self._secrets, self.terms, session, 0)
        self._everybody: list[WholeNetworkParty] = [
            WholeNetworkParty(
                name,
                data.get(name),
                self.terms,
                keys[name],
                outer[name],
                self._own[name],
                bottom=bottoms.get(name),
                weights=self._weights.get(name),
            )
            for name in rules.peers(self.terms)
        ]
        self.clients = [one for one in self._everybody if one.name in data]
        watching: list[Observer] = [self.ledger, *options.get("observers", ())]

        def receive_any() -> tuple[str, Frame]:
            name, frame = self._streams.receive_any()
            for observer in watching:
                observer(name, "up", frame)
            return name, frame

        self.label = WholeNetworkLabel(
            data[label],
            self.terms,
            (session, 0),
            {name: Observed(link, name, "label", watching) for name, link in inner.items()},
            receive_any,
            self._own[label],
            Objective.of(experiment.label, outputs, options.get("top")),
            weights=self._weights.get(label),
            records=Records(self.ledger, options.get("on_epoch", lambda record: None)),
        )

    middle = None

    def begin(self) -> None:
        """Prepare all parties for the requests of a service's session."""
        for one in self.clients:
            one.get_ready()
        self.label.begin()

    def leads(self, party: str) -> WholeNetworkLabel:
        """Return the label party that learns a given party's task.

        Raises:
            ConfigError: the party is not the label party.
        """
        if party != self.label.name:
            raise ConfigError(
                "this network has only one label party", got=party, want=self.label.name
            )
        return self.label

    @property
    def beside(self) -> Sequence[WholeNetworkParty]:
        return self.clients

    def run(self) -> WholeNetworkSession:
        """Run the whole session, or the exchanges that a resumed session still has to run."""
        start = self._start()
        programs: dict[str, Callable[[], object]] = {
            one.name: partial(one.play, start) for one in self._everybody
        }
        programs[self.label.data.name] = partial(self.label.play, start, self._watched)
        self._streams.play(programs)
        return self

    def revealed(self) -> list[Revealed]:
        """Return what each party learned, which only a process with all parties can list."""
        return [each for one in (*self._everybody, self.label) for each in one.revealed()]

    def traffic(self) -> list[dict[str, Any]]:
        """Return the traffic of all parties, by receiver and phase."""
        return [each for one in (*self._everybody, self.label) for each in one.traffic()]
