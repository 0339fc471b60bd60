"""Self-training: selects the guesses on which a model trains further."""

from __future__ import annotations

import torch
from torch import Tensor


def most_confident(scores: Tensor, share: float, least: int, every: int = 1) -> Tensor:
    """Positions of each guessed class's most confident rows; int64, surest first in a class.

    Args:
        scores: axes (rows, classes); their softmax is the confidence.
        share: share of the rows guessed to be of a class.
        least: smallest number of rows per class, if the class has that many.
        every: stride over these rows: 4 takes every fourth row. A larger step saves time and costs
            little accuracy.
    """
    confidence, guess = scores.softmax(1).max(1)
    chosen = []
    for code in range(scores.shape[1]):
        own = (guess == code).nonzero()[:, 0]
        surest = own[confidence[own].argsort(descending=True, stable=True)]
        chosen.append(surest[: max(least, round(share * len(own)))][::every])
    return torch.cat(chosen)


def leaked_of_each(labels: Tensor, classes: int) -> int:
    """Return the mean number of leaked labels of a class; at least one."""
    return max(1, len(labels) // classes)


def taught_rows(
    known: Tensor, labels: Tensor, further: Tensor, scores: Tensor, share: float, every: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the leaked rows with weight 2, and further rows with the most confident guesses.

    Source: Scudder 1965; Lee 2013 (pseudo-labels), the better half of each class at a time.

    Args:
        known: the leaked rows, axes (leaked, features).
        labels: their classes.
        further: rows without labels, axes (rows, features).
        scores: guesses about the further rows, axes (rows, classes).
        share: share of the surest guesses about each class; see `most_confident`.
        every: stride over these guesses; 1 takes all.

    Returns:
        Rows, their classes and their weights.
    """
    sure = most_confident(scores, share, leaked_of_each(labels, scores.shape[1]), every)
    weights = torch.cat([torch.full((len(known),), 2.0), torch.ones(len(sure))])
    return torch.cat([known, further[sure]]), torch.cat([labels, scores[sure].argmax(1)]), weights
