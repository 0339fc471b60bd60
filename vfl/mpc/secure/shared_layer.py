"""A linear layer whose weights two parties share, so that neither party knows the weights.

The inputs of the layer stay with their owner.

The owner has the inputs X (including a column of ones) and a share A of the weights W. The owner's
partner has the other share S, so that W = A + S. A dealer gives both parties correlated randomness
(Beaver 1991). A server continues with the outputs in plaintext, in the way of SPNN (Zhou et al.
2020, arXiv 2012.09364):

    forward    owner -> partner  E = X - U        partner -> owner  D = S - V
               owner:   X (A + D) + T             partner:  E V + (U V - T)       sum: X W
    backward   owner:   A -= X^T (G - R) + C      partner:  S -= E^T R + (U^T R - C)   sum: X^T G

The masks U, T and C come from the key stream that the owner shares with the dealer, V and R from
the stream that the partner shares with the dealer. The dealer therefore sends three products: U V -
T and U^T R - C to the partner, G - R to the owner. G is the gradient of the outputs, multiplied by
the learning rate. The backward pass needs no opening: the dealer knows R, so R takes the place of
the mask V of the textbook protocol, and the value to be opened would be zero; E was already opened
for the outputs. If the partner knows the gradient, the partner sends G - R, and the dealer sends
only two products.

The products for outputs and for the update are one-way products (`vfl.mpc.engine.one_way_product`)
with the same opening of X.

All numbers are in the ring 2^64. Weights have as many fraction bits as a product of inputs and
gradients. So no value is ever truncated: an update is exact, and it does no harm if shares wrap
around.
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

#: Fraction bits of inputs; and fraction bits of gradients times the learning rate.
INPUT_BITS, GRADIENT_BITS = 13, 26
WEIGHT_BITS = INPUT_BITS + GRADIENT_BITS
OUTPUT_BITS = INPUT_BITS + WEIGHT_BITS
#: Bits before the binary point that inputs and gradients may have.
INPUT_ROOM, GRADIENT_ROOM = 10, 3
#: Bits before the binary point that outputs may have: one less than the ring allows, as a reserve
#: for the next training step.
OUTPUT_ROOM = ring.ELEMENT_BITS - 1 - OUTPUT_BITS - 1
_FIX = "scale the columns, or lower the learning rate"


def encode_inputs(rows: Tensor, party: str) -> Tensor:
    """Encode inputs and a column of ones as ring elements, int64.

    The result has the axes (rows, columns + 1).

    Args:
        rows: inputs, float32, axes (rows, ...).
        party: name of the layer's owner, for the error message.

    Raises:
        RingRangeError, NonFiniteError: a value cannot be encoded; the error's text does not contain
            the value.
    """
    flat = rows.flatten(1)
    ones = torch.ones(len(flat), 1, dtype=flat.dtype)
    where = f"columns of party '{party}'"
    return ring.encode(torch.cat([flat, ones], 1), INPUT_BITS, where, INPUT_ROOM, _FIX)


def encode_gradient(gradient: Tensor, rate: float, party: str) -> Tensor:
    """Encode a layer's output gradient times the learning rate; int64, axes of the gradient.

    Raises:
        RingRangeError, NonFiniteError: see `encode_inputs`.
    """
    where = f"gradient for the first layer of party '{party}'"
    return ring.encode(gradient.double() * rate, GRADIENT_BITS, where, GRADIENT_ROOM, _FIX)


def first_weights(columns: int, width: int, secret: Secret, *purpose: str) -> Tensor:
    """Draw a holder's share of a layer's initial weights; int64, axes (columns, width).

    The sum of both shares has the variance of torch's initial weights. The share is drawn from a
    key stream with a secret key, not from torch's generator, which has only 2^32 seeds. With
    torch's generator, an attacker could try all seeds, find the seed whose weights explain the
    first outputs, and then compute the inputs.

    Args:
        columns: number of input columns; the column of ones is included.
        width: number of outputs for each row.
        secret: the holder's own secret.
        purpose: name of the layer; layers whose shares come from the same secret need different
            names.
    """
    reach = (2 * max(1, columns - 1)) ** -0.5
    unit = torch.from_numpy(secret.uniform((columns, width), "first weights", *purpose))
    room = ring.ELEMENT_BITS - 2 - WEIGHT_BITS
    return ring.encode((2 * unit - 1) * reach, WEIGHT_BITS, "first weights", room, _FIX)


def check_outputs(outputs: Tensor, step: int) -> None:
    """Refuse outputs near the limit of the ring.

    Without this check, a later training step might exceed the limit.

    Raises:
        RingRangeError, NonFiniteError: an output is too large; the error states how many bits the
            output needs.
    """
    ring.require_integer_bits(outputs, OUTPUT_ROOM, OUTPUT_BITS, f"first layer, step {step}", _FIX)


class _KeptOnce:
    """Stores a party's values for a later message of the same step; returns each only once."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, Tensor]] = {}

    def _keep(self, name: str, step: int, elements: Tensor) -> Tensor:
        self._kept[name] = step, elements
        return elements

    def _take(self, name: str, step: int) -> Tensor:
        """Return the value that was stored under a name, and delete it.

        Raises:
            ReusedPadError: no value was stored under the name, or it belongs to another step.
        """
        kept, elements = self._kept.get(name, (None, None))
        if elements is None or kept != step:
            raise ReusedPadError(
                "a mask was used before, or belongs to another exchange",
                where="first layer",
                got=f"step {step}",
                want="each mask once, in the order of the protocol",
            )
        del self._kept[name]
        return elements


