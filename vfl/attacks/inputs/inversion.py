"""Black-box inversion: trains a decoder from cuts to inputs on leaked pairs of inputs and cut."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from vfl.attacks.base import Attack, key_of, require_at_least, scale_by, through
from vfl.attacks.view import Grant, View
from vfl.core.seeds import scoped
from vfl.models.optimizers import descend

_HIDDEN = 256
_BATCH_SIZE = 64


class PictureDecoder(nn.Module):
    """Decoder from cuts to pictures: a linear layer, then convolutions that double side lengths.

    The layers follow the thesis (section 3.4.4): 4 channels at half the side lengths, then 16
    channels, then 32 channels at the full side lengths, then the picture's channels, with LeakyReLU
    between the layers.

    Args:
        width: width of the cut.
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
        """Return pictures, axes (rows, channels, height, width), cropped to odd side lengths."""
        pictures: Tensor = self.layers(cuts)
        return pictures[:, :, : self.height, : self.breadth]


def decoder(width: int, shape: tuple[int, ...]) -> nn.Module:
    """Return an untrained decoder from cuts, axes (rows, width), to inputs, axes (rows, *shape)."""
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
    learning_rate: float,
    draw: torch.Generator,
) -> nn.Module:
    """Train a module by Adam on the mean squared error of batches, and return it.

    Args:
        module: the module to train.
        inputs: inputs of the rows, axes (rows, ...).
        wanted: target outputs, axes (rows, ...).
        steps: number of Adam steps.
        learning_rate: Adam's learning rate.
        draw: generator that draws the rows of each batch.
    """
    module.train()
    optimizer = torch.optim.Adam(module.parameters(), lr=learning_rate)
    with scoped(key_of(draw)):
        for _ in range(steps):
            rows = torch.randint(len(inputs), (min(_BATCH_SIZE, len(inputs)),), generator=draw)
            descend(optimizer, mse_loss(module(inputs[rows]), wanted[rows]))
    return module.eval()


class Inversion(Attack):
    """Trains R to minimise sum ||R(h) - x||^2 on leaked pairs of cut h and inputs x; inverts by R.

    Source: thesis eq 2-2 and section 3.4.4; He et al. 2019, "Model inversion attacks against
    collaborative inference" (the black-box attack).

    Args:
        steps: number of Adam steps, each on 64 pairs of cut h and inputs x.
        learning_rate: Adam's learning rate.

    Raises:
        BadOptionError: an option is out of range.
    """

    goal = "inputs"
    needs = frozenset({Grant.CUTS, Grant.LEAKED_INPUTS})

    def __init__(self, steps: int = 1000, learning_rate: float = 0.001) -> None:
        require_at_least(0, steps=steps, learning_rate=learning_rate)
        self.steps = steps
        self.learning_rate = learning_rate

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        known, inputs = view.leaked.cuts, view.leaked.inputs
        scale = scale_by("standard", known)
        with scoped(key_of(draw)):
            network = decoder(known.shape[1], tuple(inputs.shape[1:]))
        regress(network, scale(known), inputs, self.steps, self.learning_rate, draw)
        return through(network, scale(view.targets.cuts))
