"""The two ends of a stream that survives cuts: count frames, keep the last few, resend.

Each end counts the frames it has sent and fully received in a session and keeps the last few it
sent, as the very frames that were handed over. When a party attaches again both ends tell what
they have received and each resends what the other lacks. Nothing is ever encoded twice.
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
    """The counts and stored frames of one end; its owner guards it against other threads.

    Args:
        window: how many sent frames are kept.
    """

    def __init__(self, window: int = WINDOW_FRAMES) -> None:
        self.window = window
        self.sent = 0
        self.received = 0
        self._stored: deque[Frame] = deque(maxlen=window)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the frames that are kept."""
        return sum(frame.wire_bytes for frame in self._stored)

    def store(self, frame: Frame) -> None:
        """Count and keep a frame, before it is written."""
        self._stored.append(frame)
        self.sent += 1

    def check_sent(self, peer_sent: int) -> None:
        """The other end must have sent what was received from it.

        Raises:
            LostPeerError: it counts fewer, so it is not the process that began the session.
        """
        if peer_sent < self.received:
            raise self._another_process(f"{peer_sent} frames sent", f"at least {self.received}")

    def missing(self, peer_received: int) -> list[Frame]:
        """The stored frames the other end lacks, oldest first.

        Raises:
            LostPeerError: it lacks more than is kept, or counts more than was sent.
        """
        gap = self.sent - peer_received
        if gap < 0:
            raise self._another_process(f"{peer_received} frames received", f"at most {self.sent}")
        if gap > len(self._stored):
            raise LostPeerError(
                "the other end lacks more frames than are kept for it",
                got=f"{gap} frames missing",
                want=f"at most {len(self._stored)}",
                fix="start the session again from its last checkpoint",
            )
        return list(self._stored)[len(self._stored) - gap :]

    @staticmethod
    def _another_process(got: str, want: str) -> LostPeerError:
        return LostPeerError(
            "the two ends of a session count differently; one of them was started anew",
            got=got,
            want=want,
            fix="start the session again from its last checkpoint",
        )


_LABEL_PARTY = "the label party"


