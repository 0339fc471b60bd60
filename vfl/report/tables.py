"""The ledger's lines added up: by party and direction, and by phase."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vfl.ledger import Traffic
from vfl.report.units import bytes_text, seconds_text


@dataclass(frozen=True, slots=True)
class PartyTotal:
    """Bytes of one party on the wire."""

    party: str
    up_bytes: int
    down_bytes: int


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the traffic table, in words."""

    name: str
    direction: str
    frames: str
    payload: str
    wire: str
    frame: str
    seconds: str


def party_totals(traffic: Sequence[Traffic]) -> list[PartyTotal]:
    """Wire bytes a party, in the ledger's order."""
    parties = dict.fromkeys(row.party for row in traffic)
    return [PartyTotal(p, _wire(traffic, p, "up"), _wire(traffic, p, "down")) for p in parties]


def party_lines(traffic: Sequence[Traffic]) -> list[Line]:
    """One line for each party and direction, up before down."""
    return _grouped(traffic, lambda row: (row.party, row.direction))


def phase_lines(traffic: Sequence[Traffic]) -> list[Line]:
    """One line for each phase and direction, all parties together, up before down."""
    return _grouped(traffic, lambda row: (row.phase, row.direction))


def _wire(traffic: Sequence[Traffic], party: str, direction: str) -> int:
    return sum(
        row.wire_bytes for row in traffic if (row.party, row.direction) == (party, direction)
    )


def _grouped(traffic: Sequence[Traffic], key: Callable[[Traffic], tuple[str, str]]) -> list[Line]:
    groups: dict[tuple[str, str], list[Traffic]] = {}
    for row in traffic:
        groups.setdefault(key(row), []).append(row)
    names = list(dict.fromkeys(name for name, _ in groups))
    ways = sorted(groups, key=lambda way: (names.index(way[0]), way[1] != "up"))
    return [_line(name, direction, groups[name, direction]) for name, direction in ways]


def _line(name: str, direction: str, rows: Sequence[Traffic]) -> Line:
    frames = sum(row.frames for row in rows)
    wire_bytes = sum(row.wire_bytes for row in rows)
    seconds = sum(row.seconds for row in rows)
    return Line(
        name=name,
        direction=direction,
        frames=f"{frames:,}",
        payload=bytes_text(sum(row.payload_bytes for row in rows)),
        wire=bytes_text(wire_bytes),
        frame=bytes_text(wire_bytes / frames) if frames else "",
        seconds=seconds_text(seconds) if seconds else "",
    )
