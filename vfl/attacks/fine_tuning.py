"""Fine-tuning: a top of the known architecture, trained on a few leaked labels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vfl.attacks.features import EmbeddingAttack, Layer
from vfl.attacks.fit import fit, key_of
from vfl.attacks.threat import Grant
from vfl.attacks.view import View
from vfl.options import require_range
from vfl.seeds import scoped


class FineTuning(EmbeddingAttack):
    """Freezes the bottom and trains a top on the leaked rows.

    A linear top starts with the class means of the leaked features as its weights, others as drawn.

    Source: thesis section 4.4.1; Fu et al. 2022 (model completion).

    Args:
        steps: full-batch Adam steps.
        rate: their learning rate.
        at: the layer it reads.

    Raises:
        BadOptionError: an option out of range.
    """

    uses = frozenset({Grant.LEAKED, Grant.TOP_RECIPE})

    def __init__(self, steps: int = 200, rate: float = 0.01, at: Layer = "cut") -> None:
        require_range("steps", steps, 0)
        require_range("rate", rate, 0)
        super().__init__(at)
        self.steps = steps
        self.rate = rate

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        leaked = view.leaked
        known = self.rows(view, leaked)
        with scoped(key_of(draw)):
            top = view.new_top(known.shape[1])
        if isinstance(top, nn.Linear):
            start_at_means(top, known, leaked.labels)
        fit(top, known, leaked.labels, self.steps, self.rate, draw)
        with torch.no_grad():
            scores: Tensor = top(self.rows(view, view.targets))
        return scores


def start_at_means(top: nn.Linear, known: Tensor, labels: Tensor) -> None:
    """Set a linear top's weights to the mean features of each class, and its biases to zero."""
    with torch.no_grad():
        for code in range(top.out_features):
            top.weight[code] = known[labels == code].mean(0)
        top.bias.zero_()