class _StreamLink:
    """What both ends of a stream do: count and keep frames, hold to limits, end once for all.

    Args:
        peer: who is at the other end, for messages.
        patience_s: how long it may say or take nothing.
        timeouts: how long to wait for everything else.
        window: sent frames kept for a resend.

    Attributes:
        limits: what frames may carry; None until something was agreed.
        patience_s: how long the other end may say or take nothing.
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
        """While a frame waits for room, read what comes over other links of this thread too.

        Where three ends send in a circle, each waits for the next one to read.

        Args:
            links: used by the same thread as this one; instead of those given before.
        """
        self._beside = tuple(links)

    def send(self, frame: Frame) -> None:
        """Store and write a frame; a link that breaks here is mended when the party comes back.

        Raises:
            OversizedFrameError: it is larger than what was agreed on; nothing was sent or kept.
            LostPeerError: the rejoin window has passed, or the other end takes nothing in time.
        """
        self._check_open()
        deadline = time.monotonic() + self.patience_s
        limits = self._outgoing
        if limits is not None and len(frame.payload) > limits.get(frame.kind, 0):
            raise OversizedFrameError(
                f"a {frame.kind.name} is larger than what was agreed on",
                where=f"step {frame.step}",
                got=f"{len(frame.payload)} bytes",
                want=f"at most {limits.get(frame.kind, 0)} bytes",
            )
        stream = self._store(frame, deadline)
        if stream is None:  # before the first attach
            return
        try:
            if self._beside:
                beside = [each for link in self._beside if (each := link._stream) is not None]
                stream.write(frame, deadline, beside)
            else:
                stream.write(frame, deadline)
        except ConnectionError:
            # The stream stays: what the other end sent before the cut can still be read.
            self._note_loss(stream)
        except TimeoutError as error:
            raise self._end(self._silent("took nothing")) from error
        except FrameError as error:
            raise self._end(error) from None

    def receive(self) -> Frame:
        """Wait for the next frame, through cuts of the stream.

        Raises:
            LostPeerError: nothing came in time, or the rejoin window has passed.
            PeerFailedError: the other end reported an error.
            FrameError: the bytes are no frame; the link has ended.
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
        """Tell the other end what went wrong here, then close; a later attach is told the same."""
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
        """Release the link; closing twice is harmless."""
        self._end(LostPeerError(f"the link to {self._peer} was closed"))

    def _store(self, frame: Frame, deadline: float) -> Stream | None:
        """Keep a frame for a resend; what it is written to, unless it will be resent anyway."""
        raise NotImplementedError

    def _readable(self, deadline: float) -> Stream:
        """What the next frame comes from."""
        raise NotImplementedError

    def _note_loss(self, stream: Stream, *, unreadable: bool = False) -> None:
        """A write to a stream failed, or a read, after which nothing more comes from it."""
        raise NotImplementedError

    def _read(self, stream: Stream, deadline: float) -> Frame | None:
        """The next frame; None where the stream was cut or replaced meanwhile."""
        try:
            frame = stream.read(deadline)
        except ConnectionError:
            self._note_loss(stream, unreadable=True)
            return None
        except FrameError as error:
            raise self._end(error) from None
        if not self._count(stream):
            return None
        try:
            return in_session(frame, self._peer)
        except VFLError as error:
            raise self._end(error) from None

    def _count(self, stream: Stream) -> bool:
        """Count a received frame, unless its stream was replaced while it was read."""
        self._sequence.received += 1
        return True

    def _limit(self, stream: Stream, incoming: Mapping[Kind, int] | None) -> None:
        stream.window = self._sequence.window
        stream.limit_bytes = LIMIT_BYTES if incoming is None else incoming

    def _silent(self, did: str) -> LostPeerError:
        return LostPeerError(f"{self._peer} {did} for {self.patience_s:g} s")

    def _release(self) -> None:
        """Let go of the current stream."""
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
    """An attached link; made by `connect`, used by one thread, and attached again after a cut.

    Args:
        reach: opens a new stream to the hub.
        hello: who this party is.
        timeouts: how long to wait.
        window: sent frames kept for a resend; the hub's is best the same.
        peer: who listens, for messages.
        limits: what frames may carry; None where nothing was agreed.
        place: where it listens, for messages.

    Attributes:
        terms: what the label party told at the first attach.
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
        """Attach to a hub; returns once it has said WELCOME.

        Args:
            host: the hub's name or address, as its certificate has it.
            port: the hub's port.
            hello: who this party is.
            ca_pem: certificate of the CA that must have signed the hub's; None for no TLS, which a
                loopback address alone allows.
            timeouts: how long to wait.
            window: sent frames kept for a resend.
            peer: who listens, for messages.
            limits: what frames may carry; without it a frame may be as large as any.
            plaintext: measure without TLS beyond this machine, where nothing is worth protecting.
            route: which session of those behind one port, see `vfl.transport.router`.

        Raises:
            AuthenticationError: wrong session, node, token or certificate.
            UserError: no TLS, and another machine.
            DisagreementError, ConsentError, PeerFailedError: the listener's refusal.
            LostPeerError: no hub answered within the rejoin window.
        """
        if ca_pem is None and not plaintext:
            require_loopback(host)
        waits = timeouts or Timeouts()
        context = None if ca_pem is None else client_context(ca_pem, route)
        reach = partial(dial, host, port, context, waits)
        return cls(reach, hello, waits, window, peer, limits, str(Address(host, port)))

    def poll(self) -> Frame | None:
        """The next frame if it is there; where the stream was cut it is mended first.

        Raises:
            LostPeerError, PeerFailedError, FrameError: see `receive`.
        """
        now = time.monotonic()
        try:
            return self._read(self._readable(now), now)
        except TimeoutError:
            return None

    def fileno(self) -> int:
        """Of the current stream; -1 once the link has ended."""
        return -1 if self._stream is None else self._stream.fileno()

    def agree(self, limits: LinkLimits) -> None:
        """From the next frame on, take and send no more than this."""
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
        assert self._stream is not None, "a link that has not ended has a stream"
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
        """Try until the rejoin window has passed; a refusal is final. What WELCOME told."""
        deadline = time.monotonic() + self._timeouts.rejoin_window_s
        while True:
            try:
                return self._greet(self._reach())
            except OSError as error:
                if time.monotonic() + self._timeouts.retry_s >= deadline:
                    asked = f"see what the command of {self._peer} says"
                    why = WHY_IT_ENDED if self._peer == _LABEL_PARTY else asked
                    raise LostPeerError(
                        f"{self._peer} cannot be reached",
                        where=self._place,
                        got=error.strerror or type(error).__name__,
                        want=f"an answer within {self._timeouts.rejoin_window_s:g} s",
                        fix=f"{why}; if it runs on, check host, port, and TLS at both",
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
    """One party's link, used by one thread while handshake threads attach new streams to it.

    Args:
        party: name of the feature party.
        timeouts: how long to wait.
        window: sent frames kept for a resend.

    Attributes:
        party: name of the feature party.
        attached: whether the party has ever attached.
    """

    def __init__(
        self, party: str, timeouts: Timeouts | None = None, window: int = WINDOW_FRAMES
    ) -> None:
        waits = timeouts or Timeouts()
        super().__init__(f"party '{party}'", waits.step_s, waits, window)
        self.party = party
        self.attached = False
        self._lost_at: float | None = None  # when a read or write of the stream first failed

    def agree(self, limits: LinkLimits) -> None:
        """From the next frame on, take and send no more than this."""
        with self._changed:
            self.limits, self._outgoing = limits, limits.down
            if self._stream is not None:
                self._bound(self._stream)

    @property
    def held_bytes(self) -> int:
        """Bytes of frames held for this party: those not taken yet, and those kept for a resend."""
        with self._changed:
            unread = 0 if self._stream is None else self._stream.inbox_bytes
            return unread + self._sequence.stored_bytes

    def attach(self, stream: Stream, hello: Hello, terms: Mapping[str, Any]) -> None:
        """Greet with WELCOME, resend what the party lacks, and take over from the old stream.

        All under the lock: a frame sent meanwhile is either among those resent or follows them,
        and one that the old stream still delivers is dropped, for the party sends it again.

        Raises:
            LostPeerError: the two ends' counts cannot be reconciled.
            VFLError: why the link has ended.
            ConnectionError, TimeoutError: the new stream broke; another may be attached.
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
        """The next frame if it is there; it never waits for one.

        Raises:
            LostPeerError: the rejoin window has passed.
            PeerFailedError, FrameError: see `receive`.
        """
        with self._changed:
            self._check_open()
            stream = self._stream
            if stream is None:
                self._check_window()
        try:
            return None if stream is None else self._read(stream, time.monotonic())
        except TimeoutError:
            return None

    def fileno(self) -> int:
        """Of the current stream; -1 without one, or once a write to it has failed.

        Without the lock, which costs more than the answer: the stream may be replaced right after.
        """
        stream = self._stream if self._lost_at is None else None
        return -1 if stream is None else stream.fileno()

    def _bound(self, stream: Stream) -> None:
        """Take no more than was agreed, and no more at a time than what is kept of it."""
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
        """Wait under the lock for a handshake thread to mend the link, in its rejoin window."""
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
                    f"{self._peer} went away and did not come back",
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
        """The rejoin window runs from here at the latest."""
        if self._stream is not None:
            self._lost_at = self._lost_at or time.monotonic()
        super()._release()


def receive_any(links: Mapping[str, PolledLink]) -> tuple[str, Frame]:
    """The next frame of whoever sends first, and who that is, through cuts of the streams.

    Args:
        links: by party.

    Raises:
        LostPeerError: nobody sent anything in time, or a rejoin window has passed.
        PeerFailedError: a party reported an error.
        FrameError: the bytes are no frame.
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
                f"parties {', '.join(links)} sent nothing for {patience_s:g} s",
                want="a frame of one of them",
            )
        wait_briefly(links.values())


def wait_briefly(links: Iterable[PolledLink]) -> None:
    """Wait until something comes over one of these links, 0.05 s at most."""
    waiting = select.poll()
    for number in (link.fileno() for link in links):
        if number >= 0:
            waiting.register(number, select.POLLIN)
    # A stream may be replaced meanwhile, which its old number does not tell.
    waiting.poll(1000 * _TICK_S)
