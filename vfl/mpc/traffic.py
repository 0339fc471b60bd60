"""Bytes that the parties sent, by phase: setup once, offline ahead of need, online."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vfl.mpc.party import Party
from vfl.mpc.rules import NAMES

PHASES = ("setup", "offline", "online")


@dataclass(frozen=True, slots=True)
class Traffic:
    """What went one way between two parties in one phase, frame headers included."""

    sender: str
    receiver: str
    phase: str
    frames: int
    wire_bytes: int


def traffic(party: Party) -> list[Traffic]:
    """What one party has sent so far."""
    return [
        Traffic(NAMES[party.role], NAMES[peer], phase, channel.frames[phase], channel.sent[phase])
        for peer, channel in sorted(party.channels.items())
        for phase in PHASES
        if channel.frames[phase]
    ]


def bytes_by_phase(rows: Iterable[Traffic]) -> dict[str, int]:
    """Total bytes of each phase."""
    totals = dict.fromkeys(PHASES, 0)
    for row in rows:
        totals[row.phase] += row.wire_bytes
    return totals
