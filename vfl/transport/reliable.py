"""Both ends of a stream that survives interrupted connections: they count, store and resend frames.

Each party counts the frames that it has sent and the frames that it has completely received in a
session, and stores the last few sent frames unchanged. When a party reconnects, both ends report
how many frames they have received, and each end resends the frames that the other lacks. Each frame
is encoded only once, also if it is sent twice.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from vfl.core.address import Address
from vfl.core.errors import FrameError, LostPeerError, OversizedFrameError, VFLError
from vfl.core.frame import LIMIT_BYTES, Frame, Kind
from vfl.transport.handshake import (
    ANSWER_LIMIT_BYTES,
    Hello,
    Welcome,
    error_frame,
    in_session,
    read_refusal,
)
from vfl.transport.link import (
    LINGER_S,
    WHY_IT_ENDED,
    WINDOW_FRAMES,
    LinkLimits,
    PolledLink,
    Timeouts,
)
from vfl.transport.stream import Stream, client_context, dial, require_loopback

_TICK_S = 0.05


class Sequence:
    """Frame counters and stored frames of one end of a stream; a lock of the owner protects them.

    Args:
        window: number of sent frames that are stored in order to resend them.
    """

    def __init__(self, window: int = WINDOW_FRAMES) -> None:
        self.window = window
        self.sent = 0
        self.received = 0
        self._stored: deque[Frame] = deque(maxlen=window)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all stored frames."""
        return sum(frame.wire_bytes for frame in self._stored)

    def store(self, frame: Frame) -> None:
        """Count and store a frame before it is written to the connection."""
        self._stored.append(frame)
        self.sent += 1

    def check_sent(self, peer_sent: int) -> None:
        """Check that the peer reports at least as many sent frames as were received from it.

        Raises:
            LostPeerError: the peer's counter is smaller than before, so the peer is a new process.
        """
        if peer_sent < self.received:
            raise self._another_process(f"{peer_sent} frames sent", f"at least {self.received}")

    def missing(self, peer_received: int) -> list[Frame]:
        """Return the stored frames that the peer has not received, with the oldest frame first.

        Raises:
            LostPeerError: the peer lacks frames that are not stored any more, or reports more
                received frames than were sent.
        """
        gap = self.sent - peer_received
        if gap < 0:
            raise self._another_process(f"{peer_received} frames received", f"at most {self.sent}")
        if gap > len(self._stored):
            raise LostPeerError(
                "the peer lacks more frames than this party stores for resending",
                got=f"{gap} frames missing",
                want=f"at most {len(self._stored)}",
                fix="start the session again from its last checkpoint",
            )
        return list(self._stored)[len(self._stored) - gap :]

    @staticmethod
    def _another_process(got: str, want: str) -> LostPeerError:
        return LostPeerError(
            "the frame counters of the two parties do not match; one party's process was started "
            "again",
            got=got,
            want=want,
            fix="start the session again from its last checkpoint",
        )


_LABEL_PARTY = "the label party"


