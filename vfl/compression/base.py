"""The codec contract: a cut becomes a payload and comes back, and so does its gradient.

One codec object serves one party at one end of a link. Both ends build it from the same spec.
The width of the cut is agreed in the handshake and the rows of a payload follow from the step,
so no size that is allocated is ever read from a payload.
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
    """When a cut travels, and whose private draws it may use.

    Attributes:
        step: number of the exchange.
        training: False for evaluation and prediction, where no codec draws.
        secret: the encoding party's secret; None at the decoding end. At inference only a feature
            party's defense has it.
        rows: position of each row of a training batch in the run's own table, int64, the same at
            both ends of a link; None at inference, and where the caller of a module gave none.
    """

    step: int = 0
    training: bool = False
    secret: Secret | None = field(default=None, repr=False)
    rows: npt.NDArray[np.int64] | None = field(default=None, repr=False, compare=False)

    def positions(self, count: int) -> npt.NDArray[np.int64]:
        """`rows`, for a codec with `needs_rows`.

        Args:
            count: rows of the batch.

        Raises:
            SpecError: nobody gave the positions, or those of another batch.
        """
        if self.rows is None or self.rows.shape != (count,):
            raise SpecError(
                "this codec keeps state for each row, and needs the positions of a batch's rows",
                where=f"step {self.step}",
                got="no positions" if self.rows is None else f"axes {self.rows.shape}",
                want=f"axes ({count},), whole numbers from 0 on",
                fix="model(inputs, rows=positions), of a loader that gives them with each batch",
            )
        return self.rows


INFERENCE = StepContext()

#: What a packer may know of the codes: nothing, how often each occurs, or how often in each unit.
Counts = Literal["none", "pooled", "by unit"]


@dataclass(frozen=True, slots=True)
class Symbols:
    """What a payload says of a cut, before it is packed.

    Attributes:
        support: which values travel, bool of axes (rows, width).
        codes: a whole number for each of those, in row order; axes (values,).
        choices: the codes are below it.
        counts: what the packer may know of the codes in advance.
    """

    support: npt.NDArray[np.bool_]
    codes: np.ndarray
    choices: int
    counts: Counts = "none"


class Encoded(NamedTuple):
    """A payload and what its maker must keep until the gradient comes (None: nothing)."""

    payload: Payload
    saved: Any


class Decoded(NamedTuple):
    """A cut and what its receiver must keep to encode the gradient (None: nothing)."""

    cut: Tensor
    saved: Any


class Codec(ABC):
    """How one party's cut and gradient travel.

    A member implements `encode`, `decode`, `encode_grad`, `decode_grad` and `formula_ratio`.
    The remaining methods have defaults that mean "this codec has none of it".
    Hyper-parameters are the arguments of the constructor and are never changed afterwards.

    Attributes:
        draws: what travels of a training cut is drawn from the party's secret, to hide something.
        repeats: the same values in the same exchange are the same bytes, in every attempt.
        needs_rows: state is kept for each row, so contexts of training name the `rows`.
        on_card: `encode` and `encode_grad` take tensors of a graphics card, and `decode` and
            `decode_grad` leave theirs on `device`; without it all tensors are the processor's.
        device: where the party's models run, set once before the first cut where `on_card` is true.
    """

    draws: ClassVar[bool] = False
    repeats: ClassVar[bool] = True
    needs_rows: ClassVar[bool] = False
    on_card: ClassVar[bool] = False
    device: torch.device = torch.device("cpu")

    def check(self, width: int) -> None:
        """Refuse a width this codec cannot carry.

        Raises:
            WidthError: with the widths or options that would fit.
        """

    @abstractmethod
    def encode(self, cut: Tensor, context: StepContext = INFERENCE) -> Encoded:
        """Payload of a cut.

        Args:
            cut: float32, axes (rows, width), finite, detached; never modified.
            context: step, phase and private draws. The same cut and context give the same bytes.
        """

    @abstractmethod
    def decode(
        self, payload: Payload, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Decoded:
        """The cut a payload stands for: float32, axes (rows, width), writable memory.

        Raises:
            FrameError: any payload that `encode` could not have made for this shape.
        """

    @abstractmethod
    def encode_grad(self, grad: Tensor, saved: Any, context: StepContext = INFERENCE) -> Payload:
        """Payload of the gradient of a decoded cut; `saved` is what `decode` returned."""

    @abstractmethod
    def decode_grad(
        self, payload: Payload, saved: Any, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Tensor:
        """The gradient for the cut that was encoded; `saved` is what `encode` returned.

        Raises:
            FrameError: any payload that `encode_grad` could not have made.
        """

    def encoder_state(self, saved: Any) -> Any:
        """What `encode` kept, from what `decode` of its payload saved.

        With it a recorded gradient is decoded again without the party that encoded the cut. The
        default suits codecs whose two ends hold the same.
        """
        return saved

    @abstractmethod
    def formula_ratio(self, width: int) -> float:
        """Size of a cut divided by dense fp32, as the literature counts it (no header)."""

    def symbols(self, cut: Tensor, context: StepContext = INFERENCE) -> Symbols | None:
        """What `encode` would say of a cut, for its entropy bound; None where that is not known.

        Nothing is learned from it, and nothing changes.
        """
        return None

    @property
    def unmasked(self) -> Codec:
        """What a measurement encodes with: the same codec without masks that are used once."""
        return self

    def payload_limit(self, rows: int, width: int) -> int:
        """Largest payload in bytes either direction can need for this shape."""
        return 4 * rows * width + 64

    def equal_queries(self, width: int) -> bool:
        """Whether all queries of as many rows of this width have one length, whatever they hold."""
        return True

    def simulate(
        self, cut: Tensor, context: StepContext = INFERENCE, grad_context: StepContext | None = None
    ) -> Tensor:
        """The wire path as one differentiable function, bit-equal to it in value and gradient.

        Args:
            cut: axes (rows, width); may require a gradient.
            context: what `encode` is given.
            grad_context: what `encode_grad` is given; the other end's secret lives in it.
        """
        simulated: Tensor = _WirePath.apply(cut, self, context, grad_context or context)  # type: ignore[no-untyped-call]
        return simulated

    # What a codec may own beyond bytes. A module's parameters train with its side's optimiser.

    def wire_width(self, width: int) -> int:
        """Width of what `encode` gets after `client_module`, for a bottom of the given width."""
        return width

    def client_module(self, width: int) -> nn.Module | None:
        """A trainable module between the bottom and `encode`, at the feature party."""
        return None

    def server_module(self, width: int) -> nn.Module | None:
        """A trainable module between `decode` and the merge, at the label party."""
        return None

    def local_loss(self, cut: Tensor, context: StepContext) -> Tensor | None:
        """A scalar the feature party adds to its own backward pass; `cut` carries a graph."""
        return None

    @property
    def learns(self) -> bool:
        """Whether a payload can only be read by an end that has read and committed those before."""
        return False

    @property
    def rows_apart(self) -> bool:
        """Whether a row and its gradient become the same in training, whatever rows are with it."""
        return False

    def commit(self, step: int) -> None:
        """A step is final at this end: the only place where adaptive state may move.

        Steps are committed in order, and when cut t is encoded or decoded both ends have committed
        the same ones: all before it, or with m in flight all but the last m - 1.
        """

    def state_dict(self) -> Mapping[str, Tensor]:
        """Adaptive state, checkpointed with the party; that of steps not yet committed too."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave."""


class _WirePath(torch.autograd.Function):
    """encode -> decode forward, encode_grad -> decode_grad backward: what really travels."""

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
