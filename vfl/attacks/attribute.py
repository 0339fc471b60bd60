"""A hidden attribute of rows, read from their cuts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vfl.attacks.base import Attack
from vfl.attacks.fit import fit, key_of
from vfl.attacks.scaling import scale_by
from vfl.attacks.threat import Grant
from vfl.attacks.view import View
from vfl.options import require_range
from vfl.seeds import scoped

_HIDDEN = 64


class Attribute(Attack):
    """Learns an attribute the task never asked for, from the cuts of a few rows that leaked it.

    The classes of its case are the attribute's values. Rows of one value are no business of the
    task's, yet cuts tell of them.

    Source: Song and Shmatikov 2020, "Overlearning reveals sensitive attributes".

    Args:
        steps: full-batch Adam steps.
        rate: their learning rate.

    Raises:
        BadOptionError: an option out of range.
    """

    needs = frozenset({Grant.CUTS, Grant.LEAKED_ATTRIBUTES})

    def __init__(self, steps: int = 200, rate: float = 0.01) -> None:
        require_range("steps", steps, 0)
        require_range("rate", rate, 0)
        self.steps = steps
        self.rate = rate

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        cuts = view.targets.cuts
        scale = scale_by("standard", cuts)
        with scoped(key_of(draw)):
            reader = nn.Sequential(
                nn.Linear(cuts.shape[1], _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, view.classes)
            )
        fit(reader, scale(view.leaked.cuts), view.leaked.labels, self.steps, self.rate, draw)
        with torch.no_grad():
            scores: Tensor = reader(scale(cuts))
        return scores
