"""What every transport offers beyond `vfl.link.Link`, and how long it waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from vfl.errors import OversizedFrameError, VFLError
from vfl.frame import HEADER_BYTES, Frame, Kind
from vfl.link import Link

#: Sent frames each end keeps for the other, so also how many may be on their way unread.
WINDOW_FRAMES = 4
#: How long an end that stops waits for the other to read why.
LINGER_S = 0.5


class TransportLink(Link, Protocol):
    """A link whose end can say why it stops."""

    def fail(self, error: VFLError) -> None:
        """Tell the other end what went wrong here, then close; its `receive` raises."""


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Largest payloads of one link, by kind, in bytes; a kind that is not named carries nothing.

    Attributes:
        up: towards the party that listens (in a session the label party).
        down: from it.
    """

    up: Mapping[Kind, int]
    down: Mapping[Kind, int]

    def inbox_bytes(self, window: int) -> int:
        """Most bytes the listening end holds of frames it has not taken yet."""
        # One ERROR ends a link, so a window is full of anything else.
        return window * _largest(self.up) + self.up.get(Kind.ERROR, 0) + HEADER_BYTES

    def resend_bytes(self, window: int) -> int:
        """Most bytes the listening end keeps of frames it may have to send again."""
        return window * _largest(self.down)

    def held_bytes(self, window: int) -> int:
        """Most bytes of frames the listening end holds for the other one.

        Args:
            window: frames that may be on their way unread, and sent frames that are kept.

        >>> LinkLimits(up={Kind.CUT: 984}, down={Kind.GRAD: 184}).held_bytes(window=4)
        4816
        """
        return self.inbox_bytes(window) + self.resend_bytes(window)


def _largest(limits: Mapping[Kind, int]) -> int:
    """Bytes of the largest frame that does not end the link, header included."""
    return max(most for kind, most in limits.items() if kind is not Kind.ERROR) + HEADER_BYTES


def check_outgoing(frame: Frame, limits: Mapping[Kind, int] | None) -> None:
    """Refuse to send, and to keep for a resend, what the other end would not take.

    Raises:
        OversizedFrameError: a payload above the agreed limit of its kind.
    """
    if limits is not None and len(frame.payload) > limits.get(frame.kind, 0):
        raise OversizedFrameError(
            f"a {frame.kind.name} is larger than what was agreed on",
            where=f"step {frame.step}",
            got=f"{len(frame.payload)} bytes",
            want=f"at most {limits.get(frame.kind, 0)} bytes",
        )


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long each kind of waiting may last, in seconds.

    Attributes:
        connect_s: one attempt of a feature party to reach the hub.
        handshake_s: one handshake, TLS and greeting together.
        step_s: the label party, for one frame of an attached party.
        idle_s: a feature party, for one frame of the label party.
        rejoin_window_s: how long a cut link may take to come back.
        retry_s: pause before a feature party tries again.
    """

    connect_s: float = 5.0
    handshake_s: float = 5.0
    step_s: float = 30.0
    idle_s: float = 3600.0
    rejoin_window_s: float = 8.0
    retry_s: float = 0.2
