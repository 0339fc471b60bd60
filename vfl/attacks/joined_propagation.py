"""Label propagation over inputs and a layer side by side: what a bottom adds to its inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vfl.attacks.features import Layer, features
from vfl.attacks.label_propagation import LabelPropagation
from vfl.attacks.scaling import Scale, Scaler
from vfl.attacks.threat import Grant
from vfl.attacks.view import Seen, View
from vfl.defenses.components import principal
from vfl.options import require_range


class JoinedPropagation(LabelPropagation):
    """Spreads the leaked labels over neighbours by inputs and a layer at once.

    Inputs alone give what anybody gets who has them. A layer that is read worse than those may
    still tell apart what they do not.

    Args:
        neighbours: of each row in the graph.
        spread: how much a row believes its neighbours, 0 to below 1.
        scaler: of the layer; see `scale_by`.
        at: the layer beside the inputs.
        share: of the layer in a mean squared distance, 0 to 1.
        components: of the inputs; 0 takes inputs as they are.

    Raises:
        BadOptionError: an option out of range.
    """

    uses = frozenset({Grant.LEAKED, Grant.UNLABELLED, Grant.INPUTS})

    def __init__(
        self,
        neighbours: int = 10,
        spread: float = 0.99,
        scaler: Scaler = "whiten",
        at: Layer = "cut",
        share: float = 0.2,
        components: int = 32,
    ) -> None:
        require_range("share", share, 0, 1)
        require_range("components", components, 0)
        super().__init__(neighbours, spread, scaler, at)
        self.share = share
        self.components = components

    def reader(self, view: View) -> Callable[[Seen], Tensor]:
        layer, turn = super().reader(view), self._turn(view)
        further = view.unlabelled
        alike = alike_by(layer(further)), alike_by(turn(features(view, further, "inputs")))

        def read(seen: Seen) -> Tensor:
            looks = alike[0](layer(seen)), alike[1](turn(features(view, seen, "inputs")))
            return torch.cat([self.share**0.5 * looks[0], (1 - self.share) ** 0.5 * looks[1]], 1)

        return read

    def _turn(self, view: View) -> Scale:
        if not self.components:
            return lambda rows: rows
        _, _, directions = principal(features(view, view.unlabelled, "inputs"))
        kept = directions[:, : self.components].float()
        return lambda rows: rows @ kept


def alike_by(reference: Tensor) -> Scale:
    """Centres rows and divides them by one number, so that the reference's mean square is 1."""
    mean = reference.mean(0)
    length = (reference - mean).square().sum(1).mean().sqrt().clamp_min(1e-12)
    return lambda rows: (rows - mean) / length
