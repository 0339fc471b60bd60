"""BottleNet++: a learned encoder and a learned decoder, trained around a noisy channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vfl.compression.packed import Scale
from vfl.compression.size import FewNumbers
from vfl.core.registry import require_range

_MOST_DECIBELS = 100


class BottleNet(FewNumbers):
    """Sends k numbers between 0 and 1 per row, with a learned encoder and a learned decoder.

    The encoder is at the feature party: a linear layer, batch normalisation and a sigmoid. The
    decoder is at the label party: a linear layer, batch normalisation and a ReLU. In training, the
    feature party adds Gaussian noise to the k numbers before it sends them, so that the learned
    encoding tolerates few bits per number. In predictions, it adds no noise.

    Source: Shao, Zhang 2020, "BottleNet++: an end-to-end approach for feature compression in
    device-edge co-inference systems", ICC workshops, sections II-B and II-C (additive white
    Gaussian noise). vfl uses linear layers in place of the paper's convolutions, because a cut has
    only one axis besides the rows.

    Args:
        k: number of numbers to send per row.
        psnr: peak signal-to-noise ratio of the channel in training, in decibels; it sets the noise.
            The peak is 1, so the noise has the standard deviation 10^(-psnr/20).
        values: format of a number: 1 to 8 bits, ``bf16`` or ``fp32``.
        scale: see `DenseCodec`.
        grad: see `DenseCodec`.

    >>> f"{BottleNet(k=4, values='8').formula_ratio(width=128):.2%}"
    '0.78%'

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(
        self,
        k: int,
        psnr: float = 20.0,
        values: str = "8",
        scale: Scale = "batch",
        grad: str = "fp32",
    ) -> None:
        require_range("psnr", psnr, 0, _MOST_DECIBELS)
        super().__init__(k, values, scale, grad)
        self.psnr = psnr

    def client_module(self, width: int) -> nn.Module:
        layers = [nn.Linear(width, self.k), nn.BatchNorm1d(self.k), nn.Sigmoid()]
        return nn.Sequential(*layers, GaussianChannel(10 ** (-self.psnr / 20)))

    def server_module(self, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(self.k, width), nn.BatchNorm1d(width), nn.ReLU())


class GaussianChannel(nn.Module):
    """Adds, in training, normal noise that the party's secret determines.

    Args:
        deviation: standard deviation of the noise.
    """

    def __init__(self, deviation: float) -> None:
        super().__init__()
        self.deviation = deviation

    def forward(self, numbers: Tensor) -> Tensor:
        """Return the numbers plus noise, axes (rows, k)."""
        if not self.training:
            return numbers
        return numbers + self.deviation * torch.randn_like(numbers)
