"""Bottoms for pictures: small convolutional networks, ResNet-20, EfficientNet-B0, transformers."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vfl.core.errors import BadOptionError, MissingDataError, SpecError, WidthError
from vfl.core.registry import require, require_choice, require_range
from vfl.models.base import (
    Activation,
    Bottom,
    FixedBottom,
    Shape,
    channels_last,
    check_dropout,
    check_size,
    make_activation,
    parse_sizes,
    picture_axes,
)

_POOL = 2


class CNNBottom(Bottom):
    """Two convolutions, each with an activation and 2x2 max pooling, and then linear layers.

    A side of the picture that has only one pixel is not pooled. So half of a picture of 8x4 pixels,
    or a picture with a single row of pixels, keeps at least one value.

    Args:
        channels: numbers of output channels of the two convolutions, separated by a dash.
        activation: activation after each convolution; see `MLPBottom`.
        pad: convolutions whose padding keeps the picture's size: "both", or "first" as in the
            thesis (section 4.4, Fashion-MNIST: the linear layer reads 64 x 6 x 6 = 2304 values).
        last: activation after the last layer, which gives the cut: relu, leaky_relu or none.
        kernels: side lengths of the kernels of the two convolutions, odd numbers, separated by a
            dash.
        hidden: sizes of the linear layers before the last linear layer; `activation` follows each
            of them.

    >>> module = CNNBottom(channels="2-4").build(shape=(1, 8, 4), width=5)
    >>> sum(p.numel() for p in module.parameters())  # 2*(25+1) + 4*(2*9+1) + 5*(4*2*1+1)
    173

    Raises:
        BadOptionError: there are not two numbers of channels, or an option has an unknown value.
    """

    def __init__(
        self,
        channels: str = "32-64",
        activation: Activation = "relu",
        pad: Literal["both", "first"] = "both",
        last: Literal["relu", "leaky_relu", "none"] = "none",
        kernels: str = "5-3",
        hidden: str = "none",
    ) -> None:
        self.channels = parse_sizes(channels, "channels")
        self.kernels, self.hidden = parse_sizes(kernels, "kernels"), parse_sizes(hidden, "hidden")
        odd = len(self.kernels) == 2 and all(one % 2 for one in self.kernels)
        require("kernels", kernels, "two odd numbers, such as 5-3", odd)
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
        first, second = self.kernels
        pads = (first // 2, second // 2 if self.pad == "both" else 0)
        for outputs, kernel, pad in zip(self.channels, self.kernels, pads, strict=True):
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
        layers.append(nn.Flatten())
        inputs = channels * math.prod(sides)
        for size in self.hidden:
            layers += [nn.Linear(inputs, size), make_activation(self.activation)]
            inputs = size
        layers.append(nn.Linear(inputs, width))
        if self.last != "none":
            layers.append(make_activation(self.last))
        return channels_last(nn.Sequential(*layers))


_CHANNELS = (16, 32, 64)
_BLOCKS = 3
_MOST_WIDE = 64


class ResNet20Bottom(Bottom):
    """A convolution, three stages of three residual blocks each, and global average pooling.

    He et al. 2016, section 4.2 with n = 3: 6n + 1 = 19 convolutions of 3x3, and a linear layer. The
    linear layer is left out if the last stage already has the width of the cut. Shortcuts are
    option A of the paper (section 3.3): they have no parameters, and pass the values on unchanged,
    with zeros for additional channels. For 3x32x32 pictures and a linear layer with 10 outputs, the
    network has 269,722 parameters (Table 6: 0.27M).

    Args:
        widen: factor by which the 16, 32 and 64 channels are multiplied; 2 gives the 128 final
            channels at which Zheng et al. 2023 cut the network.

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
    """Computes relu(x + F(x)), where F has two convolutions (He et al. 2016, eq 1).

    If the number of channels grows, height and width of the picture are halved: in F by a stride,
    and in x by dropping every second pixel. In this case, x also gets additional channels of zeros.

    Args:
        inputs: input channels.
        outputs: number of output channels, at least `inputs`.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride = 1 if inputs == outputs else 2
        self.new_channels = outputs - inputs
        self.path = nn.Sequential(
            _convolution(inputs, outputs, self.stride), nn.ReLU(), _convolution(outputs, outputs)
        )

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the block's output; input and output have axes (rows, channels, height, width)."""
        shortcut = pictures[:, :, :: self.stride, :: self.stride]
        if self.new_channels:
            before = self.new_channels // 2
            shortcut = F.pad(shortcut, (0, 0, 0, 0, before, self.new_channels - before))
        return F.relu(shortcut + self.path(pictures))


