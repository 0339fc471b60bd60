"""An inversion network: from cuts to columns, learned on a few rows of which both are known."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl.attacks.base import Attack
from vfl.attacks.decoder import decoder, regress
from vfl.attacks.features import through
from vfl.attacks.fit import key_of
from vfl.attacks.scaling import scale_by
from vfl.attacks.threat import Grant
from vfl.attacks.view import View
from vfl.options import require_range
from vfl.seeds import scoped


class Inversion(Attack):
    """Trains min sum ||R(h) - x||^2 on the leaked pairs, and applies R to the targets' cuts.

    Source: thesis eq 2-2 and section 3.4.4; He et al. 2019, "Model inversion attacks
    against collaborative inference" (black-box).

    Args:
        steps: Adam steps, each on 64 pairs.
        rate: their learning rate.

    Raises:
        BadOptionError: an option out of range.
    """

    goal = "inputs"
    needs = frozenset({Grant.CUTS, Grant.LEAKED_INPUTS})

    def __init__(self, steps: int = 1000, rate: float = 0.001) -> None:
        require_range("steps", steps, 0)
        require_range("rate", rate, 0)
        self.steps = steps
        self.rate = rate

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        known, inputs = view.leaked.cuts, view.leaked.inputs
        scale = scale_by("standard", known)
        with scoped(key_of(draw)):
            network = decoder(known.shape[1], tuple(inputs.shape[1:]))
        regress(network, scale(known), inputs, self.steps, self.rate, draw)
        return through(network, scale(view.targets.cuts))
