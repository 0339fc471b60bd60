"""Max-norm: noise along each row's own gradient, until all norms look like the largest."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from vfl.compression import Moment
from vfl.defenses.base import Defense, LabelKind, PrivacyStatement, Side
from vfl.defenses.noise import fingerprint
from vfl.defenses.refusals import require_two_classes


class MaxNorm(Defense):
    """Each row of the gradient gets noise along itself (Li et al. 2022).

    A row g becomes g (1 + s n), n normal, s^2 = max |g|^2 / |g|^2 - 1, the largest of the batch.
    So every row's squared norm is on average the largest of the batch, and the sign of its
    direction is blurred for the shorter ones. The row of largest norm stays as it is.

    >>> spread(torch.tensor([[3.0, 4.0], [0.0, 1.0]])).tolist()  # sqrt(25 / 1 - 1)
    [0.0, 4.898979663848877]
    """

    side: ClassVar[Side] = "label"
    label_free: ClassVar[bool] = True
    once: ClassVar[bool] = True

    def prepare(self, kind: LabelKind) -> None:
        require_two_classes("max_norm", kind)

    def gradient(self, grad: Tensor, labels: Tensor, moment: Moment) -> Tensor:
        assert moment.secret is not None, "gradients travel in training only"
        purpose = "max_norm", moment.step, fingerprint(grad)
        draws = torch.from_numpy(moment.secret.normal((len(grad),), *purpose))
        factors = 1 + spread(grad.double()) * draws
        return (grad * factors[:, None]).to(grad.dtype)

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        against = "a feature party that scores norms of gradients; directions and cuts less so"
        return (PrivacyStatement("labels", against),)


def spread(grad: Tensor) -> Tensor:
    """The s of every row; axes (rows, width) give (rows,). A row of zeros has nothing to blur."""
    squares = grad.square().sum(1)
    if not len(squares):
        return squares
    ratio = squares.max() / squares.clamp_min(torch.finfo(grad.dtype).tiny)
    return torch.where(squares > 0, (ratio - 1).clamp_min(0), 0.0).sqrt()
