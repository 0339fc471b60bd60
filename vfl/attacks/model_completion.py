"""Passive model completion: the bottom with a head of the attacker's own, trained by MixMatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vfl.attacks.base import Attack
from vfl.attacks.features import through
from vfl.attacks.mixmatch import MixMatch
from vfl.attacks.threat import Grant
from vfl.attacks.unfreeze import completed
from vfl.attacks.view import View
from vfl.options import require_range


class ModelCompletion(Attack):
    """Completes the trained bottom by an inference head, on leaked and unlabelled rows.

    The head is a top of the known architecture; a linear one starts at the class means. Defaults
    are those of the authors' program, but that the bottom stays as it is: with few labels, mixed
    inputs spoil it sooner than they teach it.

    Source: Fu et al. 2022, "Label inference attacks against vertical federated learning" (passive
    model completion); training by Berthelot et al. 2019.

    Args:
        steps: Adam steps.
        rate: learning rate of the head.
        batch: leaked rows, and as many unlabelled ones, in a step.
        temperature: below 1 makes guessed labels surer.
        alpha: of the Beta law that rows are mixed by.
        weight: of the unlabelled rows' loss in the end.
        bottom_rate: learning rate of the bottom; 0 trains the head alone.

    Raises:
        BadOptionError: an option out of range.
    """

    needs = frozenset(
        {Grant.INPUTS, Grant.BOTTOM, Grant.LEAKED, Grant.UNLABELLED, Grant.TOP_RECIPE}
    )

    def __init__(
        self,
        steps: int = 1000,
        rate: float = 2e-3,
        batch: int = 64,
        temperature: float = 0.8,
        alpha: float = 0.75,
        weight: float = 50.0,
        bottom_rate: float = 0.0,
    ) -> None:
        require_range("steps", steps, 0)
        require_range("rate", rate, 0)
        require_range("batch", batch, 1)
        require_range("temperature", temperature, 0.01, 1)
        require_range("alpha", alpha, 0.01)
        require_range("weight", weight, 0)
        require_range("bottom_rate", bottom_rate, 0)
        self.rate = rate
        self.bottom_rate = bottom_rate
        self.training = MixMatch(steps, batch, temperature, alpha, weight)

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        leaked, further = view.leaked, view.unlabelled.inputs
        network = completed(view, draw)
        bottom, head = network
        bottom.requires_grad_(self.bottom_rate > 0)
        groups: list[dict[str, Any]] = [{"params": list(head.parameters())}]
        if trained := [one for one in bottom.parameters() if one.requires_grad]:
            groups.append({"params": trained, "lr": self.bottom_rate})
        optimizer = torch.optim.Adam(groups, lr=self.rate)
        self.training.train(
            network, optimizer, leaked.inputs, leaked.labels, further, view.classes, draw
        )
        return through(network, view.targets.inputs)
