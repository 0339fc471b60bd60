"""ResNet-20, the residual network for small pictures, as bottom."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vfl.models.base import Bottom, Shape
from vfl.models.parts import channels_last, check_size, picture_axes

_CHANNELS = (16, 32, 64)
_BLOCKS = 3
_MOST_WIDE = 64


class ResNet20Bottom(Bottom):
    """Three stages of three residual blocks between a convolution and global average pooling.

    He et al. 2016, section 4.2 with n = 3: 6n + 1 = 19 convolutions of 3x3, and a linear layer as
    the twentieth, which is left out where the last stage already has the width of the cut.
    Shortcuts are option A (section 3.3): identity, zero-padded in the channels, no parameters.
    A 3x32x32 picture and a head of 10 give 269,722 parameters (Table 6: 0.27M).

    Args:
        widen: factor on the 16, 32, 64 channels; 2 ends in the 128 channels that Zheng et al. 2023
            cut at.

    Raises:
        BadOptionError: `widen` is below 1 or above 64.
    """

    def __init__(self, widen: int = 1) -> None:
        self.widen = check_size(widen, "widen", _MOST_WIDE)

    def build(self, shape: Shape, width: int) -> nn.Module:
        channels, _, _ = picture_axes(shape, "resnet20")
        stages = [self.widen * size for size in _CHANNELS]
        layers: list[nn.Module] = [_convolution(channels, stages[0]), nn.ReLU()]
        inputs = stages[0]
        for size in stages:
            for _ in range(_BLOCKS):
                layers.append(Residual(inputs, size))
                inputs = size
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        if inputs != width:
            layers.append(nn.Linear(inputs, width))
        return channels_last(nn.Sequential(*layers))


class Residual(nn.Module):
    """relu(x + F(x)) with two convolutions in F (He et al. 2016, eq 1).

    Where the channels grow, the picture's sides are halved: F by a stride, x by dropping every
    second pixel and adding channels of zeros.

    Args:
        inputs: channels that come in.
        outputs: channels that go out, at least `inputs`.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride = 1 if inputs == outputs else 2
        self.new_channels = outputs - inputs
        self.path = nn.Sequential(
            _convolution(inputs, outputs, self.stride), nn.ReLU(), _convolution(outputs, outputs)
        )

    def forward(self, pictures: Tensor) -> Tensor:
        """Axes (rows, channels, height, width) in and out."""
        shortcut = pictures[:, :, :: self.stride, :: self.stride]
        if self.new_channels:
            before = self.new_channels // 2
            shortcut = F.pad(shortcut, (0, 0, 0, 0, before, self.new_channels - before))
        return F.relu(shortcut + self.path(pictures))


def _convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """3x3, batch norm, initialised for ReLU (He et al. 2015, eq 14)."""
    layer = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))