class _StreamLink:
    """Common code of both ends of a stream: counters, stored frames, limits, and the link's end.

    Args:
        peer: name of the peer, for error messages.
        patience_s: longest time in seconds for which the peer may neither send nor accept data.
        timeouts: all other time limits of the link.
        window: number of sent frames that are stored in order to resend them.

    Attributes:
        limits: size limits of frames; None until the parties have agreed on limits.
        patience_s: longest time in seconds for which the peer may neither send nor accept data.
    """

    def __init__(self, peer: str, patience_s: float, timeouts: Timeouts, window: int) -> None:
        self.limits: LinkLimits | None = None
        self.patience_s = patience_s
        self._peer = peer
        self._timeouts = timeouts
        self._sequence = Sequence(window)
        self._changed = threading.Condition()
        self._stream: Stream | None = None
        self._ended: VFLError | None = None
        self._outgoing: Mapping[Kind, int] | None = None
        self._beside: tuple[_StreamLink, ...] = ()

    def read_beside(self, links: Iterable[_StreamLink]) -> None:
        """Also read these links of the same thread while `send` waits until the peer reads.

        Without this, three parties that send in a circle would deadlock: each party would wait
        until the next party reads.

        Args:
            links: links that the same thread uses; they replace those of an earlier call.
        """
        self._beside = tuple(links)

    def send(self, frame: Frame) -> None:
        """Store and write a frame.

        If the connection is broken, wait until the party has reconnected.

        Raises:
            OversizedFrameError: the frame is larger than the agreed limit, and was neither stored
                nor sent.
            LostPeerError: the party did not reconnect in time, or does not accept data in time.
        """
        self._check_open()
        deadline = time.monotonic() + self.patience_s
        limits = self._outgoing
        if limits is not None and len(frame.payload) > limits.get(frame.kind, 0):
            raise OversizedFrameError(
                f"a {frame.kind.name} frame is larger than agreed",
                where=f"step {frame.step}",
                got=f"{len(frame.payload)} bytes",
                want=f"at most {limits.get(frame.kind, 0)} bytes",
            )
        stream = self._store(frame, deadline)
        if stream is None:  # the party has not connected yet
            return
        try:
            if self._beside:
                beside = [each for link in self._beside if (each := link._stream) is not None]
                stream.write(frame, deadline, beside)
            else:
                stream.write(frame, deadline)
        except ConnectionError:
            # The broken connection stays open, so that frames which the peer sent before can still
            # be read.
            self._note_loss(stream)
        except TimeoutError as error:
            raise self._end(self._silent("took nothing")) from error
        except FrameError as error:
            raise self._end(error) from None

    def receive(self) -> Frame:
        """Wait for the next frame, even if the connection is interrupted meanwhile.

        Raises:
            LostPeerError: no frame arrived in time, or the party did not reconnect in time.
            PeerFailedError: the peer reported an error.
            FrameError: the received bytes are not a valid frame; the link has ended.
        """
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                frame = self._read(self._readable(deadline), deadline)
            except TimeoutError as error:
                raise self._end(self._silent("sent nothing")) from error
            if frame is not None:
                return frame

    def fail(self, error: VFLError) -> None:
        """Send this party's error to the peer, and to peers that connect later.

        Then the function closes the link.
        """
        with self._changed:
            stream = self._stream if self._ended is None else None
            self._ended = self._ended or error
        if stream is not None:
            try:
                stream.write(error_frame(error), time.monotonic() + LINGER_S)
                stream.end(LINGER_S)
            except (OSError, FrameError):
                stream.end()
        self.close()

    def close(self) -> None:
        """Close the link; a second call has no effect."""
        self._end(LostPeerError(f"the link to {self._peer} was closed"))

    def _store(self, frame: Frame, deadline: float) -> Stream | None:
        """Store a frame, and return the connection on which it must be written.

        The result is None if the frame will be resent later.
        """
        raise NotImplementedError

    def _readable(self, deadline: float) -> Stream:
        """Return the connection from which the next frame must be read."""
        raise NotImplementedError

    def _note_loss(self, stream: Stream, *, unreadable: bool = False) -> None:
        """Record that a write failed, or that a read failed and no more frame can be read."""
        raise NotImplementedError

    def _read(self, stream: Stream, deadline: float | None) -> Frame | None:
        """Read the next frame; return None if the connection broke or was replaced meanwhile.

        Without a deadline the method does not wait, and returns None if no frame has arrived.
        """
        try:
            frame = stream.poll() if deadline is None else stream.read(deadline)
        except ConnectionError:
            self._note_loss(stream, unreadable=True)
            return None
        except FrameError as error:
            raise self._end(error) from None
        if frame is None or not self._count(stream):
            return None
        try:
            return in_session(frame, self._peer)
        except VFLError as error:
            raise self._end(error) from None

    def _count(self, stream: Stream) -> bool:
        """Count a received frame; return False if its connection was replaced during the read."""
        self._sequence.received += 1
        return True

    def _limit(self, stream: Stream, incoming: Mapping[Kind, int] | None) -> None:
        stream.window = self._sequence.window
        stream.limit_bytes = LIMIT_BYTES if incoming is None else incoming

    def _silent(self, did: str) -> LostPeerError:
        return LostPeerError(f"{self._peer} {did} for {self.patience_s:g} s")

    def _release(self) -> None:
        """Close the current connection."""
        if self._stream is not None:
            self._stream.end()
            self._stream = None

    def _end(self, error: VFLError) -> VFLError:
        with self._changed:
            self._ended = self._ended or error
            self._release()
            self._changed.notify_all()
        return error

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._ended


