"""MixMatch (Berthelot et al. 2019): trains on labelled and unlabelled rows and their mixtures."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vfl.attacks.base import key_of, training
from vfl.core.seeds import scoped
from vfl.models.optimizers import descend

_BATCH, _TEMPERATURE, _ALPHA, _WEIGHT = 64, 0.8, 0.75, 50.0


def fit_mixmatch(
    network: nn.Module,
    known: Tensor,
    labels: Tensor,
    further: Tensor,
    classes: int,
    steps: int,
    learning_rate: float,
    draw: torch.Generator,
    *,
    batch: int = _BATCH,
    temperature: float = _TEMPERATURE,
    alpha: float = _ALPHA,
    weight: float = _WEIGHT,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Train a network by MixMatch; batch normalisation keeps its stored statistics.

    As in Fu et al. 2022: a guessed label is the network's sharpened output for the unchanged row,
    because no known augmentation of a party's columns preserves the class.

    Args:
        network: module that returns logits; the function trains it in place and leaves it in
            evaluation mode.
        known: leaked rows.
        labels: their classes.
        further: inputs of the rows without labels, axes (rows, ...).
        classes: number of classes.
        steps: number of Adam steps.
        learning_rate: Adam's learning rate; without effect if `optimizer` is given.
        draw: generator from which all random numbers are drawn.
        batch: number of leaked rows per step, drawn with replacement; a step uses the same number
            of unlabelled rows.
        temperature: temperature T of sharpening; guessed probabilities are raised to the power 1 /
            T (eq 7).
        alpha: parameter of the Beta distribution from which the weights of mixtures are drawn (eq
            8).
        weight: weight that the unlabelled rows' loss would have after the last step; the weight
            grows linearly from 0.
        optimizer: optimiser for the network's weights; None uses Adam for all weights.
    """
    if optimizer is None:
        optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate)
    training(network, keep_norms=True)
    shares = F.one_hot(labels, classes).float()
    with scoped(key_of(draw)):
        for step in range(steps):
            own = torch.randint(len(known), (batch,))
            some = further[torch.randint(len(further), (batch,))]
            with torch.no_grad():
                guesses = F.softmax(network(some) / temperature, dim=1)
            inputs, wanted = mixed(
                torch.cat([known[own], some]), torch.cat([shares[own], guesses]), alpha
            )
            grown = weight * step / steps
            descend(optimizer, mixmatch_loss(network(inputs), wanted, batch, grown))
    network.eval()


def mixed(inputs: Tensor, wanted: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Mix each row with a random partner row; the row's own weight is the larger one (eq 8-11).

    Args:
        inputs: inputs of the rows, axes (rows, ...).
        wanted: target class probabilities, axes (rows, classes).
        alpha: parameter of the Beta distribution from which the weights of mixtures are drawn. The
            weights and the partner rows come from torch's global generator.
    """
    share = float(torch.distributions.Beta(alpha, alpha).sample())
    share = max(share, 1 - share)
    other = torch.randperm(len(inputs))
    return torch.lerp(inputs[other], inputs, share), torch.lerp(wanted[other], wanted, share)


def mixmatch_loss(logits: Tensor, wanted: Tensor, labelled: int, weight: float) -> Tensor:
    """Return cross-entropy of labelled rows plus squared error of unlabelled rows (eq 2-5).

    Args:
        logits: logits of the rows, axes (rows, classes).
        wanted: target class probabilities, axes (rows, classes).
        labelled: number of labelled rows, which come first.
        weight: weight of the unlabelled rows' squared error.

    >>> logits, wanted = torch.zeros(2, 2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    >>> round(mixmatch_loss(logits, wanted, 1, 2.0).item(), 4)  # log 2 + 2 x 0.25
    1.1931
    """
    known = F.cross_entropy(logits[:labelled], wanted[:labelled])
    believed = logits[labelled:].softmax(1)
    return known + weight * F.mse_loss(believed, wanted[labelled:])
