"""The label party's connection to Flower: it finds nodes, sends messages and reads replies.

Flower delivers one session message to each node (Flower's process at a party), and one reply back;
all other messages use vfl's own TCP streams.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from vfl.config import FederationSettings
from vfl.core import errors
from vfl.core.errors import (
    DisagreementError,
    LostPeerError,
    MisalignedError,
    MissingPartyError,
    PeerFailedError,
    ProtocolError,
    VFLError,
    read_record,
)
from vfl.core.frame import Observer
from vfl.core.processes import looks
from vfl.datasets import PartyData
from vfl.datasets.alignment.positions import Alignment
from vfl.session import (
    Introduction,
    SessionMessage,
    Terms,
    check_introduction,
    for_others,
    rules,
    secure_mode,
    unexpected,
)
from vfl.session.consent import frame_limits
from vfl.session.handshake import RankStream, Withdrawn
from vfl.session.secure_mode import Layers
from vfl.session.store.witness import Standing
from vfl.transport import (
    Admission,
    Credential,
    LinkLimits,
    ObservedPoll,
    TcpHub,
    Timeouts,
    routed_listener,
    session_certificate,
)
from vfl.transport.certificates import ServerCertificate

MESSAGE_TYPE = "train.session"
IDLE_TIMEOUT_S = 3600.0
_LONGEST_SESSION_S = 30 * 24 * 3600.0  # Flower drops replies to messages that live longer
_POLL_S = 0.2
_RETURN_S = 2.0  # seconds between two checks whether lost parties have returned
_SERVING_REJOIN_S = 2.0
_AGAIN_S = 30.0  # seconds before a party that could not connect is invited again
_REPLY_LIMIT = 64 * 1024  # characters; the text of a vfl error is far shorter
#: Beginning of the text with which Flower reports an error of vfl.
_VFL_ERROR = re.compile(r"<class 'vfl\.core\.errors\.(\w{1,64})'>")
#: Flower's error codes of a node that may come back; all others end the session.
_AWAY = {5: "its SuperNode is not online", 8: "its process stopped responding"}


#: Function that opens the streams of further ranks, by party; its arguments are the session's
#: certificate and the node ids by party.
OpenRanks = Callable[[ServerCertificate, Mapping[str, int]], Mapping[str, tuple[RankStream, ...]]]


class ErasedRowsError(MisalignedError):
    """Error: a party has erased rows of the session; the session restarts without the erased rows.

    Attributes:
        places: positions of the erased rows in the alignment; see `Withdrawn`.
    """

    def __init__(self, party: str, places: Sequence[int]) -> None:
        super().__init__(
            f"party '{party}' has erased rows, and the session restarts without them",
            got=f"{len(places)} rows",
        )
        self.places = places


class Federation:
    """One session over Flower.

    As a context manager, it closes all streams and sends errors to parties.

    Args:
        grid: Flower's connection to the nodes (Flower's processes at the parties).
        terms: terms of the session.
        settings: addresses of the label party, and time limits for connected parties.
        own: the label party's aligned rows, with which every party's rows are compared.
        join_timeout_s: time limit in seconds within which all parties have to connect.
        say: callback that receives one line of text about each stage.
        attempt: number of restarts of the session so far.
        waiting: callback that is called repeatedly with the names of the missing parties.
        simulation: whether all nodes run in a simulation, in which nodes have no names and any node
            may run any party. In a deployment, a node's registered name is its party's name; a node
            without a name belongs to no party.
        partial: whether to start with the parties that connected in time; missing parties may
            connect later.
        standing: counters of the label party's store and of the other parties' stores; None if the
            parties do not compare counters.
        alignment: the label party's own alignment, which determines the order of the rows; None
            without an alignment.
        gone: parties that have left the project; the session does not wait for them.
    """

    def __init__(
        self,
        grid: Grid,
        terms: Terms,
        settings: FederationSettings,
        own: PartyData,
        join_timeout_s: float,
        say: Callable[[str], None] = lambda line: None,
        attempt: int = 0,
        simulation: bool = False,
        waiting: Callable[[Sequence[str]], None] = lambda parties: None,
        partial: bool = False,
        standing: Standing | None = None,
        alignment: Alignment | None = None,
        gone: Collection[str] = (),
    ) -> None:
        self.grid = grid
        self.terms = terms
        self.settings = settings
        self.own = own
        self.join_timeout_s = join_timeout_s
        self.say = say
        self.attempt = attempt
        self.simulation = simulation
        self._waiting, self._partial, self._standing = waiting, partial, standing
        self._observers: list[Observer] = []
        self._invited: dict[str, float] = {}
        self._returned_at = 0.0
        self.session = secrets.token_hex(16)
        self._alignment, self._gone = alignment, gone
        self._start = 0
        self._nodes: dict[str, int] = {}
        self._node_of: dict[str, str] = {}
        self._pending: dict[str, str] = {}
        self._away: set[str] = set()
        self._ranks: Mapping[str, tuple[RankStream, ...]] = {}
        self._hub: TcpHub | None = None
        self._ca_pem = ""
        self._last_poll = 0.0

    def join(
        self, observers: list[Observer], start: int = 0, open_ranks: OpenRanks | None = None
    ) -> dict[str, ObservedPoll]:
        """Wait until every party, including a dealer, has connected; return the links by name.

        If `partial` is set, return only the links of the parties that connected in time; at least
        one party must have connected.

        Args:
            observers: callbacks that are called with every frame of these links.
            start: step number of the first exchange, which is the same for all parties.
            open_ranks: function that opens the streams of further ranks, before the first party is
                invited.

        Raises:
            MissingPartyError: too few nodes are online, or a party did not open its stream.
            PeerFailedError: a party refused or failed; the error contains the text of that party's
                error.
            DisagreementError, MisalignedError: a party has different rows or a different
                experiment.
            ErasedRowsError: a party has erased rows that belong to the session.
        """
        self._start, self._observers = start, observers
        self._nodes = self._wait_for_nodes()
        certificate = session_certificate([self.settings.stream_host])
        self._ca_pem = certificate.ca_pem.decode()
        host = self.settings.bind_host or self.settings.stream_host
        self._hub = TcpHub(
            host,
            self.settings.stream_port,
            Admission(self.session, {}, self._admit, self._token_s, self._limits),
            certificate,
            Timeouts(
                step_s=self.settings.step_timeout_s,
                rejoin_window_s=self._rejoin_window_s,
            ),
            rules.window_frames(self.terms),
            listener=routed_listener(self.session, host, self.settings.stream_port),
        )
        if open_ranks is not None:
            self._ranks = open_ranks(certificate, self._nodes)
        for name in self._nodes:
            self._invite(name)
        try:
            self._hub.wait_all(list(self._nodes), self.join_timeout_s, poll=self._poll)
        except MissingPartyError as absence:
            if not (self._partial and self._node_of):
                absence.where = f"the stream at {self.settings.stream_host}:{self._hub.port}"
                raise
        return {
            party: self._link(party) for party in rules.peers(self.terms) if party in self._node_of
        }

    def lost(self, party: str) -> None:
        """Record that a party no longer answers; the session continues without the party."""
        self._node_of.pop(party, None)
        self._invited.pop(party, None)
        self._pending = {asked: name for asked, name in self._pending.items() if name != party}
        self.say(f"party {party} is lost; the session continues without it")

    def returned(self, parties: Collection[str]) -> dict[str, ObservedPoll]:
        """Return the links of the lost parties that have returned.

        Invite the other lost parties again. A lost party is invited when its node comes online, and
        again if its token has expired or the party could not connect.
        """
        now, found = time.monotonic(), dict[str, ObservedPoll]()
        for party in parties:
            if party in self._node_of:
                # the party was admitted, but its stream is not open yet
                with suppress(MissingPartyError):
                    found[party] = self._link(party)
        if now - self._returned_at > _RETURN_S:
            self._returned_at = now
            for reply in self.grid.pull_messages(list(self._pending)) if self._pending else ():
                party = self._pending.pop(reply.metadata.reply_to_message_id, "")
                self._invited[party] = now - self._token_s + _AGAIN_S
            wanted = set(parties) - set(found)
            named = [node for node in self.grid.get_nodes() if node.name in wanted]
            for party, node in nodes_by_name(named).items():
                if now - self._invited.get(party, -math.inf) > self._token_s:
                    self._nodes[party] = node
                    self._invite(party)
        return found

    @property
    def _token_s(self) -> float:
        """Seconds for which an unused token is valid.

        Flower takes a minute to notice a dead node.
        """
        rest = self.settings.restart_timeout_s if self._partial else 0.0
        return max(self.join_timeout_s, rest)

    @property
    def _rejoin_window_s(self) -> float:
        """Most seconds within which a broken stream may be restored.

        A service waits only a short time, because no progress is lost when a service restarts.
        """
        most = _SERVING_REJOIN_S if self.terms.mode == "serve" else math.inf
        return min(self.settings.rejoin_window_s, most)

    def _link(self, party: str) -> ObservedPoll:
        assert self._hub is not None, "at least one party has connected"
        link = self._hub.link(self._node_of[party])
        return ObservedPoll(link, party, "label", self._observers)

    def agree(self, layers: Mapping[str, Layers]) -> list[LinkLimits]:
        """From now on, accept frames for layers of these sizes from each party.

        Returns:
            The frame limits of every stream.
        """
        assert self._hub is not None, "all parties have joined"
        limits = {
            party: frame_limits(self.terms, party, self.own.split, layers)
            for party in rules.peers(self.terms)
        }
        for party, each in limits.items():
            self._hub.link(self._node_of[party]).agree(each)
        return list(limits.values())

    def collect(self, timeout_s: float) -> None:
        """Wait for every party's Flower reply, so that its node is free for other sessions.

        Every party has already reported its end on its stream, so a reply adds no information.
        """
        for _ in looks(timeout_s, _POLL_S):
            if not self._pending:
                return
            for reply in self.grid.pull_messages(list(self._pending)):
                self._pending.pop(reply.metadata.reply_to_message_id, None)

    def close(self) -> None:
        """Close all streams; a second call has no effect."""
        if self._hub is not None:
            self._hub.close()

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close all streams.

        If the block raised an error, send every party a report of the error.
        """
        if self._hub is None:
            return
        if error is None:
            self._hub.close()
        else:
            told = error if isinstance(error, VFLError) else unexpected(error, self.own.name)
            self._hub.fail(for_others(told, self.own.name))

    def _wait_for_nodes(self) -> dict[str, int]:
        """Return the node ids by registered node name, as soon as all expected nodes are online.

        Nodes have no names in a simulation, so the method makes names up.
        """
        wanted = [name for name in rules.peers(self.terms) if name not in self._gone]
        deadline = time.monotonic() + self.join_timeout_s
        while True:
            nodes = sorted(self.grid.get_nodes(), key=lambda node: node.node_id)
            if self.simulation:
                named = {f"node {node.node_id}": node.node_id for node in nodes[: len(wanted)]}
            else:
                named = nodes_by_name([node for node in nodes if node.name in wanted])
            if len(named) == len(wanted):
                return named
            self._waiting([name for name in wanted if name not in named])
            if time.monotonic() > deadline:
                if self._partial and named:
                    return named
                missing = [name for name in wanted if name not in named]
                count = "1 SuperNode" if len(nodes) == 1 else f"{len(nodes)} SuperNodes"
                nobody = "none belongs to an expected party"
                raise MissingPartyError(
                    f"no SuperNode of {', '.join(missing)} after {self.join_timeout_s:g} s",
                    where=f"the SuperLink at {self.settings.superlink}",
                    got=f"{count}: {', '.join(sorted(named)) or nobody}" if nodes else count,
                    want=f"a SuperNode for each of {', '.join(wanted)}",
                    fix="vfl doctor party.toml at that party shows the reason; here keys/ "
                    "must contain its key under the party's name",
                )
            time.sleep(_POLL_S)

    def _invite(self, name: str) -> None:
        """Send a node the session message with a new token; an earlier token becomes invalid."""
        assert self._hub is not None
        node = self._nodes[name]
        credential = Credential(str(node), secrets.token_urlsafe(32))
        for party in [party for party, of in list(self._node_of.items()) if of == name]:
            # the dictionary is changed in place, because other threads admit parties meanwhile
            del self._node_of[party]
        self._hub.replace(name, credential)
        message = SessionMessage(
            session=self.session,
            token=credential.token,
            node=credential.node,
            host=self.settings.stream_host,
            port=self._hub.port,
            ca_pem=self._ca_pem,
            idle_timeout_s=IDLE_TIMEOUT_S,
            rejoin_window_s=self._rejoin_window_s,
            start=self._start,
            attempt=self.attempt,
            rows=self.own.rows if self._in_the_middle(name) else 0,
            known=0 if self._standing is None else self._standing.known_of(name),
            ranks=self._ranks.get(name, ()),
            withdrawn=Withdrawn.of(self._alignment, self.session),
            terms=self.terms,
        )
        record = ConfigRecord({"message": message.model_dump_json()})
        envelope = Message(
            RecordDict({"session": record}),
            dst_node_id=node,
            message_type=MESSAGE_TYPE,
            ttl=_LONGEST_SESSION_S,
        )
        (identifier,) = self.grid.push_messages([envelope])
        self._pending[identifier] = name
        self._invited[name] = time.monotonic()
        self.say(f"invited {name} to the session")

    def _in_the_middle(self, name: str) -> bool:
        """Return whether this node may run the middle party; in a simulation, every node may."""
        middle = self.terms.middle
        return middle is not None and (self.simulation or name == middle.party)

    def _admit(self, name: str, about: Mapping[str, Any]) -> Mapping[str, Any]:
        """Check and admit a party.

        The hub calls this method when the party opens its first stream.
        """
        introduction = Introduction.parse(dict(about))
        party = introduction.party
        if party in self._node_of or (party != name and not self.simulation):
            raise DisagreementError(
                f"a node announced that it runs party '{party}'",
                got="a second node has the same name"
                if self.simulation
                else f"registered as '{name}'",
                want="one node for each party, under its own name",
            )
        told = introduction.withdrawn
        if told is not None and (erased := told.beyond(self._alignment, self.session)):
            raise ErasedRowsError(party, erased)
        check_introduction(introduction, self.terms, self.own, self.session)
        answer = self._meet(party, introduction)
        self._node_of[party] = name
        what = f"{introduction.rows} rows, same order"
        if party == rules.rowless(self.terms):
            what = (
                "it deals"
                if self.terms.middle is None
                else "it has no rows and runs the middle model"
            )
        elif secure_mode.make(self.terms.secure).divides_rows:
            what = f"{introduction.rows} separate rows"
        what = "it has ids" if self.terms.mode == "align" else what
        self.say(f"party {party} is here: {what}")
        return answer

    def _meet(self, party: str, introduction: Introduction) -> Mapping[str, Any]:
        """Check the counter of a party's store against the largest known counter.

        The result contains this party's own counter.
        """
        if self._standing is None:
            return {}
        if introduction.standing is None:
            raise ProtocolError(f"party '{party}' did not send the counter of its store")
        self._standing.require(introduction.standing.known, party)
        self._standing.admit(party, introduction.standing)
        return {"standing": self._standing.answer().model_dump()}

    def _limits(self, name: str) -> LinkLimits:
        """Return the frame limits of the party that this node runs."""
        party = next(party for party, node in self._node_of.items() if node == name)
        return frame_limits(self.terms, party, self.own.split)

    def _poll(self) -> None:
        """Read Flower's replies from time to time; send a node that came back a new invitation."""
        if time.monotonic() - self._last_poll < _POLL_S:
            return
        self._last_poll = time.monotonic()
        self._waiting([party for party in rules.peers(self.terms) if party not in self._node_of])
        for reply in self.grid.pull_messages(list(self._pending)) if self._pending else ():
            name = self._pending.pop(reply.metadata.reply_to_message_id, "a party")
            self._hear(name, reply)
        if self._away:
            online = {node.node_id for node in self.grid.get_nodes()}
            for name in sorted(self._away):
                if self._nodes[name] in online:
                    self._away.discard(name)
                    self._invite(name)

    def _hear(self, name: str, reply: Message) -> None:
        """Handle a party's Flower reply before it has joined: fail, or wait for a lost party."""
        if reply.has_error():
            why = _AWAY.get(reply.error.code)
            if why is None:
                raise PeerFailedError(
                    f"party '{name}' stopped",
                    got=f"Flower error {reply.error.code}{_class_in(reply.error)}",
                    fix="see the output of that party's SuperNode; vfl doctor party.toml there "
                    "checks the party's own file",
                )
        else:
            failure = _failure_in(reply, f"the reply of party '{name}'")
            why, code = failure.pop("what", None), failure.pop("code", None)
            if why and code != LostPeerError.code:
                raise PeerFailedError(f"party '{name}' stopped with {code}: {why}", **failure)
        if why:
            self.say(
                f"party {name} is absent ({why}); it is invited again when its SuperNode is back"
            )
            self._away.add(name)


