"""A linear layer whose weights two parties share, and neither has; its inputs stay at their owner.

The owner has the inputs X (a column of ones included) and a share A of the weights, its partner
the other share S, W = A + S. A dealer gives both what is random (Beaver 1991); a server goes on
with the outputs in plaintext, as in SPNN (Zhou et al. 2020, arXiv 2012.09364):

    forward    owner -> partner  E = X - U        partner -> owner  D = S - V
               owner:   X (A + D) + T             partner:  E V + (U V - T)       sum: X W
    backward   owner:   A -= X^T (G - R) + C      partner:  S -= E^T R + (U^T R - C)   sum: X^T G

U, T, C follow from the owner's stream with the dealer, V and R from the partner's, so the dealer
sends three products: U V - T and U^T R - C to the partner, G - R to the owner. G is the gradient of
the outputs times the learning rate. Nothing is opened on the way back: the dealer knows R, so V of
the textbook is R itself and the opening would be zero; E is that of the forward product. Where the
partner is who has the gradient, it sends G - R, and the dealer two products alone.

Each is a product made one way (`vfl.mpc.engine.one_way_product`), of one opening of X.

All numbers are of the ring 2^64, weights with as many fraction bits as a product of inputs and
gradients has. So nothing is ever truncated: an update is exact, and no share can wrap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vfl.core.errors import ProtocolError, ReusedPadError, RunFolderError
from vfl.core.frame import HEADER_BYTES, LIMIT_BYTES, Payload
from vfl.core.seeds import Secret
from vfl.mpc import ring
from vfl.mpc.engine import dealt_product, drawn, one_way_product
from vfl.mpc.numbers import RING
from vfl.mpc.ring import ELEMENT_BYTES
from vfl.mpc.secure.keys import TAG_BYTES
from vfl.mpc.stream import PadStream

#: Bits behind the point, of inputs and of gradients times the learning rate.
INPUT_BITS, GRADIENT_BITS = 13, 26
WEIGHT_BITS = INPUT_BITS + GRADIENT_BITS
OUTPUT_BITS = INPUT_BITS + WEIGHT_BITS
#: Bits before the point that inputs and gradients may have.
INPUT_ROOM, GRADIENT_ROOM = 10, 3
#: Bits before the point that outputs may have; one less than the ring has, for what comes next.
OUTPUT_ROOM = ring.ELEMENT_BITS - 1 - OUTPUT_BITS - 1
_FIX = "scale the columns, or lower the learning rate"


def encode_inputs(rows: Tensor, party: str) -> Tensor:
    """Inputs and the column of ones as ring numbers; int64, axes (rows, columns + 1).

    Args:
        rows: float32, axes (rows, ...).
        party: whose, for the message.

    Raises:
        RingRangeError, NonFiniteError: a value that cannot be encoded; it is not told.
    """
    flat = rows.flatten(1)
    ones = torch.ones(len(flat), 1, dtype=flat.dtype)
    where = f"columns of party '{party}'"
    return ring.encode(torch.cat([flat, ones], 1), INPUT_BITS, where, INPUT_ROOM, _FIX)


def encode_gradient(gradient: Tensor, rate: float, party: str) -> Tensor:
    """The gradient of a layer's outputs times the learning rate; int64 of its axes.

    Raises:
        RingRangeError, NonFiniteError: see `encode_inputs`.
    """
    where = f"gradient for the first layer of party '{party}'"
    return ring.encode(gradient.double() * rate, GRADIENT_BITS, where, GRADIENT_ROOM, _FIX)


def first_weights(columns: int, width: int, secret: Secret, *purpose: str) -> Tensor:
    """A holder's half of a layer's first weights; int64, axes (columns, width).

    The sum of both halves has the variance of torch's first weights. They come from a key stream
    and from no generator of torch's, which has 2^32 seeds: whoever tried them all would find the
    one whose weights explain the first outputs, and with it the inputs.

    Args:
        columns: of the inputs, that of ones included.
        width: of the outputs.
        secret: the holder's own.
        purpose: whose layer it is, for each secret and layer another.
    """
    reach = (2 * max(1, columns - 1)) ** -0.5
    unit = torch.from_numpy(secret.uniform((columns, width), "first weights", *purpose))
    room = ring.ELEMENT_BITS - 2 - WEIGHT_BITS
    return ring.encode((2 * unit - 1) * reach, WEIGHT_BITS, "first weights", room, _FIX)


def check_outputs(outputs: Tensor, step: int) -> None:
    """Refuse outputs that come near the end of the ring, before a later step goes beyond it.

    Raises:
        RingRangeError, NonFiniteError: told in bits.
    """
    ring.require_integer_bits(outputs, OUTPUT_ROOM, OUTPUT_BITS, f"first layer, step {step}", _FIX)


class _KeptOnce:
    """A party of a layer: what it keeps of a step for the next message of that step, given once."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, Tensor]] = {}

    def _keep(self, name: str, step: int, elements: Tensor) -> Tensor:
        self._kept[name] = step, elements
        return elements

    def _take(self, name: str, step: int) -> Tensor:
        """What was kept under a name.

        Raises:
            ReusedPadError: nothing was, or it is of another step.
        """
        kept, elements = self._kept.get(name, (None, None))
        if elements is None or kept != step:
            raise ReusedPadError(
                "a mask was used before, or belongs to another exchange",
                where="first layer",
                got=f"step {step}",
                want="each once, in the order of the protocol",
            )
        del self._kept[name]
        return elements


