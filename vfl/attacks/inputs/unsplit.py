"""UnSplit: finds inputs and a copy of the victim's bottom, given only cuts and architecture."""

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
    """Alternates between two fits: inputs that a clone maps to the cuts, and the clone's weights.

    A clone is a network of the bottom's architecture. The attack succeeds if the architecture
    leaves little freedom, as a few convolutions with nonlinear layers between them do. If the
    bottom has a linear layer, the attack fails, because other weights of this layer with other
    inputs give the same cuts. Inputs must change so slowly that the clone's weights can follow;
    otherwise inputs and clone converge to a wrong scale.

    Source: Erdogan et al. 2022, "UnSplit: data-oblivious model inversion, model stealing, and
    label inference attacks against split learning".

    Args:
        rounds: number of repetitions of both fits.
        input_steps, model_steps: number of Adam steps in each fit of the inputs, and in each fit of
            the clone's weights.
        input_learning_rate, model_learning_rate: learning rates for the inputs and for the clone's
            weights.
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
