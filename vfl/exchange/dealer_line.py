"""The label party's stream to a third party that deals: what it asks for and what comes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from vfl.exchange.guards import expect
from vfl.exchange.wire_words import read_words, size_of, split_payload
from vfl.frame import Frame, Kind, Payload
from vfl.link import Link
from vfl.mpc.shared_traffic import COLUMNS_BYTES, ROWS_BYTES
from vfl.mpc.stream import KEY_BYTES

Shapes = Mapping[str, tuple[int, int]]


class DealerLine:
    """The label party's end.

    Args:
        dealer: the third party's name.
        link: the stream to it.
    """

    def __init__(self, dealer: str, link: Link) -> None:
        self.dealer = dealer
        self.link = link

    def take(self, kind: Kind, step: int) -> Payload:
        """Wait for the dealer's frame of this kind and step.

        Raises:
            ProtocolError: another frame came.
            LostPeerError: the dealer went away.
        """
        return expect(self.link, kind, step, f"party '{self.dealer}'").payload

    def take_keys(self, count: int) -> list[bytes]:
        """The keys of the streams that the label party shares with the dealer, one a layer.

        Raises:
            ProtocolError, TruncatedFrameError: something else came.
        """
        payload = self.take(Kind.PROTOCOL, 1)
        parts = split_payload(payload, [KEY_BYTES] * count, f"keys of party '{self.dealer}'")
        return [bytes(part) for part in parts]

    def tell(self, columns: Mapping[str, int]) -> None:
        """Tell how many columns each layer has, in merge order."""
        told = [one.to_bytes(COLUMNS_BYTES, "little") for one in columns.values()]
        self.link.send(Frame(Kind.PROTOCOL, 1, b"".join(told)))

    def ask(self, step: int, rows: int, trains: bool) -> None:
        """Ask for what an exchange of so many rows needs."""
        kind = Kind.OPENING if trains else Kind.QUERY_OPENING
        self.link.send(Frame(kind, step, rows.to_bytes(ROWS_BYTES, "little")))

    def products(self, step: int, trains: bool, shapes: Shapes) -> dict[str, Tensor]:
        """U V - T of every layer; axes (rows, width) each.

        Raises:
            ProtocolError, TruncatedFrameError: something else came.
        """
        return self._read(Kind.OPENING if trains else Kind.QUERY_OPENING, step, shapes)

    def updates(self, step: int, shapes: Shapes) -> dict[str, Tensor]:
        """U^T R - C of every layer; axes (columns, width) each.

        Raises:
            ProtocolError, TruncatedFrameError: something else came.
        """
        return self._read(Kind.GRAD, step, shapes)

    def _read(self, kind: Kind, step: int, shapes: Shapes) -> dict[str, Tensor]:
        where = f"step {step} of party '{self.dealer}'"
        sizes = [size_of(shape) for shape in shapes.values()]
        parts = split_payload(self.take(kind, step), sizes, where)
        named = zip(shapes.items(), parts, strict=True)
        return {name: read_words(part, shape) for (name, shape), part in named}
