"""White-box inversion: with the victim's bottom, inputs that give the cuts that were sent."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl.attacks.base import Attack
from vfl.attacks.matching import closer_inputs
from vfl.attacks.threat import Grant
from vfl.attacks.view import View
from vfl.options import require_range

_ROWS = 2048  # searched for at once


class WhiteBoxInversion(Attack):
    """Searches for inputs that the victim's bottom maps to the recorded cuts.

    No real party has the victim's bottom: what it finds bounds what others may.

    Source: thesis eq 2-3; He et al. 2019, "Model inversion attacks against
    collaborative inference" (white-box, with total variation).

    Args:
        steps: Adam steps.
        rate: their learning rate.
        smooth: weight of the total variation of pictures.

    Raises:
        BadOptionError: an option out of range.
    """

    goal = "inputs"
    needs = frozenset({Grant.CUTS, Grant.OTHERS_BOTTOM})

    def __init__(self, steps: int = 300, rate: float = 0.05, smooth: float = 0.01) -> None:
        require_range("steps", steps, 0)
        require_range("rate", rate, 0)
        require_range("smooth", smooth, 0)
        self.steps = steps
        self.rate = rate
        self.smooth = smooth

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        bottom = view.others_bottom().eval()
        return torch.cat(
            [
                closer_inputs(
                    bottom, cuts, torch.zeros(len(cuts), *view.shape),
                    self.steps, self.rate, self.smooth,
                )
                for cuts in torch.split(view.targets.cuts, _ROWS)
            ]
        )  # fmt: skip
