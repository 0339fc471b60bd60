"""The control plane at the label party: find the nodes, send each its message, watch the replies.

Flower carries one session message to each node and one reply back; the rest is on the stream.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from vfl.config import FederationSettings
from vfl.datasets import PartyData
from vfl.errors import DisagreementError, MissingPartyError, PeerFailedError, VFLError
from vfl.link import Link, Observer
from vfl.session import Introduction, SessionMessage, Terms, check_introduction
from vfl.transport import (
    Credential,
    Observed,
    TcpHub,
    Timeouts,
    session_certificate,
)

MESSAGE_TYPE = "train.session"
IDLE_TIMEOUT_S = 3600.0
_LONGEST_SESSION_S = 30 * 24 * 3600.0  # Flower drops the reply of a message that lives longer
_POLL_S = 0.2


class Federation:
    """One session over Flower; a context manager that closes the hub and tells parties why.

    Args:
        grid: Flower's way to the nodes.
        terms: what the session is about.
        settings: addresses, and patience with parties that are here.
        own: the label party's aligned rows, to compare with everybody's.
        join_timeout_s: how long parties may take to come.
        say: told one line about each stage.
    """

    def __init__(
        self,
        grid: Grid,
        terms: Terms,
        settings: FederationSettings,
        own: PartyData,
        join_timeout_s: float,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.grid = grid
        self.terms = terms
        self.settings = settings
        self.own = own
        self.join_timeout_s = join_timeout_s
        self.say = say
        self.session = secrets.token_hex(16)
        self._node_of: dict[str, str] = {}
        self._pending: dict[str, str] = {}
        self._hub: TcpHub | None = None
        self._last_poll = 0.0

    def join(self, observers: list[Observer], start: int = 0) -> dict[str, Link]:
        """Bring every feature party onto the stream; its link by party name.

        Args:
            observers: told about every frame of these links.
            start: the exchange everybody goes on with.

        Raises:
            MissingPartyError: too few nodes, or a party that did not open its stream.
            PeerFailedError: a party refused or failed; its own words are passed on.
            DisagreementError, MisalignedError: it holds other rows or another experiment.
        """
        nodes = self._wait_for_nodes()
        credentials = {
            name: Credential(str(node), secrets.token_urlsafe(32)) for name, node in nodes.items()
        }
        certificate = session_certificate([self.settings.stream_host])
        self._hub = TcpHub(
            self.settings.bind_host or self.settings.stream_host,
            self.settings.stream_port,
            self.session,
            credentials,
            self._admit,
            certificate,
            Timeouts(
                step_s=self.settings.step_timeout_s,
                rejoin_window_s=self.settings.rejoin_window_s,
            ),
            self.terms.window_frames,
        )
        ca_pem = certificate.ca_pem.decode()
        for name, credential in credentials.items():
            self._push(name, nodes[name], credential, ca_pem, start)
        self._hub.wait_all(list(nodes), self.join_timeout_s, poll=self._poll)
        return {
            party: Observed(self._hub.link(self._node_of[party]), party, "label", observers)
            for party in self.terms.feature_parties
        }

    def collect(self, timeout_s: float) -> None:
        """Wait for the replies that end each party's message, so that no node stays busy.

        By now every party has said on the stream that it is done; a reply adds nothing.
        """
        deadline = time.monotonic() + timeout_s
        while self._pending and time.monotonic() < deadline:
            for reply in self.grid.pull_messages(list(self._pending)):
                self._pending.pop(reply.metadata.reply_to_message_id, None)
            time.sleep(_POLL_S)

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """End the streams; every party is told of an error of ours."""
        if self._hub is None:
            return
        if isinstance(error, VFLError):
            self._hub.fail(error)
        else:
            self._hub.close()

    def _wait_for_nodes(self) -> dict[str, int]:
        """Node ids by registered name, or by a made-up one where nodes have no names."""
        wanted = self.terms.feature_parties
        deadline = time.monotonic() + self.join_timeout_s
        while True:
            nodes = sorted(self.grid.get_nodes(), key=lambda node: node.node_id)
            named = {node.name: node.node_id for node in nodes if node.name in wanted}
            if len(named) == len(wanted):
                return named
            nameless = [node.node_id for node in nodes if not node.name]
            if not named and len(nameless) >= len(wanted):
                return {f"node-{node}": node for node in nameless[: len(wanted)]}
            if time.monotonic() > deadline:
                missing = [name for name in wanted if name not in named]
                raise MissingPartyError(
                    f"no SuperNode of {', '.join(missing)} is online",
                    got=f"{len(nodes)} SuperNodes: {', '.join(sorted(named)) or 'none by name'}",
                    want=f"one each of {', '.join(wanted)}",
                    fix="start the missing party's SuperNode, and register its key under its name",
                )
            time.sleep(_POLL_S)

    def _push(self, name: str, node: int, credential: Credential, ca_pem: str, start: int) -> None:
        assert self._hub is not None
        message = SessionMessage(
            session=self.session,
            token=credential.token,
            node=credential.node,
            host=self.settings.stream_host,
            port=self._hub.port,
            ca_pem=ca_pem,
            idle_timeout_s=IDLE_TIMEOUT_S,
            rejoin_window_s=self.settings.rejoin_window_s,
            start=start,
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
        self.say(f"told {name} about the session")

    def _admit(self, name: str, about: Mapping[str, Any]) -> Mapping[str, Any]:
        """Called by the hub at a party's first stream."""
        introduction = Introduction.parse(dict(about))
        party = introduction.party
        named = not name.startswith("node-")
        if party in self._node_of or (named and party != name):
            raise DisagreementError(
                f"a node introduced itself as party '{party}'",
                got=f"registered as {name}" if named else "a second node of that name",
                want="one node a party, under its own name",
            )
        check_introduction(introduction, self.terms, self.own, self.session)
        self._node_of[party] = name
        self.say(f"party {party} is here: {introduction.rows} rows, same order")
        return {}

    def _poll(self) -> None:
        """Look at Flower's replies now and then; one that reports a failure ends the session."""
        if not self._pending or time.monotonic() - self._last_poll < _POLL_S:
            return
        self._last_poll = time.monotonic()
        for reply in self.grid.pull_messages(list(self._pending)):
            name = self._pending.pop(reply.metadata.reply_to_message_id, "a party")
            if reply.has_error():
                raise PeerFailedError(
                    f"party '{name}' stopped",
                    got=f"Flower error {reply.error.code}",
                    fix="its own SuperNode's output says why",
                )
            failure = json.loads(str(reply.content["session"]["failure"]))
            if failure:
                told = {key: failure.get(key) for key in ("where", "got", "want", "fix")}
                raise PeerFailedError(
                    f"party '{name}' stopped with {failure.get('code')}: {failure.get('what')}",
                    **told,
                )
