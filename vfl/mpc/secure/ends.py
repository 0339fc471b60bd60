"""Base of the modes in which parties share a whole network: places, streams and endpoints.

All parties follow one program on additive shares. Only the label party has streams, one to each
other party; it relays the other parties' sealed messages to each other (`vfl.session.relay`). A
mode defines the role of each party, the description of its rows that a share holder announces, and
the facts (sizes and settings) that follow from all descriptions:

1. Each other party sends its key offer, and the label party sends all offers to all parties.
2. Each share holder announces the description of its rows; the label party derives the facts from
   all descriptions and sends them to all parties.
3. All parties compare terms and facts over links that only the two parties of a link can read
   (`Peer.agree`).

A mode has one subclass of `NetworkEnd`, which a `Place` connects to the other parties: `Outer` is
the place of a party with one stream, and `Middle` is the place of the label party, which has a
stream to each other party.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import ValidationError
from torch import Tensor

from vfl.config import TrainSettings
from vfl.config.toml import Settings
from vfl.core.errors import ProtocolError, RunFolderError
from vfl.core.frame import LIMIT_BYTES, Frame, Kind, Link
from vfl.core.torch_internals import Compute
from vfl.mpc.engine import Peer, traffic
from vfl.mpc.in_process import Star
from vfl.mpc.ring import multiply_on
from vfl.mpc.rules import name_of
from vfl.mpc.secure.base import KeyedMode, offers_bytes
from vfl.mpc.secure.keys import OFFER_BYTES, TAG_BYTES, Agreement, pair_seals
from vfl.session import relay, rules
from vfl.session.exchange import expect
from vfl.session.relay import SealedLinks, Switchboard
from vfl.session.secure_mode import (
    SETUP,
    Limits,
    LocalStreams,
    OwnRows,
    Revealed,
    WholeNetwork,
)
from vfl.session.terms import Terms

_Facts = TypeVar("_Facts", bound=Settings)
_Party = TypeVar("_Party", bound=Peer)

_LABEL_PARTY = "the label party"
#: Step number of the messages that describe rows; messages with key offers have the step number 0.
_DESCRIPTION = 1
#: Seconds for which a thread waits for another thread, which may be computing a large layer.
_LOCAL_S = 600.0


class NetworkSizes(ABC):
    """Sizes of a session's shared network; they bound frames and memory; see `Layers`."""

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Number of weights in the network."""

    @abstractmethod
    def memory_bytes(self, rows: int) -> int:
        """Return the approximate number of bytes of memory that a share holder uses at once."""

    @abstractmethod
    def limits(self, rows: int) -> dict[Kind, int]:
        """Return the largest payload of each kind of frame, for a number of rows."""

    def wire_bytes(self, rows: int, trains: bool) -> int:
        """Return 0: the number of bytes depends on values or drawn rows, so it is unknown."""
        return 0


def require_frame(size_bytes: int, content: str) -> None:
    """Check that the largest frame of a session is small enough to be sent.

    Args:
        size_bytes: size of the frame's payload in bytes, without the seal.
        content: words that name the frame's content, for the error's text.

    Raises:
        ProtocolError: the frame is too large.
    """
    if size_bytes + TAG_BYTES > LIMIT_BYTES:
        raise ProtocolError(
            f"{content} do not fit into a frame",
            got=f"{size_bytes} bytes",
            want=f"at most {LIMIT_BYTES} bytes",
            fix="use fewer rows or columns",
        )


class NetworkMode(KeyedMode):
    """A mode in which parties share a network, so that no party has all of its weights.

    Attributes:
        window: largest number of unread frames on the way in one direction.
        waiting: largest number of frames from one party that wait until another party requests
            them.
        announced_bytes, facts_bytes: largest size in bytes of a share holder's announcement, and of
            the facts about the network.
        facts: class of the facts about the network, which checks their values.
    """

    shares_weights: ClassVar[bool] = True
    whole_network: ClassVar[bool] = True
    window: ClassVar[int]
    waiting: ClassVar[int]
    announced_bytes: ClassVar[int]
    facts_bytes: ClassVar[int]
    facts: ClassVar[type[Settings]]

    def roles(self, agreed: Terms) -> Sequence[str]:
        """Return the parties by role number: first the holders of shares, then the dealer."""
        raise NotImplementedError

    def end(self, party: str, terms: Terms, rows: OwnRows, place: Place) -> WholeNetwork:
        """Make a party's endpoint at its place in the session."""
        raise NotImplementedError

    def about(self, frame: Frame) -> bytes:
        """Return the associated data by which the seal of a relayed frame is bound to the frame."""
        return relay.about(frame)

    def on_stream(self, frame: Frame) -> Frame:
        """Convert a frame for a stream; by default, the frame stays unchanged, see `relay`."""
        return frame

    def off_stream(self, frame: Frame, other: int) -> Frame:
        """Reverse `on_stream`.

        Args:
            frame: the received frame.
            other: number of the last party other than the receiver; see `_last_other`.
        """
        return frame

    def window_frames(self, train: TrainSettings) -> int:
        return self.window

    def limits(
        self,
        terms: Terms,
        party: str,
        rows: Mapping[Kind, int],
        layers: Mapping[str, Any] | None,
    ) -> Limits:
        up = {Kind.PROTOCOL: max(OFFER_BYTES, self.announced_bytes)}
        down = {Kind.PROTOCOL: max(offers_bytes(terms), self.facts_bytes)}
        if layers is None:
            return up, down
        sizes: NetworkSizes = layers[party]
        both = sizes.limits(max(rows.values()))
        return both, down | both

    def outer_network(
        self, party: str, terms: Terms, keys: Agreement, stream: Link, rows: OwnRows
    ) -> WholeNetwork:
        multiply_on(Compute(rows.device).device)
        return self.end(party, terms, rows, Outer(self, party, terms, keys, stream))

    def middle_network(
        self,
        terms: Terms,
        attempt: tuple[str, int],
        streams: Mapping[str, Link],
        receive_any: Callable[[], tuple[str, Frame]],
        rows: OwnRows,
    ) -> WholeNetwork:
        multiply_on(Compute(rows.device).device)
        middle = Middle(self, terms, attempt, streams, receive_any)
        return self.end(terms.label_party, terms, rows, middle)

    def local_streams(self, terms: Terms) -> LocalStreams:
        return Star(self.roles(terms), terms.label_party, _LOCAL_S)