class Owner:
    """The party that has the inputs, and a share of the weights.

    Args:
        stream: what it shares with the dealer.
    """

    def __init__(self, stream: PadStream) -> None:
        self._stream = stream

    def opened(self, inputs: Tensor, step: int) -> Tensor:
        """E for the partner, axes (rows, columns).

        Raises:
            ReusedPadError: this step, or a later one, was opened.
        """
        return inputs - drawn(self._stream, inputs.shape, "inputs", step)

    def outputs(self, inputs: Tensor, share: Tensor, weights: Tensor, step: int) -> Tensor:
        """Its share of the outputs, axes (rows, width).

        Args:
            inputs: X, axes (rows, columns).
            share: A, axes (columns, width).
            weights: D, as the partner opened them; likewise.
            step: number of the exchange.

        Raises:
            ReusedPadError: asked again.
        """
        return self._product(inputs, share + weights, "outputs", step)

    def change(self, inputs: Tensor, gradient: Tensor, step: int) -> Tensor:
        """Its share of what the weights lose, axes (columns, width).

        Args:
            inputs: X, axes (rows, columns).
            gradient: G - R, axes (rows, width).
            step: number of the exchange.

        Raises:
            ReusedPadError: asked again.
        """
        return self._product(inputs.t(), gradient, "update", step)

    def _product(self, known: Tensor, opened: Tensor, name: str, step: int) -> Tensor:
        pad = drawn(self._stream, (len(known), opened.shape[1]), name, step)
        return one_way_product(RING, ring.matmul, (known, opened), pad)


