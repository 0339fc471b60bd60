"""Training inside an attack: a few rows at once, many steps, nothing global touched."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vfl.seeds import scoped


def key_of(draw: torch.Generator) -> int:
    """A number for `seeds.scoped`, from the attack's own generator."""
    return int(torch.randint(2**62, (), generator=draw))


def fit(
    module: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    steps: int,
    rate: float,
    draw: torch.Generator,
    keep_norms: bool = False,
    batch: int = 0,
) -> nn.Module:
    """The module after so many Adam steps on the cross-entropy (Kingma and Ba 2015).

    Args:
        module: gives logits, axes (rows, classes).
        inputs: axes (rows, ...).
        labels: int64 codes, axes (rows,), or class shares, axes (rows, classes).
        steps: how many.
        rate: the learning rate.
        draw: dropout draws from here.
        keep_norms: batch normalisation uses and keeps the statistics it has.
        batch: rows of a step, drawn with replacement; all rows where there are no more, or if 0.
    """
    training(module, keep_norms)
    optimizer = torch.optim.Adam(module.parameters(), lr=rate)
    with scoped(key_of(draw)):
        for _ in range(steps):
            some, truth = inputs, labels
            if 0 < batch < len(inputs):
                drawn = torch.randint(len(inputs), (batch,))
                some, truth = inputs[drawn], labels[drawn]
            optimizer.zero_grad()
            loss = F.cross_entropy(module(some), truth)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return module.eval()


def training(module: nn.Module, keep_norms: bool) -> None:
    """Set training mode, batch normalisation apart if its statistics are to stay."""
    module.train()
    for part in module.modules():
        if keep_norms and isinstance(part, _BatchNorm):
            part.eval()