class Place(ABC):
    """A party's place in the session, which connects the party to the other parties.

    Attributes:
        attempt: name of the session, and number of this attempt at it.
        direct: links that no third party relays, by the name of the party at the other end;
            available after the parties have connected.
    """

    attempt: tuple[str, int]
    direct: Mapping[str, Link]

    @abstractmethod
    def meet(self) -> Mapping[str, Link]:
        """Exchange key offers for a new attempt; return the links to the other parties, by name."""

    @abstractmethod
    def describe(self, end: NetworkEnd[_Facts, Any]) -> _Facts:
        """Announce the party's description of its rows, and return the facts about the network.

        The label party derives the facts from all descriptions; the others receive them.

        Raises:
            ProtocolError: another party sent an unexpected message.
        """

    def confirm(self, facts: Settings) -> None:
        """At the label party, send all parties the facts that it has derived and checked."""

    def send_verdict(self, verdict: bytes, step: int) -> None:
        """See `WholeNetwork.send_verdict`."""
        raise AssertionError("only the label party sends verdicts")

    def receive_verdict(self) -> bytes:
        """See `WholeNetwork.receive_verdict`."""
        raise AssertionError("only the label party sends verdicts")

    @abstractmethod
    def end(self, report: Frame) -> list[Frame]:
        """See `WholeNetwork.end`."""


