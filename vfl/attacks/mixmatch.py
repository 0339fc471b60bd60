"""MixMatch: training with few labels and many rows without."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vfl.attacks.fit import key_of, training
from vfl.seeds import scoped


@dataclass(frozen=True, slots=True)
class MixMatch:
    """How MixMatch goes on, step by step (Berthelot et al. 2019).

    As in Fu et al. 2022 a guessed label is the model's answer to the row itself: columns of a
    party have no augmentation that is known to leave the class as it is.

    Attributes:
        steps: of the optimiser.
        batch: rows of each kind in a step, drawn with replacement.
        temperature: guesses are raised to the power of its inverse (eq 7).
        alpha: of the Beta law that rows are mixed by (eq 8).
        weight: of the unlabelled rows' loss in the end; it grows evenly from 0.
    """

    steps: int
    batch: int
    temperature: float
    alpha: float
    weight: float

    def train(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        known: Tensor,
        labels: Tensor,
        further: Tensor,
        classes: int,
        draw: torch.Generator,
    ) -> nn.Module:
        """The network after all steps; batch normalisation keeps its statistics.

        Args:
            network: from inputs to logits, axes (rows, classes).
            optimizer: of what is to be trained of it.
            known: inputs of the leaked rows, axes (leaked, ...).
            labels: their classes, int64.
            further: inputs without labels, axes (rows, ...).
            classes: how many there are.
            draw: everything random comes from here.
        """
        training(network, keep_norms=True)
        shares = F.one_hot(labels, classes).float()
        with scoped(key_of(draw)):
            for step in range(self.steps):
                own = torch.randint(len(known), (self.batch,))
                some = further[torch.randint(len(further), (self.batch,))]
                guesses = self._guess(network, some)
                inputs, wanted = mixed(
                    torch.cat([known[own], some]), torch.cat([shares[own], guesses]), self.alpha
                )
                grown = self.weight * step / self.steps
                optimizer.zero_grad()
                loss = mixmatch_loss(network(inputs), wanted, self.batch, grown)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return network.eval()

    def _guess(self, network: nn.Module, rows: Tensor) -> Tensor:
        """Sharpened answers, axes (rows, classes)."""
        with torch.no_grad():
            return F.softmax(network(rows) / self.temperature, dim=1)


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
