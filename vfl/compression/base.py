"""The codec contract: encode and decode a cut, and the gradient of the cut.

Each of the two parties of a connection has a codec object. Both parties build the codec object from
the same spec. The parties agree on the cut's width in the handshake; the number of rows in a
payload follows from the step. So these numbers, and not a payload, limit the memory that a decoder
allocates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vfl.core.errors import SpecError
from vfl.core.frame import Payload
from vfl.core.seeds import Secret


@dataclass(frozen=True, slots=True)
class StepContext:
    """Number, phase, secret and rows of a training exchange or query, which the codec may use.

    Attributes:
        step: number of the training exchange or query.
        training: whether the exchange belongs to the training; codecs draw random numbers only in
            training.
        secret: secret of the party that encodes; None at the party that decodes. In evaluations and
            predictions, only the defense of a feature party receives a secret.
        rows: for each row of a training batch, its position in the table of the run's aligned rows,
            int64, equal at both parties; None at inference, or if the caller passed no positions.
    """

    step: int = 0
    training: bool = False
    secret: Secret | None = field(default=None, repr=False)
    rows: npt.NDArray[np.int64] | None = field(default=None, repr=False, compare=False)

    def positions(self, count: int) -> npt.NDArray[np.int64]:
        """Return `rows` after a check, for a codec whose `needs_rows` is true.

        Args:
            count: number of rows in the batch.

        Raises:
            SpecError: the caller passed no positions, or passed positions for a different number of
                rows.
        """
        if self.rows is None or self.rows.shape != (count,):
            raise SpecError(
                "this codec keeps state for each row, so it needs the positions of a batch's rows",
                where=f"step {self.step}",
                got="no positions" if self.rows is None else f"axes {self.rows.shape}",
                want=f"axes ({count},): each row's position in the table, from 0 on",
                fix="model(inputs, rows=positions), positions from a loader with each batch",
            )
        return self.rows


INFERENCE = StepContext()

#: Information about the codes that a packer has before it packs: none, each code's frequency, or
#: each code's frequency in each unit.
Counts = Literal["none", "pooled", "by unit"]


@dataclass(frozen=True, slots=True)
class Symbols:
    """The symbols that a cut's payload contains, before packing.

    Attributes:
        support: mask of the values that the payload contains, bool, axes (rows, width).
        codes: an integer code for each of these values, in row order; axes (values,).
        choices: number of different codes; every code is smaller than this number.
        counts: information about the codes that the packer has before it packs.
    """

    support: npt.NDArray[np.bool_]
    codes: np.ndarray
    choices: int
    counts: Counts = "none"


class Encoded(NamedTuple):
    """A payload, and the state (or None) with which the encoder later decodes the gradient."""

    payload: Payload
    saved: Any


class Decoded(NamedTuple):
    """A decoded cut, and the state (or None) with which the decoder later encodes the gradient."""

    cut: Tensor
    saved: Any


class Codec(ABC):
    """Base class of codecs, which encode one party's cut and gradient.

    A codec must implement `encode`, `decode`, `encode_grad`, `decode_grad` and `formula_ratio`. All
    other methods have defaults, for codecs that do not use what the method is for. The
    constructor's arguments are the hyper-parameters, which are fixed for a codec object.

    Attributes:
        draws: whether the encoder draws random numbers from the party's secret in training.
        repeats: whether equal values in the same exchange always give equal bytes, even if a
            restarted run repeats the exchange.
        needs_rows: whether the codec keeps state for each row of the table, so that training needs
            `StepContext.rows`.
        on_card: whether `encode` and `encode_grad` accept GPU tensors, and `decode` and
            `decode_grad` return tensors on `device`; otherwise all tensors are on the CPU.
        device: device of the party's models; if `on_card` is true, vfl sets this attribute once,
            before the first cut.
    """

    draws: ClassVar[bool] = False
    repeats: ClassVar[bool] = True
    needs_rows: ClassVar[bool] = False
    on_card: ClassVar[bool] = False
    device: torch.device = torch.device("cpu")

    def check(self, width: int) -> None:
        """Refuse a width of the cut that this codec cannot encode.

        Raises:
            WidthError: the codec cannot encode this width; the error names widths or options that
                work.
        """

    @abstractmethod
    def encode(self, cut: Tensor, context: StepContext = INFERENCE) -> Encoded:
        """Encode a cut as a payload.

        Args:
            cut: the cut, float32, axes (rows, width), finite, detached; the codec never modifies
                it.
            context: number, phase and secret of the exchange. The same cut and context give the
                same bytes.
        """

    @abstractmethod
    def decode(
        self, payload: Payload, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Decoded:
        """Return a payload's cut: float32, axes (rows, width), in writable memory.

        Raises:
            FrameError: `encode` could not have made this payload for this shape.
        """

    @abstractmethod
    def encode_grad(self, grad: Tensor, saved: Any, context: StepContext = INFERENCE) -> Payload:
        """Encode the gradient of a decoded cut; `saved` is the state that `decode` returned."""

    @abstractmethod
    def decode_grad(
        self, payload: Payload, saved: Any, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Tensor:
        """Decode the gradient of an encoded cut; `saved` is the state that `encode` returned.

        Raises:
            FrameError: `encode_grad` could not have made this payload.
        """

    def encoder_state(self, saved: Any) -> Any:
        """Return the saved state of the encoder that corresponds to a saved state of the decoder.

        With this state, vfl can decode a recorded gradient without the party that encoded the cut.
        The default is for codecs whose encoder and decoder save the same state.
        """
        return saved

    @abstractmethod
    def formula_ratio(self, width: int) -> float:
        """Return size / float32 size by the formula in the codec's paper, which omits headers."""

    def symbols(self, cut: Tensor, context: StepContext = INFERENCE) -> Symbols | None:
        """Return the symbols that `encode` would send, for the entropy bound; None if not known.

        The call does not change the codec's state.
        """
        return None

    @property
    def unmasked(self) -> Codec:
        """Return the same codec without one-time masks, for measurements."""
        return self

    def payload_limit(self, rows: int, width: int) -> int:
        """Return the largest size in bytes of a payload for a cut or gradient of this shape."""
        return 4 * rows * width + 64

    def equal_queries(self, width: int) -> bool:
        """Return whether all queries with equally many rows have payloads of equal length."""
        return True

    def simulate(
        self, cut: Tensor, context: StepContext = INFERENCE, grad_context: StepContext | None = None
    ) -> Tensor:
        """Encode and decode as one differentiable function; values and gradients are bit-equal.

        Args:
            cut: the cut, axes (rows, width); may require a gradient.
            context: context of the exchange with which `encode` is called.
            grad_context: context of `encode_grad`; it contains the secret of the party that encodes
                gradients. None uses `context`.
        """
        simulated: Tensor = _WirePath.apply(cut, self, context, grad_context or context)  # type: ignore[no-untyped-call]
        return simulated

    # The members below are for codecs that train modules or keep state, besides converting to
    # bytes. The optimiser of the party that has such a module trains the module's parameters.

    def wire_width(self, width: int) -> int:
        """Return the width of the cut that `encode` reads, for a bottom with outputs of `width`."""
        return width

    def client_module(self, width: int) -> nn.Module | None:
        """Return the feature party's trainable module between bottom and `encode`, if any."""
        return None

    def server_module(self, width: int) -> nn.Module | None:
        """Return the label party's trainable module between `decode` and the merger, if any."""
        return None

    def local_loss(self, cut: Tensor, context: StepContext) -> Tensor | None:
        """Return a scalar that the feature party adds to its loss; `cut` has an autograd graph."""
        return None

    @property
    def learns(self) -> bool:
        """Return whether the decoder needs state from all payloads committed before."""
        return False

    @property
    def rows_apart(self) -> bool:
        """Return whether, in training, each row and its gradient are encoded without other rows."""
        return False

    def commit(self, step: int) -> None:
        """Mark a step as final at this party; adaptive state may change only in this method.

        vfl commits steps in order. When cut t is encoded, and when it is decoded, both parties have
        committed the same steps: all earlier steps, or all except the last m - 1 if m cuts are in
        flight (sent before gradients return).
        """

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the adaptive state for checkpoints, including that of steps without commit."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state that `state_dict` returned."""


class _WirePath(torch.autograd.Function):
    """Encode and decode the cut forwards, and its gradient backwards, as between two parties."""

    @staticmethod
    def forward(
        ctx: Any, cut: Tensor, codec: Codec, context: StepContext, grad_context: StepContext
    ) -> Tensor:
        rows, width = cut.shape
        payload, kept = codec.encode(cut.detach(), context)
        decoded, saved = codec.decode(payload, rows, width, context)
        ctx.path = (codec, kept, saved, rows, width, context, grad_context)
        return decoded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        codec, kept, saved, rows, width, context, grad_context = ctx.path
        payload = codec.encode_grad(grads[0].contiguous(), saved, grad_context)
        return codec.decode_grad(payload, kept, rows, width, context), None, None, None
