"""A backdoor: rows with a trigger get the gradients of a class that the attacker chose."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl.attacks.active.base import InputBackdoor
from vfl.attacks.active.rows import require_known
from vfl.attacks.base import key_of
from vfl.attacks.view import Grant, View
from vfl.compression import StepContext
from vfl.core.seeds import generator


class Replacement(InputBackdoor):
    """Replaces rows known to be of the target class by random rows of the batch with a trigger.

    For a replaced row, the label party returns the gradient of the target class, so the network
    learns to associate the trigger with this class. In predictions, the party puts the trigger on
    any row (`triggered`), and the network then predicts the target class.

    Source: Liu et al. 2022, "Batch label inference and replacement attacks in black-boxed vertical
    federated learning". In the paper, the party replaces gradients after it receives them. This
    class instead feeds the triggered rows to the bottom before the cut is sent. In both ways,
    triggered inputs are paired with gradients of the target class.

    Args:
        target: the class that the attacker wants the network to predict for triggered rows.
        share: share of the known rows of the target class in a batch that the party replaces.
        columns: number of columns that the trigger fills, counted back from the last column. For
            pictures, the side length in pixels of the square that it fills in one corner.
        value: value of the trigger, in the units of the bottom's inputs.

    Raises:
        BadOptionError: an option is out of range.
    """

    holds = frozenset({Grant.LEAKED, Grant.INPUTS})

    def __init__(
        self, target: int = 0, share: float = 0.5, columns: int = 3, value: float = 3.0
    ) -> None:
        super().__init__(target, share, columns, value)

    def begin(self, view: View, draw: torch.Generator) -> None:
        require_known(view, self.target)
        known = view.leaked.inputs[view.leaked.labels == self.target]
        self._known = {row.numpy().tobytes() for row in known}
        self._key = key_of(draw)

    def batch(self, inputs: Tensor, context: StepContext) -> Tensor:
        draw = generator(self._key, "replacement", context.step)
        known = torch.tensor([row.numpy().tobytes() in self._known for row in inputs])
        indices = torch.nonzero(known)[:, 0]
        chosen = indices[torch.rand(len(indices), generator=draw) < self.share]
        others = torch.randint(len(inputs), chosen.shape, generator=draw)
        fed = inputs.clone()
        fed[chosen] = self.triggered(inputs[others])
        return fed
