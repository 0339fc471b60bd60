"""SDAR: a simulated bottom and a decoder, each trained against a discriminator of real rows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, one_hot, softplus

from vfl.attacks.base import Attack, key_of, require_at_least, scale_by, through
from vfl.attacks.inputs.inversion import decoder
from vfl.attacks.view import Grant, View
from vfl.core.seeds import scoped
from vfl.models.optimizers import descend

_HIDDEN = 128
_BATCH_SIZE = 64


class SDAR(Attack):
    """Trains a simulator of the bottom and its decoder, and decodes the victim's cuts.

    In each step the simulator learns, on rows of the label party's own, the task with the fixed
    top, and makes cuts that its discriminator takes for the victim's. The decoder learns to invert
    the simulator, and makes of the victim's cuts rows that a second discriminator takes for real.
    Both discriminators read the label beside the cut or the row. Of the leaked rows the attack uses
    columns and labels, not their cuts: they need not be the victim's own.

    Unlike the source, it runs after the training, on the last cut of each row; its decoder reads no
    label, so that it cannot answer with the mean of a class; discriminators have dense layers. The
    bottom's owner must be the only party that feeds the top.

    Source: Zhu, Luo, Wu, Jiang, Xiao, Ooi 2025, "Passive inference attacks on split learning via
    adversarial regularization" (NDSS), the attack on vanilla split learning. `pseudo_client` is its
    relative with moments in place of discriminators.

    Args:
        steps: Adam steps of all four networks, each on 64 rows.
        learning_rate: their learning rate.
        alike: weight of the discriminator of cuts in the simulator's loss.
        real: weight of the discriminator of rows in the decoder's loss.

    >>> Grant.OTHERS_BOTTOM in SDAR(steps=100).needs
    False

    Raises:
        BadOptionError: an option out of range.
    """

    goal = "inputs"
    needs = frozenset(
        {Grant.CUTS, Grant.LEAKED_INPUTS, Grant.LABELS, Grant.TOP, Grant.BOTTOM_RECIPE}
    )

    def __init__(
        self,
        steps: int = 1000,
        learning_rate: float = 0.001,
        alike: float = 1.0,
        real: float = 0.001,
    ) -> None:
        require_at_least(0, steps=steps, learning_rate=learning_rate, alike=alike, real=real)
        self.steps = steps
        self.learning_rate = learning_rate
        self.alike = alike
        self.real = real

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        known, targets, classes = view.leaked, view.targets, view.classes
        inputs, labels = known.inputs, one_hot(known.labels, classes).float()
        cuts, theirs = targets.cuts, one_hot(targets.labels, classes).float()
        scale, top = scale_by("standard", cuts), view.top().eval().requires_grad_(False)
        with scoped(key_of(draw)):
            simulator = view.new_bottom().train()
            inverse = decoder(cuts.shape[1], tuple(inputs.shape[1:])).train()
            of_cuts = discriminator(cuts.shape[1] + classes)
            of_rows = discriminator(inputs[0].numel() + classes)
            step_of = {one: adam(one.parameters(), self.learning_rate) for one in (
                simulator, inverse, of_cuts, of_rows
            )}  # fmt: skip
            for _ in range(self.steps):
                own = torch.randint(len(inputs), (_BATCH_SIZE,), generator=draw)
                other = torch.randint(len(cuts), (_BATCH_SIZE,), generator=draw)
                rows, own_label, label = inputs[own], labels[own], theirs[other]
                simulated, cut = simulator(rows), scale(cuts[other])
                made = torch.cat([scale(simulated), own_label], 1)
                task = cross_entropy(top(simulated), own_label)
                descend(step_of[simulator], task + self.alike * taken_for_real(of_cuts, made))
                descend(
                    step_of[of_cuts], told_apart(of_cuts, torch.cat([cut, label], 1), made.detach())
                )
                decoded = inverse(cut)
                written = torch.cat([decoded.flatten(1), label], 1)
                error = mse_loss(inverse(scale(simulated.detach())), rows)
                descend(step_of[inverse], error + self.real * taken_for_real(of_rows, written))
                real = torch.cat([rows.flatten(1), own_label], 1)
                descend(step_of[of_rows], told_apart(of_rows, real, written.detach()))
        return through(inverse, scale(cuts))


def discriminator(width: int) -> nn.Module:
    """Return an untrained discriminator of rows of a width; its output is high for real rows."""
    return nn.Sequential(
        nn.Linear(width, _HIDDEN),
        nn.LeakyReLU(0.2),
        nn.Linear(_HIDDEN, _HIDDEN),
        nn.LeakyReLU(0.2),
        nn.Linear(_HIDDEN, 1),
    )


def taken_for_real(judge: nn.Module, made: Tensor) -> Tensor:
    """Return the cross-entropy of made rows with the class of real ones, a scalar."""
    return softplus(-judge(made)).mean()


def told_apart(judge: nn.Module, real: Tensor, made: Tensor) -> Tensor:
    """Return the discriminator's cross-entropy on real and on made rows, a scalar."""
    return taken_for_real(judge, real) + softplus(judge(made)).mean()


def adam(weights: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Adam:
    """Return Adam with the first momentum that discriminators need (Radford et al. 2016)."""
    return torch.optim.Adam(weights, lr=learning_rate, betas=(0.5, 0.999))
