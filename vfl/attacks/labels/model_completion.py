"""Passive model completion: trains a head (classifier) on the fixed bottom by MixMatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vfl.attacks.base import Attack, require_at_least, through
from vfl.attacks.labels.fine_tuning import completed
from vfl.attacks.labels.mixmatch import fit_mixmatch
from vfl.attacks.view import Grant, View
from vfl.core.registry import require_range


class ModelCompletion(Attack):
    """Adds a head to the trained bottom, and trains it on leaked and unlabelled rows.

    The head is a top of the known architecture; a linear head starts with the class means as
    weights. The default options are those of the authors' code, except that the bottom stays fixed:
    with few labels, training on mixed inputs makes the bottom worse.

    Source: Fu et al. 2022, "Label inference attacks against vertical federated learning" (passive
    model completion); the training follows Berthelot et al. 2019.

    Args:
        steps: Adam steps.
        learning_rate: learning rate of the head.
        batch: number of leaked rows per step, drawn with replacement; a step uses the same number
            of unlabelled rows.
        temperature: temperature of sharpening; a value below 1 makes guessed labels more certain.
            Guessed probabilities are raised to the power 1 / temperature (eq 7).
        alpha: parameter of the Beta distribution from which the weights of mixtures are drawn (eq
            8).
        weight: weight that the unlabelled rows' loss would have after the last step; the weight
            grows linearly from 0.
        bottom_learning_rate: learning rate of the bottom; 0 trains only the head.

    Raises:
        BadOptionError: an option is out of range.
    """

    needs = frozenset(
        {Grant.INPUTS, Grant.BOTTOM, Grant.LEAKED, Grant.UNLABELLED, Grant.TOP_RECIPE}
    )

    def __init__(
        self,
        steps: int = 1000,
        learning_rate: float = 2e-3,
        batch: int = 64,
        temperature: float = 0.8,
        alpha: float = 0.75,
        weight: float = 50.0,
        bottom_learning_rate: float = 0.0,
    ) -> None:
        require_at_least(0, steps=steps, learning_rate=learning_rate)
        require_range("batch", batch, 1)
        require_range("temperature", temperature, 0.01, 1)
        require_range("alpha", alpha, 0.01)
        require_at_least(0, weight=weight, bottom_learning_rate=bottom_learning_rate)
        self.steps = steps
        self.learning_rate = learning_rate
        self.batch = batch
        self.temperature = temperature
        self.alpha = alpha
        self.weight = weight
        self.bottom_learning_rate = bottom_learning_rate

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        network = completed(view, draw)
        bottom, head = network
        bottom.requires_grad_(self.bottom_learning_rate > 0)
        groups: list[dict[str, Any]] = [{"params": list(head.parameters())}]
        if trained := [one for one in bottom.parameters() if one.requires_grad]:
            groups.append({"params": trained, "lr": self.bottom_learning_rate})
        fit_mixmatch(
            network, view.leaked.inputs, view.leaked.labels, view.unlabelled.inputs, view.classes,
            self.steps, self.learning_rate, draw, batch=self.batch, temperature=self.temperature,
            alpha=self.alpha, weight=self.weight,
            optimizer=torch.optim.Adam(groups, lr=self.learning_rate),
        )  # fmt: skip
        return through(network, view.targets.inputs)
