"""The interfaces everything that talks is written against.

A `Link` is one end of an ordered, authenticated stream of frames between two parties.
A `Hub` is the label party's side of several links, one a feature party; it hides reconnects.
Sockets live in `vfl.transport` only; a protocol takes the link it is handed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from vfl.frame import Frame


class Link(Protocol):
    """One end of a stream of frames."""

    def send(self, frame: Frame) -> None:
        """Hand over one frame.

        Raises:
            LostPeerError: the other end is gone for good.
        """

    def receive(self) -> Frame:
        """Wait for the next frame.

        Raises:
            LostPeerError: nothing came in time, or the other end is gone for good.
            FrameError: the bytes are no frame.
        """

    def close(self) -> None:
        """Release the link; closing twice is harmless."""


class Hub(Protocol):
    """The label party's links, by party name."""

    def wait_all(
        self, parties: Sequence[str], timeout_s: float, poll: Callable[[], None] | None = None
    ) -> None:
        """Block until every party has attached; `poll` runs while waiting and may raise.

        Raises:
            MissingPartyError: names who did not come.
        """

    def link(self, party: str) -> Link:
        """The link to one attached party."""

    def close(self) -> None:
        """End every link and stop listening; nobody can attach afterwards."""


#: Told about every frame of a link: party, direction ("up" = towards the label party), frame.
Observer = Callable[[str, str, Frame], None]
