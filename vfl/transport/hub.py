"""The label party's end of all streams: it admits parties and holds their links.

A stranger, which is a client that has not authenticated, passes a `Front`: each connection costs a
token of its source address, and a failed greeting costs a few more. If the source has no token
left, the hub closes the connection before it reads any byte; a party tries
again automatically after that.
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
#: Most bytes that a connection may send before its greeting is accepted, TLS included.
_GREETING_LIMIT_BYTES = 2 * HANDSHAKE_LIMIT_BYTES
#: Largest number of simultaneous handshakes; each has a thread.
_HANDSHAKES = 64
#: Errors that a client without valid credentials causes; other errors are reported to the admitted
#: party.
_UNAUTHENTICATED = (OSError, AuthenticationError, FrameError, ProtocolError)


#: Function called once for each party, when it first attaches: from the party's name and its
#: `about` it returns the terms of the session.
OnAttach = Callable[[str, dict[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Credential:
    """A party's credential: the name of its node on the control plane, and its node's token."""

    node: str
    token: str = field(repr=False)


@dataclass(slots=True)
class _Ticket:
    """Stored form of a credential: digests, so that the memory of the hub contains no token.

    Attributes:
        node, token: SHA-256 of the node and token that a greeting must contain.
        expires_at: time on the monotonic clock until which the token may be used for the first
            time.
        key: SHA-256 of the key in the first greeting; None until then.
    """

    node: bytes
    token: bytes
    expires_at: float
    key: bytes | None = None


class Admission:
    """The parties that may attach in one session; safe to use from several threads.

    The first greeting that shows a token binds it to the key in this greeting. An attacker who
    learns the token later, for example from the control plane's database, cannot greet with it,
    because the attacker lacks the key.

    Args:
        session: identifier of the session.
        credentials: credential of each party, by name.
        on_attach: returns the terms for a party, or raises a `VFLError`, which both the party and
            `TcpHub.wait_all` then receive. Only one thread at a time calls it, and it must return
            within the time limit of a handshake.
        token_s: seconds for which a token is valid before its first use.
        limits: returns the size limits of a party's frames, after `on_attach` has admitted the
            party; without this function only `vfl.core.frame.LIMIT_BYTES` applies.
        clock: clock in seconds that never goes back.

    Attributes:
        limits: the argument.
        failure: error for which a party with valid credentials was refused; None if no party was
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
        """Return the names of all parties that may attach."""
        return list(self._tickets)

    def admit(self, hello: Hello) -> tuple[str, Mapping[str, Any]]:
        """Admit the party that sent a greeting; return its name and its terms.

        Raises:
            AuthenticationError: session, node and token of the greeting do not match.
            VFLError: the error that `on_attach` raised.
        """
        with self._lock:
            party = self._authenticate(hello)
            if party not in self._terms:
                self._terms[party] = self._ask(party, hello)
            return party, self._terms[party]

    def replace(self, party: str, credential: Credential) -> None:
        """Give a party a new credential; the old one is no longer valid."""
        with self._lock:
            self._tickets[party] = self._ticket(credential)
            self._terms.pop(party, None)

    def _authenticate(self, hello: Hello) -> str:
        """Find the party that sent a greeting.

        The method always compares with every credential, and every failure raises the same error.
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
                fix="start the session again; a token is valid for one node in one session, "
                "and for the process that used it first",
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
            Welcome(0, terms).frame()  # check now that the terms can be sent
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
    """A handshake in progress.

    Attributes:
        address: address of the client.
        thread: thread that runs the handshake.
        visitor: the connection at the front; the hub marks it as known after admission.
        asking: whether the hub has asked `Admission`, so that the client must receive the answer
            before the hub closes.
    """

    address: str
    thread: threading.Thread
    visitor: Visitor
    asking: bool = False


class TcpHub:
    """Listens for the feature parties of one session.

    Args:
        host: address to listen on.
        port: port to listen on, 0 for a free one.
        admission: the parties that may attach, and their terms; the hub refuses all other parties.
        certificate: certificate for TLS 1.3; None disables TLS, which is allowed only on a loopback
            address.
        timeouts: time limits.
        window: number of sent frames that are stored for a resend to each party.
        front: rules for strangers; `timeouts.handshake_s` is the deadline of their greeting.
        plaintext: allows measurements without TLS across machines, for data that need no
            protection.
        listener: source of connections instead of host and port, such as a router.

    Attributes:
        port: the port on which the hub listens.

    Raises:
        UserError: the hub cannot listen on the address, or other machines could reach it without
            TLS.
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
        """Wait until every party has attached; `poll` runs every 0.05 s and may raise.

        Raises:
            MissingPartyError: parties are missing; the error names the missing parties and the
                attached parties.
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
                    fix="is this address reachable for them? each party's own log has its errors",
                )
            if poll is not None:
                poll()
            time.sleep(_TICK_S)

    def link(self, party: str) -> HubLink:
        """Return the link to one attached party.

        Raises:
            MissingPartyError: the party has never attached.
        """
        if not self._has(party):
            raise MissingPartyError(f"party '{party}' has not attached")
        return self._links[party]

    def replace(self, party: str, credential: Credential) -> None:
        """Replace a lost party's credential, and expect the party again from the first frame on.

        The old link ends, and the old token becomes invalid.
        """
        self._admission.replace(party, credential)
        old = self._links.get(party)
        self._links[party] = self._new_link(party)
        if old is not None:
            old.close()

    def fail(self, error: VFLError) -> None:
        """Report the label party's own error to every attached party, then close."""
        for link in self._links.values():
            link.fail(error)
        self.close()

    def close(self) -> None:
        """End every link and stop listening; afterwards no party can attach."""
        self._closed.set()
        self._acceptor.join()
        self._listener.close()
        for link in self._links.values():
            link.close()
        with self._greeting_lock:
            greeting = dict(self._greeting)
        # A refusal ends the session immediately, so wait until its party has received it.
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
            except OSError:  # the listener is shut down, or the process has no file descriptor left
                if not self._closed.wait(_TICK_S):
                    self._front.make_room()
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
        """Run one handshake, from TLS to the WELCOME or ERROR frame."""
        greeting = self._greeting[stream]
        try:
            self._attach(stream, greeting)
        except (VFLError, OSError) as error:
            if isinstance(error, _UNAUTHENTICATED) and not greeting.visitor.known:
                self._front.failed(greeting.address)
            if isinstance(error, VFLError):
                with contextlib.suppress(OSError, VFLError):  # the client may have disconnected
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
            raise LostPeerError("the session is over", fix=WHY_IT_ENDED)
        # The present link objects, because an old token must not reach a replaced link.
        links = dict(self._links)
        greeting.asking = True
        party, terms = self._admission.admit(hello)
        greeting.visitor.welcome()
        link = links[party]
        if link.limits is None and self._admission.limits is not None:
            link.agree(self._admission.limits(party))
        link.attach(stream, hello, terms)
