"""EfficientNet-B0 for colour pictures, as bottom."""

from __future__ import annotations

from torch import nn

from vfl.errors import MissingDataError, SpecError
from vfl.models.base import Bottom, Shape
from vfl.models.parts import channels_last, picture_axes

FEATURES = 1280


class EfficientNetB0Bottom(Bottom):
    """torchvision's network up to its 1,280 pooled features, and a linear layer to another width.

    Tan and Le 2019, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks",
    table 1, without the dropout and the layer of 1,000 classes.

    Args:
        pretrained: start from torchvision's own weights, learned on ImageNet; they are fetched, or
            taken from torch's cache.

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
        if self.pretrained and not next(module.parameters()).is_meta:  # shapes alone need none
            module.load_state_dict(_published_weights())
        head = nn.Identity() if width == FEATURES else nn.Linear(FEATURES, width)
        module.classifier = head
        return channels_last(module)


def _published_weights() -> dict[str, object]:
    """What torchvision publishes, its hash checked.

    Raises:
        MissingDataError: it cannot be fetched and is not in torch's cache.
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
