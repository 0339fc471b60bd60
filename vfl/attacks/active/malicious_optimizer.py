"""A malicious optimiser: the attacker's bottom learns faster, so that the top relies on it more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, optim

from vfl.attacks.active.base import ActiveAdversary
from vfl.core.registry import require_range

_LAST = "last_gradient"


class MaliciousOptimizer(ActiveAdversary):
    """Takes longer steps for those weights whose gradients keep their sign from step to step.

    After the agreed optimiser has computed a step, each weight's part of it is multiplied by 1 +
    gain * g_t / g_(t-1), clipped between 1 and `most`; g_t is the weight's gradient in step t. The
    joint network then depends more on this party's bottom, so this party's cuts disclose more about
    the labels. The longer steps are the first part of the published attack; the second part is
    model completion on these cuts.

    Source: Fu et al. 2022, "Label inference attacks against vertical federated learning" (active
    model completion). The paper scales the gradients of stochastic gradient descent. Without
    momentum, scaling the steps has the same effect as scaling the gradients. Scaling the steps also
    works with Adam, which would cancel much of a scaling of the gradients.

    Args:
        gain: weight of the ratio between the current and the previous gradient of a weight.
        most: largest factor by which a weight's step is multiplied.

    Raises:
        BadOptionError: `gain` is negative, or `most` is below 1.
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
            # stored in the optimiser's state, and so in checkpoints
            last = optimizer.state[weight].get(_LAST)
            if last is not None:
                ratio = torch.nan_to_num(weight.grad / last, posinf=self.most, neginf=0.0)
                times = (1 + self.gain * ratio).clamp(1, self.most)
                weight.copy_(before + times * (weight - before))
            optimizer.state[weight][_LAST] = weight.grad.clone()


def _trained(optimizer: optim.Optimizer) -> list[Tensor]:
    groups = optimizer.param_groups
    return [weight for group in groups for weight in group["params"] if weight.grad is not None]
