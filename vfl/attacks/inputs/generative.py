"""GRNA: trains a generator that maps the attacker's columns to the victim's columns."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, softmax

from vfl.attacks.base import Attack, key_of, require_at_least, through
from vfl.attacks.view import Grant, View
from vfl.core.seeds import scoped
from vfl.models.optimizers import descend

_HIDDEN = 128
_BATCH_SIZE = 128


class Generative(Attack):
    """Trains a generator of the victim's columns to reproduce the recorded predictions.

    The attacker is a label party with columns. The attack reads no cuts, so it does not need each
    party's cut, which a secure sum hides. As in the paper, the attacker has the whole model. In
    vfl, results are therefore upper bounds, because no real label party has the victim's bottom.

    Source: Luo et al. 2021, "Feature inference attack on model predictions in vertical federated
    learning" (GRNA), with the paper's penalty on variances.

    Args:
        steps: number of Adam steps, each on 128 rows.
        learning_rate: Adam's learning rate.
        spread: a generated column has no penalty until its variance exceeds this value.

    Raises:
        BadOptionError: an option is out of range.
    """

    goal = "inputs"
    needs = frozenset({Grant.INPUTS, Grant.OUTPUTS, Grant.BOTTOM, Grant.TOP, Grant.OTHERS_BOTTOM})

    def __init__(
        self, steps: int = 2000, learning_rate: float = 0.001, spread: float = 1.0
    ) -> None:
        require_at_least(0, steps=steps, learning_rate=learning_rate, spread=spread)
        self.steps = steps
        self.learning_rate = learning_rate
        self.spread = spread

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        own = view.targets.inputs.flatten(1)
        columns = math.prod(view.shape)
        noise = torch.randn(len(own), columns, generator=draw)
        given = torch.cat([own, noise], 1)
        with scoped(key_of(draw)):
            generator = nn.Sequential(
                nn.Linear(given.shape[1], _HIDDEN),
                nn.LayerNorm(_HIDDEN),
                nn.ReLU(),
                nn.Linear(_HIDDEN, columns),
                nn.Unflatten(1, view.shape),
            )
            self._train(generator, given, view, draw)
        return through(generator, given)

    def _train(
        self, generator: nn.Module, given: Tensor, view: View, draw: torch.Generator
    ) -> None:
        victim, top = (
            one.eval().requires_grad_(False) for one in (view.others_bottom(), view.top())
        )
        own_cuts = through(view.bottom(), view.targets.inputs)
        wanted = softmax(view.targets.outputs, 1)
        optimizer = torch.optim.Adam(generator.parameters(), lr=self.learning_rate)
        for _ in range(self.steps):
            rows = torch.randint(len(given), (_BATCH_SIZE,), generator=draw)
            columns = generator(given[rows])
            outputs = top(view.merge(victim(columns), own_cuts[rows]))
            beyond = (columns.flatten(1).var(0) - self.spread).clamp(min=0).mean()
            loss = mse_loss(softmax(outputs, 1), wanted[rows]) + beyond
            descend(optimizer, loss)
