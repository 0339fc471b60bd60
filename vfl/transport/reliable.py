"""The rule that makes a cut of the stream invisible: count frames, keep the last few, resend.

Each end counts the frames it has sent and fully received in a session and keeps the last few it
sent, as the very frames that were handed over. When a party attaches again both ends tell what
they have received and each resends what the other lacks. Nothing is ever encoded twice.
"""

from __future__ import annotations

from collections import deque

from vfl.errors import LostPeerError
from vfl.frame import Frame
from vfl.transport.base import WINDOW_FRAMES


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
            raise self._stranger(f"{peer_sent} frames sent", f"at least {self.received}")

    def missing(self, peer_received: int) -> list[Frame]:
        """The stored frames the other end lacks, oldest first.

        Raises:
            LostPeerError: it lacks more than is kept, or counts more than was sent.
        """
        gap = self.sent - peer_received
        if gap < 0:
            raise self._stranger(f"{peer_received} frames received", f"at most {self.sent}")
        if gap > len(self._stored):
            raise LostPeerError(
                "the other end lacks more frames than are kept for it",
                got=f"{gap} frames missing",
                want=f"at most {len(self._stored)}",
                fix="start the session again from its last checkpoint",
            )
        return list(self._stored)[len(self._stored) - gap :]

    @staticmethod
    def _stranger(got: str, want: str) -> LostPeerError:
        return LostPeerError(
            "the two ends of a session count differently; one of them was started anew",
            got=got,
            want=want,
            fix="start the session again from its last checkpoint",
        )
