"""Quantisation: sends every value of the cut in b bits."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vfl.compression.base import INFERENCE, Decoded, Encoded, StepContext, Symbols
from vfl.compression.coding.bits import require_head
from vfl.compression.coding.values import value_code
from vfl.compression.packed import DenseCodec, Pad, Scale
from vfl.compression.topk import TopK
from vfl.core.errors import WidthError
from vfl.core.frame import Payload
from vfl.core.registry import require_range


class Quantise(DenseCodec):
    """Sends each value as a b-bit code; codes divide the range from smallest to largest value.

    The thesis (equations 3-1, 3-2, table 3.1) quantises only the cut, and sends the gradient
    unchanged; the option `grad` can quantise the gradient too.

    Hidden states of language models contain a few values a hundred times as large as all others.
    Such large values stretch the range that the codes divide. With `outliers`, the codec sends the
    largest values separately, as Dettmers et al. 2022 (LLM.int8(), section 3.2) do with whole
    columns. With ``scale=row``, a large value stretches only the range of its own row.

    Args:
        values: format of a value: 1 to 8 bits, ``bf16`` or ``fp32``.
        packer: ``dense`` (b bits per value) or ``range`` (adaptive: codes that occur often in a
            unit take fewer bits).
        scale: see `DenseCodec`.
        grad: see `DenseCodec`.
        pad: see `PackedCodec`; payload lengths depend on the values only with ``packer=range``.
        outliers: number of values of largest magnitude in each row that are sent as an index and a
            bfloat16; the codes divide the range of the other values.

    Raises:
        BadOptionError: a format is unknown, or the number of outliers is negative.

    >>> import torch
    >>> Quantise(values="4").formula_ratio(width=128)
    0.125
    >>> len(Quantise(values="4").encode(torch.zeros(2, 128)).payload)  # 4 bits and a scale a row
    136
    >>> cut, apart = torch.tensor([[0.0, 1.0, 500.0, 2.0]]), Quantise(values="4", outliers=1)
    >>> apart.decode(apart.encode(cut).payload, 1, 4).cut.tolist()
    [[0.0625, 1.0625, 500.0, 1.9375]]
    """

    packers = ("dense", "range")

    def __init__(
        self,
        values: str = "4",
        packer: Literal["dense", "range"] = "dense",
        scale: Scale = "batch",
        grad: str = "fp32",
        pad: Pad = "query",
        outliers: int = 0,
    ) -> None:
        super().__init__(value_code(values), packer, scale, grad, pad)
        require_range("outliers", outliers, 0)
        self.outliers = outliers
        self._apart = TopK(outliers, "bf16", "index") if outliers else None

    def check(self, width: int) -> None:
        super().check(width)
        if self.outliers >= width:
            raise WidthError(
                f"{self.outliers} outliers per row leave no other value of a cut of width {width}",
                got=f"outliers = {self.outliers}",
                want=f"outliers < {width}",
                fix="outliers=0 sends every value as a code",
            )

    def encode(self, cut: Tensor, context: StepContext = INFERENCE) -> Encoded:
        if self._apart is None:
            return super().encode(cut, context)
        large = self._apart.encode(cut, context)
        coded = super().encode(_filled(cut, large.saved), context)
        return Encoded(bytes(large.payload) + bytes(coded.payload), coded.saved)

    def decode(
        self, payload: Payload, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Decoded:
        if self._apart is None:
            return super().decode(payload, rows, width, context)
        view, head = memoryview(payload), self._apart.layout(width).limit_bytes(rows)
        require_head(view, head, "its outliers")
        self._apart.device = self.device
        large, indices = self._apart.decode(view[:head], rows, width, context)
        cut, saved = super().decode(view[head:], rows, width, context)
        where = indices.to(cut.device)
        return Decoded(cut.scatter_(1, where, large.gather(1, where)), saved)

    def symbols(self, cut: Tensor, context: StepContext = INFERENCE) -> Symbols | None:
        """Return the cut's codes; None with outliers, whose indices and values are not codes."""
        return super().symbols(cut, context) if self._apart is None else None

    def payload_limit(self, rows: int, width: int) -> int:
        apart = 0 if self._apart is None else self._apart.layout(width).limit_bytes(rows)
        return super().payload_limit(rows, width) + apart

    def formula_ratio(self, width: int) -> float:
        """Return b/32 for codes of b bits (thesis table 3.1), plus the share of the outliers."""
        apart = 0.0 if self._apart is None else self._apart.formula_ratio(width)
        return super().formula_ratio(width) + apart


def _filled(cut: Tensor, outliers: Tensor) -> Tensor:
    """Return the cut with each outlier replaced by a value within the range of the other values.

    Args:
        cut: the cut, axes (rows, width), finite.
        outliers: indices of the outliers, axes (rows, outliers); fewer than the width.
    """
    if not cut.numel():
        return cut
    indices = outliers.to(cut.device)
    sizes = cut.abs().scatter_(1, indices, torch.inf)
    within = cut.gather(1, sizes.argmin(1, keepdim=True))
    return cut.scatter(1, indices, within.expand(-1, indices.shape[1]))
