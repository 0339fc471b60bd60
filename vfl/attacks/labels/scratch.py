"""A baseline as an attack: trains the architecture from random weights on leaked rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vfl.attacks.base import Attack, fit, require_at_least, through, untrained
from vfl.attacks.labels.self_training import leaked_of_each, most_confident
from vfl.attacks.view import Grant, View
from vfl.core.registry import require_range

_BATCH = 128  # batch size if there are thousands of rows


class Scratch(Attack):
    """Trains an untrained bottom and top on the leaked rows: a baseline without trained weights.

    An attack whose guesses are not better than this baseline's has gained nothing from the trained
    bottom (thesis eq 4-2).

    Args:
        steps: Adam steps.
        learning_rate: Adam's learning rate.
        unlabelled: whether to train `rounds` more times: on the leaked rows, with weight 2, and on
            every fourth of the more confident half of the guesses about unlabelled rows.
        rounds: number of these further trainings.

    Raises:
        BadOptionError: an option is out of range.
    """

    needs = frozenset({Grant.INPUTS, Grant.LEAKED, Grant.BOTTOM_RECIPE, Grant.TOP_RECIPE})

    def __init__(
        self,
        steps: int = 300,
        learning_rate: float = 1e-3,
        unlabelled: bool = False,
        rounds: int = 3,
    ) -> None:
        require_at_least(0, steps=steps, learning_rate=learning_rate)
        require_range("rounds", rounds, 1)
        self.steps = steps
        self.learning_rate = learning_rate
        self.rounds = rounds if unlabelled else 0
        if unlabelled:
            self.needs |= {Grant.UNLABELLED}

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        return through(self.trained(view, draw), view.targets.inputs)

    def trained(self, view: View, draw: torch.Generator) -> nn.Module:
        """Train a network that maps inputs to class scores, and return it."""
        inputs, labels = view.leaked.inputs, view.leaked.labels
        network = fit(untrained(view, draw), inputs, labels, self.steps, self.learning_rate, draw)
        for _ in range(self.rounds):
            further = view.unlabelled.inputs
            scores = through(network, further)
            sure = most_confident(scores, 0.5, leaked_of_each(labels, view.classes), every=4)
            rows = torch.cat([inputs, inputs, further[sure]])
            taught = torch.cat([labels, labels, scores[sure].argmax(1)])
            fresh = untrained(view, draw)
            network = fit(fresh, rows, taught, self.steps, self.learning_rate, draw, batch=_BATCH)
        return network
