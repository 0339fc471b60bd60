"""Networks from a cut back to what it was made of, and how they are trained."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from vfl.attacks.fit import key_of
from vfl.seeds import scoped

_HIDDEN = 256
_BATCH_ROWS = 64


class PictureDecoder(nn.Module):
    """From a cut to pictures: a linear layer, then convolutions that double the sides.

    Layers of the thesis' section 3.4.4: 4 channels at half the sides, 16 there, 32 at the full
    sides, then the picture's own, with LeakyReLU between them.

    Args:
        width: columns of the cut.
        shape: (channels, height, width) of a picture.
    """

    def __init__(self, width: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, self.height, self.breadth = shape
        half = (4, -(-self.height // 2), -(-self.breadth // 2))
        self.layers = nn.Sequential(
            nn.Linear(width, math.prod(half)),
            nn.Unflatten(1, half),
            nn.LeakyReLU(),
            nn.Conv2d(4, 16, 3, padding=1),
            nn.LeakyReLU(),
            nn.ConvTranspose2d(16, 32, 2, stride=2),
            nn.LeakyReLU(),
            nn.Conv2d(32, channels, 3, padding=1),
        )

    def forward(self, cuts: Tensor) -> Tensor:
        """Pictures, axes (rows, channels, height, width); odd sides lose their last line."""
        pictures: Tensor = self.layers(cuts)
        return pictures[:, :, : self.height, : self.breadth]


def decoder(width: int, shape: tuple[int, ...]) -> nn.Module:
    """An untrained network from axes (rows, width) to (rows, *shape), for pictures or columns."""
    if len(shape) == 3:
        return PictureDecoder(width, shape)
    return nn.Sequential(
        nn.Linear(width, _HIDDEN),
        nn.LeakyReLU(),
        nn.Linear(_HIDDEN, _HIDDEN),
        nn.LeakyReLU(),
        nn.Linear(_HIDDEN, math.prod(shape)),
        nn.Unflatten(1, shape),
    )


def regress(
    module: nn.Module,
    inputs: Tensor,
    wanted: Tensor,
    steps: int,
    rate: float,
    draw: torch.Generator,
) -> nn.Module:
    """The module after so many Adam steps on the mean squared error, each on a batch.

    Args:
        module: what is trained.
        inputs: axes (rows, ...).
        wanted: what it should give, axes (rows, ...).
        steps: how many.
        rate: the learning rate.
        draw: which rows are in a batch.
    """
    module.train()
    optimizer = torch.optim.Adam(module.parameters(), lr=rate)
    with scoped(key_of(draw)):
        for _ in range(steps):
            rows = torch.randint(len(inputs), (min(_BATCH_ROWS, len(inputs)),), generator=draw)
            optimizer.zero_grad()
            mse_loss(module(inputs[rows]), wanted[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return module.eval()
