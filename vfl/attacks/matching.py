"""Inputs that a bottom maps to given cuts, searched for directly."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def closer_inputs(
    bottom: nn.Module, cuts: Tensor, start: Tensor, steps: int, rate: float, smooth: float
) -> Tensor:
    """`start` after so many Adam steps towards inputs whose cuts are those given.

    Each row minimises ||M(x) - h||^2 + smooth * TV(x) by itself (thesis eq 2-3; He et al. 2019).

    Args:
        bottom: M; its weights stay.
        cuts: h, axes (rows, width).
        start: axes (rows, ...).
        steps: how many.
        rate: the learning rate.
        smooth: weight of the total variation.
    """
    inputs = start.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([inputs], lr=rate)
    for _ in range(steps):
        loss = (bottom(inputs) - cuts).square().sum(1) + smooth * total_variation(inputs)
        (inputs.grad,) = torch.autograd.grad(loss.sum(), inputs)
        optimizer.step()
    return inputs.detach()


def total_variation(pictures: Tensor) -> Tensor:
    """Sum of the differences between neighbouring pixels, axes (rows,); 0 for plain columns.

    Rudin et al. 1992, in its form with absolute values.

    >>> total_variation(torch.tensor([[[[1.0, 3.0], [0.0, 3.0]]]]))
    tensor([6.])
    """
    if pictures.dim() < 4:
        return pictures.new_zeros(len(pictures))
    down = (pictures[:, :, 1:] - pictures[:, :, :-1]).abs().flatten(1).sum(1)
    right = (pictures[..., 1:] - pictures[..., :-1]).abs().flatten(1).sum(1)
    return down + right
