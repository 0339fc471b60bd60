"""Common code of all links: limits, deadlines, observers; and links within one process.

An exchange between parties of one process uses no other module of this package: `local_pair` passes
frames without encoding them, and `Observed` reports each frame to the ledger and the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Literal, Protocol

from vfl.core.errors import LostPeerError, ProtocolError, VFLError
from vfl.core.frame import HEADER_BYTES, Frame, Kind, Link, Observer
from vfl.transport.handshake import error_frame, read_failure

#: Number of sent frames that each party stores for a resend; also the largest number of unread
#: frames in transit.
WINDOW_FRAMES = 4
#: Seconds for which a party that ends a link waits until the peer has read the reason.
LINGER_S = 0.5
#: Fix that is shown to a party whose session has ended.
WHY_IT_ENDED = (
    "see the output of the label party's command: a session ends for all when one party's "
    "rows or settings differ"
)


class TransportLink(Link, Protocol):
    """A link that can report an error of this party to the peer."""

    def fail(self, error: VFLError) -> None:
        """Report an error of this party to the peer, then close; the peer's `receive` raises it."""


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Largest payloads on one link in bytes, by kind; frames of other kinds must have no payload.

    Attributes:
        up: limits of frames to the listening party (in a session, the label party).
        down: limits of frames from the label party.
    """

    up: Mapping[Kind, int]
    down: Mapping[Kind, int]

    def inbox_bytes(self, window: int) -> int:
        """Return the most bytes of unread frames that the listening party may hold."""
        # An ERROR frame ends a link, so all other frames of a window have other kinds.
        return window * _largest(self.up) + self.up.get(Kind.ERROR, 0) + HEADER_BYTES

    def resend_bytes(self, window: int) -> int:
        """Return how many bytes of sent frames the listening party stores at most, for a resend."""
        return window * _largest(self.down)

    def held_bytes(self, window: int) -> int:
        """Return the most bytes that the listening party holds in memory for one peer.

        Args:
            window: largest number of unread frames in transit, and of sent frames stored for a
                resend.

        >>> LinkLimits(up={Kind.CUT: 984}, down={Kind.GRAD: 184}).held_bytes(window=4)
        4816
        """
        return self.inbox_bytes(window) + self.resend_bytes(window)


def _largest(limits: Mapping[Kind, int]) -> int:
    """Return the size, with header, of the largest frame whose kind is not ERROR."""
    return max(most for kind, most in limits.items() if kind is not Kind.ERROR) + HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits for each kind of waiting, in seconds.

    Attributes:
        connect_s: time for one attempt of a feature party to connect to the hub.
        handshake_s: time for one handshake, TLS and greeting together.
        step_s: time in which the label party expects a frame of an attached party.
        idle_s: time in which a feature party expects a frame of the label party.
        rejoin_window_s: time in which a lost connection must be restored.
        retry_s: pause before a feature party tries to connect again.
    """

    connect_s: float = 5.0
    handshake_s: float = 5.0
    step_s: float = 30.0
    idle_s: float = 3600.0
    rejoin_window_s: float = 8.0
    retry_s: float = 0.2


@dataclass(slots=True)
class Depth:
    """Length of the longest chain of dependent messages that led to a party's present state."""

    hops: int = 0


#: A frame, with the length of the chain of messages before it; None if the link was closed.
Sent = tuple[int, Frame] | None


class LocalLink:
    """One end of an in-process pair of links; one thread runs both ends, or each end its own.

    Args:
        put: function that queues a sent message for the peer.
        incoming: queue of messages from the peer.
        peer: name of the peer, for messages.
        timeout_s: seconds that `receive` waits; 0 if one thread runs both ends, because no frame
            could arrive meanwhile.
        depth: counter of message chains of this party, shared by all its links.
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
        """Send one frame; if the peer has closed the link, only `receive` raises an error.

        Raises:
            LostPeerError: this end of the link is closed.
        """
        if self._closed:
            raise _closed_link()
        self._put((self._depth.hops + 1, frame))

    def receive(self) -> Frame:
        """Receive the next frame.

        Raises:
            LostPeerError: no frame arrived in time, or the link is closed and every frame was read.
            ProtocolError: the peer has sent nothing, and no other thread runs that could send.
            PeerFailedError: the peer reported an error.
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
        """Return the next frame, or None if no frame has arrived.

        Raises:
            LostPeerError, PeerFailedError: see `receive`.
        """
        return None if self._incoming.empty() else self.receive()

    def read_beside(self, links: Sequence[Any]) -> None:
        """Do nothing, because a send on this link never blocks."""

    def fail(self, error: VFLError) -> None:
        """Report an error of this party to the peer, then close."""
        if not self._closed:
            self.send(error_frame(error))
        self.close()

    def close(self) -> None:
        """Close this end; the peer can still read the frames that were already sent."""
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
    """Unpack a message from `peer`: the length of its message chain, and the frame.

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
    """Return the error for a party whose frame did not arrive in time."""
    return LostPeerError(f"{peer} sent nothing in time", want=f"a frame within {timeout_s:g} s")


def _closed_link() -> LostPeerError:
    return LostPeerError("an in-process link is closed")


def local_pair(
    names: tuple[str, str] = ("the other party", "the other party"),
    timeout_s: float = 0.0,
    depths: tuple[Depth | None, Depth | None] = (None, None),
) -> tuple[LocalLink, LocalLink]:
    """Make the two connected ends of an in-process link.

    Args:
        names: names of the parties at the two ends.
        timeout_s: seconds that each end waits for the peer; 0 if one thread runs both ends.
        depths: counters of message chains of the two parties.

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
        """Longest time in seconds without a frame from the peer."""

    def poll(self) -> Frame | None:
        """Return the next frame, or None if no frame has arrived."""

    def fileno(self) -> int:
        """File descriptor to wait for; -1 if there is none."""


class Observed:
    """A link with observers, which are called after each frame that was sent or received.

    Args:
        link: the link that carries the frames.
        party: name of the feature party on this link.
        end: role of the party at this end: "feature" or "label".
        observers: functions that receive (party, "up" or "down", frame); "up" is towards the label
            party.
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
    """A feature party's links to several label parties, used as one link.

    Each sent frame goes to every label party with the same bytes. Each call of `receive` reads
    one frame from the next label party, in a fixed order of the label parties.
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
        """File descriptors as a list, in the form of a link that has several streams."""
        return [self.fileno()]

    @property
    def waits_for(self) -> str:
        """Name of the feature party of this link."""
        return self._party
