"""A malicious optimiser: the top comes to rely on the bottom that learns fastest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, optim

from vfl.attacks.active.base import ActiveAdversary
from vfl.core.registry import require_range

_LAST = "last_gradient"


class MaliciousOptimizer(ActiveAdversary):
    """Takes longer steps wherever the gradient of a weight keeps its direction.

    The step of each weight is multiplied by 1 + gain * g_t / g_(t-1), clipped between 1 and `most`,
    after the agreed optimiser. The joint network then depends more on this party's bottom, and its
    cuts reveal more of the labels. The second half of the attack is model completion on these cuts.

    Source: Fu et al. 2022, "Label inference attacks against vertical federated learning"
    (active model completion), where the gradients of a stochastic gradient descent are scaled;
    scaling the steps does the same to it and works under Adam, which would undo scaled gradients.

    Args:
        gain: weight of the ratio of two gradients.
        most: the largest multiple.

    Raises:
        BadOptionError: a negative gain, or a multiple below 1.
    """

    who = "feature party"

    def __init__(self, gain: float = 1.0, most: float = 5.0) -> None:
        require_range("gain", gain, 0)
        require_range("most", most, 1)
        self.gain = gain
        self.most = most
        self._before: dict[Tensor, Tensor] = {}

    def optimizer(self, optimizer: optim.Optimizer) -> optim.Optimizer:
        optimizer.register_step_pre_hook(self._remember)
        optimizer.register_step_post_hook(self._stretch)
        return optimizer

    def _remember(self, optimizer: optim.Optimizer, *_: Any) -> None:
        self._before = {weight: weight.detach().clone() for weight in _trained(optimizer)}

    @torch.no_grad()
    def _stretch(self, optimizer: optim.Optimizer, *_: Any) -> None:
        for weight, before in self._before.items():
            assert weight.grad is not None
            # Kept with the optimiser's own state, so that a checkpoint has it too.
            last = optimizer.state[weight].get(_LAST)
            if last is not None:
                ratio = torch.nan_to_num(weight.grad / last, posinf=self.most, neginf=0.0)
                times = (1 + self.gain * ratio).clamp(1, self.most)
                weight.copy_(before + times * (weight - before))
            optimizer.state[weight][_LAST] = weight.grad.clone()


def _trained(optimizer: optim.Optimizer) -> list[Tensor]:
    groups = optimizer.param_groups
    return [weight for group in groups for weight in group["params"] if weight.grad is not None]
