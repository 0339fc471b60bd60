"""Self-training: a logistic regression that is taught its own confident guesses."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl.attacks.base import Layer, Scaler
from vfl.attacks.labels.classifiers import Logistic, Predict, fit_logistic
from vfl.attacks.view import Grant, View
from vfl.core.registry import require_range


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


class SelfTraining(Logistic):
    """Logistic regression on the leaked rows, then again with its most confident guesses.

    A defense that makes a few labels worth little leaves the classes apart, and unlabelled rows
    show where they are. A leaked row counts twice as much as a guessed one.

    Source: Scudder 1965; Lee 2013 (pseudo-labels), the better half of each class at a time.

    Args:
        rounds: how often it is taught again.
        share: of the rows guessed to be of a class, those it is taught.
        every: of which it takes each such one only.
        scaler: see `scale_by`; "whiten" undoes what hides classes where the variance is low.
        strength: inverse weight of the squared penalty.
        at: the layer it reads.

    Raises:
        BadOptionError: an option out of range.
    """

    uses = frozenset({Grant.LEAKED, Grant.UNLABELLED})

    def __init__(
        self,
        rounds: int = 4,
        share: float = 0.5,
        every: int = 4,
        scaler: Scaler = "standard",
        strength: float = 1.0,
        at: Layer = "cut",
    ) -> None:
        require_range("rounds", rounds, 0)
        require_range("share", share, 0, 1)
        require_range("every", every, 1)
        super().__init__(scaler, strength, at)
        self.rounds = rounds
        self.share = share
        self.every = every

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        scale, labels = self.scale(view), view.leaked.labels
        known, further = (scale(self.rows(view, one)) for one in (view.leaked, view.unlabelled))
        predict = self.learn(known, labels, view.classes)
        for _ in range(self.rounds):
            rows, taught, weights = taught_rows(
                known, labels, further, predict, self.share, self.every
            )
            predict = fit_logistic(rows, taught, view.classes, self.strength, weights)
        return predict(scale(self.rows(view, view.targets)))


def taught_rows(
    known: Tensor, labels: Tensor, further: Tensor, predict: Predict, share: float, every: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Leaked rows, counted twice, and the surest guesses about further ones.

    Args:
        known: the leaked rows, axes (leaked, features).
        labels: their classes.
        further: rows without labels, axes (rows, features).
        predict: guesses.
        share: of the guesses about each class, the surest; see `most_confident`.
        every: of which each such one.

    Returns:
        Rows, their classes, and how much each counts.
    """
    scores = predict(further)
    sure = most_confident(scores, share, leaked_of_each(labels, scores.shape[1]), every)
    weights = torch.cat([torch.full((len(known),), 2.0), torch.ones(len(sure))])
    return torch.cat([known, further[sure]]), torch.cat([labels, scores[sure].argmax(1)]), weights
