"""Scores: what an attack's guess is worth, seen with truth that it never had."""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor


def accuracy(scores: Tensor, labels: Tensor) -> float:
    """Share of rows whose largest score is their class; axes (rows, classes) and (rows,).

    >>> accuracy(torch.tensor([[0.2, 0.8], [0.9, 0.1]]), torch.tensor([1, 1]))
    0.5
    """
    return float((scores.argmax(1) == labels).double().mean())


def matched_accuracy(clusters: Tensor, labels: Tensor) -> float:
    """Share of rows in the cluster of their class, under the best matching (thesis eq 4-26).

    The matching is one to one (Hungarian algorithm); clusters beyond the classes match nothing.

    >>> matched_accuracy(torch.tensor([1, 1, 0, 0]), torch.tensor([0, 0, 1, 0]))
    0.75
    """
    size = int(max(clusters.max(), labels.max())) + 1
    together = torch.bincount(clusters * size + labels, minlength=size * size).view(size, size)
    rows, columns = linear_sum_assignment(together.numpy(), maximize=True)
    return float(together[rows, columns].sum()) / len(labels)


def auc(scores: Tensor, positive: Tensor) -> float:
    """Chance that a positive row scores above a negative one, ties counting half.

    >>> auc(torch.tensor([0.1, 0.4, 0.4, 0.9]), torch.tensor([False, False, True, True]))
    0.875
    """
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(positive.numpy(), scores.double().numpy()))


def rate_at(scores: Tensor, positive: Tensor, false_rate: float = 0.01) -> float:
    """Share of positive rows that score above all but a share `false_rate` of the others.

    Carlini et al. 2022: what an attacker is sure of, which an average hides.

    >>> rate_at(torch.tensor([0.1, 0.4, 0.7, 0.9]), torch.tensor([False, False, True, True]))
    1.0
    """
    others = scores[~positive].double().sort(descending=True).values
    allowed = int(false_rate * len(others))
    threshold = others[allowed] if allowed < len(others) else -torch.inf
    return float((scores[positive].double() > threshold).double().mean())


def mean_squared_error(guess: Tensor, inputs: Tensor) -> float:
    """Mean over rows and columns of the squared difference.

    >>> mean_squared_error(torch.zeros(2, 3), torch.full((2, 3), 2.0))
    4.0
    """
    return float((guess.double() - inputs.double()).square().mean())
