"""A feature party's half where first layers are shared: a share of its own, one of another's.

In every exchange it opens its inputs to its partner and its share of the other's weights to their
owner, both masked; gets what was opened to it; and sends the label party its shares of both layers'
outputs, under masks that cancel out between all parties. It never sees an output or a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vfl.compression import INFERENCE, Moment
from vfl.errors import ExposedCutError, ProtocolError, RunFolderError
from vfl.exchange.guards import expect
from vfl.exchange.masked import QUERY, TRAINING
from vfl.exchange.neighbours import Neighbours
from vfl.exchange.shared_exposure import nobodys_bottom
from vfl.exchange.wire_words import read_words, size_of, split_payload, words_bytes
from vfl.frame import Frame, Kind, Payload
from vfl.link import Link
from vfl.mpc.sealing import TAG_BYTES
from vfl.mpc.shared_layer import Owner, Partner, encode_inputs, encode_weights, first_weights
from vfl.mpc.shared_traffic import SharedAxes, fits
from vfl.mpc.stream import KEY_BYTES, PadStream
from vfl.seeds import Secret

#: How many columns a layer has, as it is told when an attempt begins.
COLUMNS_BYTES = 4
#: The variance of a sum of two first weights is that of one.
_HALF = 2**-0.5


@dataclass(slots=True)
class _Pending:
    """An exchange under way: what came of it so far."""

    step: int
    trains: bool
    inputs: Tensor
    opened: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Attempt:
    """Both roles of the party in one attempt, and its ways to the parties it shares with."""

    owner: Owner
    partner: Partner
    near: Neighbours


class SharedHalf:
    """What `FeatureHalf` is where every party holds its own bottom.

    Args:
        party: its name, for messages.
        bottom: one linear layer, whose weights it starts with one share of.
        columns: of its inputs.
        width: the agreed width of all outputs.
        link: the stream to the label party.
        secret: the party's own; its share of the other layer starts from it.
    """

    in_flight = 1

    def __init__(
        self, party: str, bottom: nn.Module, columns: int, width: int, link: Link, secret: Secret
    ) -> None:
        self.party = party
        self.width = width
        self.link = link
        self.columns = columns + 1
        self._secret = secret
        self._own = encode_weights(_linear(bottom, party, columns, width), _HALF)
        self._other: Tensor | None = None
        self._attempt: _Attempt | None = None
        self._pending: _Pending | None = None

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
            self._other = self._fresh(columns)
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

    def introduce(self) -> None:
        """Tell how many columns this party's layer has, before the deal."""
        self.link.send(Frame(Kind.PROTOCOL, 1, self.columns.to_bytes(COLUMNS_BYTES, "little")))

    def fit(self, inputs: Callable[[], Tensor]) -> None:
        """Nothing looks at the training inputs."""

    @property
    def awaiting(self) -> int:
        """Exchanges whose gradients have not been taken yet."""
        return 0 if self._pending is None or not self._pending.trains else 1

    def send_cut(self, inputs: Tensor, step: int) -> None:
        """Open a training batch of axes (rows, ...), and the other's weights; `answer` goes on.

        Raises:
            RingRangeError, NonFiniteError: inputs that cannot be encoded; nothing was sent.
            ReusedPadError: this step, or a later one, was opened in this attempt.
            ProtocolError: no keys were agreed on.
        """
        self._open(inputs, step, trains=True)

    def send_query(self, inputs: Tensor, step: int) -> None:
        """The same for rows to evaluate or predict."""
        self._open(inputs, step, trains=False)

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

    def take_receipt(self, step: int) -> bytes:
        """Wait until the label party has the query; what it says to it."""
        self._pending = None
        return bytes(expect(self.link, Kind.ACK, step, "the label party").payload)

    def query_cut(self, inputs: Tensor, moment: Moment = INFERENCE) -> Tensor:
        """Nobody has a party's cut here.

        Raises:
            ExposedCutError: always.
        """
        raise nobodys_bottom(self.party)

    def state_dict(self) -> dict[str, Tensor]:
        """Its shares: of its own layer, and of the other's once it was told how large that is."""
        return {"own": self._own} | ({} if self._other is None else {"other": self._other})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave.

        Raises:
            RunFolderError: shares of another layer, or something else.
        """
        own, other = state.get("own"), state.get("other")
        if own is None or own.shape != self._own.shape:
            raise RunFolderError(
                "these are no shares of this party's first layer",
                got="none" if own is None else f"{len(own)} columns",
                want=f"{len(self._own)} columns, as secure = 'beaver' keeps them",
            )
        self._own, self._other = own.clone(), None if other is None else other.clone()

    def training_state(self) -> dict[str, Any]:
        """What training needs to go on exactly; every exchange before it has ended."""
        return {"state": self.state_dict()}

    def load_training_state(self, saved: Mapping[str, Any], batch: Callable[[int], Tensor]) -> None:
        """Restore what `training_state` gave."""
        self._pending = None
        self.load_state_dict(saved["state"])

    def _open(self, inputs: Tensor, step: int, trains: bool) -> None:
        attempt = self._begun()
        words = encode_inputs(inputs, self.party)
        own = words_bytes(attempt.owner.opened(words, step))
        other = words_bytes(attempt.partner.opened(self._shared(), step))
        sealed = attempt.near.to_partner.seal(own, f"inputs {step}")
        sealed += attempt.near.to_owner.seal(other, f"weights {step}")
        self._pending = _Pending(step, trains, words)
        kind = Kind.OPENING if trains else Kind.QUERY_OPENING
        self.link.send(Frame(kind, step, sealed))

    def _begun(self) -> _Attempt:
        if self._attempt is None:
            raise ProtocolError(
                f"party '{self.party}' has no keys to mask its numbers with",
                want="an agreement between the feature parties before the first exchange",
            )
        return self._attempt

    def _shared(self) -> Tensor:
        assert self._other is not None, "an attempt has begun, and told its axes"
        return self._other

    def _fresh(self, columns: int) -> Tensor:
        """This party's part of the other layer's first weights."""
        draw = torch.Generator().manual_seed(self._secret.number("first weights of another"))
        return first_weights(columns, self.width, draw, _HALF)


def _linear(bottom: nn.Module, party: str, columns: int, width: int) -> nn.Linear:
    """The one layer of a bottom that is one linear layer of these axes."""
    layers = [part for part in bottom.modules() if not isinstance(part, nn.Sequential | nn.Flatten)]
    want = "bottom = 'mlp:hidden=none', and depth in the top"
    if len(layers) != 1 or not isinstance(layer := layers[0], nn.Linear):
        raise ExposedCutError(
            f"the bottom of party '{party}' is more than one linear layer, which cannot be shared",
            got=", ".join(type(part).__name__ for part in layers[:4]) or "nothing",
            want=want,
        )
    axes = f"{layer.in_features} to {layer.out_features}"
    if axes != f"{columns} to {width}":
        raise ExposedCutError(
            f"the bottom of party '{party}' does not fit its columns and width",
            got=axes,
            want=f"{columns} to {width}",
        )
    return layer