class TcpLink(_StreamLink):
    """A party's link to the hub, made by `connect` and used by one thread.

    The link reconnects automatically.

    Args:
        reach: function that opens a new connection to the hub.
        hello: greeting that this party sends whenever it connects.
        timeouts: time limits.
        window: number of sent frames that are stored in order to resend them; the hub must use the
            same number.
        peer: name of the party that listens, for error messages.
        limits: size limits of frames; None if the parties agreed on none.
        place: address of the party that listens, for error messages.

    Attributes:
        terms: the `terms` in the hub's answer to the first greeting.
    """

    def __init__(
        self,
        reach: Callable[[], Stream],
        hello: Hello,
        timeouts: Timeouts,
        window: int,
        peer: str = _LABEL_PARTY,
        limits: LinkLimits | None = None,
        place: str | None = None,
    ) -> None:
        super().__init__(peer, timeouts.idle_s, timeouts, window)
        if limits is not None:
            self.agree(limits)
        self._reach = reach
        self._place = place
        self._hello = hello
        self._broken = False
        self.terms = self._attach()

    @classmethod
    def connect(
        cls,
        host: str,
        port: int,
        hello: Hello,
        ca_pem: bytes | None = None,
        timeouts: Timeouts | None = None,
        window: int = WINDOW_FRAMES,
        peer: str = _LABEL_PARTY,
        limits: LinkLimits | None = None,
        *,
        plaintext: bool = False,
        route: str = "",
    ) -> TcpLink:
        """Connect to a hub; return after the hub's WELCOME frame.

        Args:
            host: host name or address of the hub, as in the hub's certificate.
            port: the hub's port.
            hello: greeting of this party.
            ca_pem: certificate of the CA that must have signed the hub's certificate; None disables
                TLS, which is allowed only on a loopback address.
            timeouts: time limits.
            window: number of sent frames that are stored in order to resend them.
            peer: name of the party that listens, for error messages.
            limits: size limits of frames; with None, only the general limit of a frame applies.
            plaintext: whether connections without TLS to other machines are allowed, for
                measurements with data that need no protection.
            route: name of the session if several sessions share the port; see
                `vfl.transport.router`.

        Raises:
            AuthenticationError: the session's name, the node, the token or the certificate is
                wrong.
            UserError: the address is on another machine, and TLS is disabled.
            DisagreementError, ConsentError, RolledBackError, PeerFailedError: the hub refused this
                party.
            LostPeerError: no hub answered within the time limit for reconnecting.
        """
        if ca_pem is None and not plaintext:
            require_loopback(host)
        waits = timeouts or Timeouts()
        context = None if ca_pem is None else client_context(ca_pem, route)
        reach = partial(dial, host, port, context, waits)
        return cls(reach, hello, waits, window, peer, limits, str(Address(host, port)))

    def poll(self) -> Frame | None:
        """Return the next frame, or None if none has arrived.

        If the connection can no longer be read, reconnect and return None.

        Raises:
            LostPeerError, PeerFailedError, FrameError: see `receive`.
        """
        return self._read(self._readable(time.monotonic()), None)

    def fileno(self) -> int:
        """File descriptor of the current connection; -1 after the link has ended."""
        return -1 if self._stream is None else self._stream.fileno()

    def agree(self, limits: LinkLimits) -> None:
        """Apply size limits to frames in both directions, from the next frame on."""
        self.limits, self._outgoing = limits, limits.up
        if self._stream is not None:
            self._limit(self._stream, limits.down)

    def _store(self, frame: Frame, deadline: float) -> Stream | None:
        if self._broken:
            self._rejoin()
        self._sequence.store(frame)
        return self._stream

    def _readable(self, deadline: float) -> Stream:
        self._check_open()
        assert self._stream is not None, "a link that has not ended has a connection"
        return self._stream

    def _note_loss(self, stream: Stream, *, unreadable: bool = False) -> None:
        self._broken = True
        if unreadable:
            self._rejoin()

    def _rejoin(self) -> None:
        self._release()
        time.sleep(self._timeouts.retry_s)
        try:
            self._attach()
        except VFLError as error:
            self._end(error)
            raise
        self._broken = False

    def _attach(self) -> Mapping[str, Any]:
        """Try to connect until the time limit for reconnecting; a refusal of the hub is final.

        The method returns the `terms` in the hub's WELCOME frame.
        """
        deadline = time.monotonic() + self._timeouts.rejoin_window_s
        while True:
            try:
                return self._greet(self._reach())
            except OSError as error:
                if time.monotonic() + self._timeouts.retry_s >= deadline:
                    asked = f"see the output of {self._peer}'s command"
                    why = WHY_IT_ENDED if self._peer == _LABEL_PARTY else asked
                    raise LostPeerError(
                        f"{self._peer} cannot be reached",
                        where=self._place,
                        got=error.strerror or type(error).__name__,
                        want=f"an answer within {self._timeouts.rejoin_window_s:g} s",
                        fix=f"{why}; if that party still runs, "
                        "check host, port, and TLS at both parties",
                    ) from error
            time.sleep(self._timeouts.retry_s)

    def _greet(self, stream: Stream) -> Mapping[str, Any]:
        try:
            deadline = time.monotonic() + self._timeouts.handshake_s
            sequence = self._sequence
            hello = replace(self._hello, sent=sequence.sent, received=sequence.received)
            stream.limit_bytes = ANSWER_LIMIT_BYTES
            stream.write(hello.frame(), deadline)
            answer = stream.read(deadline)
            if answer.kind is Kind.ERROR:
                raise read_refusal(answer, self._peer)
            welcome = Welcome.of(answer)
            self._limit(stream, None if self.limits is None else self.limits.down)
            for frame in sequence.missing(welcome.received):
                stream.write(frame, time.monotonic() + self._timeouts.idle_s)
        except BaseException:
            stream.end()
            raise
        self._stream = stream
        return welcome.terms


