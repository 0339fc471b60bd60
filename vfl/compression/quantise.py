"""Quantisation: every value of the cut in b bits."""

from __future__ import annotations

from typing import Literal

from vfl.compression.coding.values import value_code
from vfl.compression.packed import DenseCodec, Pad, Scale


class Quantise(DenseCodec):
    """Sends every value as a code of b bits between the smallest and the largest.

    The thesis (equations 3-1, 3-2, table 3.1) quantises only the cut and passes the gradient
    straight through; `grad` can shorten that too.

    Args:
        values: format of a value: 1 to 8 bits, ``bf16`` or ``fp32``.
        packer: ``dense`` (b bits each) or ``range`` (adaptive: frequent codes of a unit take fewer
            bits).
        scale: see `DenseCodec`.
        grad: see `DenseCodec`.
        pad: see `PackedCodec`; only ``packer=range`` has lengths that differ.

    >>> import torch
    >>> Quantise(values="4").formula_ratio(width=128)
    0.125
    >>> len(Quantise(values="4").encode(torch.zeros(2, 128)).payload)  # 4 bits and a scale a row
    136
    """

    packers = ("dense", "range")

    def __init__(
        self,
        values: str = "4",
        packer: Literal["dense", "range"] = "dense",
        scale: Scale = "batch",
        grad: str = "fp32",
        pad: Pad = "query",
    ) -> None:
        super().__init__(value_code(values), packer, scale, grad, pad)
