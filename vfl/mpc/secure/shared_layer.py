"""A linear layer whose weights two parties share, and neither has; its inputs stay at their owner.

The owner has the inputs X (a column of ones included) and a share A of the weights, its partner
the other share S, W = A + S. A dealer gives both what is random (Beaver 1991); a server goes on
with the outputs in clear, as in SPNN (Zhou et al. 2020, arXiv 2012.09364):

    forward    owner -> partner  E = X - U        partner -> owner  D = S - V
               owner:   X (A + D) + T             partner:  E V + (U V - T)       sum: X W
    backward   owner:   A -= X^T (G - R) + C      partner:  S -= E^T R + (U^T R - C)   sum: X^T G

U, T, C follow from the owner's stream with the dealer, V and R from the partner's, so the dealer
sends three products: U V - T and U^T R - C to the partner, G - R to the owner. G is the gradient of
the outputs times the learning rate. Nothing is opened on the way back: the dealer knows R, so V of
the textbook is R itself and the opening would be zero; E is that of the forward product. Where the
partner is who has the gradient, it sends G - R, and the dealer two products alone.

All numbers are of the ring 2^64, weights with as many fraction bits as a product of inputs and
gradients has. So nothing is ever truncated: an update is exact, and no share can wrap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vfl.core.errors import ReusedPadError
from vfl.core.frame import HEADER_BYTES, LIMIT_BYTES
from vfl.core.seeds import Secret
from vfl.mpc import ring
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
    ring.require_room(outputs, OUTPUT_ROOM, OUTPUT_BITS, f"first layer, step {step}", _FIX)


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
        return inputs - _draw(self._stream, inputs.shape, "inputs", step)

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
        mask = _draw(self._stream, (len(inputs), share.shape[1]), "outputs", step)
        return ring.matmul(inputs, share + weights) + mask

    def change(self, inputs: Tensor, gradient: Tensor, step: int) -> Tensor:
        """Its share of what the weights lose, axes (columns, width).

        Args:
            inputs: X, axes (rows, columns).
            gradient: G - R, axes (rows, width).
            step: number of the exchange.

        Raises:
            ReusedPadError: asked again.
        """
        mask = _draw(self._stream, (inputs.shape[1], gradient.shape[1]), "update", step)
        return ring.matmul(inputs.t(), gradient) + mask


class Partner:
    """The party that has the other share of the weights, and no inputs.

    It may have the gradient: then it, and not the dealer, sends the owner G - R.

    Args:
        stream: what it shares with the dealer.
    """

    def __init__(self, stream: PadStream) -> None:
        self._stream = stream
        self._mask: tuple[int, Tensor] | None = None
        self._gradient: tuple[int, Tensor] | None = None

    def opened(self, share: Tensor, step: int) -> Tensor:
        """D for the owner, of the share S, axes (columns, width).

        Raises:
            ReusedPadError: this step, or a later one, was opened.
        """
        mask = _draw(self._stream, share.shape, "weights", step)
        self._mask = step, mask
        return share - mask

    def outputs(self, inputs: Tensor, dealt: Tensor, step: int) -> Tensor:
        """Its share of the outputs, axes (rows, width).

        Args:
            inputs: E, as the owner opened them; axes (rows, columns).
            dealt: U V - T; axes (rows, width).
            step: number of the exchange, whose weights were opened.

        Raises:
            ReusedPadError: asked again.
        """
        mask = _of(self._mask, step)
        self._mask = None
        return ring.matmul(inputs, mask) + dealt

    def change(self, inputs: Tensor, dealt: Tensor, step: int) -> Tensor:
        """Its share of what the weights lose, axes (columns, width).

        Args:
            inputs: E, axes (rows, columns).
            dealt: U^T R - C; axes (columns, width).
            step: number of the exchange.

        Raises:
            ReusedPadError: asked again.
        """
        mask = self._gradient_mask((len(inputs), dealt.shape[1]), step)
        return ring.matmul(inputs.t(), mask) + dealt

    def share_gradient(self, gradient: Tensor, step: int) -> Tensor:
        """G - R for the owner, before the partner's own `change` of that step.

        Args:
            gradient: G, int64, axes (rows, width).
            step: number of the exchange.

        Raises:
            ReusedPadError: the gradient of this step, or of a later one, was shared.
        """
        mask = _draw(self._stream, tuple(gradient.shape), "gradient", step)
        self._gradient = step, mask
        return gradient - mask

    def _gradient_mask(self, shape: tuple[int, ...], step: int) -> Tensor:
        """R: drawn now, or when this partner shared the gradient."""
        if self._gradient is None:
            return _draw(self._stream, shape, "gradient", step)
        mask = _of(self._gradient, step)
        self._gradient = None
        return mask


class Dealer:
    """Who gives both what is random; it must see neither E nor D.

    Args:
        owner, partner: the stream it shares with each.
        columns: of the inputs, that of ones included.
        width: of the outputs.
    """

    def __init__(self, owner: PadStream, partner: PadStream, columns: int, width: int) -> None:
        self._owner, self._partner = owner, partner
        self.columns, self.width = columns, width
        self._inputs: tuple[int, Tensor] | None = None
        self._gradient: tuple[int, Tensor] | None = None

    def deal(self, rows: int, step: int) -> Tensor:
        """What the partner needs for the outputs: U V - T, axes (rows, width).

        Raises:
            ReusedPadError: this step, or a later one, was dealt.
        """
        inputs = _draw(self._owner, (rows, self.columns), "inputs", step)
        weights = _draw(self._partner, (self.columns, self.width), "weights", step)
        outputs = _draw(self._owner, (rows, self.width), "outputs", step)
        self._inputs = step, inputs
        return ring.matmul(inputs, weights) - outputs

    def deal_update(self, step: int) -> Tensor:
        """What the partner needs for the update: U^T R - C, axes (columns, width).

        Raises:
            ReusedPadError: this step's was dealt, or its outputs were not.
        """
        inputs = _of(self._inputs, step)
        self._inputs = None
        gradient = _draw(self._partner, (len(inputs), self.width), "gradient", step)
        update = _draw(self._owner, (self.columns, self.width), "update", step)
        self._gradient = step, gradient
        return ring.matmul(inputs.t(), gradient) - update

    def share_gradient(self, gradient: Tensor, step: int) -> Tensor:
        """G - R for the owner, where the dealer is who has the gradient.

        Args:
            gradient: G, int64, axes (rows, width).
            step: number of the exchange, whose update was dealt.

        Raises:
            ReusedPadError: the gradient of this step was shared, or its update never dealt.
        """
        mask = _of(self._gradient, step)
        self._gradient = None
        return gradient - mask


def _of(kept: tuple[int, Tensor] | None, step: int) -> Tensor:
    """The mask that was kept for a step.

    Raises:
        ReusedPadError: there is none, or it is of another step.
    """
    if kept is None or kept[0] != step:
        raise ReusedPadError(
            "a mask was used before, or belongs to another exchange",
            where="first layer",
            got=f"step {step}",
            want="each once, in the order of the protocol",
        )
    return kept[1]


def _draw(stream: PadStream, shape: tuple[int, ...], *purpose: str | int) -> Tensor:
    """Uniform ring numbers, each given once; int64 of the shape."""
    elements = stream.elements64(shape[0] * shape[1], *purpose)
    return torch.from_numpy(elements.view("<i8")).reshape(shape)


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
        return ELEMENT_BYTES * (rows * self.columns + self.other * self.width) + 2 * TAG_BYTES

    def relayed_bytes(self, rows: int) -> int:
        """Payload of what is opened to it, with the products dealt to it."""
        elements = rows * self.other + self.columns * self.width + rows * self.width
        return ELEMENT_BYTES * elements + 2 * TAG_BYTES

    def gradient_bytes(self, rows: int) -> int:
        """Payload of its share of the gradient, with what is dealt for the other layer."""
        return ELEMENT_BYTES * (rows * self.width + self.other * self.width)

    def wire_bytes(self, rows: int, trains: bool) -> int:
        """Bytes the party sends and receives in an exchange, headers included.

        >>> SharedAxes(columns=3, other=5, width=2).wire_bytes(rows=4, trains=True)
        784
        """
        outputs, own, other = rows * self.width, self.columns * self.width, self.other * self.width
        up = rows * self.columns + other + outputs
        down = rows * self.other + own + outputs
        elements = up + down + (outputs + other if trains else 0)
        return ELEMENT_BYTES * elements + 4 * (TAG_BYTES + HEADER_BYTES)


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
        return ELEMENT_BYTES * rows * self.columns

    def relayed_bytes(self, rows: int) -> int:
        """Payload of what is opened to it: the other share of its layer, of any rows."""
        return ELEMENT_BYTES * self.columns * self.width

    def gradient_bytes(self, rows: int) -> int:
        """Payload of its share of the gradient."""
        return ELEMENT_BYTES * rows * self.width

    def wire_bytes(self, rows: int, trains: bool) -> int:
        """Bytes the party sends and receives in an exchange, headers included.

        >>> OwnerAxes(columns=3, width=2).wire_bytes(rows=4, trains=True)
        336
        """
        outputs = rows * self.width
        elements = rows * self.columns + self.columns * self.width + outputs
        return ELEMENT_BYTES * (elements + (outputs if trains else 0)) + 4 * HEADER_BYTES


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
    elements = products + (updates if trains else 0)
    return ROWS_BYTES + ELEMENT_BYTES * elements + (3 if trains else 2) * HEADER_BYTES


def products_bytes(widths: Sequence[int], rows: int) -> int:
    """Payload of the products that a third party deals for the layers of an exchange."""
    return ELEMENT_BYTES * rows * sum(widths)


def updates_bytes(layers: Sequence[LayerAxes]) -> int:
    """Payload of what a third party deals for the updates of the layers."""
    return ELEMENT_BYTES * sum(layer.columns * layer.width for layer in layers)


def fits(columns: int, width: int) -> bool:
    """Whether a layer of so many columns can be shared: it is opened in half a frame at most."""
    return 1 <= columns <= MOST_COLUMNS and 2 * ELEMENT_BYTES * columns * width <= LIMIT_BYTES