def _convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Return a 3x3 convolution with batch norm, initialised for ReLU (He et al. 2015, eq 14)."""
    layer = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


FEATURES = 1280


class EfficientNetB0Bottom(Bottom):
    """torchvision's network up to its 1,280 pooled features, and a linear layer to the cut.

    Tan and Le 2019, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks",
    table 1, without dropout and without the last layer, which has 1,000 classes.

    Args:
        pretrained: whether training starts from torchvision's ImageNet weights, which are
            downloaded or taken from torch's cache.

    >>> module = EfficientNetB0Bottom().build(shape=(3, 32, 32), width=1280)
    >>> sum(p.numel() for p in module.parameters())  # torchvision's 5,288,548 - 1281 * 1000
    4007548
    """

    def __init__(self, pretrained: bool = False) -> None:
        self.pretrained = pretrained

    def build(self, shape: Shape, width: int) -> nn.Module:
        from torchvision.models import efficientnet_b0

        channels, _, _ = picture_axes(shape, "efficientnet_b0")
        if channels != 3:
            raise SpecError(
                "bottom 'efficientnet_b0' takes pictures in colour",
                got=f"rows of shape {shape}",
                want="(3, height, width)",
                fix="use resnet20 for grey pictures",
            )
        module: nn.Module = efficientnet_b0()
        if self.pretrained and not next(module.parameters()).is_meta:  # shapes need no weights
            module.load_state_dict(_published_weights())
        head = nn.Identity() if width == FEATURES else nn.Linear(FEATURES, width)
        module.classifier = head
        return channels_last(module)


def _published_weights() -> dict[str, object]:
    """Return the weights that torchvision publishes, after a check of their file's hash.

    Raises:
        MissingDataError: the weights are not in torch's cache and cannot be downloaded.
    """
    from torchvision.models import EfficientNet_B0_Weights

    published = EfficientNet_B0_Weights.IMAGENET1K_V1
    try:
        return dict(published.get_state_dict(progress=False, check_hash=True, weights_only=True))
    except (OSError, RuntimeError) as error:
        raise MissingDataError(
            "the pretrained weights of EfficientNet-B0 cannot be fetched",
            where=published.url,
            got=type(error).__name__,
            fix="put that file in torch's cache (torch.hub.get_dir()), folder checkpoints",
        ) from None


#: Largest allowed sizes: torchvision's largest network has 32 layers and tokens of width 1,280.
_MOST_LAYERS = 64
_MOST_TOKENS = 2**14


class ViTBottom(Bottom):
    """torchvision's vision transformer, trained from random weights, and a linear layer to the cut.

    Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words: Transformers for Image Recognition at
    Scale", section 3.1. The default options are those of the thesis (section 4.4.6), for pictures
    of 128 x 128 pixels.

    Args:
        patch: side length, in pixels, of the square patches that become tokens.
        tokens: width of a token.
        layers: encoder blocks.
        heads: number of attention heads in a block.
        hidden: width of a block's hidden layer; 0 means four times the width of a token.
        dropout: dropout probability in the encoder, from 0 to below 1.

    >>> module = ViTBottom(patch=4, tokens=8, layers=1, heads=2).build(shape=(1, 8, 8), width=3)
    >>> embed, block = 8 * 17 + 8 + 8 * (4 + 1), 4 * (8 * 9) + 32 * 9 + 8 * 33 + 2 * 16
    >>> sum(p.numel() for p in module.parameters()) == embed + block + 16 + 3 * 9
    True

    Raises:
        BadOptionError: an option is out of range, or `heads` does not divide `tokens`.
    """

    def __init__(
        self,
        patch: int = 16,
        tokens: int = 256,
        layers: int = 4,
        heads: int = 8,
        hidden: int = 0,
        dropout: float = 0.0,
    ) -> None:
        self.patch = check_size(patch, "patch")
        self.tokens = check_size(tokens, "tokens", _MOST_TOKENS)
        self.layers = check_size(layers, "layers", _MOST_LAYERS)
        self.heads = check_size(heads, "heads", _MOST_TOKENS)
        self.hidden = check_size(hidden or 4 * tokens, "hidden")
        self.dropout = check_dropout(dropout)
        if tokens % heads:
            raise BadOptionError(
                "all heads must take equal shares of a token",
                got=f"tokens={tokens},heads={heads}",
                want="a token width that is a multiple of heads",
            )

    def build(self, shape: Shape, width: int) -> nn.Module:
        from torchvision.models import VisionTransformer

        channels, height, side = picture_axes(shape, "vit")
        if height != side or side % self.patch:
            raise SpecError(
                "bottom 'vit' accepts only squares that its patches fill completely",
                got=f"rows of shape {shape} and patch={self.patch}",
                want="a height that equals the width and is a multiple of the patch",
                fix="set data.side, or another patch",
            )
        module: nn.Module = VisionTransformer(
            side, self.patch, self.layers, self.heads, self.tokens, self.hidden, self.dropout
        )
        if channels != 3:  # torchvision's model reads three channels
            module.conv_proj = nn.Conv2d(channels, self.tokens, self.patch, self.patch)
        module.heads = nn.Linear(self.tokens, width)  # torchvision starts from zero weights
        return module


class HOGBottom(FixedBottom):
    """Histograms of oriented gradients (Dalal and Triggs 2005): a bottom without weights.

    Each square cell of pixels gets a histogram of unsigned gradient directions, weighted by the
    gradients' lengths. Blocks of two by two adjacent cells are normalised to length 1. The
    histograms of all channels of a picture are added. Pixels beyond the last complete cell (at the
    right and lower edges) are ignored.

    Args:
        cell: side length of a cell, in pixels.
        orientations: number of directions in a histogram, over half a turn.

    >>> HOGBottom(cell=7).columns(shape=(1, 28, 28))  # 3 * 3 blocks of 4 cells
    324

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(self, cell: int = 4, orientations: int = 9) -> None:
        require_range("cell", cell, 1, 256)
        require_range("orientations", orientations, 2, 64)
        self.cell, self.orientations = cell, orientations

    def columns(self, shape: Shape) -> int:
        _, *sides = picture_axes(shape, "hog")
        cells = [side // self.cell for side in sides]
        if min(cells) < 1:
            raise SpecError(
                "a picture is smaller than one cell",
                got=f"cell={self.cell} for rows of shape {shape}",
                want=f"a cell of at most {min(sides)}",
            )
        blocks = math.prod(max(1, count - 1) for count in cells)
        return blocks * math.prod(min(2, count) for count in cells) * self.orientations

    def build(self, shape: Shape, width: int) -> nn.Module:
        if (columns := self.columns(shape)) != width:
            raise WidthError(
                "bottom 'hog' has only one possible width",
                got=f"width {width} for rows of shape {shape}",
                want=f"width {columns}",
                fix=f"set width to {columns}",
            )
        return _OrientedGradients(self.cell, self.orientations)


class _OrientedGradients(nn.Module):
    def __init__(self, cell: int, orientations: int) -> None:
        super().__init__()
        self._cell, self._orientations = cell, orientations

    def forward(self, pictures: Tensor) -> Tensor:
        rows, channels, *sides = pictures.shape
        flat = pictures.reshape(rows * channels, *sides)
        across = F.pad(flat[:, :, 2:] - flat[:, :, :-2], (1, 1)) if sides[1] > 2 else 0 * flat
        down = F.pad(flat[:, 2:] - flat[:, :-2], (0, 0, 1, 1)) if sides[0] > 2 else 0 * flat
        lengths = (across.square() + down.square() + 1e-12).sqrt()
        bins = torch.arange(self._orientations, device=flat.device).view(-1, 1, 1)
        with torch.no_grad():  # no gradient passes through directions, which a zero vector lacks
            turns = torch.atan2(down, across)[:, None] / math.pi * self._orientations
            apart = (turns - bins).remainder(self._orientations)
            shares = (1 - torch.minimum(apart, self._orientations - apart)).relu()
        cells = F.avg_pool2d(shares * lengths[:, None], self._cell)
        cells = cells.view(rows, channels, *cells.shape[1:]).sum(1)
        blocks = F.unfold(cells, (min(2, cells.shape[2]), min(2, cells.shape[3])))
        return F.normalize(blocks, dim=1, eps=1e-3).flatten(1)
