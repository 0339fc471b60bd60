"""What a third party does that has no data and only deals: it answers how many rows, with products.

It draws a key for the label party's stream of each layer; each owner's follows from the key that
the dealer and the owner agreed on, which the label party carried and does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from secrets import token_bytes

from vfl.errors import ProtocolError
from vfl.exchange.wire_words import split_payload, words_bytes
from vfl.frame import LIMIT_BYTES, Frame, Kind, Payload
from vfl.link import Link
from vfl.mpc.ring import WORD_BYTES
from vfl.mpc.shared_layer import Dealer
from vfl.mpc.shared_traffic import COLUMNS_BYTES, ROWS_BYTES, OwnerAxes, fits
from vfl.mpc.stream import KEY_BYTES, PadStream

_ASKS = {Kind.OPENING: True, Kind.QUERY_OPENING: False}


class DealerHalf:
    """The dealer's end of the stream to the label party.

    Args:
        party: its name, for messages.
        owners: the feature parties, in merge order, each with the width of its layer.
        link: the stream to the label party.
        most_rows: rows of the largest exchange that was agreed on.

    Attributes:
        sent_bytes: what it has dealt since an attempt began, headers included.
    """

    def __init__(
        self, party: str, owners: Mapping[str, int], link: Link, most_rows: int = LIMIT_BYTES
    ) -> None:
        self.party = party
        self._most_rows = most_rows
        self.link = link
        self.sent_bytes = 0
        self._owners = owners
        self._keys: Sequence[bytes] = ()
        self._dealers: list[Dealer] = []

    def introduce(self) -> None:
        """Draw keys for a new attempt, and give the label party its own."""
        self._dealers, self.sent_bytes = [], 0
        self._keys = [token_bytes(KEY_BYTES) for _ in self._owners]
        self.link.send(Frame(Kind.PROTOCOL, 1, b"".join(self._keys)))

    def begin(self, keys: Mapping[str, bytes], told: Payload) -> None:
        """Deal for layers of these columns, under these keys.

        Args:
            keys: what the dealer agreed on with each owner.
            told: columns of each layer, as the label party says.

        Raises:
            TruncatedFrameError: it says something of another length.
            ProtocolError: it names columns that cannot be, or nothing was drawn for the attempt.
        """
        parts = split_payload(told, [COLUMNS_BYTES] * len(self._owners), "columns of the layers")
        drawn, self._keys = self._keys, ()
        if len(drawn) != len(parts):
            raise ProtocolError("columns came twice", fix="begin a new attempt")
        layers = zip(self._owners.items(), drawn, parts, strict=True)
        self._dealers = [
            self._layer(keys[name], key, int.from_bytes(part, "little"), width)
            for (name, width), key, part in layers
        ]

    @property
    def layers(self) -> dict[str, OwnerAxes]:
        """The layers it deals for, once an attempt has begun."""
        dealers = zip(self._owners, self._dealers, strict=True)
        return {name: OwnerAxes(one.columns, one.width) for name, one in dealers}

    def deal(self) -> Frame:
        """Wait for what is asked, and answer it if it is an exchange; the frame that asked.

        Raises:
            ProtocolError, FrameError: something else was asked; nothing was dealt.
            ReusedPadError: this exchange, or a later one, was dealt in this attempt.
        """
        frame = self.link.receive()
        if frame.kind is Kind.DONE:
            return frame
        if frame.kind not in _ASKS or frame.branch != 0 or not self._dealers:
            raise ProtocolError(
                "a message out of turn from the label party",
                got=frame.kind.name,
                want="rows of an exchange, after keys were agreed on, or DONE",
            )
        rows, step = self._rows(frame), frame.step
        products = [words_bytes(one.deal(rows, step)) for one in self._dealers]
        self._send(Frame(frame.kind, step, b"".join(products)))
        if _ASKS[frame.kind]:  # while the others compute their outputs
            updates = [words_bytes(one.deal_update(step)) for one in self._dealers]
            self._send(Frame(Kind.GRAD, step, b"".join(updates)))
        return frame

    def _send(self, frame: Frame) -> None:
        self.sent_bytes += frame.wire_bytes
        self.link.send(frame)

    def _layer(self, owner: bytes, partner: bytes, columns: int, width: int) -> Dealer:
        if not fits(columns, width):
            raise ProtocolError("a layer of so many columns cannot be shared", got=f"{columns}")
        return Dealer(PadStream(owner), PadStream(partner), columns, width)

    def _rows(self, frame: Frame) -> int:
        """How many rows are asked for; no masks are drawn for more than was agreed on."""
        (part,) = split_payload(frame.payload, [ROWS_BYTES], f"rows of step {frame.step}")
        rows = int.from_bytes(part, "little")
        row = max(max(one.columns, one.width) for one in self._dealers)
        if rows > self._most_rows or not 1 <= rows * WORD_BYTES * row <= LIMIT_BYTES:
            raise ProtocolError(
                "an exchange of so many rows was not agreed on, or fits no frame",
                got=f"{rows} rows",
                want=f"1 to {self._most_rows} rows",
            )
        return rows
