"""Traffic ledger: bytes sent on each link, and seconds that the label party waited for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from vfl.core.frame import HEADER_BYTES, Frame, Kind
from vfl.core.text import csv_text

#: Phase in which frames of handshakes and reports are counted; their size does not depend on the
#: training.
CONTROL = "control"
_PHASES = {
    Kind.CUT: "train",
    Kind.GRAD: "train",
    Kind.OPENING: "train",
    Kind.QUERY: "evaluate",
    Kind.ACK: "evaluate",
    Kind.QUERY_OPENING: "evaluate",
}


@dataclass(slots=True)
class Traffic:
    """Traffic in one direction between one feature party and the label party in one phase.

    Attributes:
        direction: "up" (from the feature party to the label party) or "down".
        payload_bytes: bytes of the payloads, for example of encoded cuts or gradients.
        wire_bytes: payload bytes plus the 16-byte headers; the bytes of TLS records are not
            counted.
        seconds: time that the label party waited for these frames, in seconds.
    """

    party: str
    direction: str
    phase: str
    frames: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    seconds: float = 0.0


def size(count: float) -> str:
    """Format a number of bytes with a unit such as kB.

    >>> size(1_234_567)
    '1.23 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"


class Ledger:
    """Counter of all frames on all links; use it as an `Observer`.

    Attributes:
        phase: phase in which the next frames are counted; None derives the phase from each frame's
            kind.
    """

    def __init__(self) -> None:
        self.phase: str | None = None
        self._rows: dict[tuple[str, str, str], Traffic] = {}

    def __call__(self, party: str, direction: str, frame: Frame) -> None:
        """Count a frame."""
        key = party, direction, self.phase or _PHASES.get(frame.kind, CONTROL)
        row = self._rows.get(key) or self._row(*key)
        payload_bytes = len(frame.payload)
        row.frames += 1
        row.payload_bytes += payload_bytes
        row.wire_bytes += HEADER_BYTES + payload_bytes

    def waited(self, party: str, phase: str, seconds: float) -> None:
        """Add time spent waiting for a party's frames."""
        self._row(party, "up", phase).seconds += seconds

    def rows(self) -> list[Traffic]:
        """Return all entries of the ledger, sorted by party, direction and phase."""
        return [self._rows[key] for key in sorted(self._rows)]

    def bytes_by_party(self, direction: str) -> dict[str, int]:
        """Return each party's wire bytes in one direction, without the phase `CONTROL`."""
        totals: dict[str, int] = defaultdict(int)
        for row in self.rows():
            if row.direction == direction and row.phase != CONTROL:
                totals[row.party] += row.wire_bytes
        return dict(totals)

    def payload_bytes(self, phase: str) -> int:
        """Return the payload bytes of one phase, in both directions, of all parties."""
        return sum(row.payload_bytes for row in self.rows() if row.phase == phase)

    def total_bytes(self, direction: str) -> int:
        """Return the wire bytes in one direction of all parties; see `bytes_by_party`."""
        return sum(self.bytes_by_party(direction).values())

    def state(self) -> list[dict[str, str | int | float]]:
        """Return all counts as plain values, for a checkpoint."""
        return [asdict(row) for row in self.rows()]

    def restore(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Set the counts to those that `state` returned earlier; counts since then are lost."""
        rows = [Traffic(**row) for row in state]
        self._rows = {(row.party, row.direction, row.phase): row for row in rows}

    def to_csv(self) -> str:
        """Return the counts as the text of ``traffic.csv``."""
        rows = [{**asdict(row), "seconds": round(row.seconds, 6)} for row in self.rows()]
        return csv_text([field.name for field in fields(Traffic)], rows)

    def _row(self, party: str, direction: str, phase: str) -> Traffic:
        key = (party, direction, phase)
        if key not in self._rows:
            self._rows[key] = Traffic(party, direction, phase)
        return self._rows[key]
