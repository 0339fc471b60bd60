"""Label inference for numeric labels, by a regression that is fitted on leaked labels."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from vfl.attacks.base import EmbeddingAttack, Layer, Scaler, fit, scale_by, through, untrained
from vfl.attacks.view import Grant, View
from vfl.core.registry import require_choice, require_range

Learner = Literal["ridge", "kernel", "neighbours", "scratch"]
_STEPS, _LEARNING_RATE = 300, 1e-3


class Regression(EmbeddingAttack):
    """Predicts each target's label from the leaked rows, by regression or by nearest neighbours.

    First, the attack centres the leaked labels and divides them by their standard deviation. With a
    single leaked label, or if all leaked labels are equal, the attack predicts this number for
    every row.

    Sources: Hoerl and Kennard 1970 (ridge), Saunders et al. 1998 (kernel), Dudani 1976 (votes
    weighted by distance).

    Args:
        at: the layer whose outputs are the features; see `features`. "gradients" reads the
            gradients of a recorded training. There, the gradient of a squared error is the error
            times the top's slope, which is the same for all rows if the top is linear.
        learner: "ridge": linear ridge regression. "kernel": ridge regression with kernel exp(-|x -
            x'|^2 / (d v)), for d features with variance v over the leaked rows. "neighbours": the
            mean of the five nearest leaked rows, weighted by inverse distance. "scratch": an
            untrained bottom and top learn the labels of the leaked rows from the inputs, whatever
            `at` is; this is the baseline without the trained model.
        scaler: scaling of the features, fitted on the unlabelled rows; see `scale_by`.
        strength: inverse weight of the penalty on squared coefficients, for "ridge" and "kernel".

    Raises:
        BadOptionError: an option is out of range.
    """

    goal = "values"
    uses = frozenset({Grant.LEAKED})

    def __init__(
        self,
        at: Layer = "cut",
        learner: Learner = "ridge",
        scaler: Scaler = "standard",
        strength: float = 1.0,
    ) -> None:
        require_choice("learner", learner, get_args(Learner))
        require_choice("scaler", scaler, get_args(Scaler))
        require_range("strength", strength, 1e-9)
        super().__init__(at)
        self.learner: Learner = learner
        self.scaler: Scaler = scaler
        self.strength = strength
        if learner == "scratch":
            self.needs = self.uses | {Grant.INPUTS, Grant.BOTTOM_RECIPE, Grant.TOP_RECIPE}
        elif scaler != "none":
            self.needs |= {Grant.UNLABELLED}

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        labels = view.leaked.labels.float()
        mean, spread = labels.mean(), labels.std(unbiased=False)
        if not spread > 0:
            return mean.expand(view.targets.rows).clone()
        wanted = (labels - mean) / spread
        if self.learner == "scratch":
            found = self._scratch(view, wanted, draw)
        else:
            known, asked = (self.rows(view, seen) for seen in (view.leaked, view.targets))
            if self.scaler != "none":
                scale = scale_by(self.scaler, self.rows(view, view.unlabelled))
                known, asked = scale(known), scale(asked)
            found = predicted(known, wanted, asked, self.learner, self.strength)
        return mean + spread * found

    def _scratch(self, view: View, wanted: Tensor, draw: torch.Generator) -> Tensor:
        network = untrained(view, draw)
        fit(
            network, view.leaked.inputs, wanted, _STEPS, _LEARNING_RATE, draw,
            loss=lambda answers, truth: F.mse_loss(answers[:, 0], truth),
        )  # fmt: skip
        return through(network, view.targets.inputs)[:, 0]


def predicted(
    known: Tensor, wanted: Tensor, asked: Tensor, learner: Learner = "ridge", strength: float = 1.0
) -> Tensor:
    """Predict the numbers of new rows from rows with known numbers; axes of `wanted`, for new rows.

    >>> rows = torch.tensor([[-1.0], [0.0], [1.0]])
    >>> predicted(rows, rows[:, 0], torch.tensor([[2.0]]), strength=1e6).round(decimals=3)
    tensor([2.])

    Args:
        known: features of the rows with known numbers, axes (rows, features).
        wanted: the known numbers, with mean 0: axes (rows,), or axes (rows, numbers) for several
            numbers per row.
        asked: features of the new rows, axes (asked, features).
        learner: "ridge", "kernel" or "neighbours"; see `Regression`.
        strength: inverse weight of the penalty on squared coefficients.
    """
    if learner == "neighbours":
        distance, near = torch.cdist(asked, known).topk(min(5, len(known)), dim=1, largest=False)
        say = 1 / distance.clamp_min(1e-12)
        say = say.reshape(*say.shape, *[1] * (wanted.dim() - 1))
        return (say * wanted[near]).sum(1) / say.sum(1)
    if learner == "ridge":
        centre = known.mean(0)
        left, right = known - centre, asked - centre
        inner, beside = left @ left.T, right @ left.T
    else:
        width = known.shape[1] * known.var(unbiased=False).clamp_min(1e-12)
        inner = torch.exp(-torch.cdist(known, known).square() / width)
        beside = torch.exp(-torch.cdist(asked, known).square() / width)
    penalty = torch.eye(len(known)) / strength
    solved = torch.linalg.solve((inner + penalty).double(), wanted.double()).float()
    found: Tensor = beside @ solved
    return found
