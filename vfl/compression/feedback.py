"""Error feedback: both parties store an estimate of each row's cut, and frames contain its change.

If a row was sent before, the feature party sends the compressed difference between the row's new
cut and its stored estimate. Both parties then add the compressed difference to their estimate of
the row's cut. Frames of later steps send the values that an earlier frame left out. So, as the
training converges, the error of sending only k values disappears.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl.compression.base import INFERENCE, Codec, Decoded, Encoded, StepContext
from vfl.compression.coding.bits import require_head
from vfl.compression.coding.values import GradientCode, require_finite
from vfl.compression.none import dense_bytes, dense_tensor
from vfl.compression.packed import PackedCodec
from vfl.compression.quantise import Quantise
from vfl.compression.topk import TopK
from vfl.core.frame import Payload
from vfl.core.registry import require_choice

Positions = npt.NDArray[np.int64]
#: Largest number of steps whose estimates wait for `commit`; the oldest ones beyond it are dropped.
_MOST_WAITING = 64


class _Batch(NamedTuple):
    """Estimates of a batch's rows, (rows, width), 0 where missing, and a mask of stored ones."""

    rows: Positions
    surrogates: Tensor
    known: Tensor


class _Surrogates:
    """The stored estimate of each row that was sent; only `commit` changes stored estimates."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._table = torch.zeros(0, 0)
        self._waiting: dict[int, tuple[Positions, Tensor]] = {}

    def of(self, rows: Positions, width: int) -> _Batch:
        """Return the stored estimates of the rows of a batch."""
        slots = torch.tensor([self._slots.get(row, -1) for row in rows.tolist()], dtype=torch.int64)
        known, found = slots >= 0, torch.zeros(len(rows), width)
        if known.any():
            found[known] = self._table[slots[known]]
        return _Batch(rows, found, known)

    def record(self, step: int, rows: Positions, values: Tensor) -> None:
        """Hold the new estimates of a step until `commit` stores them."""
        self._waiting[step] = rows, values
        while len(self._waiting) > _MOST_WAITING:
            del self._waiting[min(self._waiting)]

    def commit(self, step: int) -> None:
        """Store the held estimates of a step, which both parties have completed."""
        rows, values = self._waiting.pop(step, (np.empty(0, np.int64), torch.zeros(0, 0)))
        if not len(rows):
            return
        slots = [self._slots.setdefault(row, len(self._slots)) for row in rows.tolist()]
        if len(self._slots) > len(self._table):
            grown = torch.zeros(2 * len(self._slots), values.shape[1])
            grown[: len(self._table)] = self._table if len(self._table) else 0
            self._table = grown
        self._table[slots] = values

    def state_dict(self) -> dict[str, Tensor]:
        """Return the estimates of all rows as tensors."""
        state = {
            "rows": torch.tensor(list(self._slots), dtype=torch.int64),
            "values": self._table[: len(self._slots)].clone(),
        }
        for step, (rows, values) in self._waiting.items():
            state[f"waiting.{step}.rows"] = torch.from_numpy(rows.copy())
            state[f"waiting.{step}.values"] = values.clone()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state that `state_dict` returned; an empty state changes nothing."""
        if not state:
            return
        self._slots = {row: slot for slot, row in enumerate(state["rows"].tolist())}
        self._table = state["values"].clone()
        steps = [int(name.split(".")[1]) for name in state if name.endswith(".rows")]
        self._waiting = {
            step: (state[f"waiting.{step}.rows"].numpy(), state[f"waiting.{step}.values"])
            for step in sorted(steps)
        }


