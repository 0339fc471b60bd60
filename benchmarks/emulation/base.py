"""Common code of emulated networks: bandwidth and delay, arrival times, the parties' addresses."""

from __future__ import annotations

import math
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, NoReturn, Self

from vfl.core.errors import BadOptionError, VFLError
from vfl.core.frame import Frame, Kind
from vfl.session.secure_mode import LocalStreams
from vfl.transport import TransportLink

LOOPBACK = "127.0.0.1"
_PART = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]+)")
_MBPS = {"kbps": 1e-3, "mbps": 1.0, "gbps": 1e3}
_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_WANT = "bandwidth and round trip, or one of them, such as 80mbps,40ms"


@dataclass(frozen=True, slots=True)
class Wan:
    """Network link of every party: bandwidth in each direction, and delay to the other parties.

    Attributes:
        mbps: bandwidth in Mbit/s at which a party can send; None sets no limit.
        round_trip_ms: round-trip time in ms between any two parties.

    Raises:
        BadOptionError: the bandwidth is not positive, or a time is negative.
    """

    mbps: float | None = None
    round_trip_ms: float = 0.0

    def __post_init__(self) -> None:
        if self.mbps is not None and not 0 < self.mbps < math.inf:
            _refuse(f"{self.mbps:g} mbps", "more than 0 mbps")
        if not 0 <= self.round_trip_ms < math.inf:
            _refuse(f"{self.round_trip_ms:g} ms", "0 ms or more")

    @staticmethod
    def parse(text: str) -> Wan:
        """Parse a bandwidth and a round-trip time.

        >>> Wan.parse("80mbps,40ms")
        Wan(mbps=80.0, round_trip_ms=40.0)
        >>> print(Wan.parse("0.5s, 1gbps"))
        1000mbps,500ms

        Raises:
            BadOptionError: the text is invalid; the error shows the valid forms.
        """
        found: dict[str, float] = {}
        for part in text.lower().split(","):
            part = part.strip()
            match = _PART.fullmatch(part)
            if match is None:
                _refuse(f"'{part}'")
            number, unit = float(match[1]), match[2]
            if unit in _MBPS:
                name, number = "mbps", number * _MBPS[unit]
            elif unit in _MS:
                name, number = "round_trip_ms", number * _MS[unit]
            else:
                _refuse(f"'{part}'", f"a unit of {', '.join([*_MBPS, *_MS])}")
            if name in found:
                _refuse(f"'{text}', which states it twice")
            found[name] = number
        return Wan(found.get("mbps"), found.get("round_trip_ms", 0.0))

    def __str__(self) -> str:
        bandwidth = [] if self.mbps is None else [f"{self.mbps:g}mbps"]
        return ",".join([*bandwidth, f"{self.round_trip_ms:g}ms"])

    @property
    def one_way_s(self) -> float:
        """Seconds from the departure of a bit until its arrival."""
        return self.round_trip_ms / 2000

    @property
    def seconds_a_byte(self) -> float:
        """Seconds for which a byte occupies the link of its sender."""
        return 8e-6 / self.mbps if self.mbps else 0.0

    def limit_s(self, most_bytes: int, hops: int) -> float:
        """Return the least time of a protocol: max(bytes / bandwidth) + hops * round trip / 2.

        >>> round(1000 * Wan(80, 40).limit_s(256 * 1024, hops=1), 1)
        46.2

        Args:
            most_bytes: number of bytes that the party with the most traffic sends.
            hops: number of sequential messages.
        """
        return most_bytes * self.seconds_a_byte + hops * self.one_way_s


def _refuse(got: str, want: str = _WANT) -> NoReturn:
    raise BadOptionError(
        "this is not a valid network link", where="option 'wan'", got=got, want=want
    )


class Egress:
    """Outgoing network link of one party; all its messages leave one by one over this link.

    Args:
        wan: bandwidth and delay of the link.

    Attributes:
        sent_bytes: number of bytes sent so far.
    """

    def __init__(self, wan: Wan) -> None:
        self._seconds_a_byte, self._delay_s = wan.seconds_a_byte, wan.one_way_s
        self._free_at = 0.0
        self._lock = threading.Lock()
        self.sent_bytes = 0

    def arrival(self, now: float, size: int) -> float:
        """Return the arrival time of bytes that are sent now, in seconds on the clock of `now`.

        >>> line = Egress(Wan(mbps=8, round_trip_ms=100))
        >>> line.arrival(now=10.0, size=1_000_000), line.arrival(now=10.5, size=1_000_000)
        (11.05, 12.05)
        """
        with self._lock:
            self.sent_bytes += size
            self._free_at = max(now, self._free_at) + size * self._seconds_a_byte
            return self._free_at + self._delay_s


class Address(NamedTuple):
    """Host and port of a listener."""

    host: str
    port: int


