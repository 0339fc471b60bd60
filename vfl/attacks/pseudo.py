"""Pseudo-labels: which of a model's own guesses it is taught again."""

from __future__ import annotations

import torch
from torch import Tensor


def most_confident(scores: Tensor, share: float, least: int, every: int = 1) -> Tensor:
    """Positions of each guessed class's most confident rows; int64, surest first in a class.

    Args:
        scores: axes (rows, classes); their softmax is the confidence.
        share: of the rows that are guessed to be of a class.
        least: so many of each class at least, as far as there are any.
        every: takes each such one of them only, which costs little and saves time.
    """
    confidence, guess = scores.softmax(1).max(1)
    chosen = []
    for code in range(scores.shape[1]):
        own = (guess == code).nonzero()[:, 0]
        surest = own[confidence[own].argsort(descending=True, stable=True)]
        chosen.append(surest[: max(least, round(share * len(own)))][::every])
    return torch.cat(chosen)


def leaked_of_each(labels: Tensor, classes: int) -> int:
    """How many labels of each class leaked, on average; at least one."""
    return max(1, len(labels) // classes)