class RowFeedback(Codec):
    """Sends how a row's cut has changed since this row was last sent.

    Queries are sent as float32, without compression, because the row of a query may have no
    estimate.

    Args:
        of: codec that compresses the differences; it must not have learned state or random draws.
        grad: format of gradients; see `ErrorFeedback`.
        first: format of a row's first cut: ``compressed`` sends it compressed, as a difference from
            zero; ``dense`` sends float32.
    """

    needs_rows: ClassVar[bool] = True

    def __init__(self, of: PackedCodec, grad: str, first: Literal["compressed", "dense"]) -> None:
        self._of = of
        self._grad = GradientCode(grad)
        self._first_is_dense = first == "dense"
        self._surrogates = _Surrogates()

    def check(self, width: int) -> None:
        self._of.check(width)

    def encode(self, cut: Tensor, context: StepContext = INFERENCE) -> Encoded:
        if not context.training:
            return Encoded(dense_bytes(cut), None)
        rows, width = cut.shape
        batch = self._surrogates.of(context.positions(rows), width)
        whole, some = self._parts(batch)
        difference = cut[some] - batch.surrogates[some]
        require_finite(cut[whole])
        require_finite(difference)
        changes = self._of.encode(difference, context).payload
        payload = bytes(dense_bytes(cut[whole])) + bytes(changes)
        # stores the estimates as the decoder will
        self.decode(payload, rows, width, context)
        return Encoded(payload, None)

    def decode(
        self, payload: Payload, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Decoded:
        if not context.training:
            return Decoded(dense_tensor(payload, rows, width), None)
        batch = self._surrogates.of(context.positions(rows), width)
        whole, some = self._parts(batch)
        dense, view = 4 * width * int(whole.sum()), memoryview(payload)
        require_head(view, dense, "its new rows")
        moved = batch.surrogates.clone()
        moved[whole] = dense_tensor(view[:dense], int(whole.sum()), width)
        moved[some] += self._of.decode(view[dense:], int(some.sum()), width, context).cut
        self._surrogates.record(context.step, batch.rows, moved)
        return Decoded(moved.clone(), None)

    def encode_grad(self, grad: Tensor, saved: Any, context: StepContext = INFERENCE) -> Payload:
        return self._grad.encode(grad, None, context)

    def decode_grad(
        self, payload: Payload, saved: Any, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Tensor:
        return torch.from_numpy(self._grad.decode(payload, rows, width, None))

    def formula_ratio(self, width: int) -> float:
        """Return the ratio for differences; the formula ignores first cuts sent as float32."""
        return self._of.formula_ratio(width)

    def payload_limit(self, rows: int, width: int) -> int:
        return super().payload_limit(rows, width) + self._of.payload_limit(rows, width)

    @property
    def learns(self) -> bool:
        return True

    def commit(self, step: int) -> None:
        self._surrogates.commit(step)

    def state_dict(self) -> Mapping[str, Tensor]:
        return self._surrogates.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._surrogates.load_state_dict(state)

    def _parts(self, batch: _Batch) -> tuple[Tensor, Tensor]:
        """Return masks, axes (rows,), of rows to send as float32 and as differences."""
        whole = ~batch.known if self._first_is_dense else torch.zeros_like(batch.known)
        return whole, ~whole


class ErrorFeedback(RowFeedback):
    """EF-VFL: sends, for each row, the k largest changes since the row was last sent.

    Source: Valdeira, Xavier, Soares, Chi, "Communication-efficient Vertical Federated Learning via
    Compressed Error Feedback", IEEE Transactions on Signal Processing 2025.

    The codec is the paper's algorithm 1 with private labels. The label party computes the gradient
    at the estimated cut, and returns all its values. Each party stores a float32 vector for each
    training row.

    Args:
        k: number of changed values to send per row.
        values: format of a change: ``fp32``, ``bf16``, or 1 to 8 bits.
        packer: ``enumerative``, ``index`` or ``bitmap``, see `TopK`.
        scale: group of values with common range limits, for values of 1 to 8 bits: the whole
            ``batch`` or each ``row``.
        grad: format of a gradient: ``fp32``, ``bf16``, or 2 to 8 bits with one scale per row and
            random rounding without bias.

    >>> cut, codec = torch.tensor([[4.0, 3.0, 2.0, 1.0]]), ErrorFeedback(k=1)
    >>> for step in range(3):
    ...     context = StepContext(step, training=True, rows=np.array([7]))
    ...     print(codec.decode(codec.encode(cut, context).payload, 1, 4, context).cut.tolist())
    ...     codec.commit(step)
    [[4.0, 0.0, 0.0, 0.0]]
    [[4.0, 3.0, 0.0, 0.0]]
    [[4.0, 3.0, 2.0, 0.0]]

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(
        self,
        k: int,
        values: str = "fp32",
        packer: Literal["enumerative", "index", "bitmap"] = "enumerative",
        scale: Literal["batch", "row"] = "batch",
        grad: str = "fp32",
    ) -> None:
        require_choice("packer", packer, ("enumerative", "index", "bitmap"))
        require_choice("scale", scale, ("batch", "row"))
        super().__init__(TopK(k, values, packer, scale), grad, "compressed")


class AQSGD(RowFeedback):
    """AQ-SGD: sends each value's change in b bits; a row's first cut is sent as float32.

    Source: Wang et al., "Fine-tuning Language Models over Slow Networks using Activation
    Quantization with Guarantees", NeurIPS 2022, algorithm 1, which quantises gradients without
    feedback.

    Args:
        values: number of bits of a change, 1 to 8.
        scale: group of changes with common range limits: the whole ``batch`` or each ``row``.
        grad: see `ErrorFeedback`.

    >>> codec, cut = AQSGD(values="4"), torch.ones(2, 64)
    >>> for step in range(2):
    ...     context = StepContext(step, training=True, rows=np.arange(2))
    ...     print(len(codec.encode(cut, context).payload))  # dense; then 4 bits each and a scale
    ...     codec.commit(step)
    512
    68

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(
        self, values: str = "4", scale: Literal["batch", "row"] = "batch", grad: str = "8"
    ) -> None:
        require_choice("values", values, tuple("12345678"))
        require_choice("scale", scale, ("batch", "row"))
        super().__init__(Quantise(values, scale=scale), grad, "dense")
