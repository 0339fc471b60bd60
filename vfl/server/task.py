"""A task at the label party: what is minimised, and what the outputs mean."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from vfl.server.quality import (
    classification_quality,
    reduced,
    reduced_quality,
    regression_quality,
)

#: Most classes of which a phase's outputs are kept whole, and an AUC is computed.
FEW_CLASSES = 50


class Task(nn.Module):
    """One task; calling it gives the loss of a batch.

    A module, so that what it learned from the labels is kept with the label party's weights.
    """

    name: ClassVar[str]

    def fit(self, labels: Tensor, weights: Tensor | None = None) -> None:
        """Look at the training labels once, before the first step; all of axes (rows,)."""

    def answers(self, outputs: Tensor) -> Tensor:
        """What outputs of axes (rows, outputs) say, in the labels' own units."""
        return outputs

    def own_units(self, loss: float) -> float:
        """A loss in the labels' own units."""
        return loss

    def evidence(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """What `quality` needs of a batch, axes (rows, ...)."""
        return self.answers(outputs)

    def quality(self, evidence: Tensor, labels: Tensor) -> dict[str, float]:
        """The figures of a whole phase by name; see `vfl.server.quality`."""
        raise NotImplementedError


class Classification(Task):
    """Cross-entropy over classes.

    Args:
        hits: rows whose class is among so many largest outputs are counted; 0 counts none.
    """

    name = "classification"

    def __init__(self, hits: int = 0) -> None:
        super().__init__()
        self.hits = hits

    def forward(self, outputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """The loss of logits of axes (rows, classes) for codes of axes (rows,)."""
        if weights is None:
            return cross_entropy(outputs, labels)
        return weighted_mean(cross_entropy(outputs, labels, reduction="none"), weights)

    def quality(self, evidence: Tensor, labels: Tensor) -> dict[str, float]:
        return classification_quality(evidence, labels, self.hits)


class ManyClasses(Classification):
    """The same over so many classes that a phase's outputs are not kept."""

    def evidence(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return reduced(outputs, labels)

    def quality(self, evidence: Tensor, labels: Tensor) -> dict[str, float]:
        return reduced_quality(evidence, labels, self.hits)


class Regression(Task):
    """Mean squared error of labels made standard: minus their mean, over their deviation.

    The top learns numbers around 0 and 1 whatever the labels' units; whatever is told outside,
    losses too, is in the labels' own.
    """

    name = "regression"
    center: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros((), dtype=torch.float64))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def fit(self, labels: Tensor, weights: Tensor | None = None) -> None:
        exact = labels.double()
        weights = torch.ones_like(exact) if weights is None else weights.double()
        center = weighted_mean(exact, weights)
        counted = exact[weights > 0]
        varies = bool((counted != counted[0]).any())
        scale = weighted_mean((exact - center) ** 2, weights).sqrt() if varies else torch.ones(())
        self.center.copy_(center)
        self.scale.copy_(scale)

    def forward(self, outputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """The loss of outputs of axes (rows, 1) for labels of axes (rows,)."""
        targets = (labels - self.center) / self.scale
        if weights is None:
            return mse_loss(outputs[:, 0], targets)
        return weighted_mean((outputs[:, 0] - targets) ** 2, weights)

    def answers(self, outputs: Tensor) -> Tensor:
        return outputs.double() * self.scale + self.center

    def own_units(self, loss: float) -> float:
        return loss * float(self.scale) ** 2

    def quality(self, evidence: Tensor, labels: Tensor) -> dict[str, float]:
        return regression_quality(evidence, labels)


def make_task(name: str, outputs: int, hits: int = 0) -> Task:
    """The task of a name.

    Args:
        name: "classification" or "regression".
        outputs: number of classes, or 1.
        hits: see `Classification`.
    """
    if name == "regression":
        return Regression()
    return Classification(hits) if outputs <= FEW_CLASSES else ManyClasses(hits)


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """sum(w * v) / sum(w), both of axes (rows,); 0 where no row weighs anything.

    >>> float(weighted_mean(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 1.0])))
    2.0
    """
    total = weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)
    return (weights * values).sum() / total