class Partner(_KeptOnce):
    """The party that has the other share of one party's layer, and no inputs.

    It may have the gradient: then it, and not the dealer, sends the owner G - R.

    Args:
        owner: whose layer it is; empty until an attempt names it.
        secret: the partner's own; its share starts from it.
        purpose: which layer it is, for each secret and layer another.

    """

    def __init__(self, owner: str, secret: Secret, purpose: str) -> None:
        super().__init__()
        self._share: Tensor | None = None
        self._axes: tuple[int, int] | None = None
        self._owner = owner
        self._secret = secret
        self._purpose = purpose
        self._stream: PadStream | None = None

    def begin(self, stream: PadStream, columns: int, width: int, owner: str = "") -> None:
        """A new attempt has begun.

        Args:
            stream: what the partner shares with the dealer about this layer.
            columns: of the layer, that of ones included.
            width: of the outputs.
            owner: whose layer it is, where that was not known before.

        Raises:
            RunFolderError: the share that was kept is of another layer.
        """
        if self._share is not None and self._share.shape != (columns, width):
            raise RunFolderError(
                "the kept share is of another party's layer, or of another one than party "
                f"'{owner or self._owner}' has now",
                got=f"{len(self._share)} columns",
                want=f"{columns} columns",
            )
        self._axes, self._stream = (columns, width), stream
        self._kept.clear()

    @property
    def share(self) -> Tensor | None:
        """S, axes (columns, width), once an attempt has named them; made when it is asked for.

        So a party can refuse a layer that is too large after it was told its axes.
        """
        if self._share is None and self._axes is not None:
            self._share = first_weights(*self._axes, self._secret, self._purpose)
        return self._share

    @share.setter
    def share(self, share: Tensor | None) -> None:
        self._share = share

    @property
    def shape(self) -> tuple[int, int]:
        """Columns, that of ones included, and width, once an attempt has begun."""
        assert self._axes is not None, "an attempt names the axes of the share"
        return self._axes

    def opened(self, step: int) -> Tensor:
        """D for the owner, axes (columns, width).

        Raises:
            ReusedPadError: this step, or a later one, was opened in this attempt.
        """
        return self._begun() - self._masked("weights", self.shape, step)

    def outputs(self, inputs: Tensor, dealt: Tensor, step: int) -> Tensor:
        """Its share of the outputs, axes (rows, width).

        Args:
            inputs: E, as the owner opened them; axes (rows, columns).
            dealt: U V - T; axes (rows, width).
            step: number of the exchange, whose weights were opened.

        Raises:
            ReusedPadError: asked again.
        """
        mask = self._take("weights", step)
        self._keep("inputs", step, inputs)
        return one_way_product(RING, ring.matmul, (inputs, mask), dealt)

    def change(self, dealt: Tensor, step: int) -> Tensor:
        """What its share loses, axes (columns, width); `dealt` is U^T R - C.

        Raises:
            ReusedPadError: asked again.
        """
        inputs = self._take("inputs", step)
        if "gradient" not in self._kept:  # the dealer shared the gradient, not this partner
            self._masked("gradient", (len(inputs), dealt.shape[1]), step)
        mask = self._take("gradient", step)
        return one_way_product(RING, ring.matmul, (inputs.t(), mask), dealt)

    def share_gradient(self, gradient: Tensor, step: int) -> Tensor:
        """G - R for the owner, before the partner's own `change` of that step.

        Args:
            gradient: G, int64, axes (rows, width).
            step: number of the exchange.

        Raises:
            ReusedPadError: the gradient of this step, or of a later one, was shared.
        """
        return gradient - self._masked("gradient", gradient.shape, step)

    def move(self, change: Tensor) -> None:
        """Take what `change` gave from the share."""
        self.share = self._begun() - change

    def _masked(self, name: str, shape: Sequence[int], step: int) -> Tensor:
        assert self._stream is not None, "an attempt brings a stream"
        return self._keep(name, step, drawn(self._stream, shape, name, step))

    def _begun(self) -> Tensor:
        share = self.share
        assert share is not None, "an attempt names the axes of the share"
        return share


class Dealer(_KeptOnce):
    """Who gives both what is random; it must see neither E nor D.

    Args:
        owner, partner: the stream it shares with each.
        columns: of the inputs, that of ones included.
        width: of the outputs.
    """

    def __init__(self, owner: PadStream, partner: PadStream, columns: int, width: int) -> None:
        super().__init__()
        self._owner, self._partner = owner, partner
        self.columns, self.width = columns, width

    def deal(self, rows: int, step: int) -> Tensor:
        """What the partner needs for the outputs: U V - T, axes (rows, width).

        Raises:
            ReusedPadError: this step, or a later one, was dealt.
        """
        inputs = drawn(self._owner, (rows, self.columns), "inputs", step)
        weights = drawn(self._partner, (self.columns, self.width), "weights", step)
        pad = drawn(self._owner, (rows, self.width), "outputs", step)
        self._keep("inputs", step, inputs)
        return dealt_product(RING, ring.matmul, (inputs, weights), pad)

    def deal_update(self, step: int) -> Tensor:
        """What the partner needs for the update: U^T R - C, axes (columns, width).

        Raises:
            ReusedPadError: this step's was dealt, or its outputs were not.
        """
        inputs = self._take("inputs", step)
        gradient = drawn(self._partner, (len(inputs), self.width), "gradient", step)
        pad = drawn(self._owner, (self.columns, self.width), "update", step)
        self._keep("gradient", step, gradient)
        return dealt_product(RING, ring.matmul, (inputs.t(), gradient), pad)

    def share_gradient(self, gradient: Tensor, step: int) -> Tensor:
        """G - R for the owner, where the dealer is who has the gradient.

        Args:
            gradient: G, int64, axes (rows, width).
            step: number of the exchange, whose update was dealt.

        Raises:
            ReusedPadError: the gradient of this step was shared, or its update never dealt.
        """
        return gradient - self._take("gradient", step)


#: Copies of a matrix that a party holds at once: as numbers, limbs, masks, sealed and not.
_COPIES = 16
#: A query's inputs, opened at once, must fit into a frame.
MOST_COLUMNS = 2**15


