"""Links inside one process: a frame is handed over as it is, nothing is packed or copied."""

from __future__ import annotations

from collections import deque

from vfl.errors import LostPeerError, ProtocolError, VFLError
from vfl.frame import Frame, Kind
from vfl.transport.messages import error_frame, read_failure


class LocalLink:
    """One end of an in-process pair, for the one thread that plays both parties.

    Args:
        outgoing: frames for the other end.
        incoming: frames from the other end.
        closed: non-empty once either end has closed; shared by both.
    """

    __slots__ = ("_closed", "_incoming", "_outgoing")

    def __init__(self, outgoing: deque[Frame], incoming: deque[Frame], closed: list[str]) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._closed = closed

    def send(self, frame: Frame) -> None:
        """Hand over one frame.

        Raises:
            LostPeerError: an end has closed the link.
        """
        if self._closed:
            raise LostPeerError("an in-process link is closed")
        self._outgoing.append(frame)

    def receive(self) -> Frame:
        """The next frame; it never waits, for nobody else is running.

        Raises:
            LostPeerError: an end has closed the link and every frame was read.
            ProtocolError: the other end has sent nothing.
            PeerFailedError: the other end reported an error.
        """
        if not self._incoming:
            if self._closed:
                raise LostPeerError("an in-process link is closed")
            raise ProtocolError(
                "an in-process link has nothing to receive",
                fix="let the other party send before this one receives",
            )
        frame = self._incoming.popleft()
        if frame.kind is Kind.ERROR:
            raise read_failure(frame, "the other party")
        return frame

    def fail(self, error: VFLError) -> None:
        """Tell the other end what went wrong here, then close."""
        if not self._closed:
            self._outgoing.append(error_frame(error))
        self.close()

    def close(self) -> None:
        """End the pair; frames already sent to the other end can still be read there."""
        self._incoming.clear()
        if not self._closed:
            self._closed.append("closed")


def local_pair() -> tuple[LocalLink, LocalLink]:
    """Two connected ends.

    >>> label, feature = local_pair()
    >>> feature.send(Frame(Kind.CUT, step=7))
    >>> label.receive().step
    7
    """
    up: deque[Frame] = deque()
    down: deque[Frame] = deque()
    closed: list[str] = []
    return LocalLink(down, up, closed), LocalLink(up, down, closed)
