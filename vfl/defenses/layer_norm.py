"""Layer normalisation of the cut, without trainable scale or shift."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from vfl.defenses.base import Defense, Side


class LayerNorm(Defense):
    """Each row of the cut gets mean 0 and variance 1 (Ba et al. 2016, eq 3-4, no affine part).

    An anti-defense on its own: labels get *easier* to infer. On MNIST with one label a class, fine
    tuning a top reads 66 % of the classes from plain cuts and 97 % from normalised ones. It is the
    companion of losses that need a bounded cut (`potential` brings it along) and a row of its own
    in comparisons, so that nobody mistakes its effect for theirs. Only the feature party runs it;
    it has no state and promises nothing.

    >>> import torch
    >>> wrapped = LayerNorm().wrap_bottom(nn.Identity(), width=2)
    >>> [round(value, 3) for value in wrapped(torch.tensor([[1.0, 3.0]]))[0].tolist()]
    [-1.0, 1.0]
    """

    side: ClassVar[Side] = "feature"

    def wrap_bottom(self, bottom: nn.Module, width: int) -> nn.Module:
        return nn.Sequential(bottom, nn.LayerNorm(width, elementwise_affine=False))