@dataclass(frozen=True, slots=True)
class LayerAxes:
    """The layers a party has shares of: its own, and that of another whose partner it is.

    Attributes:
        columns: of its own layer, that of ones included.
        width: of the outputs.
        other: columns of the other layer; 0 where the label party is the partner of all.
    """

    columns: int
    width: int
    other: int = 0

    @property
    def parameters(self) -> int:
        """How many weights the party has shares of."""
        return (self.columns + self.other) * self.width

    def memory_bytes(self, rows: int) -> int:
        """What the party holds at once in an exchange of so many rows, at most.

        >>> LayerAxes(columns=3, width=2, other=5).memory_bytes(rows=4)
        8192
        """
        elements = self.parameters + rows * (self.columns + self.other + 2 * self.width)
        return _COPIES * ELEMENT_BYTES * elements

    @property
    def _tags_bytes(self) -> int:
        """What two parties open to each other through the label party comes sealed, twice."""
        return 2 * TAG_BYTES if self.other else 0

    def opened_bytes(self, rows: int) -> int:
        """Payload of what the party opens in an exchange: its inputs, and a share of weights."""
        elements = rows * self.columns + self.other * self.width
        return ELEMENT_BYTES * elements + self._tags_bytes

    def relayed_bytes(self, rows: int) -> int:
        """Payload of what is opened to it, with the products dealt to it as a partner."""
        elements = rows * self.other + self.columns * self.width
        elements += rows * self.width if self.other else 0
        return ELEMENT_BYTES * elements + self._tags_bytes

    def gradient_bytes(self, rows: int) -> int:
        """Payload of its share of the gradient, with what is dealt for the other layer."""
        return ELEMENT_BYTES * (rows + self.other) * self.width

    def wire_bytes(self, rows: int, trains: bool) -> int:
        """Bytes the party sends and receives in an exchange, headers included.

        >>> LayerAxes(columns=3, width=2, other=5).wire_bytes(rows=4, trains=True)
        784
        >>> LayerAxes(columns=3, width=2).wire_bytes(rows=4, trains=True)
        336
        """
        outputs = ELEMENT_BYTES * rows * self.width
        back = self.gradient_bytes(rows) if trains else 0
        payloads = self.opened_bytes(rows) + self.relayed_bytes(rows) + outputs + back
        return payloads + 4 * HEADER_BYTES


#: How many rows an exchange has, as a third party that deals is asked for it.
ROWS_BYTES = 4
#: How many columns a layer has, as it is told when an attempt begins.
COLUMNS_BYTES = 4


def bytes_to_deal(layers: Sequence[LayerAxes], rows: int, trains: bool) -> int:
    """Bytes that a third party sends and receives to deal for an exchange, headers included.

    >>> bytes_to_deal([LayerAxes(columns=3, width=2)], rows=4, trains=True)
    164
    """
    payloads = ROWS_BYTES + products_bytes([layer.width for layer in layers], rows)
    payloads += updates_bytes(layers) if trains else 0
    return payloads + (3 if trains else 2) * HEADER_BYTES


def products_bytes(widths: Sequence[int], rows: int) -> int:
    """Payload of the products that a third party deals for the layers of an exchange."""
    return ELEMENT_BYTES * rows * sum(widths)


def updates_bytes(layers: Sequence[LayerAxes]) -> int:
    """Payload of what a third party deals for the updates of the layers."""
    return ELEMENT_BYTES * sum(layer.columns * layer.width for layer in layers)


def fits(columns: int, width: int) -> bool:
    """Whether a layer of so many columns can be shared: it is opened in half a frame at most."""
    return 1 <= columns <= MOST_COLUMNS and 2 * ELEMENT_BYTES * columns * width <= LIMIT_BYTES


def read_columns(told: Payload, width: int, sender: str) -> int:
    """The columns of a layer of that width, as somebody told them.

    Raises:
        ProtocolError: it told something else, or more than can be shared.
    """
    columns = int.from_bytes(told, "little")
    if len(told) != COLUMNS_BYTES or not fits(columns, width):
        raise ProtocolError(
            f"a layer of so many columns cannot be shared, which {sender} told",
            got=f"{columns} in {len(told)} bytes",
            want=f"a number from 1 to {MOST_COLUMNS} in {COLUMNS_BYTES} bytes, whose layer fits "
            "half a frame",
        )
    return columns
