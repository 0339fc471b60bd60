"""Passports: secret inputs from which a party computes the scale and the shift of a layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vfl.core.registry import MOST_WEIGHT, require_range
from vfl.defenses.base import (
    Defense,
)
from vfl.privacy import PrivacyStatement

_MOST_PASSPORTS = 1024


class Passport(Defense):
    """A passport layer after each bottom and before the top (FedPass: Gu et al. 2023).

    The layer multiplies its inputs by weights W, and then applies a scale gamma and a shift beta.
    gamma and beta follow from W and secret passports s: gamma is the mean over the passports s of
    D(E(W s)), where D(E(.)) is a small autoencoder; beta is computed in the same way from other
    passports. In training, the passports of each step are random around secret means; in
    predictions, the passports are these means. The means and the random passports follow from each
    party's secret, as the party's initial weights do.

    Args:
        count: number of passports for the scale, and of other passports for the shift, up to 1024.
        reach: the means of the passports are uniform random numbers between -reach and 0.
        sigma: standard deviation of the passports around their means.

    >>> layer = PassportLayer(4, count=1, reach=1.0, sigma=0.1)
    >>> tuple(layer.scale_passports.shape), layer(torch.zeros(3, 4)).shape
    ((1, 4), torch.Size([3, 4]))

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(self, count: int = 1, reach: float = 1.0, sigma: float = 0.1) -> None:
        require_range("count", count, 1, _MOST_PASSPORTS)
        require_range("reach", reach, 0, MOST_WEIGHT)
        require_range("sigma", sigma, 0, MOST_WEIGHT)
        self.count = count
        self.reach = reach
        self.sigma = sigma

    def wrap_bottom(self, bottom: nn.Module, width: int) -> nn.Module:
        return nn.Sequential(bottom, self._layer(width))

    def wrap_top(self, top: nn.Module, width: int) -> nn.Module:
        return nn.Sequential(self._layer(width), top)

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        return tuple(
            PrivacyStatement(protects, f"{who}, which lacks the passports of the other side")
            for protects, who in (("inputs", "the label party"), ("labels", "a feature party"))
        )

    def _layer(self, width: int) -> nn.Module:
        return PassportLayer(width, self.count, self.reach, self.sigma)


class PassportLayer(nn.Module):
    """A layer that maps rows x, axes (rows, width), to gamma * (W x) + beta.

    The layer's random numbers come from the generator of the surrounding block of
    `vfl.core.seeds.scoped`.

    Args:
        width: units.
        count, reach, sigma: see `Passport`.
    """

    scale_passports: Tensor
    shift_passports: Tensor

    def __init__(self, width: int, count: int, reach: float, sigma: float) -> None:
        super().__init__()
        self.sigma = sigma
        self.linear = nn.Linear(width, width, bias=False)
        hidden = max(1, width // 4)
        self.autoencoder = nn.Sequential(
            nn.Linear(width, hidden), nn.LeakyReLU(), nn.Linear(hidden, width)
        )
        for name in ("scale", "shift"):
            self.register_buffer(f"{name}_passports", -reach * torch.rand(count, width))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the layer's output, axes (rows, width)."""
        scale, shift = self._of(self.scale_passports), self._of(self.shift_passports)
        outputs: Tensor = scale * self.linear(rows) + shift
        return outputs

    def _of(self, passports: Tensor) -> Tensor:
        if self.training and self.sigma:
            passports = passports + self.sigma * torch.randn_like(passports)
        made: Tensor = self.autoencoder(self.linear(passports)).mean(0)
        return made
