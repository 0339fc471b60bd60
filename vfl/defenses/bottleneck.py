"""Mutual information bottleneck: a noisy code passes little information to the top."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from vfl.compression import StepContext
from vfl.core.registry import MOST_WEIGHT, require_range
from vfl.defenses.base import Cuts, Defense, Loss


def divergence(mean: Tensor, deviation: Tensor) -> Tensor:
    """Return KL(N(mean, deviation^2) || N(0, 1)) in nats: sum over width, mean over rows.

    Args:
        mean: means of the code, axes (rows, width).
        deviation: standard deviations of the code, axes (rows, width), above 0.

    >>> divergence(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]]))
    tensor(0.5000)
    """
    each = (mean.square() + deviation.square() - 1) / 2 - deviation.log()
    return each.sum() / max(len(mean), 1)


class NoisyTop(nn.Module):
    """A top that reads a Gaussian code: mean + deviation x noise in training, the mean otherwise.

    Args:
        top: module that reads the code.
        width: width of the merged cut, and of the code.
    """

    def __init__(self, top: nn.Module, width: int) -> None:
        super().__init__()
        self.mean = nn.Linear(width, width)
        self.deviation = nn.Linear(width, width)
        self.top = top
        self.information: Tensor | None = None

    def forward(self, cut: Tensor) -> Tensor:
        """Return outputs, axes (rows, outputs); training stores the divergence as `information`."""
        code = self.mean(cut)
        if self.training:
            deviation = softplus(self.deviation(cut) - 0.5) + 1e-6
            self.information = divergence(code, deviation)
            code = code + deviation * torch.randn_like(code)
        outputs: Tensor = self.top(code)
        return outputs


class Bottleneck(Defense):
    """Puts a Gaussian code between cut and top at the label party, and penalises its information.

    The defense adds alpha x KL(code || N(0, 1)) to the label party's loss. The divergence is an
    upper bound of the mutual information between the merged cut and the code. Source: Zou et al.
    2023 (MID), with the variational bound of Alemi et al. 2017. The bottoms do not learn features
    that the top does not use, because no gradient favours such features. The layers that compute
    the code train with the top and are saved with it. In training, the noise comes from the label
    party's secret; predictions use no noise. The feature party sends its cut unchanged, so an
    attacker with labelled rows can still use all features in the cut. The defense states no
    guarantee.

    Args:
        alpha: weight of the divergence (in nats) in the label party's loss.

    >>> wrapped = Bottleneck().wrap_top(nn.Identity(), width=2).eval()
    >>> torch.equal(wrapped(torch.ones(1, 2)), wrapped(torch.ones(1, 2)))
    True

    Raises:
        BadOptionError: an option is out of range.
    """

    side = "label"
    label_free = True
    reads_cuts = False

    def __init__(self, alpha: float = 0.001) -> None:
        require_range("alpha", alpha, 0, MOST_WEIGHT)
        self.alpha = alpha
        self._top: NoisyTop | None = None

    def wrap_top(self, top: nn.Module, width: int) -> nn.Module:
        self._top = NoisyTop(top, width)
        return self._top

    def loss(self, cuts: Cuts, labels: Tensor, logits: Tensor, context: StepContext) -> Loss:
        if self._top is None or self._top.information is None:
            return None
        information, self._top.information = self._top.information, None
        return self.alpha * information
