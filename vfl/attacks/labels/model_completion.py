"""Passive model completion: the bottom with a head of the attacker's own, trained by MixMatch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vfl.attacks.base import Attack, key_of, require_at_least, through, training
from vfl.attacks.labels.fine_tuning import completed
from vfl.attacks.view import Grant, View
from vfl.core.registry import require_range
from vfl.core.seeds import scoped


class ModelCompletion(Attack):
    """Completes the trained bottom by an inference head, on leaked and unlabelled rows.

    The head is a top of the known architecture; a linear one starts at the class means. Defaults
    are those of the authors' program, but that the bottom stays as it is: with few labels, mixed
    inputs spoil it sooner than they teach it.

    Source: Fu et al. 2022, "Label inference attacks against vertical federated learning" (passive
    model completion); training by Berthelot et al. 2019.

    Args:
        steps: Adam steps.
        learning_rate: learning rate of the head.
        batch: leaked rows, and as many unlabelled ones, in a step, drawn with replacement.
        temperature: below 1 makes guessed labels surer: they are raised to the power of its
            inverse (eq 7).
        alpha: of the Beta law that rows are mixed by (eq 8).
        weight: of the unlabelled rows' loss in the end; it grows evenly from 0.
        bottom_learning_rate: learning rate of the bottom; 0 trains the head alone.

    Raises:
        BadOptionError: an option out of range.
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
        self._mixmatch(network, torch.optim.Adam(groups, lr=self.learning_rate), view, draw)
        return through(network, view.targets.inputs)

    def _mixmatch(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        view: View,
        draw: torch.Generator,
    ) -> None:
        """All steps of MixMatch; batch normalisation keeps its statistics.

        As in Fu et al. 2022 a guessed label is the model's sharpened answer to the row itself:
        columns of a party have no augmentation that is known to leave the class as it is.
        """
        known, further = view.leaked.inputs, view.unlabelled.inputs
        training(network, keep_norms=True)
        shares = F.one_hot(view.leaked.labels, view.classes).float()
        with scoped(key_of(draw)):
            for step in range(self.steps):
                own = torch.randint(len(known), (self.batch,))
                some = further[torch.randint(len(further), (self.batch,))]
                with torch.no_grad():
                    guesses = F.softmax(network(some) / self.temperature, dim=1)
                inputs, wanted = mixed(
                    torch.cat([known[own], some]), torch.cat([shares[own], guesses]), self.alpha
                )
                grown = self.weight * step / self.steps
                optimizer.zero_grad()
                loss = mixmatch_loss(network(inputs), wanted, self.batch, grown)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()


def mixed(inputs: Tensor, wanted: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Each row mixed with another, its own share being the larger (eq 8-11).

    Args:
        inputs: axes (rows, ...).
        wanted: class shares, axes (rows, classes).
        alpha: of the Beta law of the share, drawn from torch's generator as the other rows are.
    """
    share = float(torch.distributions.Beta(alpha, alpha).sample())
    share = max(share, 1 - share)
    other = torch.randperm(len(inputs))
    return torch.lerp(inputs[other], inputs, share), torch.lerp(wanted[other], wanted, share)


def mixmatch_loss(logits: Tensor, wanted: Tensor, labelled: int, weight: float) -> Tensor:
    """Cross-entropy of the labelled rows and squared error of the others (eq 2-5).

    Args:
        logits: axes (rows, classes).
        wanted: class shares, alike.
        labelled: how many rows, the first ones, have labels.
        weight: of the others.

    >>> logits, wanted = torch.zeros(2, 2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    >>> round(mixmatch_loss(logits, wanted, 1, 2.0).item(), 4)  # log 2 + 2 x 0.25
    1.1931
    """
    known = F.cross_entropy(logits[:labelled], wanted[:labelled])
    believed = logits[labelled:].softmax(1)
    return known + weight * F.mse_loss(believed, wanted[labelled:])
