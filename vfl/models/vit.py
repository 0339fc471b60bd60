"""A vision transformer, as bottom."""

from __future__ import annotations

from torch import nn

from vfl.errors import BadOptionError, SpecError
from vfl.models.base import Bottom, Shape
from vfl.models.parts import check_dropout, check_size, picture_axes

#: Blocks of torchvision's largest network have 32 layers and tokens of 1,280.
_MOST_LAYERS = 64
_MOST_TOKENS = 2**14


class ViTBottom(Bottom):
    """torchvision's vision transformer, trained from scratch, and a linear layer to the cut.

    Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words: Transformers for Image Recognition at
    Scale", section 3.1. The defaults are the thesis' (section 4.4.6), for pictures of 128 x 128.

    Args:
        patch: pixels a side of the squares that become tokens.
        tokens: width of a token.
        layers: encoder blocks.
        heads: attention heads of a block.
        hidden: width of a block's hidden layer; 0 takes four times that of a token.
        dropout: probability in the encoder, 0 to below 1.

    >>> module = ViTBottom(patch=4, tokens=8, layers=1, heads=2).build(shape=(1, 8, 8), width=3)
    >>> embed, block = 8 * 17 + 8 + 8 * (4 + 1), 4 * (8 * 9) + 32 * 9 + 8 * 33 + 2 * 16
    >>> sum(p.numel() for p in module.parameters()) == embed + block + 16 + 3 * 9
    True

    Raises:
        BadOptionError: an option out of range, or tokens that the heads cannot share evenly.
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
                "each head takes an equal share of a token",
                got=f"tokens={tokens},heads={heads}",
                want="tokens that heads divides",
            )

    def build(self, shape: Shape, width: int) -> nn.Module:
        from torchvision.models import VisionTransformer

        channels, height, side = picture_axes(shape, "vit")
        if height != side or side % self.patch:
            raise SpecError(
                "bottom 'vit' takes squares that its patches fill",
                got=f"rows of shape {shape} and patch={self.patch}",
                want="a height that equals the width and is a multiple of the patch",
                fix="set data.side, or another patch",
            )
        module: nn.Module = VisionTransformer(
            side, self.patch, self.layers, self.heads, self.tokens, self.hidden, self.dropout
        )
        if channels != 3:  # torchvision's takes colours
            module.conv_proj = nn.Conv2d(channels, self.tokens, self.patch, self.patch)
        module.heads = nn.Linear(self.tokens, width)  # torchvision's starts at zero
        return module
