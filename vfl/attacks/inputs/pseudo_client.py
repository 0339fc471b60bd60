"""A pseudo-client: a bottom that fits the attacker's own top is trained and then inverted."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from vfl.attacks.base import Attack, key_of, require_at_least, scale_by, through
from vfl.attacks.inputs.inversion import decoder, regress
from vfl.attacks.view import Grant, View
from vfl.core.seeds import scoped
from vfl.models.optimizers import descend

_BATCH_SIZE = 64


class PseudoClient(Attack):
    """Trains a bottom (pseudo-bottom) to fit the label party's top, and then inverts this bottom.

    The attacker is the label party; its top stays fixed. The pseudo-bottom trains on the attacker's
    rows and their labels. A second loss matches mean and covariance of its cuts with those of the
    victim's cuts; the attack `sdar` uses a discriminator for this. Before the inversion, the cuts
    of both bottoms are standardised, which removes remaining differences in mean and standard
    deviation. The attack uses columns and labels of the leaked rows, but not their cuts. So the
    attacker may use any rows of the same kind, also rows that the victim does not have.

    Source: Gao and Zhang 2023 (PCAT), with the alignment of Sun and Saenko 2016 (CORAL). The victim
    must be the only party that feeds the top.

    Args:
        steps: number of Adam steps, each on 64 rows: this many for the pseudo-bottom, and again for
            its inversion.
        learning_rate: Adam's learning rate.
        align: weight of the distance between the distributions of the two bottoms' cuts.

    Raises:
        BadOptionError: an option is out of range.
    """

    goal = "inputs"
    needs = frozenset(
        {Grant.CUTS, Grant.LEAKED_INPUTS, Grant.LABELS, Grant.TOP, Grant.BOTTOM_RECIPE}
    )

    def __init__(self, steps: int = 1000, learning_rate: float = 0.001, align: float = 1.0) -> None:
        require_at_least(0, steps=steps, learning_rate=learning_rate, align=align)
        self.steps = steps
        self.learning_rate = learning_rate
        self.align = align

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        inputs, cuts = view.leaked.inputs, view.targets.cuts
        with scoped(key_of(draw)):
            pseudo = self._pseudo(view, draw)
            network = decoder(cuts.shape[1], tuple(inputs.shape[1:]))
        made = through(pseudo, inputs)
        regress(
            network, scale_by("standard", made)(made), inputs, self.steps, self.learning_rate, draw
        )
        return through(network, scale_by("standard", cuts)(cuts))

    def _pseudo(self, view: View, draw: torch.Generator) -> nn.Module:
        inputs, labels, cuts = view.leaked.inputs, view.leaked.labels, view.targets.cuts
        pseudo, top = view.new_bottom().train(), view.top().eval().requires_grad_(False)
        optimizer = torch.optim.Adam(pseudo.parameters(), lr=self.learning_rate)
        for _ in range(self.steps):
            own = torch.randint(len(inputs), (_BATCH_SIZE,), generator=draw)
            others = torch.randint(len(cuts), (_BATCH_SIZE,), generator=draw)
            made = pseudo(inputs[own])
            loss = cross_entropy(top(made), labels[own])
            loss = loss + self.align * distance_of_moments(made, cuts[others])
            descend(optimizer, loss)
        return pseudo


def distance_of_moments(one: Tensor, other: Tensor) -> Tensor:
    """Return mean squared differences of means and covariances, in units of `other`'s variance.

    Args:
        one: the first sample, axes (rows, width).
        other: the second sample, axes (other rows, width).
    """
    scale = other.var(0).mean().clamp(min=torch.finfo(other.dtype).tiny)
    means = (one.mean(0) - other.mean(0)).square().mean() / scale
    spreads = (torch.cov(one.T) - torch.cov(other.T)).square().mean() / scale.square()
    return means + spreads
