"""What a line between two sites does to bytes: ``80mbps,40ms``, and the limit it sets."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NoReturn

from vfl.core.errors import BadOptionError

_PART = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]+)")
_MBPS = {"kbps": 1e-3, "mbps": 1.0, "gbps": 1e3}
_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_WANT = "bandwidth and round trip, or one of them, such as 80mbps,40ms"


@dataclass(frozen=True, slots=True)
class Wan:
    """Every party's line: its own bandwidth in each direction, and the way to the others.

    Attributes:
        mbps: millions of bits a second that a party can send; None is no limit.
        round_trip_ms: there and back, between any two parties.

    Raises:
        BadOptionError: no bandwidth at all, or a time that cannot be.
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
        """A line from its spelling.

        >>> Wan.parse("80mbps,40ms")
        Wan(mbps=80.0, round_trip_ms=40.0)
        >>> print(Wan.parse("0.5s, 1gbps"))
        1000mbps,500ms

        Raises:
            BadOptionError: with what can be written.
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
                _refuse(f"'{text}', which says it twice")
            found[name] = number
        return Wan(found.get("mbps"), found.get("round_trip_ms", 0.0))

    def __str__(self) -> str:
        bandwidth = [] if self.mbps is None else [f"{self.mbps:g}mbps"]
        return ",".join([*bandwidth, f"{self.round_trip_ms:g}ms"])

    @property
    def one_way_s(self) -> float:
        """Between the departure of a bit and its arrival."""
        return self.round_trip_ms / 2000

    @property
    def seconds_a_byte(self) -> float:
        """How long a byte keeps its sender's line busy."""
        return 8e-6 / self.mbps if self.mbps else 0.0

    def limit_s(self, most_bytes: int, hops: int) -> float:
        """The least a protocol can take: max(bytes / bandwidth) + hops * round trip / 2.

        >>> round(1000 * Wan(80, 40).limit_s(256 * 1024, hops=1), 1)
        46.2

        Args:
            most_bytes: of the party that sends most.
            hops: messages that wait for each other.
        """
        return most_bytes * self.seconds_a_byte + hops * self.one_way_s


def _refuse(got: str, want: str = _WANT) -> NoReturn:
    raise BadOptionError("no line like that", where="option 'wan'", got=got, want=want)
