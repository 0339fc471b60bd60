"""What embedding attacks read: rows at the cut, one layer before it, or as they came in."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from vfl.attacks.base import Attack
from vfl.attacks.joint import JointBottom
from vfl.attacks.own_bottom import last_layer
from vfl.attacks.threat import Grant
from vfl.attacks.view import Seen, View
from vfl.defenses.anchored import AnchoredBottom
from vfl.options import require_choice

Layer = Literal["cut", "bottom", "learned", "before", "inputs"]
#: What each layer asks of a view.
LAYER_NEEDS: dict[str, frozenset[Grant]] = {
    "cut": frozenset({Grant.CUTS}),
    "bottom": frozenset({Grant.INPUTS, Grant.BOTTOM}),
    "learned": frozenset({Grant.INPUTS, Grant.BOTTOM}),
    "before": frozenset({Grant.INPUTS, Grant.BOTTOM}),
    "inputs": frozenset({Grant.INPUTS}),
}
_ROWS = 4096  # of one forward pass


class EmbeddingAttack(Attack):
    """An attack that reads one layer of the rows it is about.

    Attributes:
        uses: grants it needs besides those of the layer.

    Args:
        at: the layer; see `features`.

    Raises:
        BadOptionError: no such layer.
    """

    uses: ClassVar[frozenset[Grant]] = frozenset()

    def __init__(self, at: Layer) -> None:
        require_choice("at", at, tuple(LAYER_NEEDS))
        self.at: Layer = at
        self.needs = LAYER_NEEDS[at] | self.uses

    def rows(self, view: View, seen: Seen) -> Tensor:
        """The features of one group of rows, axes (rows, features)."""
        return features(view, seen, self.at)


def features(view: View, seen: Seen, layer: Layer) -> Tensor:
    """One group of rows as flat float32 features, axes (rows, features).

    Args:
        view: where the bottom comes from.
        seen: the group.
        layer: "cut": as it travelled; "bottom": before noise and codec, which the bottom's owner
            can leave out; "learned": of an `anchored` bottom the part that labels moved, apart from
            the components that anybody computes from inputs, and of another one the same as
            "bottom"; "before": what the bottom's last layer with weights is given (thesis
            4.4.3); "inputs": the columns.
    """
    if layer == "cut":
        return seen.cuts.flatten(1)
    if layer == "inputs":
        return seen.inputs.flatten(1)
    if layer == "bottom":
        return through(view.bottom(), seen.inputs).flatten(1)
    if layer == "learned":
        return through(learned_part(view.bottom()), seen.inputs).flatten(1)
    kept = seen.before
    return before_last(view.bottom(), seen.inputs) if kept is None else kept


def learned_part(bottom: nn.Module) -> nn.Module:
    """What is trained of an `anchored` bottom; another one whole."""
    if isinstance(bottom, JointBottom):
        return bottom.each(learned_part)
    anchored = (part for part in bottom.modules() if isinstance(part, AnchoredBottom))
    return next((part.learned for part in anchored), bottom)


def before_last(bottom: nn.Module, inputs: Tensor) -> Tensor:
    """What the last layer with weights of a bottom is given, axes (rows, features).

    Layers that a defense or a codec put around it do not count; see `last_layer`. A bottom without
    weights is given the inputs.
    """
    if isinstance(bottom, JointBottom):
        return torch.cat([before_last(one, part) for one, part in bottom.parts(inputs)], 1)
    layer = last_layer(bottom, inputs[:1])
    if layer is None:
        return inputs.flatten(1)
    found: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, given: found.append(given[0].flatten(1)))
    try:
        through(bottom, inputs)
    finally:
        hook.remove()
    return torch.cat(found)


def through(module: nn.Module, inputs: Tensor) -> Tensor:
    """A module's outputs for many rows, in evaluation mode and without a graph."""
    module.eval()
    with torch.no_grad():
        return torch.cat([module(part) for part in torch.split(inputs, _ROWS)])
