"""A network that is computed: bytes and hops on the parties' own clocks, exact and without waiting.

Each party has a clock. What it sends leaves when its line is free and carries the moment of its
arrival; who receives it is then at least as late. Real compute takes no time unless it is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from vfl.bench.network.egress import Egress
from vfl.bench.network.wan import Wan
from vfl.core.errors import VFLError
from vfl.core.frame import Frame
from vfl.transport import TransportLink


class LinkModel:
    """The clocks of some parties and what they have sent.

    >>> model = LinkModel(["bank", "lender"], Wan(mbps=80, round_trip_ms=40))
    >>> sent = model.send("bank", 256 * 1024)
    >>> model.receive("lender", sent)
    >>> round(1000 * model.now("lender"), 1), model.hops
    (46.2, 1)

    Args:
        parties: their names.
        wan: what every party's line does.
    """

    kind = "model"

    def __init__(self, parties: Sequence[str], wan: Wan) -> None:
        self.parties, self.wan = tuple(parties), wan
        self._egress = {party: Egress(wan) for party in parties}
        self._clocks = dict.fromkeys(parties, 0.0)
        self._depths = dict.fromkeys(parties, 0)

    @property
    def hops(self) -> int:
        """Messages that had to wait for each other, in the longest chain so far."""
        return max(self._depths.values())

    @property
    def seconds(self) -> float:
        """How late it is at the last party."""
        return max(self._clocks.values())

    def now(self, party: str) -> float:
        """How late it is at a party, in seconds."""
        return self._clocks[party]

    def bytes_sent(self) -> dict[str, int]:
        """What each party has sent so far."""
        return {party: egress.sent_bytes for party, egress in self._egress.items()}

    def compute(self, party: str, seconds: float) -> None:
        """Let a party's clock run, for work measured elsewhere or assumed."""
        self._clocks[party] += seconds

    def send(self, party: str, size: int) -> tuple[float, int]:
        """Send bytes; what is to be handed to `receive` with them."""
        arrival = self._egress[party].arrival(self._clocks[party], size)
        return arrival, self._depths[party] + 1

    def receive(self, party: str, sent: tuple[float, int]) -> None:
        """Wait at a party for what was sent."""
        arrival, depth = sent
        self._clocks[party] = max(self._clocks[party], arrival)
        self._depths[party] = max(self._depths[party], depth)

    def between(
        self, one: str, other: str, ends: tuple[TransportLink, TransportLink]
    ) -> tuple[TransportLink, TransportLink]:
        """A link between two parties that keeps their clocks.

        Args:
            one: who has the first end.
            other: who has the second.
            ends: a pair that carries the frames, in order; from one thread or several.
        """
        there, back = deque[tuple[float, int]](), deque[tuple[float, int]]()
        return (
            _ModelLink(self, one, ends[0], there, back),
            _ModelLink(self, other, ends[1], back, there),
        )


class _ModelLink:
    """One end: tells the model of every frame, and passes it on."""

    def __init__(
        self,
        model: LinkModel,
        party: str,
        link: TransportLink,
        outgoing: deque[tuple[float, int]],
        incoming: deque[tuple[float, int]],
    ) -> None:
        self._model, self._party, self._link = model, party, link
        self._outgoing, self._incoming = outgoing, incoming

    def send(self, frame: Frame) -> None:
        self._outgoing.append(self._model.send(self._party, frame.wire_bytes))
        self._link.send(frame)

    def receive(self) -> Frame:
        frame = self._link.receive()
        self._model.receive(self._party, self._incoming.popleft())
        return frame

    def fail(self, error: VFLError) -> None:
        self._link.fail(error)

    def close(self) -> None:
        self._link.close()
