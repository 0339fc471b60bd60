"""A hidden attribute of rows, read from their cuts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vfl.attacks.base import Attack, fit, key_of, require_at_least, scale_by
from vfl.attacks.view import Grant, View
from vfl.core.seeds import scoped

_HIDDEN = 64


class Attribute(Attack):
    """Learns an attribute the task never asked for, from the cuts of a few rows that leaked it.

    The classes of its case are the attribute's values. Rows of one value are no business of the
    task's, yet cuts tell of them.

    Source: Song and Shmatikov 2020, "Overlearning reveals sensitive attributes".

    Args:
        steps: full-batch Adam steps.
        learning_rate: their learning rate.

    Raises:
        BadOptionError: an option out of range.
    """

    needs = frozenset({Grant.CUTS, Grant.LEAKED_ATTRIBUTES})

    def __init__(self, steps: int = 200, learning_rate: float = 0.01) -> None:
        require_at_least(0, steps=steps, learning_rate=learning_rate)
        self.steps = steps
        self.learning_rate = learning_rate

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        cuts = view.targets.cuts
        scale = scale_by("standard", cuts)
        with scoped(key_of(draw)):
            network = nn.Sequential(
                nn.Linear(cuts.shape[1], _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, view.classes)
            )
        fit(
            network,
            scale(view.leaked.cuts),
            view.leaked.labels,
            self.steps,
            self.learning_rate,
            draw,
        )
        with torch.no_grad():
            scores: Tensor = network(scale(cuts))
        return scores
