"""NoPeek: a cut that correlates little with the inputs it was made of."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from vfl.compression import Moment
from vfl.defenses.base import Defense, Side
from vfl.defenses.dcor import distance_correlation, distances
from vfl.options import require_range


class NoPeek(Defense):
    """A feature party adds alpha x dCor^2(cut, inputs) to its own backward pass.

    Source: Vepakomma et al. 2020; thesis eq 2-5. It makes rows harder to rebuild from their
    cuts and says nothing of labels. Only the feature party runs it, while it trains; it has no
    state. The estimate of a batch gets worse with the width of the cut. It promises nothing that
    could be stated.

    Args:
        alpha: weight beside the gradient that the label party sends.

    >>> import torch
    >>> cut, inputs = torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([[1.0], [3.0], [7.0]])
    >>> round(NoPeek(alpha=0.5).local_loss(cut, inputs, Moment()).item(), 4)
    0.5
    """

    side: ClassVar[Side] = "feature"

    def __init__(self, alpha: float = 0.1) -> None:
        require_range("alpha", alpha, 0)
        self.alpha = alpha

    def local_loss(self, cut: Tensor, inputs: Tensor, moment: Moment) -> Tensor:
        return self.alpha * distance_correlation(distances(cut), distances(inputs))
