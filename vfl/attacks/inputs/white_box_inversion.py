"""White-box inversion: finds inputs for which the victim's bottom returns the sent cuts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vfl.attacks.base import Attack, require_at_least
from vfl.attacks.view import Grant, View


def closer_inputs(
    bottom: nn.Module, cuts: Tensor, start: Tensor, steps: int, learning_rate: float, smooth: float
) -> Tensor:
    """Move `start` by Adam towards inputs that produce the given cuts, and return the result.

    For each row separately, the search minimises ||M(x) - h||^2 + smooth * TV(x) over x (thesis eq
    2-3; He et al. 2019).

    Args:
        bottom: the bottom M, whose weights stay fixed.
        cuts: the cuts h, axes (rows, width).
        start: initial inputs x, axes (rows, ...).
        steps: number of Adam steps.
        learning_rate: Adam's learning rate.
        smooth: weight of the total variation TV of pictures.
    """
    inputs = start.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([inputs], lr=learning_rate)
    for _ in range(steps):
        loss = (bottom(inputs) - cuts).square().sum(1) + smooth * total_variation(inputs)
        (inputs.grad,) = torch.autograd.grad(loss.sum(), inputs)
        optimizer.step()
    return inputs.detach()


def total_variation(pictures: Tensor) -> Tensor:
    """Return the sum of differences between adjacent pixels, axes (rows,); 0 for table columns.

    Source: Rudin et al. 1992, with absolute differences.

    >>> total_variation(torch.tensor([[[[1.0, 3.0], [0.0, 3.0]]]]))
    tensor([6.])
    """
    if pictures.dim() < 4:
        return pictures.new_zeros(len(pictures))
    down = (pictures[:, :, 1:] - pictures[:, :, :-1]).abs().flatten(1).sum(1)
    right = (pictures[..., 1:] - pictures[..., :-1]).abs().flatten(1).sum(1)
    return down + right


_ROWS = 2048  # number of rows in one search


class WhiteBoxInversion(Attack):
    """Searches for inputs that the victim's bottom maps to the recorded cuts.

    No real party has the victim's bottom, so the result is an upper bound for attacks without this
    bottom.

    Source: thesis eq 2-3; He et al. 2019, "Model inversion attacks against collaborative inference"
    (the white-box attack, with total variation).

    Args:
        steps: Adam steps.
        learning_rate: Adam's learning rate.
        smooth: weight of the total variation of pictures.

    Raises:
        BadOptionError: an option is out of range.
    """

    goal = "inputs"
    needs = frozenset({Grant.CUTS, Grant.OTHERS_BOTTOM})

    def __init__(self, steps: int = 300, learning_rate: float = 0.05, smooth: float = 0.01) -> None:
        require_at_least(0, steps=steps, learning_rate=learning_rate, smooth=smooth)
        self.steps = steps
        self.learning_rate = learning_rate
        self.smooth = smooth

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        bottom = view.others_bottom().eval()
        return torch.cat(
            [
                closer_inputs(
                    bottom, cuts, torch.zeros(len(cuts), *view.shape),
                    self.steps, self.learning_rate, self.smooth,
                )
                for cuts in torch.split(view.targets.cuts, _ROWS)
            ]
        )  # fmt: skip
