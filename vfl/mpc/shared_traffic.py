"""What shared first layers send: bytes that follow from the axes alone, so they are known ahead."""

from __future__ import annotations

from dataclasses import dataclass

from vfl.frame import HEADER_BYTES, LIMIT_BYTES
from vfl.mpc.ring import WORD_BYTES
from vfl.mpc.sealing import TAG_BYTES

#: A query's inputs, opened at once, must fit into a frame.
MOST_COLUMNS = 2**15


@dataclass(frozen=True, slots=True)
class SharedAxes:
    """The two layers a party has shares of.

    Attributes:
        columns: of its own layer, that of ones included.
        other: of the layer before, whose partner it is.
        width: of both.
    """

    columns: int
    other: int
    width: int

    def wire_bytes(self, rows: int, trains: bool) -> int:
        """Bytes the party sends and receives in an exchange, headers included.

        >>> SharedAxes(columns=3, other=5, width=2).wire_bytes(rows=4, trains=True)
        784
        """
        outputs, own, other = rows * self.width, self.columns * self.width, self.other * self.width
        up = rows * self.columns + other + outputs
        down = rows * self.other + own + outputs
        words = up + down + (outputs + other if trains else 0)
        return WORD_BYTES * words + 4 * (TAG_BYTES + HEADER_BYTES)


def fits(columns: int, width: int) -> bool:
    """Whether a layer of so many columns can be shared: it is opened in half a frame at most."""
    return 1 <= columns <= MOST_COLUMNS and 2 * WORD_BYTES * columns * width <= LIMIT_BYTES