class Outer(Place):
    """Place of a party that has only a stream to the label party: a share holder or the dealer.

    Args:
        mode, party, terms, keys, stream: see `SecureMode.outer_network`.
    """

    def __init__(
        self, mode: NetworkMode, party: str, terms: Terms, keys: Agreement, stream: Link
    ) -> None:
        self._mode, self._party, self._terms = mode, party, terms
        self._keys, self.stream = keys, stream
        self.attempt = keys.binding.session, keys.binding.attempt

    def meet(self) -> Mapping[str, Link]:
        mode, peers, label = self._mode, rules.peers(self._terms), self._terms.label_party
        self.stream.send(Frame(Kind.PROTOCOL, 0, self._keys.offer))
        offers = expect(self.stream, Kind.PROTOCOL, 0, _LABEL_PARTY).payload
        seals = pair_seals(self._party, self._keys.keys(offers))
        stream = Framed(self.stream, mode, _last_other(peers, self._party))
        links = SealedLinks(stream, seals, peers, mode.waiting, mode.about)
        self.direct = {label: links.direct}
        return self.direct | links.others

    def describe(self, end: NetworkEnd[_Facts, Any]) -> _Facts:
        if (own := end.announced()) is not None:
            self._link.send(Frame(Kind.PROTOCOL, _DESCRIPTION, own))
        raw = _described(self._link, self._mode.facts_bytes, _LABEL_PARTY)
        facts: _Facts = read_description(self._mode.facts, raw, _LABEL_PARTY)
        return facts

    def receive_verdict(self) -> bytes:
        return receive_verdict(self._link)

    def end(self, report: Frame) -> list[Frame]:
        return report_to_label_party(self._link, report)

    @property
    def _link(self) -> Link:
        return self.direct[self._terms.label_party]


class Middle(Place):
    """Place of the label party, which relays the messages of the other parties to each other.

    Args:
        mode, terms, attempt, streams, receive_any: see `SecureMode.middle_network`.
    """

    def __init__(
        self,
        mode: NetworkMode,
        terms: Terms,
        attempt: tuple[str, int],
        streams: Mapping[str, Link],
        receive_any: Callable[[], tuple[str, Frame]],
    ) -> None:
        self._mode, self._terms, self.attempt = mode, terms, attempt
        names = list(streams)
        self._streams = {
            name: Framed(stream, mode, _last_other(names, name)) for name, stream in streams.items()
        }

        def receive() -> tuple[str, Frame]:
            name, frame = receive_any()
            return name, self._streams[name].taken(frame)

        board = Switchboard(self._streams, receive, lambda one, two: one != two, mode.waiting)
        self.direct = board.links

    def meet(self) -> Mapping[str, Link]:
        offers = [
            expect(self.direct[name], Kind.PROTOCOL, 0, f"party '{name}'").payload
            for name in rules.peers(self._terms)
        ]
        self._send_all(Frame(Kind.PROTOCOL, 0, b"".join(offers)))
        return self.direct

    def describe(self, end: NetworkEnd[_Facts, Any]) -> _Facts:
        told, own = {}, end.announced()
        for name in self._mode.roles(self._terms)[:-1]:
            if name == self._terms.label_party:
                assert own is not None, "a holder has rows"
                told[name] = own
            else:
                most = self._mode.announced_bytes
                told[name] = _described(self.direct[name], most, f"party '{name}'")
        return end.facts_of(told)

    def confirm(self, facts: Settings) -> None:
        described = facts.model_dump_json().encode()
        if len(described) > self._mode.facts_bytes:
            raise ProtocolError(
                "the description of all rows is too long to be sent",
                got=f"{len(described)} bytes",
                want=f"at most {self._mode.facts_bytes} bytes",
                fix="fewer classes, or shorter class names",
            )
        self._send_all(Frame(Kind.PROTOCOL, _DESCRIPTION, described))

    def send_verdict(self, verdict: bytes, step: int) -> None:
        self._send_all(Frame(Kind.ACK, step, verdict))

    def end(self, report: Frame) -> list[Frame]:
        return collect_reports(self.direct, self._terms, report)

    def _send_all(self, frame: Frame) -> None:
        for link in self.direct.values():
            link.send(frame)


