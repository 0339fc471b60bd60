"""A two-layer convolutional network as bottom."""

from __future__ import annotations

import math

from torch import nn

from vfl.errors import BadOptionError
from vfl.models.base import Bottom, Shape
from vfl.models.parts import parse_sizes, picture_axes

_POOL = 2


class CNNBottom(Bottom):
    """5x5 and 3x3 convolution, each followed by ReLU and 2x2 max pooling, then one linear layer.

    Both convolutions are padded to keep the picture's size. A side of one pixel is not pooled, so
    half a picture of 8x4, or a single line of pixels, still has something left to connect.

    Args:
        channels: output channels of the two convolutions, joined by a dash.

    >>> module = CNNBottom(channels="2-4").build(shape=(1, 8, 4), width=5)
    >>> sum(p.numel() for p in module.parameters())  # 2*(25+1) + 4*(2*9+1) + 5*(4*2*1+1)
    173

    Raises:
        BadOptionError: not two numbers of channels.
    """

    def __init__(self, channels: str = "32-64") -> None:
        self.channels = parse_sizes(channels, "channels")
        if len(self.channels) != 2:
            raise BadOptionError(
                "bottom 'cnn' has two convolutions",
                got=f"channels={channels}",
                want="such as 32-64",
            )

    def build(self, shape: Shape, width: int) -> nn.Module:
        channels, *sides = picture_axes(shape, "cnn")
        layers: list[nn.Module] = []
        for out_channels, kernel in zip(self.channels, (5, 3), strict=True):
            pool = tuple(min(_POOL, side) for side in sides)
            layers += [nn.Conv2d(channels, out_channels, kernel, padding=kernel // 2), nn.ReLU()]
            layers.append(nn.MaxPool2d(pool))
            channels, sides = out_channels, [s // p for s, p in zip(sides, pool, strict=True)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * math.prod(sides), width))
