"""Distance correlation of a cut with labels or inputs, and two defenses that reduce it."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl.compression import StepContext
from vfl.core.registry import MOST_WEIGHT, require_range
from vfl.defenses.base import Cuts, Defense, Loss

#: Lower limit of squared distances. The square root has an infinite slope at 0, and rounding errors
#: could make a squared distance negative.
_LEAST_SQUARE = 1e-8
#: Upper limit of how many (rows, rows) matrices are in memory for the correlation and its gradient.
#: The measured number is 6.4.
_MATRICES = 8


def distances(rows: Tensor) -> Tensor:
    """Return Euclidean distances between all pairs of rows; axes (rows, rows), diagonal 0."""
    flat = rows.flatten(1)
    squares = flat.square().sum(dim=1)
    gram = flat @ flat.T
    away = (squares[:, None] + squares - 2 * gram).clamp_min(_LEAST_SQUARE)
    itself = torch.eye(len(flat), dtype=torch.bool, device=flat.device)
    return away.masked_fill(itself, 1.0).sqrt().masked_fill(itself, 0.0)


def label_distances(labels: Tensor) -> Tensor:
    """Return distances between labels: 0 or sqrt 2 for classes, |a - b| for numbers a and b."""
    if labels.is_floating_point():
        return (labels[:, None] - labels).abs()
    return torch.ne(labels[:, None], labels) * 2**0.5


def distance_correlation(one: Tensor, other: Tensor) -> Tensor:
    """Return the squared distance correlation of two variables of a batch's rows; 0: independent.

    For the doubly centred distances A and B of the two variables, the result is sum(A B) /
    sqrt(sum(A^2) sum(B^2)) (Szekely et al. 2007; thesis eq 4-23 and 4-24; this is the square).

    Args:
        one: distances between the rows' values of the first variable, axes (rows, rows).
        other: distances between the same rows' values of the second variable, axes (rows, rows).

    >>> rows = torch.tensor([[0.0], [1.0], [3.0]])
    >>> round(distance_correlation(distances(rows), distances(-2 * rows)).item(), 4)
    1.0
    """
    if len(one) < 2:
        return one.sum() * 0
    one, other = _centred(one), _centred(other)
    return (one * other).sum() / (one.square().sum() * other.square().sum() + 1e-12).sqrt()


def _centred(values: Tensor) -> Tensor:
    means = values.mean(dim=1)
    return values - means[:, None] - means + means.mean()


class LabelCorrelation(Defense):
    """The label party adds alpha x dCor^2(cut, labels) to its loss for each feature party's cut.

    Source: Sun et al. 2022; eq 4-23 of the thesis, where this defense is the baseline. Each batch
    gives an estimate of the distance correlation; larger batches give better gradients. Only the
    label party runs this defense, only in training; the defense has no state. The defense has a
    weakness: the cut still separates the classes, but along directions in which cuts vary little.
    An attacker who fine-tunes a network does not use these directions, but an attacker who
    standardises the cut uses them. The defense states no guarantee.

    Args:
        alpha: weight of the squared distance correlation in the label party's loss.

    >>> cut, labels = torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([0, 0, 1])
    >>> round(LabelCorrelation(alpha=2).loss({"bank": cut}, labels, cut, StepContext()).item(), 4)
    1.8371

    Raises:
        BadOptionError: an option is out of range.
    """

    side = "label"

    def __init__(self, alpha: float = 1.0) -> None:
        require_range("alpha", alpha, 0, MOST_WEIGHT)
        self.alpha = alpha

    def loss(self, cuts: Cuts, labels: Tensor, logits: Tensor, context: StepContext) -> Loss:
        apart = label_distances(labels)
        terms = [distance_correlation(distances(cut), apart) for cut in cuts.values()]
        return self.alpha * torch.stack(terms).sum()


class NoPeek(Defense):
    """A feature party adds alpha x dCor^2(cut, inputs) to its own loss.

    Source: Vepakomma et al. 2020; thesis eq 2-5. The defense makes it harder to reconstruct a row's
    inputs from the row's cut, but does not protect labels. Only the feature party runs this
    defense, only in training; the defense has no state. If the cut is wider, a batch's estimate of
    the correlation is less exact. The defense states no guarantee.

    Args:
        alpha: weight of the squared distance correlation, relative to the gradient from the label
            party.

    >>> import torch
    >>> cut, inputs = torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([[1.0], [3.0], [7.0]])
    >>> round(NoPeek(alpha=0.5).local_loss(cut, inputs, StepContext()).item(), 4)
    0.5

    Raises:
        BadOptionError: an option is out of range.
    """

    side = "feature"

    def __init__(self, alpha: float = 0.1) -> None:
        require_range("alpha", alpha, 0, MOST_WEIGHT)
        self.alpha = alpha

    def working_bytes(self, rows: int, columns: int, width: int) -> int:
        return 4 * (_MATRICES * rows**2 + 3 * rows * (columns + width))

    def local_loss(self, cut: Tensor, inputs: Tensor, context: StepContext) -> Tensor:
        return self.alpha * distance_correlation(distances(cut), distances(inputs))