class NetworkEnd(WholeNetwork, ABC, Generic[_Facts, _Party]):
    """One party's endpoint of a network whose weights no single party has; see `WholeNetwork`.

    Args:
        mode, terms, rows: see `SecureMode.outer_network`.
        party: name of the party.
        place: the party's place in the session, which connects it to the other parties.
    """

    def __init__(self, mode: Any, party: str, terms: Terms, rows: OwnRows, place: Place) -> None:
        self.party = party
        self._mode, self._terms, self._rows, self._place = mode, terms, rows, place
        self._roles = list(mode.roles(terms))
        self._role = self._roles.index(party)
        self._label_role = self._roles.index(terms.label_party)
        self._digest = rows.digest()
        self._account = Account(party, self._roles)
        self._known: _Facts | None = None
        self._player: _Party | None = None

    # Methods that a mode defines.

    @abstractmethod
    def announced(self) -> bytes | None:
        """Return the party's description of its rows if the party holds shares; otherwise None."""

    @abstractmethod
    def facts_of(self, told: Mapping[str, bytes]) -> _Facts:
        """At the label party, derive the facts about the network from all holders' descriptions.

        Raises:
            ProtocolError: a holder's description describes no possible rows.
        """

    @abstractmethod
    def sizes_of(self, facts: _Facts) -> NetworkSizes:
        """Check a network's facts against the party's own rows; return the network's sizes.

        Raises:
            DisagreementError: the facts state another number of rows than the party has.
            ProtocolError: no network can have these sizes.
        """

    @abstractmethod
    def _player_of(self, links: Mapping[int, Link]) -> _Party:
        """Make the protocol's object for this party; it has no keys yet."""

    @abstractmethod
    def _started(
        self, weights: Mapping[str, Tensor] | None, state: Mapping[str, Any] | None
    ) -> None:
        """Share rows and weights, or continue from the state of an earlier attempt; see `begin`."""

    # Methods that all modes have in common.

    def begin(
        self, weights: Mapping[str, Tensor] | None, state: Mapping[str, Any] | None = None
    ) -> None:
        links, label = self._place.meet(), self._terms.label_party
        facts = self._known = self._place.describe(self)
        sizes = self.sizes_of(facts)  # the limits in the party's own file may exclude these sizes
        self._rows.agreed({name: sizes for name in self._roles if name != label})
        self._place.confirm(facts)
        player = self._player = self._player_of(
            {self._roles.index(name): link for name, link in links.items()}
        )
        about = {"terms": self._terms.digest(), "facts": facts.model_dump(mode="json")}
        player.agree(about, *self._place.attempt)
        if state is not None:
            require_same_rows(self.party, self._digest, state["inputs"])
        self._started(weights, state)
        if state is not None:
            self._account.restore(state["revealed"], player)
        self._note(SETUP)

    def revealed(self) -> list[Revealed]:
        return self._account.revealed()

    def traffic(self) -> list[dict[str, Any]]:
        return self._account.traffic(self._begun)

    def send_verdict(self, verdict: bytes, step: int) -> None:
        self._place.send_verdict(verdict, step)

    def receive_verdict(self) -> bytes:
        return self._place.receive_verdict()

    def end(self, report: Frame) -> list[Frame]:
        return self._place.end(report)

    @property
    def _facts(self) -> _Facts:
        assert self._known is not None, "an attempt has begun"
        return self._known

    @property
    def _begun(self) -> _Party:
        assert self._player is not None, "an attempt has begun"
        return self._player

    def _note(self, phase: str) -> None:
        """Record the values that the party has learned since the last call, under this phase."""
        self._account.note(self._begun, phase)

    def _wait_for_the_dealt(self, number: int) -> None:
        """Wait for a frame of a holder, so that the dealer does not deal too far ahead."""
        player, dealer = self._begun, len(self._roles) - 1
        if self._role == dealer:
            player.channels[dealer - 1].receive_bytes(number, 0)
        elif self._role == dealer - 1:
            player.channels[dealer].send_bytes(b"", number, "online")

    def _kept(self) -> dict[str, Any]:
        """Return the state that every party saves: its rows' digest, and what it has learned."""
        return {"inputs": self._digest, "revealed": self._account.state()}


def receive_verdict(link: Link) -> bytes:
    """Receive the label party's verdict on an epoch; see `WholeNetwork.receive_verdict`.

    Raises:
        ProtocolError: the message is not a verdict.
    """
    frame = link.receive()
    if frame.kind is not Kind.ACK:
        raise ProtocolError(
            f"an unexpected message from {_LABEL_PARTY}",
            got=frame.kind.name,
            want="the verdict on the validation of an epoch",
        )
    return bytes(frame.payload)


def report_to_label_party(link: Link, report: Frame) -> list[Frame]:
    """Send this party's last message to the label party, and receive the label party's last one."""
    link.send(report)
    return [expect(link, Kind.DONE, 0, _LABEL_PARTY)]


def collect_reports(links: Mapping[str, Link], terms: Terms, report: Frame) -> list[Frame]:
    """At the label party, receive all parties' last messages; send its own last message to them."""
    last = [expect(links[name], Kind.DONE, 0, f"party '{name}'") for name in rules.peers(terms)]
    for link in links.values():
        link.send(report)
    return last


