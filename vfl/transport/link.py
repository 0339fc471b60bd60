"""Common code of all links: limits, deadlines, observers; and links within one process.

An exchange between parties of one process uses no other module of this package: `local_pair` passes
frames without encoding them, and `Observed` passes a copy of each frame to observers, for example
to the ledger and the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Literal, Protocol

from vfl.core.errors import LostPeerError, ProtocolError, VFLError
from vfl.core.frame import HEADER_BYTES, Frame, Kind, Link, Observer
from vfl.transport.handshake import error_frame, read_failure

#: Number of sent frames that each party stores in order to send them again; also the largest number
#: of unread frames in transit.
WINDOW_FRAMES = 4
#: Seconds that a party which ends a link waits, so that the peer can read the reason.
LINGER_S = 0.5
#: Text that suggests a remedy to a party whose session has ended.
WHY_IT_ENDED = (
    "see the output of the label party's command: a session ends for all when one party's "
    "rows or settings differ"
)


class TransportLink(Link, Protocol):
    """A link that can report an error of this party to the peer."""

    def fail(self, error: VFLError) -> None:
        """Send an error of this party to the peer, then close the link.

        The peer's `receive` raises this error.
        """


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Largest payloads on one link in bytes, by kind of frame; frames of other kinds must be empty.

    Attributes:
        up: limits of frames to the party that listens for connections (in a session, the label
            party).
        down: limits of frames from the party that listens.
    """

    up: Mapping[Kind, int]
    down: Mapping[Kind, int]

    def inbox_bytes(self, window: int) -> int:
        """Return the most bytes of a peer's unread frames that the listening party stores."""
        # An ERROR frame ends a link, so a full window contains no ERROR frame.
        return window * _largest(self.up) + self.up.get(Kind.ERROR, 0) + HEADER_BYTES

    def resend_bytes(self, window: int) -> int:
        """Return the most bytes of sent frames that the listening party stores for resending."""
        return window * _largest(self.down)

    def held_bytes(self, window: int) -> int:
        """Return the most bytes that the listening party needs in memory for one peer.

        Args:
            window: largest number of unread frames in transit, which is also the number of sent
                frames that are stored.

        >>> LinkLimits(up={Kind.CUT: 984}, down={Kind.GRAD: 184}).held_bytes(window=4)
        4816
        """
        return self.inbox_bytes(window) + self.resend_bytes(window)


def _largest(limits: Mapping[Kind, int]) -> int:
    """Return the size, with header, of the largest frame whose kind is not ERROR."""
    return max(most for kind, most in limits.items() if kind is not Kind.ERROR) + HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits for each kind of waiting on a stream, in seconds.

    Attributes:
        connect_s: time for one attempt of a feature party to open a connection to the hub.
        handshake_s: time for one handshake: TLS and greeting together.
        step_s: longest time that the label party waits for a frame of a connected party.
        idle_s: longest time that a feature party waits for a frame of the label party.
        rejoin_window_s: time within which the party must restore a lost connection.
        retry_s: pause before a feature party tries again to connect.
    """

    connect_s: float = 5.0
    handshake_s: float = 5.0
    step_s: float = 30.0
    idle_s: float = 3600.0
    rejoin_window_s: float = 8.0
    retry_s: float = 0.2


@dataclass(slots=True)
class Depth:
    """Length of the longest chain of messages that led to a party's present state.

    Each message of the chain was sent after the previous message had arrived.
    """

    hops: int = 0


#: Number of messages in the chain that ends with a frame (see `Depth`), and the frame itself; None
#: if the link was closed.
Sent = tuple[int, Frame] | None


class LocalLink:
    """One end of a link within a process.

    One thread uses both ends, or each end has its own thread.

    Args:
        put: function that puts a sent message into the queue of the peer.
        incoming: queue of the messages that the peer has sent.
        peer: name of the peer, for error messages.
        timeout_s: seconds that `receive` waits; 0 if one thread uses both ends, because no frame
            could arrive while this thread waits.
        depth: counter of message chains of this party; all links of the party share the counter.
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
        """Send one frame.

        If the peer has closed the link, `send` raises no error, but the next `receive` does.

        Raises:
            LostPeerError: this end of the link is closed.
        """
        if self._closed:
            raise _closed_link()
        self._put((self._depth.hops + 1, frame))

    def receive(self) -> Frame:
        """Receive the next frame.

        Raises:
            LostPeerError: no frame arrived in time, or the link is closed and all frames have been
                read.
            ProtocolError: one thread uses both ends, and the peer has sent nothing that this call
                could receive.
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
        """Send an error of this party to the peer, then close the link."""
        if not self._closed:
            self.send(error_frame(error))
        self.close()

    def close(self) -> None:
        """Close this end of the link; the peer can still read the frames that were sent before."""
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
    """Unpack a queued message from `peer` into the length of its message chain and the frame.

    Raises:
        LostPeerError: the link was closed.
        PeerFailedError: the frame is an ERROR frame.
    """
    if sent is None:
        raise _closed_link()
    if sent[1].kind is Kind.ERROR:
        raise read_failure(sent[1], peer)
    return sent


def sent_nothing(peer: str, timeout_s: float) -> LostPeerError:
    """Make the error for a party from which no frame arrived in time."""
    return LostPeerError(f"{peer} sent nothing in time", want=f"a frame within {timeout_s:g} s")


def _closed_link() -> LostPeerError:
    return LostPeerError("an in-process link is closed")


def local_pair(
    names: tuple[str, str] = ("the other party", "the other party"),
    timeout_s: float = 0.0,
    depths: tuple[Depth | None, Depth | None] = (None, None),
) -> tuple[LocalLink, LocalLink]:
    """Make the two connected ends of a link within one process.

    Args:
        names: names of the parties at the two ends.
        timeout_s: seconds that each end waits for a frame; 0 if one thread uses both ends.
        depths: counters of message chains, one for each of the two parties.

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
    """A link that also offers `poll`, which does not wait; see `vfl.transport.reliable`."""

    @property
    def patience_s(self) -> float:
        """Longest time without a frame from the peer, in seconds."""

    def poll(self) -> Frame | None:
        """Return the next frame, or None if no frame has arrived."""

    def fileno(self) -> int:
        """File descriptor that becomes readable when a frame arrives; -1 if there is none."""


class Observed:
    """A link that calls its observers after each frame that was sent or received.

    Args:
        link: the link that carries the frames.
        party: name of the feature party that this link connects with the label party.
        end: role of the party that owns this end of the link: "feature" or "label".
        observers: functions that are called with (party, "up" or "down", frame); "up" is the
            direction to the label party.
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
    """A feature party's links to several label parties, with the methods of one link.

    `send` sends the same bytes to every label party. Each call of `receive` reads one frame, from
    the label parties in turn.
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
    """A link with observers that also offers `poll`."""

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
        """List of the file descriptor; links with several streams have the same method."""
        return [self.fileno()]

    @property
    def waits_for(self) -> str:
        """Name of the feature party that this link connects with the label party."""
        return self._party
