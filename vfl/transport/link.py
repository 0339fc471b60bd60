"""Common code of all links: limits, deadlines, observers; and the link within one process.

An exchange between parties of one process uses no other module of this package: `local_pair` passes
frames without encoding them, and `Observed` reports each to the ledger and the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Literal, Protocol

from vfl.core.errors import LostPeerError, ProtocolError, VFLError
from vfl.core.frame import HEADER_BYTES, Frame, Kind, Link, Observer
from vfl.transport.handshake import error_frame, read_failure

#: Number of sent frames that each end stores for the other; also the limit of unread frames in
#: transit.
WINDOW_FRAMES = 4
#: Time that an ending link waits until the other end has read the reason.
LINGER_S = 0.5
#: Cure for a party whose session has ended.
WHY_IT_ENDED = (
    "see the output of the label party's command: a session ends for all when one party's "
    "rows or settings differ"
)


class TransportLink(Link, Protocol):
    """A link whose end can report its error to the other end."""

    def fail(self, error: VFLError) -> None:
        """Report an error of this end to the other end, then close; `receive` raises it there."""


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Largest payloads of one link, by kind, in bytes; other kinds must have no payload.

    Attributes:
        up: limits towards the listening party (in a session, the label party).
        down: limits of frames from the label party.
    """

    up: Mapping[Kind, int]
    down: Mapping[Kind, int]

    def inbox_bytes(self, window: int) -> int:
        """Largest total size of unread frames at the listening end."""
        # One ERROR ends a link, so the other frames of a window are of other kinds.
        return window * _largest(self.up) + self.up.get(Kind.ERROR, 0) + HEADER_BYTES

    def resend_bytes(self, window: int) -> int:
        """Largest total size of sent frames that the listening end stores for a resend."""
        return window * _largest(self.down)

    def held_bytes(self, window: int) -> int:
        """Largest total size of frames that the listening end holds for the other end.

        Args:
            window: number of unread frames in transit, and of stored sent frames.

        >>> LinkLimits(up={Kind.CUT: 984}, down={Kind.GRAD: 184}).held_bytes(window=4)
        4816
        """
        return self.inbox_bytes(window) + self.resend_bytes(window)


def _largest(limits: Mapping[Kind, int]) -> int:
    """Return the size of the largest frame that does not end the link, header included."""
    return max(most for kind, most in limits.items() if kind is not Kind.ERROR) + HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits of each kind of waiting, in seconds.

    Attributes:
        connect_s: time for one attempt of a feature party to reach the hub.
        handshake_s: time for one handshake, TLS and greeting together.
        step_s: time in which the label party expects one frame of an attached party.
        idle_s: time in which a feature party expects one frame of the label party.
        rejoin_window_s: time for a lost connection to come back.
        retry_s: pause before a feature party tries again.
    """

    connect_s: float = 5.0
    handshake_s: float = 5.0
    step_s: float = 30.0
    idle_s: float = 3600.0
    rejoin_window_s: float = 8.0
    retry_s: float = 0.2


@dataclass(slots=True)
class Depth:
    """Length of the longest chain of messages that led to a party's present state."""

    hops: int = 0


#: A frame with the length of the chain before it; None if the link was closed.
Sent = tuple[int, Frame] | None


class LocalLink:
    """One end of an in-process pair; one thread may run both ends, or each has its own.

    Args:
        put: queues a sent message.
        incoming: messages from the other end.
        peer: name of the other end, for messages.
        timeout_s: seconds that `receive` waits; 0 if no other thread could send meanwhile.
        depth: depth of this party, shared by its links.
    """

    def __init__(
        self,
        put: Callable[[Sent], None],
        incoming: SimpleQueue[Sent],
        peer: str = "the other party",
        timeout_s: float = 0.0,
        depth: Depth | None = None,
    ) -> None:
        self._put = put
        self._incoming = incoming
        self._closed = False
        self._peer = peer
        self._timeout_s = timeout_s
        self._depth = depth or Depth()

    def send(self, frame: Frame) -> None:
        """Send one frame; if the other end has closed, only `receive` raises an error.

        Raises:
            LostPeerError: this end of the link is closed.
        """
        if self._closed:
            raise _closed_link()
        self._put((self._depth.hops + 1, frame))

    def receive(self) -> Frame:
        """Receive the next frame.

        Raises:
            LostPeerError: no frame came in time, or an end has closed the link and every frame was
                read.
            ProtocolError: the other end has sent nothing, and no other thread is running.
            PeerFailedError: the other end reported an error.
        """
        if self._closed:
            raise _closed_link()
        try:
            sent = self._incoming.get(self._timeout_s > 0, self._timeout_s)
        except Empty:
            raise self._nothing() from None
        if sent is None:
            self._incoming.put(None)
        hops, frame = opened(sent, self._peer)
        self._depth.hops = max(self._depth.hops, hops)
        return frame

    def poll(self) -> Frame | None:
        """Return the next frame if it has arrived.

        Raises:
            LostPeerError, PeerFailedError: see `receive`.
        """
        return None if self._incoming.empty() else self.receive()

    def read_beside(self, links: Sequence[Any]) -> None:
        """Do nothing, because a send on this link never blocks."""

    def fail(self, error: VFLError) -> None:
        """Report an error of this end to the other end, then close."""
        if not self._closed:
            self.send(error_frame(error))
        self.close()

    def close(self) -> None:
        """Close this end; the other end can still read frames already sent to it."""
        if not self._closed:
            self._closed = True
            self._put(None)

    def _nothing(self) -> VFLError:
        if self._timeout_s:
            return sent_nothing(self._peer, self._timeout_s)
        return ProtocolError(
            "an in-process link has nothing to receive",
            fix="let the other party send before this one receives",
        )