class HubLink(_StreamLink):
    """The hub's link to one party.

    One thread uses the link, other threads attach new connections to it.

    Args:
        party: name of the feature party.
        timeouts: time limits.
        window: number of sent frames that are stored in order to resend them.

    Attributes:
        party: name of the feature party.
        attached: whether the party has connected at least once.
    """

    def __init__(
        self, party: str, timeouts: Timeouts | None = None, window: int = WINDOW_FRAMES
    ) -> None:
        waits = timeouts or Timeouts()
        super().__init__(f"party '{party}'", waits.step_s, waits, window)
        self.party = party
        self.attached = False
        # Time at which a read or a write first failed on the present connection.
        self._lost_at: float | None = None

    def agree(self, limits: LinkLimits) -> None:
        """Apply size limits to frames in both directions, from the next frame on."""
        with self._changed:
            self.limits, self._outgoing = limits, limits.down
            if self._stream is not None:
                self._bound(self._stream)

    @property
    def held_bytes(self) -> int:
        """Bytes of frames stored for this party: unread ones, and sent ones for resending."""
        with self._changed:
            unread = 0 if self._stream is None else self._stream.inbox_bytes
            return unread + self._sequence.stored_bytes

    def attach(self, stream: Stream, hello: Hello, terms: Mapping[str, Any]) -> None:
        """Answer a party's greeting, resend missing frames, and replace its old connection.

        The method holds the link's lock from start to end. If another thread sends a frame
        meanwhile, the frame is therefore either resent by this method, or sent after it. A frame
        that the old connection still delivers is dropped, because the party resends this frame.

        Raises:
            LostPeerError: the frame counters of the two parties do not match.
            VFLError: the error that has ended the link earlier.
            ConnectionError, TimeoutError: the new connection broke; the caller may attach another
                connection.
        """
        with self._changed:
            self._check_open()
            self._sequence.check_sent(hello.sent)
            missing = self._sequence.missing(hello.received)
            self._release()
            deadline = time.monotonic() + self._timeouts.handshake_s
            self._bound(stream)
            stream.write(Welcome(self._sequence.received, terms).frame(), deadline)
            for frame in missing:
                stream.write(frame, deadline)
            self._stream, self._lost_at = stream, None
            self.attached = True
            self._changed.notify_all()

    def poll(self) -> Frame | None:
        """Return the next frame without waiting, or None if no frame has arrived.

        Raises:
            LostPeerError: the party did not reconnect in time.
            PeerFailedError, FrameError: see `receive`.
        """
        with self._changed:
            self._check_open()
            stream = self._stream
            if stream is None:
                self._check_window()
        return None if stream is None else self._read(stream, None)

    def fileno(self) -> int:
        """File descriptor of the current connection.

        The value is -1 without a connection, or after a failed write. The method takes no lock,
        because the connection may be replaced right after the call anyway.
        """
        stream = self._stream if self._lost_at is None else None
        return -1 if stream is None else stream.fileno()

    def _bound(self, stream: Stream) -> None:
        """Limit each frame's size as agreed, and the unread bytes to those of a full window."""
        stream.wire_limit_bytes = None
        self._limit(stream, None if self.limits is None else self.limits.up)
        if self.limits is not None:
            stream.inbox_limit_bytes = self.limits.inbox_bytes(stream.window)

    def _store(self, frame: Frame, deadline: float) -> Stream | None:
        with self._changed:
            while self._lost_at is not None:
                self._await(deadline, "took nothing")
            self._check_open()
            self._sequence.store(frame)
            return self._stream

    def _readable(self, deadline: float) -> Stream:
        with self._changed:
            while self._stream is None:
                self._await(deadline, "sent nothing")
            self._check_open()
            return self._stream

    def _await(self, deadline: float, did: str) -> None:
        """Wait until a handshake thread attaches a connection or the time is over.

        The caller has the lock.
        """
        self._check_open()
        now = time.monotonic()
        if now >= deadline:
            raise self._end(self._silent(did))
        self._check_window()
        window_s = self._timeouts.rejoin_window_s
        rejoin_by = deadline if self._lost_at is None else self._lost_at + window_s
        self._changed.wait(min(deadline, rejoin_by) - now)

    def _check_window(self) -> None:
        window_s = self._timeouts.rejoin_window_s
        if self._lost_at is not None and time.monotonic() >= self._lost_at + window_s:
            raise self._end(
                LostPeerError(
                    f"{self._peer} disconnected and did not reconnect",
                    want=f"a new connection within {window_s:g} s",
                )
            )

    def _count(self, stream: Stream) -> bool:
        with self._changed:
            return self._stream is stream and super()._count(stream)

    def _note_loss(self, stream: Stream, *, unreadable: bool = False) -> None:
        with self._changed:
            if self._stream is stream:
                if unreadable:
                    self._release()
                self._lost_at = self._lost_at or time.monotonic()

    def _release(self) -> None:
        """Close the current connection.

        The time limit for reconnecting begins at the latest at this point.
        """
        if self._stream is not None:
            self._lost_at = self._lost_at or time.monotonic()
        super()._release()


def receive_any(links: Mapping[str, PolledLink]) -> tuple[str, Frame]:
    """Receive the next frame from any party, even if connections break; return (party, frame).

    Args:
        links: links by name of the party at the other end.

    Raises:
        LostPeerError: no party sent a frame in time, or a party did not reconnect in time.
        PeerFailedError: a party reported an error.
        FrameError: the received bytes are not a frame.
    """
    patience_s = max(link.patience_s for link in links.values())
    deadline = time.monotonic() + patience_s
    while True:
        for name, link in links.items():
            frame = link.poll()
            if frame is not None:
                return name, frame
        if time.monotonic() >= deadline:
            raise LostPeerError(
                f"none of the parties {', '.join(links)} sent a frame for {patience_s:g} s",
                want="a frame from one of these parties",
            )
        wait_briefly(links.values())


def wait_briefly(links: Iterable[PolledLink]) -> None:
    """Wait until one of these links has data to read, but at most 0.05 s."""
    waiting = select.poll()
    for number in (link.fileno() for link in links):
        if number >= 0:
            waiting.register(number, select.POLLIN)
    # The wait is short: if a connection is replaced meanwhile, its old file descriptor never shows
    # new data.
    waiting.poll(1000 * _TICK_S)