class Owner:
    """The party that has the inputs of a layer and one share of the layer's weights.

    Args:
        stream: key stream that the owner shares with the dealer.
    """

    def __init__(self, stream: PadStream) -> None:
        self._stream = stream

    def opened(self, inputs: Tensor, step: int) -> Tensor:
        """Return the masked inputs E for the partner, axes (rows, columns).

        Raises:
            ReusedPadError: values of this step, or of a later step, were already opened.
        """
        return inputs - drawn(self._stream, inputs.shape, "inputs", step)

    def outputs(self, inputs: Tensor, share: Tensor, weights: Tensor, step: int) -> Tensor:
        """Return the owner's share of the outputs, axes (rows, width).

        Args:
            inputs: the inputs X, axes (rows, columns).
            share: the owner's share A of the weights, axes (columns, width).
            weights: D, the partner's masked share of the weights, which the partner opened; axes
                (columns, width).
            step: number of the training step or query.

        Raises:
            ReusedPadError: the share for this step was already returned.
        """
        return self._product(inputs, share + weights, "outputs", step)

    def change(self, inputs: Tensor, gradient: Tensor, step: int) -> Tensor:
        """Return the owner's share of the change to subtract from the weights.

        The axes are (columns, width).

        Args:
            inputs: the inputs X, axes (rows, columns).
            gradient: the masked gradient G - R, axes (rows, width).
            step: number of the training step.

        Raises:
            ReusedPadError: the share for this step was already returned.
        """
        return self._product(inputs.t(), gradient, "update", step)

    def _product(self, known: Tensor, opened: Tensor, name: str, step: int) -> Tensor:
        pad = drawn(self._stream, (len(known), opened.shape[1]), name, step)
        return one_way_product(RING, ring.matmul, (known, opened), pad)


