"""What every transport offers beyond `vfl.link.Link`, and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vfl.errors import VFLError
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