def opened(sent: Sent, peer: str) -> tuple[int, Frame]:
    """Unpack a message of `peer`: its chain length, and a frame for the application.

    Raises:
        LostPeerError: the link was closed.
        PeerFailedError: the frame reports an error.
    """
    if sent is None:
        raise _closed_link()
    if sent[1].kind is Kind.ERROR:
        raise read_failure(sent[1], peer)
    return sent


def sent_nothing(peer: str, timeout_s: float) -> LostPeerError:
    """Make the error for a party whose frame did not arrive in time."""
    return LostPeerError(f"{peer} sent nothing in time", want=f"a frame within {timeout_s:g} s")


def _closed_link() -> LostPeerError:
    return LostPeerError("an in-process link is closed")


def local_pair(
    names: tuple[str, str] = ("the other party", "the other party"),
    timeout_s: float = 0.0,
    depths: tuple[Depth | None, Depth | None] = (None, None),
) -> tuple[LocalLink, LocalLink]:
    """Make two connected ends.

    Args:
        names: names of the parties at the two ends.
        timeout_s: seconds that each end waits for the other; 0 if one thread runs both.
        depths: depths of the two parties, which count chains of messages.

    >>> label, feature = local_pair()
    >>> feature.send(Frame(Kind.CUT, step=7))
    >>> label.receive().step
    7
    """
    here: SimpleQueue[Sent] = SimpleQueue()
    there: SimpleQueue[Sent] = SimpleQueue()
    return (
        LocalLink(there.put, here, names[1], timeout_s, depths[0]),
        LocalLink(here.put, there, names[0], timeout_s, depths[1]),
    )


class PolledLink(TransportLink, Protocol):
    """A link that can also be polled; see `vfl.transport.reliable`."""

    @property
    def patience_s(self) -> float:
        """Longest silence of its other end, in seconds."""

    def poll(self) -> Frame | None:
        """The next frame if it has arrived."""

    def fileno(self) -> int:
        """File descriptor to wait for; -1 if there is none."""


class Observed:
    """A link with observers, which are called after each frame that was sent or received.

    Args:
        link: the link that carries the frames.
        party: name of the feature party at one of its ends.
        end: name of the party at this end.
        observers: receive (party, "up" or "down", frame); up is towards the label party.
    """

    __slots__ = ("_link", "_observers", "_party", "_receiving", "_sending")

    def __init__(
        self,
        link: TransportLink,
        party: str,
        end: Literal["feature", "label"],
        observers: Sequence[Observer],
    ) -> None:
        self._link = link
        self._party = party
        self._observers = tuple(observers)
        self._sending, self._receiving = ("up", "down") if end == "feature" else ("down", "up")

    def send(self, frame: Frame) -> None:
        self._link.send(frame)
        for observer in self._observers:
            observer(self._party, self._sending, frame)

    def receive(self) -> Frame:
        frame = self._link.receive()
        for observer in self._observers:
            observer(self._party, self._receiving, frame)
        return frame

    def fail(self, error: VFLError) -> None:
        self._link.fail(error)

    def close(self) -> None:
        self._link.close()


class FanOut:
    """A feature party's streams to several label parties, as one link.

    Each sent frame goes to all of them, with the same bytes; frames are received from one after the
    other, always in the same order.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = tuple(links)
        self._next = 0

    def send(self, frame: Frame) -> None:
        for link in self._links:
            link.send(frame)

    def receive(self) -> Frame:
        frame = self._links[self._next].receive()
        self._next = (self._next + 1) % len(self._links)
        return frame

    def close(self) -> None:
        for link in self._links:
            link.close()


class ObservedPoll(Observed):
    """An observed link that can be polled."""

    __slots__ = ("_polled",)

    def __init__(
        self,
        link: PolledLink,
        party: str,
        end: Literal["feature", "label"],
        observers: Sequence[Observer],
    ) -> None:
        super().__init__(link, party, end, observers)
        self._polled = link

    @property
    def patience_s(self) -> float:
        return self._polled.patience_s

    def poll(self) -> Frame | None:
        frame = self._polled.poll()
        if frame is not None:
            for observer in self._observers:
                observer(self._party, self._receiving, frame)
        return frame

    def fileno(self) -> int:
        return self._polled.fileno()

    def filenos(self) -> list[int]:
        """File descriptors, with the interface of a link of several streams."""
        return [self.fileno()]

    @property
    def waits_for(self) -> str:
        """Name of the party at the other end of this link."""
        return self._party
