"""The hub: the label party's end of all streams; it admits parties and stores their links.

Clients that have not authenticated yet are limited by a `Front`, a rate limiter: each connection
costs a token of its source address, and a failed greeting costs a few more tokens. If the source
address has no token left, the hub closes the connection before it reads any byte; a party whose
connection is closed in this way tries again automatically.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vfl.core.errors import (
    AuthenticationError,
    FrameError,
    LostPeerError,
    MissingPartyError,
    PeerFailedError,
    ProtocolError,
    VFLError,
)
from vfl.core.frame import HANDSHAKE_LIMIT_BYTES
from vfl.transport.certificates import ServerCertificate
from vfl.transport.front import Front, FrontLimits, Visitor
from vfl.transport.handshake import Hello, Welcome, error_frame
from vfl.transport.link import LINGER_S, WHY_IT_ENDED, WINDOW_FRAMES, LinkLimits, Timeouts
from vfl.transport.reliable import HubLink
from vfl.transport.router import Listener, PortListener
from vfl.transport.stream import Stream, open_stream, require_loopback

_TICK_S = 0.05
#: Most bytes that a connection may send before the hub accepts its greeting, including TLS.
_GREETING_LIMIT_BYTES = 2 * HANDSHAKE_LIMIT_BYTES
#: Largest number of simultaneous handshakes; each handshake has a thread.
_HANDSHAKES = 64
#: Errors that a client without valid credentials can cause; the hub then takes further tokens of
#: the client's source address.
_UNAUTHENTICATED = (OSError, AuthenticationError, FrameError, ProtocolError)


#: Function that is called once for each party, when it first connects: it takes the party's name
#: and the party's `about`, and returns the terms of the session.
OnAttach = Callable[[str, dict[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Credential:
    """A party's credential: the name of its node in Flower, and the node's token."""

    node: str
    token: str = field(repr=False)


@dataclass(slots=True)
class _Ticket:
    """Stored form of a credential: it contains digests, so that the hub's memory contains no token.

    Attributes:
        node, token: SHA-256 digests of the node and of the token that a greeting must contain.
        expires_at: time on the monotonic clock before which the token must be used for the first
            time.
        key: SHA-256 of the key in the first greeting; None before the first greeting.
    """

    node: bytes
    token: bytes
    expires_at: float
    key: bytes | None = None


class Admission:
    """The parties that may connect in one session; several threads may use the object at once.

    The first greeting with a token binds the token to the key in this greeting. An attacker who
    learns the token later, for example from Flower's database, cannot use the token, because the
    attacker lacks the key.

    Args:
        session: identifier of the session.
        credentials: credential of each party, by name.
        on_attach: function that returns the terms for a party, or raises a `VFLError`; both the
            party and `TcpHub.wait_all` then receive the error. The function is called by one
            thread at a time, and must return within the time limit of a handshake.
        token_s: seconds for which a token is valid before its first use.
        limits: function that returns the size limits of a party's frames, called after `on_attach`
            has admitted the party; without this function only the general limit
            `vfl.core.frame.LIMIT_BYTES` applies.
        clock: monotonic clock in seconds.

    Attributes:
        limits: the argument.
        failure: error with which a party with valid credentials was refused; None if no party was
            refused.
    """

    def __init__(
        self,
        session: str,
        credentials: Mapping[str, Credential],
        on_attach: OnAttach | None = None,
        token_s: float = math.inf,
        limits: Callable[[str], LinkLimits] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.failure: VFLError | None = None
        self._session = _digest(session)
        self._token_s = token_s
        self._clock = clock
        self._tickets = {party: self._ticket(one) for party, one in credentials.items()}
        self._on_attach = on_attach
        self._terms: dict[str, Mapping[str, Any]] = {}
        self._lock = threading.Lock()

    @property
    def parties(self) -> Sequence[str]:
        """Return the names of all parties that may connect."""
        return list(self._tickets)

    def admit(self, hello: Hello) -> tuple[str, Mapping[str, Any]]:
        """Admit the party that sent a greeting; return the party's name and the terms for it.

        Raises:
            AuthenticationError: the session, the node and the token of the greeting do not belong
                together.
            VFLError: the error with which `on_attach` refused the party.
        """
        with self._lock:
            party = self._authenticate(hello)
            if party not in self._terms:
                self._terms[party] = self._ask(party, hello)
            return party, self._terms[party]

    def replace(self, party: str, credential: Credential) -> None:
        """Give a party a new credential, and invalidate the old credential."""
        with self._lock:
            self._tickets[party] = self._ticket(credential)
            self._terms.pop(party, None)

    def _authenticate(self, hello: Hello) -> str:
        """Find the party that sent a greeting.

        To hide which part is wrong, the method always compares with every credential, and every
        failure raises the same error.
        """
        token, node, key = _digest(hello.token), _digest(hello.node), _digest(hello.key)
        session_known, now = _same(_digest(hello.session), self._session), self._clock()
        found = None
        for party, ticket in self._tickets.items():
            unused = ticket.key is None and now <= ticket.expires_at
            is_its_own = _same(key, ticket.key or bytes(len(key)))
            if _same(token, ticket.token) & _same(node, ticket.node) & (unused | is_its_own):
                found = party
        if not session_known or found is None:
            raise AuthenticationError(
                "the hub has no such session, node and token",
                fix="start the session again; a token is valid for one node in one session, and "
                "only for the process that used the token first",
            )
        self._tickets[found].key = key
        return found

    def _ticket(self, credential: Credential) -> _Ticket:
        expires_at = self._clock() + self._token_s
        return _Ticket(_digest(credential.node), _digest(credential.token), expires_at)

    def _ask(self, party: str, hello: Hello) -> Mapping[str, Any]:
        if self._on_attach is None:
            return {}
        try:
            terms = self._on_attach(party, dict(hello.about))
            Welcome(0, terms).frame()  # check here that the terms can be sent as a frame
        except VFLError as error:
            self.failure = error
            raise
        except Exception as error:
            self.failure = PeerFailedError(
                "the label party failed while it admitted a party",
                where=f"party '{party}'",
                got=type(error).__name__,
            )
            raise self.failure from error
        return terms


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _same(given: bytes, wanted: bytes) -> bool:
    """Compare two values in constant time."""
    return hmac.compare_digest(given, wanted)


@dataclass(slots=True)
class _Greeting:
    """A handshake that has not ended yet.

    Attributes:
        address: network address of the client.
        thread: thread that runs the handshake.
        visitor: the connection as `Front` counts it; after admission, the hub marks it as
            authenticated.
        asking: whether the hub has passed the greeting to `Admission`; the hub then closes only
            after the client has received the answer.
    """

    address: str
    thread: threading.Thread
    visitor: Visitor
    asking: bool = False


class TcpHub:
    """Listens for the streams of the other parties of one session.

    Args:
        host: address on which the hub listens.
        port: port on which the hub listens; with 0, the operating system chooses a free port.
        admission: the parties that may connect, and their terms; the hub refuses all others.
        certificate: certificate for TLS 1.3; None disables TLS, which is allowed only on a loopback
            address.
        timeouts: time limits.
        window: number of sent frames that are stored for each party, in order to resend them.
        front: rate limiter for clients that have not authenticated; they must send their greeting
            within `timeouts.handshake_s`.
        plaintext: whether connections without TLS to other machines are allowed, for measurements
            with data that need no protection.
        listener: source of connections that replaces host and port, for example a router.

    Attributes:
        port: the number of the port on which the hub listens.

    Raises:
        UserError: the hub cannot listen at the address, or other machines could reach the hub
            without TLS.
    """

    def __init__(
        self,
        host: str,
        port: int,
        admission: Admission,
        certificate: ServerCertificate | None = None,
        timeouts: Timeouts | None = None,
        window: int = WINDOW_FRAMES,
        front: Front | None = None,
        *,
        plaintext: bool = False,
        listener: Listener | None = None,
    ) -> None:
        if certificate is None and not plaintext:
            require_loopback(host)
        self._admission = admission
        self._timeouts = timeouts or Timeouts()
        self._window = window
        self._context = certificate.context() if certificate else None
        self._links = {party: self._new_link(party) for party in admission.parties}
        self._greeting: dict[Stream, _Greeting] = {}
        self._greeting_lock = threading.Lock()
        self._front = front or Front(FrontLimits(strangers=_HANDSHAKES))
        self._closed = threading.Event()
        self._listener = listener or PortListener(host, port)
        self.port: int = self._listener.port
        self._acceptor = threading.Thread(target=self._accept, name="vfl-hub", daemon=True)
        self._acceptor.start()

    def wait_all(
        self, parties: Sequence[str], timeout_s: float, poll: Callable[[], None] | None = None
    ) -> None:
        """Wait until every party has connected.

        `poll` is called every 0.05 s and may raise an error.

        Raises:
            MissingPartyError: some parties did not connect in time; the error names the missing
                parties and the connected parties.
            VFLError: `on_attach` refused a party.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if self._admission.failure is not None:
                raise self._admission.failure
            missing = [party for party in parties if not self._has(party)]
            if not missing:
                return
            if time.monotonic() >= deadline:
                here = [party for party in parties if party not in missing]
                raise MissingPartyError(
                    f"no stream from {', '.join(missing)} within {timeout_s:g} s",
                    where=f"port {self.port}",
                    got=", ".join(here) or "no party",
                    want=", ".join(parties),
                    fix="check that the parties can reach this address. The errors of each party "
                    "are in its own log",
                )
            if poll is not None:
                poll()
            time.sleep(_TICK_S)

    def link(self, party: str) -> HubLink:
        """Return the link to one party that has connected.

        Raises:
            MissingPartyError: the party has not connected yet.
        """
        if not self._has(party):
            raise MissingPartyError(f"party '{party}' has not connected")
        return self._links[party]

    def replace(self, party: str, credential: Credential) -> None:
        """Replace a lost party's credential.

        The hub then expects a new process with new frame counters. The party's old link ends, and
        its old token becomes invalid.
        """
        self._admission.replace(party, credential)
        old = self._links.get(party)
        self._links[party] = self._new_link(party)
        if old is not None:
            old.close()

    def fail(self, error: VFLError) -> None:
        """Send the label party's own error to every connected party, then close the hub."""
        for link in self._links.values():
            link.fail(error)
        self.close()

    def close(self) -> None:
        """Close every link and stop listening; afterwards no party can connect."""
        self._closed.set()
        self._listener.stop()
        self._acceptor.join()
        self._listener.close()
        for link in self._links.values():
            link.close()
        with self._greeting_lock:
            greeting = dict(self._greeting)
        # A party's refusal ends the session immediately, so wait until this party has received the
        # refusal.
        deadline = time.monotonic() + 2 * LINGER_S
        for stream, each in greeting.items():
            if each.asking:
                each.thread.join(max(0.0, deadline - time.monotonic()))
            stream.end()
            each.thread.join()

    def _new_link(self, party: str) -> HubLink:
        return HubLink(party, self._timeouts, self._window)

    def _has(self, party: str) -> bool:
        link = self._links.get(party)
        return link is not None and link.attached

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:  # the hub is closing, or the process has no free descriptor
                if not self._closed.wait(_TICK_S):
                    self._front.make_room(error)
                continue
            if self._front.allow(address):
                self._begin(connection, address)
            else:
                connection.close()

    def _begin(self, connection: socket.socket, address: str) -> None:
        """Start a handshake in a new thread."""
        try:
            stream = open_stream(connection, self._context)
        except (OSError, ValueError):
            connection.close()  # closed already
            return
        stream.limit_bytes = HANDSHAKE_LIMIT_BYTES
        stream.wire_limit_bytes = _GREETING_LIMIT_BYTES
        thread = threading.Thread(
            target=self._greet, args=(stream,), name="vfl-handshake", daemon=True
        )

        def end() -> None:
            stream.end()
            if thread.is_alive():
                thread.join()

        visitor = self._front.enter(address, end)
        if visitor is None:
            stream.end()
            return
        with self._greeting_lock:
            self._greeting[stream] = _Greeting(address, thread, visitor)
        thread.start()

    def _greet(self, stream: Stream) -> None:
        """Run one handshake, from TLS up to the WELCOME or ERROR frame."""
        greeting = self._greeting[stream]
        try:
            self._attach(stream, greeting)
        except (VFLError, OSError) as error:
            if isinstance(error, _UNAUTHENTICATED) and not greeting.visitor.known:
                self._front.failed(greeting.address)
            if isinstance(error, VFLError):
                # the client may already have disconnected
                with contextlib.suppress(OSError, VFLError):
                    stream.write(error_frame(error), time.monotonic() + LINGER_S)
                    stream.end(LINGER_S)
            stream.end()
        finally:
            greeting.visitor.leave()
            with self._greeting_lock:
                del self._greeting[stream]

    def _attach(self, stream: Stream, greeting: _Greeting) -> None:
        deadline = time.monotonic() + self._timeouts.handshake_s
        stream.handshake(deadline)
        hello = Hello.of(stream.read(deadline))
        if self._closed.is_set():
            raise LostPeerError("the session has ended", fix=WHY_IT_ENDED)
        # Copy the present links: a party that was admitted with an old token must not reach a newer
        # link.
        links = dict(self._links)
        greeting.asking = True
        party, terms = self._admission.admit(hello)
        greeting.visitor.welcome()
        link = links[party]
        if link.limits is None and self._admission.limits is not None:
            link.agree(self._admission.limits(party))
        link.attach(stream, hello, terms)
