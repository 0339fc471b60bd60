"""A party's bottom with what its defense and its codec put around it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class OwnBottom(nn.Module):
    """From a party's columns to what it sends; what is around the bottom can be told from it.

    Args:
        parts: the defended bottom and, of some codecs, an adapter; one after the other.
        core: the bottom itself, somewhere in the first part; a defense may have replaced it, and
            then that part is taken for it.
    """

    def __init__(self, parts: Iterable[nn.Module], core: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)
        replaced = all(one is not core for one in self.parts.modules())
        self.core = self.parts[0] if replaced else core

    def forward(self, inputs: Tensor) -> Tensor:
        """Axes (rows, ...) in, (rows, width) out."""
        sent: Tensor = self.parts(inputs)
        return sent


def last_layer(bottom: nn.Module, row: Tensor) -> nn.Module | None:
    """The layer with weights that a bottom itself ends with; None of a bottom without any.

    Args:
        bottom: what is around an `OwnBottom`, such as a passport or an adapter, does not count.
        row: any, axes (1, ...), to see what is called last.
    """
    core = bottom.core if isinstance(bottom, OwnBottom) else bottom
    called: list[nn.Module] = []
    hooks = [
        one.register_forward_pre_hook(lambda layer, _: called.append(layer))
        for one in core.modules()
        if _maps(one)
    ]
    try:
        with torch.no_grad():
            bottom.eval()(row)
    finally:
        for hook in hooks:
            hook.remove()
    return called[-1] if called else None


def _maps(layer: nn.Module) -> bool:
    """Whether a layer mixes its inputs, as linear layers and convolutions do."""
    weight = layer._parameters.get("weight")
    return weight is not None and weight.dim() > 1
