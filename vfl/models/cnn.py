"""A two-layer convolutional network as bottom."""

from __future__ import annotations

import math
from typing import Literal

from torch import nn

from vfl.errors import BadOptionError, SpecError
from vfl.models.base import Bottom, Shape
from vfl.models.parts import Activation, channels_last, make_activation, parse_sizes, picture_axes
from vfl.options import require_choice

_POOL = 2


class CNNBottom(Bottom):
    """5x5 and 3x3 convolution, each followed by ReLU and 2x2 max pooling, then one linear layer.

    A side of one pixel is not pooled, so half a picture of 8x4, or a single line of pixels, still
    has something left to connect.

    Args:
        channels: output channels of the two convolutions, joined by a dash.
        activation: after each convolution; see `MLPBottom`.
        pad: convolutions that keep the picture's size: "both", or "first" as in the thesis (section
            4.4, Fashion-MNIST: 64 x 6 x 6 = 2304 values reach the linear layer).
        last: activation of the cut, relu, leaky_relu or none.

    >>> module = CNNBottom(channels="2-4").build(shape=(1, 8, 4), width=5)
    >>> sum(p.numel() for p in module.parameters())  # 2*(25+1) + 4*(2*9+1) + 5*(4*2*1+1)
    173

    Raises:
        BadOptionError: not two numbers of channels, or an unknown choice.
    """

    def __init__(
        self,
        channels: str = "32-64",
        activation: Activation = "relu",
        pad: Literal["both", "first"] = "both",
        last: Literal["relu", "leaky_relu", "none"] = "none",
    ) -> None:
        self.channels = parse_sizes(channels, "channels")
        if len(self.channels) != 2:
            raise BadOptionError(
                "bottom 'cnn' has two convolutions",
                got=f"channels={channels}",
                want="such as 32-64",
            )
        make_activation(activation)
        require_choice("pad", pad, ("both", "first"))
        require_choice("last", last, ("relu", "leaky_relu", "none"))
        self.activation = activation
        self.pad = pad
        self.last = last

    def build(self, shape: Shape, width: int) -> nn.Module:
        channels, *sides = picture_axes(shape, "cnn")
        layers: list[nn.Module] = []
        kernels, pads = (5, 3), (2, 1 if self.pad == "both" else 0)
        for outputs, kernel, pad in zip(self.channels, kernels, pads, strict=True):
            sides = [side + 2 * pad - kernel + 1 for side in sides]
            if min(sides) < 1:
                raise SpecError(
                    "a convolution without padding needs a larger picture",
                    got=f"rows of shape {shape}",
                    fix="cnn:pad=both",
                )
            pool = tuple(min(_POOL, side) for side in sides)
            layers += [nn.Conv2d(channels, outputs, kernel, padding=pad)]
            layers += [make_activation(self.activation), nn.MaxPool2d(pool)]
            channels, sides = outputs, [s // p for s, p in zip(sides, pool, strict=True)]
        layers += [nn.Flatten(), nn.Linear(channels * math.prod(sides), width)]
        if self.last != "none":
            layers.append(make_activation(self.last))
        return channels_last(nn.Sequential(*layers))