class Partner(_KeptOnce):
    """The party that has the other share of a layer's weights, but no inputs.

    If the partner knows the gradient, then the partner, not the dealer, sends G - R to the owner.

    Args:
        owner: name of the layer's owner; empty before the first attempt at the session.
        secret: the partner's own secret, from which its initial share of the weights is drawn.
        purpose: name of the layer; layers whose shares come from the same secret need different
            names.

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
        """Begin a new attempt at the session.

        Args:
            stream: key stream that the partner shares with the dealer for this layer.
            columns: number of columns of the layer; the column of ones is included.
            width: number of outputs for each row.
            owner: name of the layer's owner, if it was not known before.

        Raises:
            RunFolderError: the stored share belongs to another layer.
        """
        if self._share is not None and self._share.shape != (columns, width):
            raise RunFolderError(
                "the saved share belongs to another layer than the one that party "
                f"'{owner or self._owner}' has now",
                got=f"{len(self._share)} columns",
                want=f"{columns} columns",
            )
        self._axes, self._stream = (columns, width), stream
        self._kept.clear()

    @property
    def share(self) -> Tensor | None:
        """The share S of the weights, axes (columns, width), in an attempt.

        The share is drawn when it is first read. A party can thus receive the axes first, and
        refuse a layer that is too large.
        """
        if self._share is None and self._axes is not None:
            self._share = first_weights(*self._axes, self._secret, self._purpose)
        return self._share

    @share.setter
    def share(self, share: Tensor | None) -> None:
        self._share = share

    @property
    def shape(self) -> tuple[int, int]:
        """Number of columns of the layer (column of ones included) and its width, in an attempt."""
        assert self._axes is not None, "`begin` sets the axes of the share"
        return self._axes

    def opened(self, step: int) -> Tensor:
        """Return D, the masked share of the weights for the owner; axes (columns, width).

        Raises:
            ReusedPadError: values of this step, or of a later step, were already opened in this
                attempt.
        """
        return self._begun() - self._masked("weights", self.shape, step)

    def outputs(self, inputs: Tensor, dealt: Tensor, step: int) -> Tensor:
        """Return the partner's share of the outputs, axes (rows, width).

        Args:
            inputs: E, the owner's masked inputs, which the owner opened; axes (rows, columns).
            dealt: the dealt product U V - T; axes (rows, width).
            step: number of the step in which the share of the weights was opened.

        Raises:
            ReusedPadError: the share for this step was already returned.
        """
        mask = self._take("weights", step)
        self._keep("inputs", step, inputs)
        return one_way_product(RING, ring.matmul, (inputs, mask), dealt)

    def change(self, dealt: Tensor, step: int) -> Tensor:
        """Return the change to subtract from the share S.

        The axes are (columns, width). The argument `dealt` is U^T R - C.

        Raises:
            ReusedPadError: the change for this step was already returned.
        """
        inputs = self._take("inputs", step)
        # Here the dealer, and not this partner, has shared the gradient.
        if "gradient" not in self._kept:
            self._masked("gradient", (len(inputs), dealt.shape[1]), step)
        mask = self._take("gradient", step)
        return one_way_product(RING, ring.matmul, (inputs.t(), mask), dealt)

    def share_gradient(self, gradient: Tensor, step: int) -> Tensor:
        """Return G - R for the owner.

        In each step, call this method before the partner's own `change`.

        Args:
            gradient: the gradient G, int64, axes (rows, width).
            step: number of the training step.

        Raises:
            ReusedPadError: the gradient of this step, or of a later step, was already shared.
        """
        return gradient - self._masked("gradient", gradient.shape, step)

    def move(self, change: Tensor) -> None:
        """Subtract the result of `change` from the share S."""
        self.share = self._begun() - change

    def _masked(self, name: str, shape: Sequence[int], step: int) -> Tensor:
        assert self._stream is not None, "`begin` sets the stream"
        return self._keep(name, step, drawn(self._stream, shape, name, step))

    def _begun(self) -> Tensor:
        share = self.share
        assert share is not None, "`begin` sets the axes of the share"
        return share


class Dealer(_KeptOnce):
    """Deals correlated randomness to owner and partner.

    The dealer must see neither E nor D.

    Args:
        owner, partner: key streams that the dealer shares with the owner and with the partner.
        columns: number of input columns; the column of ones is included.
        width: number of outputs for each row.
    """

    def __init__(self, owner: PadStream, partner: PadStream, columns: int, width: int) -> None:
        super().__init__()
        self._owner, self._partner = owner, partner
        self.columns, self.width = columns, width

    def deal(self, rows: int, step: int) -> Tensor:
        """Return the partner's dealt term of the outputs: U V - T, axes (rows, width).

        Raises:
            ReusedPadError: values of this step, or of a later step, were already dealt.
        """
        inputs = drawn(self._owner, (rows, self.columns), "inputs", step)
        weights = drawn(self._partner, (self.columns, self.width), "weights", step)
        pad = drawn(self._owner, (rows, self.width), "outputs", step)
        self._keep("inputs", step, inputs)
        return dealt_product(RING, ring.matmul, (inputs, weights), pad)

    def deal_update(self, step: int) -> Tensor:
        """Return the partner's dealt term of the weight update: U^T R - C, axes (columns, width).

        Raises:
            ReusedPadError: the update for this step was already dealt, or the outputs for this step
                were not dealt.
        """
        inputs = self._take("inputs", step)
        gradient = drawn(self._partner, (len(inputs), self.width), "gradient", step)
        pad = drawn(self._owner, (self.columns, self.width), "update", step)
        self._keep("gradient", step, gradient)
        return dealt_product(RING, ring.matmul, (inputs.t(), gradient), pad)

    def share_gradient(self, gradient: Tensor, step: int) -> Tensor:
        """Return G - R for the owner, if the dealer knows the gradient.

        Args:
            gradient: the gradient G, int64, axes (rows, width).
            step: number of the training step whose update was dealt.

        Raises:
            ReusedPadError: the gradient of this step was already shared, or its update was not
                dealt.
        """
        return gradient - self._take("gradient", step)


#: Number of copies of a matrix that a party stores at once: as elements, limbs, masks, sealed bytes
#: and unsealed bytes.
_COPIES = 16
#: Largest number of columns; the inputs of a query are opened in one message, so they must fit into
#: a frame.
MOST_COLUMNS = 2**15


@dataclass(frozen=True, slots=True)
class LayerAxes:
    """Sizes of the layers of which a party has shares: its own layer, and another party's.

    Attributes:
        columns: number of columns of the party's own layer, including the column of ones.
        width: number of outputs of each layer for each row.
        other: number of columns of the other party's layer; 0 if the label party is the partner of
            all parties' layers.
    """

    columns: int
    width: int
    other: int = 0

    @property
    def parameters(self) -> int:
        """Number of weights of which the party has a share."""
        return (self.columns + self.other) * self.width

    def memory_bytes(self, rows: int) -> int:
        """Return about the party's peak memory in bytes during a step with this many rows.

        >>> LayerAxes(columns=3, width=2, other=5).memory_bytes(rows=4)
        8192
        """
        elements = self.parameters + rows * (self.columns + self.other + 2 * self.width)
        return _COPIES * ELEMENT_BYTES * elements

    @property
    def _tags_bytes(self) -> int:
        """Bytes of the seals' tags in two openings that the label party relays."""
        return 2 * TAG_BYTES if self.other else 0

    def opened_bytes(self, rows: int) -> int:
        """Return the bytes of the party's openings: masked inputs, and masked weight shares."""
        elements = rows * self.columns + self.other * self.width
        return ELEMENT_BYTES * elements + self._tags_bytes

    def relayed_bytes(self, rows: int) -> int:
        """Return the bytes of the openings and dealt products that the party receives."""
        elements = rows * self.other + self.columns * self.width
        elements += rows * self.width if self.other else 0
        return ELEMENT_BYTES * elements + self._tags_bytes

    def gradient_bytes(self, rows: int) -> int:
        """Return the bytes of the party's gradient share, and of the other layer's dealt update."""
        return ELEMENT_BYTES * (rows + self.other) * self.width

    def wire_bytes(self, rows: int, trains: bool) -> int:
        """Return the bytes that the party sends and receives in a step; headers are included.

        >>> LayerAxes(columns=3, width=2, other=5).wire_bytes(rows=4, trains=True)
        784
        >>> LayerAxes(columns=3, width=2).wire_bytes(rows=4, trains=True)
        336
        """
        outputs = ELEMENT_BYTES * rows * self.width
        back = self.gradient_bytes(rows) if trains else 0
        payloads = self.opened_bytes(rows) + self.relayed_bytes(rows) + outputs + back
        return payloads + 4 * HEADER_BYTES


