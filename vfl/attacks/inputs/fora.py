"""FORA: trains a substitute bottom whose cuts have the victim's distribution, and inverts it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vfl.attacks.base import Attack, key_of, require_at_least, scale_by, through
from vfl.attacks.inputs.inversion import decoder, regress
from vfl.attacks.inputs.sdar import adam, discriminator, taken_for_real, told_apart
from vfl.attacks.view import Grant, View
from vfl.core.seeds import scoped
from vfl.models.optimizers import descend

_BATCH_SIZE = 64
#: Kernel widths, as multiples of the mean squared distance within a batch.
_KERNELS = (0.25, 0.5, 1.0, 2.0, 4.0)


class FORA(Attack):
    """Trains a substitute of the victim's bottom on the attacker's rows, and inverts it.

    A discriminator and a distance between distributions (`mk_mmd`) make the distribution of the
    substitute's cuts similar to the distribution of the victim's cuts. The attack needs no labels
    and no top. So a party that only relays cuts can run the attack as well as a label party, even
    if other parties also send cuts to the top. Equal distributions of cuts do not determine which
    reconstructed column is which true column; only the architecture of the bottom can decide this.
    For convolutional bottoms on digits, the attack's error is still larger than the error of the
    mean picture (docs/results/reconstruction_bottoms.csv).

    Source: Xu et al. 2024, "A stealthy wrongdoer: feature-oriented reconstruction attack against
    split learning" (CVPR): the losses of the paper's substitute client and inverse network, and its
    attack on a snapshot of cuts. In vfl, the snapshot consists of the last cut of each row.

    Args:
        steps: number of Adam steps, each on 64 rows: once for the substitute, and again for the
            inversion.
        learning_rate: Adam's learning rate.
        distance: weight of the distance `mk_mmd` relative to the discriminator's loss.

    >>> Grant.LABELS in FORA().needs
    False

    Raises:
        BadOptionError: an option is out of range.
    """

    goal = "inputs"
    needs = frozenset({Grant.CUTS, Grant.LEAKED_INPUTS, Grant.BOTTOM_RECIPE})

    def __init__(
        self, steps: int = 1000, learning_rate: float = 0.001, distance: float = 1.0
    ) -> None:
        require_at_least(0, steps=steps, learning_rate=learning_rate, distance=distance)
        self.steps = steps
        self.learning_rate = learning_rate
        self.distance = distance

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        inputs, cuts = view.leaked.inputs, view.targets.cuts
        scale = scale_by("standard", cuts)
        with scoped(key_of(draw)):
            substitute = self._substitute(view, scale(cuts), draw)
            network = decoder(cuts.shape[1], tuple(inputs.shape[1:]))
        made = scale(through(substitute, inputs))
        regress(network, made, inputs, self.steps, self.learning_rate, draw)
        return through(network, scale(cuts))

    def _substitute(self, view: View, wanted: Tensor, draw: torch.Generator) -> nn.Module:
        """Return a substitute bottom whose standardised cuts follow the victim's distribution."""
        inputs, scale = view.leaked.inputs, scale_by("standard", view.targets.cuts)
        substitute, judge = view.new_bottom().train(), discriminator(wanted.shape[1])
        own, judging = (adam(one.parameters(), self.learning_rate) for one in (substitute, judge))
        for _ in range(self.steps):
            rows = inputs[torch.randint(len(inputs), (_BATCH_SIZE,), generator=draw)]
            theirs = wanted[torch.randint(len(wanted), (_BATCH_SIZE,), generator=draw)]
            made = scale(substitute(rows))
            descend(own, taken_for_real(judge, made) + self.distance * mk_mmd(made, theirs))
            descend(judging, told_apart(judge, theirs, made.detach()))
        return substitute


def mk_mmd(one: Tensor, other: Tensor) -> Tensor:
    """Return the squared maximum mean discrepancy of two samples, summed over Gaussian kernels.

    The widths of the kernels are five multiples of the mean squared distance between all rows (Long
    et al. 2015).

    Args:
        one: the first sample, axes (rows, width).
        other: the second sample, axes (other rows, width).

    >>> rows = torch.tensor([[0.0], [1.0]])
    >>> float(mk_mmd(rows, rows)), round(float(mk_mmd(rows, rows + 9)), 3)
    (0.0, 7.514)
    """
    rows = torch.cat([one, other])
    sizes = rows.square().sum(1)
    squares = (sizes[:, None] + sizes - 2 * rows @ rows.T).clamp(min=0)
    width = squares.detach().mean().clamp(min=torch.finfo(rows.dtype).tiny)
    kernel = sum((torch.exp(-squares / (times * width)) for times in _KERNELS), torch.zeros(()))
    first, second = kernel[: len(one)], kernel[len(one) :]
    return (
        first[:, : len(one)].mean() + second[:, len(one) :].mean() - 2 * first[:, len(one) :].mean()
    )
