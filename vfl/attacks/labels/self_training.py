"""Self-training: selects the guesses on which a model trains again."""

from __future__ import annotations

import torch
from torch import Tensor


def most_confident(scores: Tensor, share: float, least: int, every: int = 1) -> Tensor:
    """Return the positions of each guessed class's most confident rows; int64, best first.

    Args:
        scores: class scores, axes (rows, classes); their softmax is the confidence.
        share: share of the rows of each guessed class to select.
        least: smallest number of rows to select per class, if the class has so many.
        every: stride over the selected rows; 4 takes every fourth row. A larger stride saves time
            and costs little accuracy.
    """
    confidence, guess = scores.softmax(1).max(1)
    chosen = []
    for code in range(scores.shape[1]):
        own = (guess == code).nonzero()[:, 0]
        surest = own[confidence[own].argsort(descending=True, stable=True)]
        chosen.append(surest[: max(least, round(share * len(own)))][::every])
    return torch.cat(chosen)


def leaked_of_each(labels: Tensor, classes: int) -> int:
    """Return the mean number of leaked labels per class; at least one."""
    return max(1, len(labels) // classes)


def taught_rows(
    known: Tensor, labels: Tensor, further: Tensor, scores: Tensor, share: float, every: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the leaked rows with weight 2, and the rows with the most confident guesses.

    Source: Scudder 1965; Lee 2013 (pseudo-labels). With a `share` of 0.5, the more confident half
    of each class is used.

    Args:
        known: features of the leaked rows, axes (leaked, features).
        labels: their classes.
        further: features of rows without labels, axes (rows, features).
        scores: class scores of the unlabelled rows, axes (rows, classes).
        share: share of each guessed class's rows to use, the most confident first; see
            `most_confident`.
        every: stride over the selected rows; 1 takes all of them.

    Returns:
        Features of the rows, their classes and their weights.
    """
    sure = most_confident(scores, share, leaked_of_each(labels, scores.shape[1]), every)
    weights = torch.cat([torch.full((len(known),), 2.0), torch.ones(len(sure))])
    return torch.cat([known, further[sure]]), torch.cat([labels, scores[sure].argmax(1)]), weights
