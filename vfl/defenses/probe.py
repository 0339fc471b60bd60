"""The few-shot probe: trains cuts from which a linear classifier with few labels fails."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from vfl.compression import StepContext
from vfl.core.registry import MOST_WEIGHT, require_range
from vfl.defenses.base import MOST_ROWS, Cuts, Defense, LabelKind, Loss, require_classes

_RIDGE = 0.3
#: Added to the covariance before whitening, as a share of the mean variance.
_FLOOR = 2e-3


def probe_alignment(
    cut: Tensor, labels: Tensor, classes: int, support: int, whiten: bool = False
) -> Tensor:
    """Fit a ridge regression on some rows; return its alignment with other rows' classes.

    Columns are standardised by the batch (or whitened). With S the first `support` rows, Q the
    others, T = onehot - 1/C: predictions P = (Q S'/width) (S S'/width + 0.3)^-1 T. A class's
    alignment is the mean of <P, onehot - 1/C> over its queries; the result is the mean of the
    absolute values over the classes among the queries. Gradients go through S and Q.

    Args:
        cut: axes (rows, width).
        labels: codes 0..C-1, axes (rows,).
        classes: C.
        support: rows the attacker knows; half of the batch at most.
        whiten: remove correlations too, by the Cholesky factor of the covariance.

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
    # This uses float64: a wide cut has fewer rows than columns, and rounding alone may exceed the
    # floor.
    exact = centred.double()
    covariance = exact.T @ exact / len(cut)
    floor = _FLOOR * covariance.diagonal().mean() + 1e-6
    factor = torch.linalg.cholesky(covariance + floor * torch.eye(cut.shape[1]).to(exact))
    whitened: Tensor = torch.linalg.solve_triangular(factor, exact.T, upper=False).T
    return whitened.to(cut.dtype)


class Probe(Defense):
    """The label party simulates an attacker with few labels, and penalises cuts that help it.

    It adds alpha x `probe_alignment` of each feature party's cut to its loss; the simulated
    attacker knows `support` rows in even steps and twice as many in odd ones, so batches should
    have about 256 rows. A top with a hidden layer then still finds the classes. Our own, in the
    family of adversarial regularisation with a closed-form adversary (Bertinetto et al. 2019 for
    the ridge). Only the label party runs it, while it trains; it has no state. Classifiers that are
    not linear, or that have unlabelled rows, still find classes: It makes no promise that could be
    stated.

    Args:
        alpha: weight in the label party's loss.
        support: labelled rows of the attacker.
        whiten: let the attacker whiten the cut first.

    >>> cut, labels = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]), torch.tensor([0, 1, 0, 1])
    >>> probe, logits = Probe(alpha=2, support=2), torch.zeros(4, 2)
    >>> round(probe.loss({"bank": cut}, labels, logits, StepContext()).item(), 4)
    0.8696
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