def nodes_by_name(nodes: Sequence[Any]) -> dict[str, int]:
    """Return the ids of Flower's nodes by registered name.

    Raises:
        DisagreementError: two nodes have the same name.
    """
    named = {node.name: node.node_id for node in nodes}
    if len(named) < len(nodes):
        counts = Counter(node.name for node in nodes)
        raise DisagreementError(
            "two SuperNodes are online under one name",
            got=", ".join(f"{count} of '{name}'" for name, count in counts.items() if count > 1),
            want="one node for each party, registered under the party's name",
            fix="start the SuperLink again: it uses only the keys in keys/, one for each party",
        )
    return named


def _class_in(error: Any) -> str:
    """Return the class of a vfl error that Flower reports, without the error's text."""
    found = _VFL_ERROR.match(str(getattr(error, "reason", "")))
    known = found is not None and isinstance(getattr(errors, found[1], None), type)
    return f" ({found[1]})" if found is not None and known else ""


def _failure_in(reply: Message, where: str) -> dict[str, str]:
    """Return the fields of the error in a party's reply; empty if the reply contains no error.

    Raises:
        ProtocolError: the reply was not sent by vfl's ClientApp.
    """
    try:
        text = reply.content["session"]["failure"]
    except (KeyError, TypeError, ValueError):
        text = None
    if not isinstance(text, str) or len(text) > _REPLY_LIMIT:
        raise ProtocolError(
            "a Flower reply belongs to no session of vfl",
            where=where,
            want="a reply from vfl's own ClientApp",
        )
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        raise ProtocolError("a Flower reply is not JSON", where=where) from None
    return {} if record == {} else read_record(record, where)
