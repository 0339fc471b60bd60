"""A feature party's half where first layers are shared: a share of its own, one of another's.

In every exchange it opens its inputs to its partner and its share of the other's weights to their
owner, both masked; gets what was opened to it; and sends the label party its shares of both layers'
outputs, under masks that cancel out between all parties. It never sees an output or a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from vfl.errors import ProtocolError, RunFolderError
from vfl.exchange.guards import expect
from vfl.exchange.masked import QUERY, TRAINING
from vfl.exchange.neighbours import Neighbours
from vfl.exchange.share_holder import Pending, ShareHolder, no_keys
from vfl.exchange.wire_words import read_words, size_of, split_payload, words_bytes
from vfl.frame import Frame, Kind, Payload
from vfl.link import Link
from vfl.mpc.sealing import TAG_BYTES
from vfl.mpc.shared_layer import Owner, Partner, encode_inputs, first_weights
from vfl.mpc.shared_traffic import COLUMNS_BYTES, SharedAxes, fits
from vfl.mpc.stream import KEY_BYTES, PadStream
from vfl.seeds import Secret


@dataclass(frozen=True, slots=True)
class _Attempt:
    """Both roles of the party in one attempt, and its ways to the parties it shares with."""

    owner: Owner
    partner: Partner
    near: Neighbours


class SharedHalf(ShareHolder):
    """A feature party that is also the partner of another one.

    Args:
        party: its name, for messages.
        bottom: one linear layer of the axes of the shared one; its weights are not used.
        columns: of its inputs.
        width: the agreed width of all outputs.
        link: the stream to the label party.
        secret: the party's own; its shares start from it.
    """

    def __init__(
        self, party: str, bottom: nn.Module, columns: int, width: int, link: Link, secret: Secret
    ) -> None:
        super().__init__(party, bottom, columns, width, link, secret)
        self._secret = secret
        self._other: Tensor | None = None
        self._attempt: _Attempt | None = None

    def begin(self, order: tuple[str, ...], keys: Mapping[str, bytes], deal: Payload) -> None:
        """A new attempt has begun, with new keys and a new stream from the dealer.

        Args:
            order: all feature parties.
            keys: of each pair this party is in.
            deal: the key of its stream with the dealer, and the columns of the layer of which it
                holds the other share.

        Raises:
            TruncatedFrameError: a deal of another length.
            ProtocolError: it names columns that cannot be.
            RunFolderError: the shares that were kept are of other layers.
        """
        key, told = split_payload(deal, [KEY_BYTES, COLUMNS_BYTES], "deal")
        columns = int.from_bytes(told, "little")
        if not fits(columns, self.width):
            raise ProtocolError("a layer of so many columns cannot be shared", got=f"{columns}")
        if self._other is None:
            self._other = first_weights(columns, self.width, self._secret, "of another")
        if self._other.shape != (columns, self.width):
            raise RunFolderError(
                "the kept share is of another party's layer",
                got=f"{len(self._other)} columns",
                want=f"{columns} columns",
            )
        stream = PadStream(bytes(key))
        near = Neighbours(self.party, order, keys)
        self._attempt = _Attempt(Owner(stream), Partner(stream), near)
        self._pending = None

    @property
    def axes(self) -> SharedAxes:
        """The layers it has shares of, once an attempt has begun."""
        return SharedAxes(self.columns, len(self._shared()), self.width)

    def answer(self, step: int) -> None:
        """Take what was opened to this party, and send its share of the outputs.

        Raises:
            ProtocolError, FrameError, AuthenticationError: nothing was sent.
        """
        attempt, pending, other = self._begun(), self._pending, self._shared()
        assert pending is not None, "nothing was opened"
        kind = Kind.OPENING if pending.trains else Kind.QUERY_OPENING
        payload = expect(self.link, kind, step, "the label party").payload
        rows, (columns, width) = len(pending.inputs), other.shape
        opened, weights = (rows, columns), (self.columns, width)
        sizes = [size_of(opened) + TAG_BYTES, size_of(weights) + TAG_BYTES, size_of((rows, width))]
        parts = split_payload(payload, sizes, f"step {step} of party '{self.party}'")
        near = attempt.near
        pending.opened = read_words(near.from_owner.open(parts[0], f"inputs {step}"), opened)
        masked = read_words(near.from_partner.open(parts[1], f"weights {step}"), weights)
        total = attempt.owner.outputs(pending.inputs, self._own, masked, step)
        dealt = read_words(parts[2], (rows, width))
        total += attempt.partner.outputs(pending.opened, dealt, step)
        near.mask(total, TRAINING if pending.trains else QUERY, step)
        self.link.send(Frame(Kind.CUT if pending.trains else Kind.QUERY, step, words_bytes(total)))

    def take_gradient(self) -> None:
        """Wait for this party's share of the gradient and move both shares of weights.

        Raises:
            ProtocolError, FrameError: the shares are left as they were.
        """
        attempt, pending = self._begun(), self._pending
        assert pending is not None, "nothing was opened"
        assert pending.opened is not None, "no outputs were sent"
        step, shape, other = pending.step, (len(pending.inputs), self.width), self._shared()
        payload = expect(self.link, Kind.GRAD, step, "the label party").payload
        where = f"gradient of step {step}"
        shared, dealt = split_payload(payload, [size_of(shape), size_of(other.shape)], where)
        own_change = attempt.owner.change(pending.inputs, read_words(shared, shape), step)
        dealt_words = read_words(dealt, tuple(other.shape))
        other_change = attempt.partner.change(pending.opened, dealt_words, step)
        self._own, self._other = self._own - own_change, other - other_change
        self._pending = None

    def state_dict(self) -> dict[str, Tensor]:
        """Its shares: of its own layer, and of the other's once it was told how large that is."""
        return super().state_dict() | ({} if self._other is None else {"other": self._other})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave.

        Raises:
            RunFolderError: shares of another layer, or something else.
        """
        super().load_state_dict(state)
        other = state.get("other")
        self._other = None if other is None else other.clone()

    def _open(self, inputs: Tensor, step: int, trains: bool) -> None:
        attempt = self._begun()
        words = encode_inputs(inputs, self.party)
        own = words_bytes(attempt.owner.opened(words, step))
        other = words_bytes(attempt.partner.opened(self._shared(), step))
        sealed = attempt.near.to_partner.seal(own, f"inputs {step}")
        sealed += attempt.near.to_owner.seal(other, f"weights {step}")
        self._pending = Pending(step, trains, words)
        kind = Kind.OPENING if trains else Kind.QUERY_OPENING
        self.link.send(Frame(kind, step, sealed))

    def _begun(self) -> _Attempt:
        if self._attempt is None:
            raise no_keys(self.party)
        return self._attempt

    def _shared(self) -> Tensor:
        assert self._other is not None, "an attempt has begun, and told its axes"
        return self._other
