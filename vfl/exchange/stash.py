"""The weights a cut was made with, kept until its gradient comes.

With several exchanges in flight the optimiser moves the weights between the forward and the
backward pass of a cut. The exact gradient of that cut belongs to the weights that made it, and
autograd refuses weights that were changed in place, so such a forward pass runs on copies
(weight stashing: Harlap et al. 2018, PipeDream, section 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call


class Stash:
    """A copy of a party's state at one step, and the gradients of its weights.

    Args:
        model: the party's modules by name.
        state: everything the party's state is at this step; see `vfl.exchange.state.gather`.

    Attributes:
        state: the copy.
    """

    def __init__(self, model: nn.ModuleDict, state: Mapping[str, Tensor]) -> None:
        self.state = {name: value.detach().clone() for name, value in state.items()}
        self._model = model
        self._weights = {
            name: self.state[name].detach().requires_grad_(weight.requires_grad)
            for name, weight in model.named_parameters()
        }

    def forward(self, part: str, inputs: Tensor) -> Tensor:
        """What one of the modules makes of `inputs` with the weights of this step.

        Buffers, such as running statistics, move as in any forward pass of the module.
        """
        module, prefix = self._model[part], f"{part}."
        own = {
            name.removeprefix(prefix): weight
            for name, weight in self._weights.items()
            if name.startswith(prefix)
        }
        moved = {name: buffer.clone() for name, buffer in module.named_buffers()}
        outputs: Tensor = functional_call(module, own | moved, (inputs,))
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(moved[name])
        return outputs

    def hand_over(self) -> None:
        """Add the gradients that backward left at the copies to those of the party's weights."""
        for name, weight in self._model.named_parameters():
            grad = self._weights[name].grad
            if grad is not None:
                weight.grad = grad if weight.grad is None else weight.grad + grad
