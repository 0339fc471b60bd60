"""The few-shot probe: a loss that makes linear classifiers with few labels fail on cuts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from vfl.compression import StepContext
from vfl.core.registry import MOST_WEIGHT, require_range
from vfl.defenses.base import MOST_ROWS, Cuts, Defense, LabelKind, Loss, require_classes

_RIDGE = 0.3
#: Value added to the covariance's diagonal before whitening, relative to the mean of the variances.
_FLOOR = 2e-3


def probe_alignment(
    cut: Tensor, labels: Tensor, classes: int, support: int, whiten: bool = False
) -> Tensor:
    """Fit ridge regression on some rows, and return its alignment with the other rows' classes.

    The function first standardises the cut's columns within the batch, or whitens them. S are the
    first `support` rows, and Q are the other rows; the targets of S are T = onehot - 1/C. The
    predictions for Q are P = (Q S'/width) (S S'/width + 0.3)^-1 T. The alignment of a class is the
    mean of <P, onehot - 1/C> over its rows in Q. The result is the mean of the absolute alignments
    over all classes that occur in Q. Gradients flow through S and Q.

    Args:
        cut: cuts of the batch's rows, axes (rows, width).
        labels: class numbers 0..C-1, axes (rows,).
        classes: number of classes C.
        support: number of rows whose labels the simulated attacker knows; at most half of the
            batch.
        whiten: whether to also remove correlations between columns, by the Cholesky factor of the
            covariance.

    >>> cut = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    >>> round(probe_alignment(cut, torch.tensor([0, 1, 0, 1]), 2, 2).item(), 4)  # 0.5 * 2 / 2.3
    0.4348
    """
    support = min(support, len(cut) // 2)
    if support == 0:
        return cut.sum() * 0
    rows = _whitened(cut) if whiten else _standardised(cut)
    truth = one_hot(labels, classes).to(cut.dtype) - 1 / classes
    known, asked = rows[:support], rows[support:]
    ridge = _RIDGE * torch.eye(support, dtype=cut.dtype, device=cut.device)
    solved = torch.linalg.solve(known @ known.T / cut.shape[1] + ridge, truth[:support])
    right = ((asked @ (known.T @ solved)) / cut.shape[1] * truth[support:]).sum(dim=1)
    counts = torch.bincount(labels[support:], minlength=classes)
    sums = torch.zeros_like(counts, dtype=cut.dtype).index_add(0, labels[support:], right)
    present = counts > 0
    return (sums[present] / counts[present]).abs().mean()


def _standardised(cut: Tensor) -> Tensor:
    centred = cut - cut.mean(dim=0)
    return centred * (centred.square().mean(dim=0) + 1e-6).rsqrt()


def _whitened(cut: Tensor) -> Tensor:
    centred = cut - cut.mean(dim=0)
    # If a cut has fewer rows than columns, its covariance is singular up to rounding. Rounding
    # errors of float32 may exceed `floor`, so the computation uses float64.
    exact = centred.double()
    covariance = exact.T @ exact / len(cut)
    floor = _FLOOR * covariance.diagonal().mean() + 1e-6
    factor = torch.linalg.cholesky(covariance + floor * torch.eye(cut.shape[1]).to(exact))
    whitened: Tensor = torch.linalg.solve_triangular(factor, exact.T, upper=False).T
    return whitened.to(cut.dtype)


class Probe(Defense):
    """The label party simulates an attacker with few labels; it penalises cuts that help.

    The label party adds alpha x `probe_alignment` of each feature party's cut to its loss. The
    simulated attacker has `support` labels in even steps and twice as many in odd steps, so batches
    should have about 256 rows. A top with a hidden layer can still learn the classes from such
    cuts. The design is our own: adversarial regularisation, with ridge regression as an adversary
    in closed form (Bertinetto et al. 2019). Only the label party runs this defense, only in
    training; the defense has no state. The defense states no guarantee, because attackers with
    nonlinear classifiers or with unlabelled rows can still find the classes.

    Args:
        alpha: weight of the alignment in the label party's loss.
        support: number of labelled rows that the simulated attacker has.
        whiten: whether the simulated attacker first whitens the cut.

    >>> cut, labels = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]), torch.tensor([0, 1, 0, 1])
    >>> probe, logits = Probe(alpha=2, support=2), torch.zeros(4, 2)
    >>> round(probe.loss({"bank": cut}, labels, logits, StepContext()).item(), 4)
    0.8696

    Raises:
        BadOptionError: an option is out of range.
    """

    side = "label"

    def __init__(self, alpha: float = 0.6, support: int = 50, whiten: bool = False) -> None:
        require_range("alpha", alpha, 0, MOST_WEIGHT)
        require_range("support", support, 1, MOST_ROWS)
        self.alpha = alpha
        self.support = support
        self.whiten = whiten

    def prepare(self, kind: LabelKind) -> None:
        require_classes("probe", kind)

    def loss(self, cuts: Cuts, labels: Tensor, logits: Tensor, context: StepContext) -> Loss:
        support = self.support * (1 + context.step % 2)
        found = [
            probe_alignment(cut, labels, logits.shape[1], support, self.whiten)
            for cut in cuts.values()
        ]
        return self.alpha * torch.stack(found).sum()
