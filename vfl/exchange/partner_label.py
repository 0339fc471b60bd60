"""The label party's side where a third party deals: it is the partner of every feature party.

It holds the other share of each first layer, sees inputs under masks it does not know, and learns
the sum of the outputs. It has the gradient, so it sends G - R itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from vfl.compression import INFERENCE, Moment
from vfl.compression.none import Uncompressed
from vfl.errors import RunFolderError
from vfl.exchange.dealer_line import DealerLine
from vfl.exchange.label_half import LabelHalf
from vfl.exchange.masked import MaskedHalves
from vfl.exchange.shared_label import columns_of
from vfl.exchange.wire_words import read_words, size_of, split_payload, words_bytes
from vfl.frame import Frame, Kind, Payload
from vfl.mpc.masked_sum import Ring
from vfl.mpc.shared_layer import Partner, check_outputs, encode_gradient, first_weights
from vfl.mpc.stream import PadStream
from vfl.seeds import Secret


@dataclass(slots=True)
class _Attempt:
    """The role in one attempt, and what an exchange under way has come to."""

    partner: Partner
    opened: Tensor | None = None
    updates: Callable[[], Mapping[str, Tensor]] | None = None


class PartnerShare(Uncompressed):
    """What stands in the label party's place of a codec: the other share of one party's layer.

    Args:
        party: whose layer it is.
        rate: the learning rate, which the gradient is multiplied with.
        secret: the label party's own; its share starts from it.
    """

    def __init__(self, party: str, rate: float, secret: Secret) -> None:
        self._party = party
        self._rate = rate
        self._secret = secret
        self._share: Tensor | None = None
        self._attempt: _Attempt | None = None

    def begin(self, stream: PadStream, columns: int, width: int) -> None:
        """A new attempt has begun.

        Args:
            stream: what the label party shares with the dealer about this layer.
            columns: of the layer, that of ones included.
            width: of the outputs.

        Raises:
            RunFolderError: the share that was kept is of another layer.
        """
        if self._share is None:
            self._share = first_weights(columns, width, self._secret, self._party)
        if self._share.shape != (columns, width):
            raise RunFolderError(
                f"the kept share is not of the layer that party '{self._party}' has",
                got=f"{len(self._share)} columns",
                want=f"{columns} columns",
            )
        self._attempt = _Attempt(Partner(stream))

    @property
    def shape(self) -> tuple[int, int]:
        """Columns, that of ones included, and width, once an attempt has begun."""
        columns, width = self._kept().shape
        return columns, width

    def opened(self, step: int) -> bytes:
        """D for the owner: the share, masked.

        Raises:
            ReusedPadError: this step, or a later one, was opened in this attempt.
        """
        return words_bytes(self._begun().partner.opened(self._kept(), step))

    def outputs(self, inputs: Tensor, dealt: Tensor, step: int) -> Tensor:
        """Its share of the outputs, axes (rows, width).

        Args:
            inputs: E, as the owner opened them; axes (rows, columns).
            dealt: U V - T; axes (rows, width).
            step: number of the exchange.

        Raises:
            ReusedPadError: asked again.
        """
        attempt = self._begun()
        attempt.opened = inputs
        return attempt.partner.outputs(inputs, dealt, step)

    def await_update(self, dealt: Callable[[], Mapping[str, Tensor]]) -> None:
        """Where every layer's U^T R - C comes from, when the gradient of the exchange is known."""
        self._begun().updates = dealt

    def encode_grad(self, grad: Tensor, saved: Any, moment: Moment = INFERENCE) -> Payload:
        """The owner's share of the gradient; the label party's share of the weights moves.

        Raises:
            RingRangeError, NonFiniteError: the gradient cannot be encoded; nothing is sent.
            ReusedPadError: this exchange's gradient was shared before.
            ProtocolError, FrameError: the dealer sent something else; nothing is sent.
        """
        attempt = self._begun()
        assert attempt.opened is not None, "no inputs were opened"
        assert attempt.updates is not None, "nothing is dealt for an update"
        words = encode_gradient(grad, self._rate, self._party)
        dealt = attempt.updates()[self._party]
        shared = attempt.partner.share_gradient(words, moment.step)
        self._share = self._kept() - attempt.partner.change(attempt.opened, dealt, moment.step)
        attempt.opened = attempt.updates = None
        return words_bytes(shared)

    def state_dict(self) -> dict[str, Tensor]:
        """The share, once its axes are known."""
        return {} if self._share is None else {"share": self._share}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave.

        Raises:
            RunFolderError: there is no share.
        """
        share = state.get("share")
        if share is None:
            raise RunFolderError(
                f"the label party has no share of the first layer of party '{self._party}'",
                want="weights that were trained with a third party that deals",
            )
        self._share = share.clone()

    def _kept(self) -> Tensor:
        assert self._share is not None, "an attempt has begun, and told its axes"
        return self._share

    def _begun(self) -> _Attempt:
        assert self._attempt is not None, "no attempt has begun"
        return self._attempt


class PartnerHalves(MaskedHalves):
    """The label party's halves of all feature parties, and the other share of all their layers.

    Args:
        halves: by party, in merge order; each has a `PartnerShare` for a codec.
        dealer: the third party's line.
        ring: what the shares of the outputs are numbers of.
    """

    def __init__(self, halves: Mapping[str, LabelHalf], dealer: DealerLine, ring: Ring) -> None:
        super().__init__(halves, ring)
        self._by_party = halves
        self._dealer = dealer
        self._own: Tensor | None = None

    @property
    def dealer(self) -> DealerLine:
        """The third party that deals."""
        return self._dealer

    def begin(self) -> Mapping[str, int]:
        """Take this attempt's keys from the dealer and tell it what layers there are.

        Returns:
            Columns of each party's layer, that of ones included.

        Raises:
            ProtocolError, FrameError: somebody sent something else.
            LostPeerError: somebody went away.
            RunFolderError: a share that was kept is of another layer.
        """
        columns = {name: columns_of(half) for name, half in self._by_party.items()}
        keys = self._dealer.take_keys(len(columns))
        for half, key in zip(self._by_party.values(), keys, strict=True):
            _share(half).begin(PadStream(key), columns[half.party], half.width)
        self._dealer.tell(columns)
        return columns

    def relay(self, step: int, rows: int, trains: bool) -> None:
        """Ask the dealer for this exchange, and open the shares of the weights to their owners.

        Raises:
            ReusedPadError: this exchange, or a later one, was opened in this attempt.
        """
        self._dealer.ask(step, rows, trains)
        kind = Kind.OPENING if trains else Kind.QUERY_OPENING
        for half in self._by_party.values():
            half.link.send(Frame(kind, step, _share(half).opened(step)))

    def receive_cut(self, step: int, rows: int) -> Tensor:
        total = super().receive_cut(step, rows)
        shapes = {name: _share(half).shape for name, half in self._by_party.items()}

        @cache
        def updates() -> dict[str, Tensor]:  # the dealer computes them while the top does its work
            return self._dealer.updates(step, shapes)

        for half in self._by_party.values():
            _share(half).await_update(updates)
        return total

    def _sum(self, kind: Kind, step: int, rows: int, own: Sequence[Payload] = ()) -> Tensor:
        total = super()._sum(kind, step, rows, [*own, self._outputs(kind, step, rows)])
        check_outputs(total, step)
        return total

    def _outputs(self, kind: Kind, step: int, rows: int) -> bytes:
        """The label party's own share of the sum."""
        trains = kind is Kind.CUT
        shapes = {name: (rows, half.width) for name, half in self._by_party.items()}
        dealt = self._dealer.products(step, trains, shapes)
        shares = [
            _share(half).outputs(self._opened(half, step, rows, trains), dealt[name], step)
            for name, half in self._by_party.items()
        ]
        return words_bytes(sum(shares[1:], start=shares[0]))

    def _opened(self, half: LabelHalf, step: int, rows: int, trains: bool) -> Tensor:
        """A party's masked inputs; axes (rows, columns)."""
        kind, shape = Kind.OPENING if trains else Kind.QUERY_OPENING, (rows, _share(half).shape[0])
        payload = half.take(kind, step).payload
        where = f"step {step} of party '{half.party}'"
        (words,) = split_payload(payload, [size_of(shape)], where)
        return read_words(words, shape)


def _share(half: LabelHalf) -> PartnerShare:
    assert isinstance(half.codec, PartnerShare), "the label party has a share of this layer"
    return half.codec