def require_same_rows(party: str, digest: str, trained: str) -> None:
    """Refuse to continue a training with other rows than the checkpoint's.

    The digests of the inputs are compared.

    Raises:
        RunFolderError: the digest of the rows differs from that of the checkpoint.
    """
    if digest != trained:
        raise RunFolderError(
            f"the rows of party '{party}' changed since the checkpoint",
            got=f"inputs {digest[:8]}...",
            want=f"inputs {trained[:8]}...",
            fix="restore the table, or train again",
        )


class Framed:
    """A party's view of a stream with the frames of a mode; see `NetworkMode.on_stream`."""

    def __init__(self, stream: Link, mode: NetworkMode, other: int) -> None:
        self._stream, self._mode, self._other = stream, mode, other

    def send(self, frame: Frame) -> None:
        self._stream.send(self._mode.on_stream(frame))

    def receive(self) -> Frame:
        return self.taken(self._stream.receive())

    def taken(self, frame: Frame) -> Frame:
        return self._mode.off_stream(frame, self._other)

    def close(self) -> None:
        """Leave the stream open, because the code that opened it closes it."""


def _last_other(names: Sequence[str], name: str) -> int:
    """Return the number of the last party other than `name`; see `vfl.session.relay`."""
    return max(1 + at for at, each in enumerate(names) if each != name)


def _described(link: Link, most: int, sender: str) -> bytes:
    """Receive the description of its rows that a party sends.

    Raises:
        ProtocolError: the party sends another kind of message, or a description that is too long.
    """
    payload = expect(link, Kind.PROTOCOL, _DESCRIPTION, sender).payload
    if len(payload) > most:
        raise ProtocolError(
            f"{sender} sends a longer description of its rows than allowed",
            got=f"{len(payload)} bytes",
            want=f"at most {most} bytes",
        )
    return bytes(payload)


def read_description(kind: type[Any], raw: bytes, sender: str) -> Any:
    """Parse a description into an object of the model class `kind`.

    Raises:
        ProtocolError: the description does not have the expected fields.
    """
    try:
        return kind.model_validate_json(raw)
    except ValidationError:
        raise ProtocolError(
            f"{sender} describes its rows in another form than this version reads",
            fix="install the same vfl version at every party",
        ) from None


class Account:
    """Values that one party of a shared network has learned, by phase, and the bytes that it sent.

    Args:
        party: name of the party.
        roles: names of all parties, in the order of their role numbers.
    """

    def __init__(self, party: str, roles: Sequence[str]) -> None:
        self._party = party
        self._names = {name_of(role): name for role, name in enumerate(roles)}
        self._seen: Counter[tuple[str, str]] = Counter()
        self._revealed: dict[tuple[str, str], Revealed] = {}

    def note(self, peer: Peer, phase: str) -> None:
        """Record the values that the party has learned since the last call, under this phase."""
        found = self._counted(peer)
        for (what, where), elements in (found - self._seen).items():
            said = f"{what}, {where}"
            before = self._revealed.get((phase, said))
            times, values = (before.times, before.values) if before else (0, 0)
            self._revealed[phase, said] = Revealed(
                self._party, said, "all", phase, times + 1, values + elements
            )
        self._seen = found

    def revealed(self) -> list[Revealed]:
        """Return all values that the party has learned, by phase."""
        return list(self._revealed.values())

    def state(self) -> list[dict[str, Any]]:
        """Return the state from which `restore` continues."""
        return [asdict(one) for one in self._revealed.values()]

    def restore(self, state: Sequence[Mapping[str, Any]], peer: Peer) -> None:
        """Continue from the state of an earlier attempt, whose counts `peer` has restored."""
        for one in state:
            kept = Revealed(**one)
            self._revealed[kept.phase, kept.what] = kept
        self._seen = self._counted(peer)

    def traffic(self, peer: Peer) -> list[dict[str, Any]]:
        """Return the bytes that the party has sent, by receiver and phase."""
        return [
            {
                "party": self._party,
                "receiver": self._names[row.receiver],
                "phase": row.phase,
                "frames": row.frames,
                "wire_bytes": row.wire_bytes,
            }
            for row in traffic(peer)
        ]

    @staticmethod
    def _counted(peer: Peer) -> Counter[tuple[str, str]]:
        leaks = peer.leakage.leaks()
        return Counter({(leak.what, leak.where): leak.elements for leak in leaks})
