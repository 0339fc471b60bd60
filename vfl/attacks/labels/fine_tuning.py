"""Fine-tuning of bottom and top on a few leaked labels; `classifiers` fine-tunes only the top."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vfl.attacks.base import Attack, fit, key_of, require_at_least, through
from vfl.attacks.labels.classifiers import start_at_means
from vfl.attacks.view import Grant, View
from vfl.core.seeds import scoped


class Unfreeze(Attack):
    """Trains bottom and top on the leaked rows, starting from the bottom's trained weights.

    A linear top starts with the class means of the bottom's outputs as weights; other tops start
    with random weights. The attack reads the bottom's output before noise and codec, because the
    owner of the bottom can leave these out. Batch normalisation keeps its statistics from the
    victim's training, because statistics of a few leaked rows are less accurate.

    Args:
        steps: number of Adam steps, each on all leaked rows.
        learning_rate: Adam's learning rate.

    Raises:
        BadOptionError: an option is out of range.
    """

    needs = frozenset({Grant.INPUTS, Grant.BOTTOM, Grant.LEAKED, Grant.TOP_RECIPE})

    def __init__(self, steps: int = 150, learning_rate: float = 1e-3) -> None:
        require_at_least(0, steps=steps, learning_rate=learning_rate)
        self.steps = steps
        self.learning_rate = learning_rate

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        leaked = view.leaked
        network = completed(view, draw)
        fit(
            network,
            leaked.inputs,
            leaked.labels,
            self.steps,
            self.learning_rate,
            draw,
            keep_norms=True,
        )
        return through(network, view.targets.inputs)


def completed(view: View, draw: torch.Generator) -> nn.Sequential:
    """Return the attacker's bottom with a new top; a linear top starts with class means."""
    bottom, leaked = view.bottom(), view.leaked
    known = through(bottom, leaked.inputs)
    with scoped(key_of(draw)):
        top = view.new_top(known.shape[1])
    if isinstance(top, nn.Linear):
        start_at_means(top, known, leaked.labels)
    for weights in bottom.parameters():
        weights.requires_grad_(True)
    return nn.Sequential(bottom, top)
