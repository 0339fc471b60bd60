"""The codec contract: encode and decode a cut, and the cut's gradient.

A connection has a codec object at each of its two parties. Both parties build their codec object
from the same spec. The parties agree on the cut's width in the handshake; the step determines the
number of rows in a payload. So a decoder never reads from a payload how much memory to allocate.
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
    """Number, phase, secret and rows of an exchange, for the codec.

    Attributes:
        step: number of the exchange.
        training: whether the exchange is part of the training; codecs draw random numbers only in
            training.
        secret: the encoding party's secret; None at the decoding party. In an evaluation or
            prediction, only the defense of a feature party receives a secret.
        rows: position of each row of a training batch in the run's table, int64, equal at both
            parties; None at inference, or if the caller passed no positions.
    """

    step: int = 0
    training: bool = False
    secret: Secret | None = field(default=None, repr=False)
    rows: npt.NDArray[np.int64] | None = field(default=None, repr=False, compare=False)

    def positions(self, count: int) -> npt.NDArray[np.int64]:
        """Return `rows` after a check, for a codec with `needs_rows`.

        Args:
            count: number of rows in the batch.

        Raises:
            SpecError: the caller passed no positions, or positions of a batch of another size.
        """
        if self.rows is None or self.rows.shape != (count,):
            raise SpecError(
                "this codec keeps state for each row, so it needs the positions of a batch's rows",
                where=f"step {self.step}",
                got="no positions" if self.rows is None else f"axes {self.rows.shape}",
                want=f"axes ({count},), whole numbers from 0 on",
                fix="model(inputs, rows=positions), positions from a loader with each batch",
            )
        return self.rows


INFERENCE = StepContext()

#: A packer's knowledge about the codes before it packs: none, the frequency of each code, or each
#: code's frequency in each unit.
Counts = Literal["none", "pooled", "by unit"]


@dataclass(frozen=True, slots=True)
class Symbols:
    """The symbols in a cut's payload before packing.

    Attributes:
        support: mask of the values that the payload contains, bool, axes (rows, width).
        codes: an integer code for each of these values, in row order; axes (values,).
        choices: number of different codes; every code is smaller than this number.
        counts: the packer's knowledge about the codes before it packs.
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

    A codec implements `encode`, `decode`, `encode_grad`, `decode_grad` and `formula_ratio`. All
    other methods have defaults that suit codecs without the corresponding feature. The
    constructor's arguments are the hyper-parameters, which never change afterwards.

    Attributes:
        draws: whether the encoder draws from the party's secret in training.
        repeats: whether equal values in the same exchange always give equal bytes, even if a
            restart repeats the exchange.
        needs_rows: whether the codec keeps state for each row, so that training needs
            `StepContext.rows`.
        on_card: whether `encode` and `encode_grad` accept GPU tensors, and `decode` and
            `decode_grad` return tensors on `device`; otherwise all tensors are on the CPU.
        device: device of the party's models; if `on_card` is true, vfl sets it once before the
            first cut.
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
        """Return the encoder's saved state that corresponds to a decoder's saved state.

        With this state, vfl can decode a recorded gradient without the party that encoded the cut.
        The default suits codecs whose encoder and decoder save the same state.
        """
        return saved

    @abstractmethod
    def formula_ratio(self, width: int) -> float:
        """Return compressed size / dense fp32 size by the papers' formulas, which omit headers."""

    def symbols(self, cut: Tensor, context: StepContext = INFERENCE) -> Symbols | None:
        """Return the symbols that `encode` would send, for the entropy bound; None if unknown.

        The call changes no state.
        """
        return None

    @property
    def unmasked(self) -> Codec:
        """Return the same codec without one-time masks, for measurements."""
        return self

    def payload_limit(self, rows: int, width: int) -> int:
        """Return the largest payload, in bytes, of a cut or gradient with this shape."""
        return 4 * rows * width + 64

    def equal_queries(self, width: int) -> bool:
        """Return whether all queries with equally many rows have payloads of the same length."""
        return True

    def simulate(
        self, cut: Tensor, context: StepContext = INFERENCE, grad_context: StepContext | None = None
    ) -> Tensor:
        """Encode and decode as one differentiable function, with bit-equal values and gradients.

        Args:
            cut: the cut, axes (rows, width); may require a gradient.
            context: context of `encode`.
            grad_context: context of `encode_grad`; it contains the secret of the party that encodes
                gradients.
        """
        simulated: Tensor = _WirePath.apply(cut, self, context, grad_context or context)  # type: ignore[no-untyped-call]
        return simulated

    # The members below are optional parts of a codec besides the conversion to bytes. The optimiser
    # of the party that has a module trains the module's parameters.

    def wire_width(self, width: int) -> int:
        """Return the width of the input of `encode`, for a bottom whose outputs have this width."""
        return width

    def client_module(self, width: int) -> nn.Module | None:
        """Return a trainable module between the bottom and `encode`, at the feature party."""
        return None

    def server_module(self, width: int) -> nn.Module | None:
        """Return a trainable module between `decode` and the merge, at the label party."""
        return None

    def local_loss(self, cut: Tensor, context: StepContext) -> Tensor | None:
        """Return a scalar that the feature party adds to its loss; `cut` has an autograd graph."""
        return None

    @property
    def learns(self) -> bool:
        """Return whether the decoder needs state from all earlier committed payloads."""
        return False

    @property
    def rows_apart(self) -> bool:
        """Return whether training encodes each row and its gradient independently of other rows."""
        return False

    def commit(self, step: int) -> None:
        """Mark a step as final at this party; adaptive state may change only in this method.

        vfl commits steps in order. When cut t is encoded and when it is decoded, the parties have
        committed the same steps: all earlier steps, or all except the last m - 1 if m cuts are in
        flight.
        """

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the adaptive state for checkpoints, including the state of uncommitted steps."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state that `state_dict` returned."""


class _WirePath(torch.autograd.Function):
    """Encode and decode the cut forward, and its gradient backward, as between two parties."""

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
