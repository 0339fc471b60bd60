"""Self-training: selects the rows whose guessed labels a model trains on next."""

from __future__ import annotations

import torch
from torch import Tensor


def most_confident(scores: Tensor, share: float, least: int, every: int = 1) -> Tensor:
    """Return positions of the rows with most confident guesses, per guessed class; best first.

    Args:
        scores: class scores, axes (rows, classes); their softmax is the confidence.
        share: share of the rows of each guessed class to select.
        least: smallest number of rows to select per guessed class, if so many rows have this guess.
        every: step between the selected rows that are used; 4 uses every fourth of them. A larger
            step saves time and costs little accuracy.
    """
    confidence, guess = scores.softmax(1).max(1)
    chosen = []
    for code in range(scores.shape[1]):
        own = (guess == code).nonzero()[:, 0]
        surest = own[confidence[own].argsort(descending=True, stable=True)]
        chosen.append(surest[: max(least, round(share * len(own)))][::every])
    return torch.cat(chosen)


def leaked_of_each(labels: Tensor, classes: int) -> int:
    """Return the number of leaked labels divided by the number of classes, at least 1."""
    return max(1, len(labels) // classes)


def taught_rows(
    known: Tensor, labels: Tensor, further: Tensor, scores: Tensor, share: float, every: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the leaked rows with weight 2, and the rows with the most confident guesses with 1.

    Source: Scudder 1965; Lee 2013 (pseudo-labels). With a `share` of 0.5, the more confident half
    of the rows guessed to be of each class is used.

    Args:
        known: features of the leaked rows, axes (leaked, features).
        labels: their classes.
        further: features of the unlabelled rows, axes (rows, features).
        scores: class scores of the unlabelled rows, axes (rows, classes).
        share: share of the rows guessed to be of each class to use, the most confident first; see
            `most_confident`.
        every: step between the selected rows that are used; 1 uses all of them.

    Returns:
        Features of the returned rows, their (true or guessed) classes, and their weights.
    """
    sure = most_confident(scores, share, leaked_of_each(labels, scores.shape[1]), every)
    weights = torch.cat([torch.full((len(known),), 2.0), torch.ones(len(sure))])
    return torch.cat([known, further[sure]]), torch.cat([labels, scores[sure].argmax(1)]), weights
