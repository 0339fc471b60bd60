"""UnSplit: finds inputs and a copy of the bottom together, from cuts and the architecture alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from vfl.attacks.base import Attack, key_of, require_at_least
from vfl.attacks.inputs.white_box_inversion import closer_inputs
from vfl.attacks.view import Grant, View
from vfl.core.seeds import scoped
from vfl.models.optimizers import descend


class UnSplit(Attack):
    """Alternates two fits: of inputs that a clone maps to the cuts, and of the clone itself.

    It succeeds if the architecture leaves little freedom, as few convolutions with nonlinear layers
    between them do; a linear layer can be exchanged for any other. Inputs have to move slower than
    the clone learns, or both settle on another scale.

    Source: Erdogan et al. 2022, "UnSplit: data-oblivious model inversion, model stealing, and
    label inference attacks against split learning".

    Args:
        rounds: turns of both.
        input_steps, model_steps: Adam steps before the fit changes to the other one.
        input_learning_rate, model_learning_rate: their learning rates.
        smooth: weight of the total variation of pictures.

    Raises:
        BadOptionError: an option is out of range.
    """

    goal = "inputs"
    needs = frozenset({Grant.CUTS, Grant.BOTTOM_RECIPE})

    def __init__(
        self,
        rounds: int = 60,
        input_steps: int = 20,
        model_steps: int = 20,
        input_learning_rate: float = 0.005,
        model_learning_rate: float = 0.001,
        smooth: float = 0.1,
    ) -> None:
        self.rounds = rounds
        self.input_steps = input_steps
        self.model_steps = model_steps
        self.input_learning_rate = input_learning_rate
        self.model_learning_rate = model_learning_rate
        self.smooth = smooth
        require_at_least(0, **vars(self))

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        cuts = view.targets.cuts
        with scoped(key_of(draw)):
            clone = view.new_bottom().train()
            optimizer = torch.optim.Adam(
                clone.parameters(), lr=self.model_learning_rate, amsgrad=True
            )
            inputs = torch.zeros(len(cuts), *view.shape)
            for _ in range(self.rounds):
                inputs = closer_inputs(
                    clone, cuts, inputs, self.input_steps, self.input_learning_rate, self.smooth
                )
                for _ in range(self.model_steps):
                    descend(optimizer, mse_loss(clone(inputs), cuts))
        return inputs
