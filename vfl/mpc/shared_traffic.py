"""What shared first layers send: bytes that follow from the axes alone, so they are known ahead."""

from __future__ import annotations

from collections.abc import Sequence
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

    def opened_bytes(self, rows: int) -> int:
        """Payload of what the party opens in an exchange: its inputs, and a share of weights."""
        return WORD_BYTES * (rows * self.columns + self.other * self.width) + 2 * TAG_BYTES

    def relayed_bytes(self, rows: int) -> int:
        """Payload of what is opened to it, with the products dealt to it."""
        words = rows * self.other + self.columns * self.width + rows * self.width
        return WORD_BYTES * words + 2 * TAG_BYTES

    def gradient_bytes(self, rows: int) -> int:
        """Payload of its share of the gradient, with what is dealt for the other layer."""
        return WORD_BYTES * (rows * self.width + self.other * self.width)

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


@dataclass(frozen=True, slots=True)
class OwnerAxes:
    """The one layer a party has a share of, where the label party has the other.

    Attributes:
        columns: that of ones included.
        width: of the outputs.
    """

    columns: int
    width: int

    def opened_bytes(self, rows: int) -> int:
        """Payload of what the party opens in an exchange: its inputs."""
        return WORD_BYTES * rows * self.columns

    def relayed_bytes(self, rows: int) -> int:
        """Payload of what is opened to it: the other share of its layer, of any rows."""
        return WORD_BYTES * self.columns * self.width

    def gradient_bytes(self, rows: int) -> int:
        """Payload of its share of the gradient."""
        return WORD_BYTES * rows * self.width

    def wire_bytes(self, rows: int, trains: bool) -> int:
        """Bytes the party sends and receives in an exchange, headers included.

        >>> OwnerAxes(columns=3, width=2).wire_bytes(rows=4, trains=True)
        336
        """
        outputs = rows * self.width
        words = rows * self.columns + self.columns * self.width + outputs
        return WORD_BYTES * (words + (outputs if trains else 0)) + 4 * HEADER_BYTES


#: What of a first layer, or two, a party has shares of.
LayerAxes = SharedAxes | OwnerAxes
#: How many rows an exchange has, as a third party that deals is asked for it.
ROWS_BYTES = 4
#: How many columns a layer has, as it is told when an attempt begins.
COLUMNS_BYTES = 4


def bytes_to_deal(layers: Sequence[OwnerAxes], rows: int, trains: bool) -> int:
    """Bytes that a third party sends and receives to deal for an exchange, headers included.

    >>> bytes_to_deal([OwnerAxes(columns=3, width=2)], rows=4, trains=True)
    164
    """
    products = sum(rows * layer.width for layer in layers)
    updates = sum(layer.columns * layer.width for layer in layers)
    words = products + (updates if trains else 0)
    return ROWS_BYTES + WORD_BYTES * words + (3 if trains else 2) * HEADER_BYTES


def products_bytes(widths: Sequence[int], rows: int) -> int:
    """Payload of the products that a third party deals for the layers of an exchange."""
    return WORD_BYTES * rows * sum(widths)


def updates_bytes(layers: Sequence[LayerAxes]) -> int:
    """Payload of what a third party deals for the updates of the layers."""
    return WORD_BYTES * sum(layer.columns * layer.width for layer in layers)


def fits(columns: int, width: int) -> bool:
    """Whether a layer of so many columns can be shared: it is opened in half a frame at most."""
    return 1 <= columns <= MOST_COLUMNS and 2 * WORD_BYTES * columns * width <= LIMIT_BYTES