class Network:
    """Parties on this machine and the emulated links between them; use it as a context manager.

    This base class is the plain loopback: no delay, no counts.

    Args:
        parties: names of the parties, without repetition.
        wan: network link of every party.
    """

    kind = "loopback"

    def __init__(self, parties: Sequence[str], wan: Wan | None = None) -> None:
        assert len(set(parties)) == len(parties), "every party has a name of its own"
        self.parties = tuple(parties)
        self.wan = wan or Wan()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def command(self, party: str) -> list[str]:
        """Return the prefix of a command line that runs the command at a party."""
        return []

    def host(self, party: str) -> str:
        """Return the host address at which a party listens."""
        return LOOPBACK

    def reach(self, source: str, target: str, port: int) -> Address:
        """Return the address at which a party reaches a port of another party."""
        return Address(self.host(target), port)

    def bytes_sent(self) -> dict[str, int]:
        """Return the bytes that each party has sent so far; empty if bytes are not counted."""
        return {}

    def close(self) -> None:
        """End the network; open connections through it are lost."""


class LinkModel:
    """A computed network: a clock for each party, and the bytes that the party has sent.

    A message leaves when its sender's link is free, and carries the time of its arrival; the
    receiver's clock is then set to at least this time. Real computation does not advance the
    clocks, unless `compute` adds its time.

    >>> model = LinkModel(["bank", "lender"], Wan(mbps=80, round_trip_ms=40))
    >>> sent = model.send("bank", 256 * 1024)
    >>> model.receive("lender", sent)
    >>> round(1000 * model.now("lender"), 1), model.hops
    (46.2, 1)

    Args:
        parties: their names.
        wan: network link of every party.
    """

    kind = "model"

    def __init__(self, parties: Sequence[str], wan: Wan) -> None:
        self.parties, self.wan = tuple(parties), wan
        self._egress = {party: Egress(wan) for party in parties}
        self._clocks = dict.fromkeys(parties, 0.0)
        self._depths = dict.fromkeys(parties, 0)

    @property
    def hops(self) -> int:
        """Number of sequential messages in the longest chain so far."""
        return max(self._depths.values())

    @property
    def seconds(self) -> float:
        """Time on the clock that is furthest ahead, in seconds."""
        return max(self._clocks.values())

    def now(self, party: str) -> float:
        """Return the time on a party's clock, in seconds."""
        return self._clocks[party]

    def bytes_sent(self) -> dict[str, int]:
        """Return the number of bytes that each party has sent so far."""
        return {party: egress.sent_bytes for party, egress in self._egress.items()}

    def compute(self, party: str, seconds: float) -> None:
        """Advance a party's clock by a computation time that was measured or is assumed."""
        self._clocks[party] += seconds

    def send(self, party: str, size: int) -> tuple[float, int]:
        """Send a number of bytes; return the argument for `receive`."""
        arrival = self._egress[party].arrival(self._clocks[party], size)
        return arrival, self._depths[party] + 1

    def receive(self, party: str, sent: tuple[float, int]) -> None:
        """Advance a party's clock to the arrival of bytes that were sent to it."""
        arrival, depth = sent
        self._clocks[party] = max(self._clocks[party], arrival)
        self._depths[party] = max(self._depths[party], depth)

    def between(
        self, one: str, other: str, ends: tuple[TransportLink, TransportLink]
    ) -> tuple[TransportLink, TransportLink]:
        """Return a link between two parties that advances their clocks.

        Args:
            one: name of the party at the first end of the link.
            other: name of the party at the second end of the link.
            ends: pair of links that carry the frames in order, for one thread or several threads.
        """
        there, back = deque[tuple[float, int]](), deque[tuple[float, int]]()
        return (
            _ModelLink(self, one, ends[0], there, back),
            _ModelLink(self, other, ends[1], back, there),
        )

    def star(self, middle: str, streams: LocalStreams) -> LocalStreams:
        """Return streams between one party and all others that advance the clocks of all parties.

        Args:
            middle: name of the party in the middle.
            streams: streams that carry the frames between threads.
        """
        return _ModelStar(self, middle, streams)


class _ModelStar:
    """Streams of threads over computed network links; see `LinkModel.star`."""

    def __init__(self, model: LinkModel, middle: str, streams: LocalStreams) -> None:
        self._streams = streams
        self._taken = {name: _Taken(link) for name, link in streams.inner.items()}
        self.inner: dict[str, TransportLink] = {}
        self.outer: dict[str, TransportLink] = {}
        for name, taken in self._taken.items():
            ends = model.between(middle, name, (taken, streams.outer[name]))
            self.inner[name], self.outer[name] = ends

    def receive_any(self) -> tuple[str, Frame]:
        name, frame = self._streams.receive_any()
        self._taken[name].frame = frame
        return name, self.inner[name].receive()

    def play(self, programs: Mapping[str, Callable[[], object]]) -> None:
        self._streams.play(programs)


class _Taken:
    """The central party's end of a stream; returns the frame that `receive_any` received last."""

    def __init__(self, link: TransportLink) -> None:
        self._link, self.frame = link, Frame(Kind.DONE, 0)
        self.send, self.fail, self.close = link.send, link.fail, link.close

    def receive(self) -> Frame:
        return self.frame


class _ModelLink:
    """One end of a link that reports every frame to the model."""

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