#: Bytes that the number of rows takes in a request to a third party that deals.
ROWS_BYTES = 4
#: Bytes that the number of columns takes in the announcement of a layer.
COLUMNS_BYTES = 4


def bytes_to_deal(layers: Sequence[LayerAxes], rows: int, trains: bool) -> int:
    """Return the bytes of a third party's messages for one step; headers are included.

    >>> bytes_to_deal([LayerAxes(columns=3, width=2)], rows=4, trains=True)
    164
    """
    payloads = ROWS_BYTES + products_bytes([layer.width for layer in layers], rows)
    payloads += updates_bytes(layers) if trains else 0
    return payloads + (3 if trains else 2) * HEADER_BYTES


def products_bytes(widths: Sequence[int], rows: int) -> int:
    """Return the bytes of the products that a third party deals for all layers in one step."""
    return ELEMENT_BYTES * rows * sum(widths)


def updates_bytes(layers: Sequence[LayerAxes]) -> int:
    """Return the bytes of the weight updates that a third party deals for all layers."""
    return ELEMENT_BYTES * sum(layer.columns * layer.width for layer in layers)


def fits(columns: int, width: int) -> bool:
    """Return whether a layer is small enough to be shared.

    Its opened weights must fit into half a frame.
    """
    return 1 <= columns <= MOST_COLUMNS and 2 * ELEMENT_BYTES * columns * width <= LIMIT_BYTES


def read_columns(told: Payload, width: int, sender: str) -> int:
    """Parse the number of columns of a layer of this width, which another party announced.

    Raises:
        ProtocolError: the number is malformed, or is too large for a layer to be shared.
    """
    columns = int.from_bytes(told, "little")
    if len(told) != COLUMNS_BYTES or not fits(columns, width):
        raise ProtocolError(
            f"{sender} announced a layer with a number of columns that cannot be shared",
            got=f"{columns} in {len(told)} bytes",
            want=f"a number from 1 to {MOST_COLUMNS} in {COLUMNS_BYTES} bytes, whose layer fits "
            "half a frame",
        )
    return columns
