"""Links between threads of one process, for the three parties of a private module.

Each frame carries how many messages lie before it one after the other; the largest such number a
party has seen is its depth, and the depth of the last party is the count of hops.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

from vfl.errors import LostPeerError, PeerFailedError, VFLError
from vfl.frame import Frame
from vfl.mpc.rules import NAMES

_CLOSED = LostPeerError("an in-process link is closed")


@dataclass(slots=True)
class Depth:
    """How many messages had to follow one another to bring one party to where it is."""

    hops: int = 0


class MemoryLink:
    """One end of a pair; used by one thread.

    Args:
        own, peer: roles of the two ends, for messages.
        outgoing, incoming: frames with their depth, or the error that ended the link.
        depth: of this party, shared by its links.
        timeout_s: how long `receive` waits.
    """

    def __init__(
        self,
        own: int,
        peer: int,
        outgoing: queue.SimpleQueue[tuple[int, Frame] | VFLError],
        incoming: queue.SimpleQueue[tuple[int, Frame] | VFLError],
        depth: Depth,
        timeout_s: float,
    ) -> None:
        self._own = NAMES[own]
        self._peer = NAMES[peer]
        self._outgoing = outgoing
        self._incoming = incoming
        self._depth = depth
        self._timeout_s = timeout_s
        self._closed = threading.Event()

    def send(self, frame: Frame) -> None:
        """Hand over one frame.

        Raises:
            LostPeerError: this end was closed.
        """
        if self._closed.is_set():
            raise LostPeerError(_CLOSED.what)
        self._outgoing.put((self._depth.hops + 1, frame))

    def receive(self) -> Frame:
        """Wait for the next frame.

        Raises:
            LostPeerError: nothing came in time, or the other end was closed.
            PeerFailedError: the other end said what went wrong there.
        """
        try:
            received = self._incoming.get(timeout=self._timeout_s)
        except queue.Empty:
            raise LostPeerError(
                f"{self._peer} sent nothing in time", want=f"a frame within {self._timeout_s:g} s"
            ) from None
        if isinstance(received, VFLError):
            self._incoming.put(received)
            raise received
        hops, frame = received
        self._depth.hops = max(self._depth.hops, hops)
        return frame

    def fail(self, error: VFLError) -> None:
        """Tell the other end what went wrong here, then close."""
        if not self._closed.is_set():
            self._closed.set()
            self._outgoing.put(
                PeerFailedError(
                    f"{self._own} stopped with {error.code}: {error.what}",
                    where=error.where,
                    got=error.got,
                    want=error.want,
                    fix=error.fix,
                )
            )

    def close(self) -> None:
        """Release the link; closing twice is harmless."""
        if not self._closed.is_set():
            self._closed.set()
            self._outgoing.put(LostPeerError(_CLOSED.what))


def triangle(timeout_s: float = 30.0) -> tuple[list[dict[int, MemoryLink]], list[Depth]]:
    """Links between three parties: of each, by the role at the other end; and their depths."""
    depths = [Depth() for _ in range(3)]
    links: list[dict[int, MemoryLink]] = [{} for _ in range(3)]
    for one, two in ((0, 1), (0, 2), (1, 2)):
        there: queue.SimpleQueue[tuple[int, Frame] | VFLError] = queue.SimpleQueue()
        back: queue.SimpleQueue[tuple[int, Frame] | VFLError] = queue.SimpleQueue()
        links[one][two] = MemoryLink(one, two, there, back, depths[one], timeout_s)
        links[two][one] = MemoryLink(two, one, back, there, depths[two], timeout_s)
    return links, depths
