"""The label party's side of all streams: who may attach, who has, and their links."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from vfl.errors import LostPeerError, MissingPartyError, VFLError
from vfl.frame import HANDSHAKE_LIMIT_BYTES, LIMIT_BYTES
from vfl.transport.admission import Admission, Credential, OnAttach
from vfl.transport.base import LINGER_S, WINDOW_FRAMES, Timeouts
from vfl.transport.certificates import ServerCertificate
from vfl.transport.hub_link import HubLink
from vfl.transport.messages import Hello, error_frame
from vfl.transport.sockets import listen, open_stream
from vfl.transport.stream import Stream

_TICK_S = 0.05
_HANDSHAKES = 64


class TcpHub:
    """Listens for the feature parties of one session.

    Args:
        host: address to listen on.
        port: port to listen on, 0 for a free one.
        session: name of the session.
        credentials: what each party must show, by party name; nobody else can attach.
        on_attach: admits a party and gives its terms, or raises a `VFLError` that both the party
            and `wait_all` then get. Called by one thread at a time, within the handshake's limit.
        certificate: for TLS 1.3; None for none.
        timeouts: how long to wait.
        window: sent frames kept for a resend, per party.
        handshakes: how many may be under way at once; more wait to be accepted.

    Attributes:
        port: the port really listened on.

    Raises:
        UserError: the address cannot be listened on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        session: str,
        credentials: Mapping[str, Credential],
        on_attach: OnAttach | None = None,
        certificate: ServerCertificate | None = None,
        timeouts: Timeouts | None = None,
        window: int = WINDOW_FRAMES,
        handshakes: int = _HANDSHAKES,
    ) -> None:
        self._admission = Admission(session, credentials, on_attach)
        self._timeouts = timeouts or Timeouts()
        self._window = window
        self._context = certificate.context() if certificate else None
        self._links = {party: self._new_link(party) for party in credentials}
        self._greeting: dict[Stream, threading.Thread] = {}
        self._greeting_lock = threading.Lock()
        self._slots = threading.Semaphore(handshakes)
        self._closed = threading.Event()
        self._listener = listen(host, port)
        self._listener.settimeout(_TICK_S)
        self.port: int = self._listener.getsockname()[1]
        self._door = threading.Thread(target=self._accept, name="vfl-hub", daemon=True)
        self._door.start()

    def wait_all(
        self, parties: Sequence[str], timeout_s: float, poll: Callable[[], None] | None = None
    ) -> None:
        """Block until every party has attached; `poll` runs every 0.05 s and may raise.

        Raises:
            MissingPartyError: names who did not come, and who did.
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
                    got=", ".join(here) or "nobody",
                    want=", ".join(parties),
                    fix="is this address open to them? each party's own log says what it met",
                )
            if poll is not None:
                poll()
            time.sleep(_TICK_S)

    def link(self, party: str) -> HubLink:
        """The link to one attached party.

        Raises:
            MissingPartyError: it has never attached.
        """
        if not self._has(party):
            raise MissingPartyError(f"party '{party}' has not attached")
        return self._links[party]

    def replace(self, party: str, credential: Credential) -> None:
        """Forget a lost party and expect it anew, with a new token and from the first frame on.

        The old link ends and the old token is worth nothing any more.
        """
        self._admission.replace(party, credential)
        old = self._links.get(party)
        self._links[party] = self._new_link(party)
        if old is not None:
            old.close()

    def fail(self, error: VFLError) -> None:
        """Tell every attached party what went wrong here, then close."""
        for link in self._links.values():
            link.fail(error)
        self.close()

    def close(self) -> None:
        """End every link and stop listening; nobody can attach afterwards."""
        self._closed.set()
        with contextlib.suppress(OSError):  # closing alone would not wake a thread in accept
            self._listener.shutdown(socket.SHUT_RDWR)
        self._door.join()
        self._listener.close()
        for link in self._links.values():
            link.close()
        with self._greeting_lock:
            greeting = dict(self._greeting)
        for stream, thread in greeting.items():
            stream.end()
            thread.join()

    def _new_link(self, party: str) -> HubLink:
        return HubLink(party, self._timeouts, self._window)

    def _has(self, party: str) -> bool:
        link = self._links.get(party)
        return link is not None and link.attached

    def _accept(self) -> None:
        while not self._closed.is_set():
            if not self._slots.acquire(timeout=_TICK_S):
                continue
            if not self._accept_one():
                self._slots.release()

    def _accept_one(self) -> bool:
        """Start one handshake; False when nobody came in this tick."""
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return False
        except OSError:
            self._closed.wait(_TICK_S)  # shut down, or out of file descriptors for now
            return False
        try:
            stream = open_stream(connection, self._context)
        except (OSError, ValueError):
            connection.close()  # gone already
            return False
        stream.limit_bytes = HANDSHAKE_LIMIT_BYTES
        thread = threading.Thread(
            target=self._greet, args=(stream,), name="vfl-handshake", daemon=True
        )
        with self._greeting_lock:
            self._greeting[stream] = thread
        thread.start()
        return True

    def _greet(self, stream: Stream) -> None:
        """One handshake, from TLS to WELCOME or ERROR, in a thread of its own."""
        try:
            self._attach(stream)
        except VFLError as error:
            with contextlib.suppress(OSError, VFLError):  # it may not stay to hear it
                stream.write(error_frame(error), time.monotonic() + LINGER_S)
            stream.end(LINGER_S)
        except OSError:
            stream.end()
        finally:
            with self._greeting_lock:
                del self._greeting[stream]
            self._slots.release()

    def _attach(self, stream: Stream) -> None:
        deadline = time.monotonic() + self._timeouts.handshake_s
        stream.handshake(deadline)
        hello = Hello.of(stream.read(deadline))
        if self._closed.is_set():
            raise LostPeerError("the session is over")
        links = dict(self._links)  # those of now: an old token must not reach a replaced link
        party, terms = self._admission.admit(hello)
        stream.limit_bytes = LIMIT_BYTES
        links[party].attach(stream, hello, terms)
