"""The label party's side of shared first layers: it deals, relays, and learns the outputs' sum."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from vfl.compression import INFERENCE, Moment
from vfl.compression.none import Uncompressed
from vfl.errors import ProtocolError
from vfl.exchange.label_half import LabelHalf
from vfl.exchange.masked import MaskedHalves
from vfl.exchange.neighbours import owner_of, partner_of
from vfl.exchange.wire_words import size_of, split_payload, words_bytes
from vfl.frame import Frame, Kind, Payload
from vfl.mpc.masked_sum import Ring
from vfl.mpc.sealing import TAG_BYTES
from vfl.mpc.shared_layer import Dealer, check_outputs, encode_gradient
from vfl.mpc.shared_traffic import COLUMNS_BYTES, MOST_COLUMNS, fits
from vfl.mpc.stream import KEY_BYTES, PadStream


class SharedGradient(Uncompressed):
    """What stands in the label party's place of a codec: a gradient goes out as shares.

    Args:
        party: whose layer the gradient is for.
        rate: the learning rate, which the gradient is multiplied with.
    """

    def __init__(self, party: str, rate: float) -> None:
        self._party = party
        self._rate = rate
        self._dealer: Dealer | None = None
        self._other = b""

    def begin(self, dealer: Dealer) -> None:
        """Use this dealer of the party's layer from now on: a new attempt has begun."""
        self._dealer = dealer

    def beside(self, dealt: bytes) -> None:
        """What was dealt for the update of the party's other layer goes with the next gradient."""
        self._other = dealt

    def encode_grad(self, grad: Tensor, saved: Any, moment: Moment = INFERENCE) -> Payload:
        """The party's share as an owner, and what it needs as a partner.

        Raises:
            RingRangeError, NonFiniteError: the gradient cannot be encoded; nothing is sent.
            ReusedPadError: this exchange's gradient was shared before.
        """
        assert self._dealer is not None, "no attempt has begun"
        words = encode_gradient(grad, self._rate, self._party)
        return words_bytes(self._dealer.share_gradient(words, moment.step)) + self._other


class SharedHalves(MaskedHalves):
    """The label party's halves of all feature parties, whose outputs come out as one sum.

    Args:
        halves: by party, in merge order; each has a `SharedGradient` for a codec.
        ring: what the shares of the outputs are numbers of.
    """

    def __init__(self, halves: Mapping[str, LabelHalf], ring: Ring) -> None:
        super().__init__(halves, ring)
        self._by_party = halves
        self._order = tuple(halves)
        self._dealers: dict[str, Dealer] = {}

    def begin(self) -> Mapping[str, int]:
        """Deal anew: give each party a stream of its own, and the columns of its other layer.

        Returns:
            Columns of each party's layer, that of ones included.

        Raises:
            ProtocolError, FrameError: a party sent something else than its columns.
            LostPeerError: a party went away.
        """
        keys = {name: secrets.token_bytes(KEY_BYTES) for name in self._order}
        columns = {name: columns_of(half) for name, half in self._by_party.items()}
        for name, half in self._by_party.items():
            partner = partner_of(name, self._order)
            owner, other = PadStream(keys[name]), PadStream(keys[partner])
            self._dealers[name] = Dealer(owner, other, columns[name], half.width)
            _codec(half).begin(self._dealers[name])
            told = columns[owner_of(name, self._order)].to_bytes(COLUMNS_BYTES, "little")
            half.link.send(Frame(Kind.PROTOCOL, 1, keys[name] + told))
        return columns

    def relay(self, step: int, rows: int, trains: bool) -> None:
        """Pass on what the parties open to each other, each with the products dealt to it.

        Raises:
            ProtocolError, FrameError: a party sent something else.
            ReusedPadError: this exchange, or a later one, was dealt in this attempt.
        """
        dealt = {
            name: words_bytes(dealer.deal(rows, step)) for name, dealer in self._dealers.items()
        }
        kind = Kind.OPENING if trains else Kind.QUERY_OPENING
        opened = {name: self._opened(name, kind, step, rows) for name in self._order}
        for name, half in self._by_party.items():
            owner, partner = owner_of(name, self._order), partner_of(name, self._order)
            inputs, weights = opened[owner][0], opened[partner][1]
            half.link.send(Frame(kind, step, b"".join([inputs, weights, dealt[owner]])))
        if trains:  # while the parties compute their outputs
            for name, half in self._by_party.items():
                other = self._dealers[owner_of(name, self._order)]
                _codec(half).beside(words_bytes(other.deal_update(step)))

    def _sum(self, kind: Kind, step: int, rows: int, own: Sequence[Payload] = ()) -> Tensor:
        total = super()._sum(kind, step, rows, own)
        check_outputs(total, step)
        return total

    def _opened(self, name: str, kind: Kind, step: int, rows: int) -> list[memoryview]:
        """A party's masked inputs, and its masked share of the other layer, both sealed."""
        other = self._dealers[owner_of(name, self._order)]
        sizes = [
            size_of((rows, self._dealers[name].columns)) + TAG_BYTES,
            size_of((other.columns, other.width)) + TAG_BYTES,
        ]
        payload = self._by_party[name].take(kind, step).payload
        return split_payload(payload, sizes, f"step {step} of party '{name}'")


def columns_of(half: LabelHalf) -> int:
    """Wait for a party to tell the columns of its layer, that of ones included.

    Raises:
        ProtocolError: it tells something else, or more than can be shared.
    """
    told = half.take(Kind.PROTOCOL, 1).payload
    columns = int.from_bytes(told, "little")
    if len(told) != COLUMNS_BYTES or not fits(columns, half.width):
        raise ProtocolError(
            f"party '{half.party}' told something else than columns of a layer that can be shared",
            got=f"{len(told)} bytes",
            want=f"a number from 1 to {MOST_COLUMNS} in {COLUMNS_BYTES} bytes",
        )
    return columns


def _codec(half: LabelHalf) -> SharedGradient:
    assert isinstance(half.codec, SharedGradient), "gradients leave as shares"
    return half.codec
