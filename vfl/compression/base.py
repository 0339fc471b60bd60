"""The codec contract: encode and decode a cut, and its gradient.

One codec object serves one party at one end of a link. Both ends build it from the same spec. The
parties agree on the cut's width in the handshake, and the rows of a payload follow from the step.
So a decoder never reads the size of an allocation from a payload.
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
    """Step, phase and private random draws of an exchange.

    Attributes:
        step: number of the exchange.
        training: False for evaluation and prediction, where no codec draws.
        secret: the encoding party's secret; None at the decoding end. At inference only a feature
            party's defense receives it.
        rows: position of each row of a training batch in the run's table, int64, equal at both ends
            of a link; None at inference, or if the caller of a module passed none.
    """

    step: int = 0
    training: bool = False
    secret: Secret | None = field(default=None, repr=False)
    rows: npt.NDArray[np.int64] | None = field(default=None, repr=False, compare=False)

    def positions(self, count: int) -> npt.NDArray[np.int64]:
        """Return `rows`, for a codec with `needs_rows`.

        Args:
            count: rows of the batch.

        Raises:
            SpecError: the caller passed no positions, or passed the positions of another batch.
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

#: A packer's knowledge of the codes: none, the frequency of each, or its frequency in each unit.
Counts = Literal["none", "pooled", "by unit"]


@dataclass(frozen=True, slots=True)
class Symbols:
    """The symbols of a cut's payload, before packing.

    Attributes:
        support: mask of the values that are sent, bool of axes (rows, width).
        codes: an integer for each of those values, in row order; axes (values,).
        choices: codes are below this number.
        counts: the packer's advance knowledge of the codes.
    """

    support: npt.NDArray[np.bool_]
    codes: np.ndarray
    choices: int
    counts: Counts = "none"


class Encoded(NamedTuple):
    """A payload, and the encoder's state for the gradient (None: no state)."""

    payload: Payload
    saved: Any


class Decoded(NamedTuple):
    """A cut, and the decoder's state to encode the gradient (None: no state)."""

    cut: Tensor
    saved: Any


class Codec(ABC):
    """Encoding of one party's cut and gradient.

    A member implements `encode`, `decode`, `encode_grad`, `decode_grad` and `formula_ratio`. The
    remaining methods have defaults for codecs without that feature. Hyper-parameters are the
    arguments of the constructor and are never changed afterwards.

    Attributes:
        draws: whether the encoder draws from the party's secret in training, to hide values.
        repeats: whether equal values in the same exchange always give equal bytes, in every
            attempt.
        needs_rows: whether the codec keeps state for each row, so that training contexts need
            `rows`.
        on_card: whether `encode` and `encode_grad` accept tensors of a graphics card, and `decode`
            and `decode_grad` leave theirs on `device`; otherwise all tensors are on the processor.
        device: device of the party's models, set once before the first cut where `on_card` is true.
    """

    draws: ClassVar[bool] = False
    repeats: ClassVar[bool] = True
    needs_rows: ClassVar[bool] = False
    on_card: ClassVar[bool] = False
    device: torch.device = torch.device("cpu")

    def check(self, width: int) -> None:
        """Refuse a width that this codec cannot carry.

        Raises:
            WidthError: the width does not fit; the error names widths or options that would.
        """

    @abstractmethod
    def encode(self, cut: Tensor, context: StepContext = INFERENCE) -> Encoded:
        """Encode a cut as a payload.

        Args:
            cut: float32, axes (rows, width), finite, detached; never modified.
            context: step, phase and private draws. The same cut and context give the same bytes.
        """

    @abstractmethod
    def decode(
        self, payload: Payload, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Decoded:
        """Decode a payload to a cut: float32, axes (rows, width), writable memory.

        Raises:
            FrameError: `encode` could not have made this payload for this shape.
        """

    @abstractmethod
    def encode_grad(self, grad: Tensor, saved: Any, context: StepContext = INFERENCE) -> Payload:
        """Encode the gradient of a decoded cut; `saved` is what `decode` returned."""

    @abstractmethod
    def decode_grad(
        self, payload: Payload, saved: Any, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Tensor:
        """Decode the gradient of the encoded cut; `saved` is what `encode` returned.

        Raises:
            FrameError: `encode_grad` could not have made this payload.
        """

    def encoder_state(self, saved: Any) -> Any:
        """Return the encoder's state that belongs to the state which `decode` returned.

        It allows to decode a recorded gradient without the party that encoded the cut. The default
        suits codecs whose two ends keep the same state.
        """
        return saved

    @abstractmethod
    def formula_ratio(self, width: int) -> float:
        """Return the size relative to dense fp32, as the literature counts it (no header)."""

    def symbols(self, cut: Tensor, context: StepContext = INFERENCE) -> Symbols | None:
        """Return the symbols that `encode` would send, for the entropy bound; None if unknown.

        The call changes no state.
        """
        return None

    @property
    def unmasked(self) -> Codec:
        """The same codec without one-time masks, for measurements."""
        return self

    def payload_limit(self, rows: int, width: int) -> int:
        """Return the largest payload in bytes that either direction can need for this shape."""
        return 4 * rows * width + 64

    def equal_queries(self, width: int) -> bool:
        """Return whether all queries with the same number of rows have one length."""
        return True

    def simulate(
        self, cut: Tensor, context: StepContext = INFERENCE, grad_context: StepContext | None = None
    ) -> Tensor:
        """Run the wire path as one differentiable function; values and gradients are bit-equal.

        Args:
            cut: axes (rows, width); may require a gradient.
            context: context of `encode`.
            grad_context: context of `encode_grad`; it contains the other end's secret.
        """
        simulated: Tensor = _WirePath.apply(cut, self, context, grad_context or context)  # type: ignore[no-untyped-call]
        return simulated

    # Optional parts of a codec besides bytes. A module's parameters train with its side's
    # optimiser.

    def wire_width(self, width: int) -> int:
        """Return the width that `encode` receives, for a bottom of this width."""
        return width

    def client_module(self, width: int) -> nn.Module | None:
        """Return a trainable module between the bottom and `encode`, at the feature party."""
        return None

    def server_module(self, width: int) -> nn.Module | None:
        """Return a trainable module between `decode` and the merge, at the label party."""
        return None

    def local_loss(self, cut: Tensor, context: StepContext) -> Tensor | None:
        """Return a scalar that the feature party adds to its own loss; `cut` carries a graph."""
        return None

    @property
    def learns(self) -> bool:
        """Return whether a payload can be decoded only after all earlier ones were committed."""
        return False

    @property
    def rows_apart(self) -> bool:
        """Return whether training encodes each row and its gradient independently of others."""
        return False

    def commit(self, step: int) -> None:
        """Mark a step as final at this end; adaptive state may change only here.

        Steps are committed in order. When cut t is encoded or decoded, both ends have committed
        same steps: all earlier steps, or with m in flight all but the last m - 1.
        """

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return adaptive state for checkpoints, including that of uncommitted steps."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state_dict`."""


class _WirePath(torch.autograd.Function):
    """encode -> decode forward, encode_grad -> decode_grad backward, as on the wire."""

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
