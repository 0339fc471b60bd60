"""SDAR: simulates the victim's bottom and trains a decoder, each against a discriminator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, one_hot, softplus

from vfl.attacks.base import Attack, Goal, key_of, require_at_least, scale_by, through
from vfl.attacks.inputs.inversion import decoder
from vfl.attacks.view import Grant, GrantedRows, View
from vfl.core.seeds import scoped
from vfl.models.optimizers import descend

_HIDDEN = 128
_BATCH_SIZE = 64


#: Grants that the attack needs: as a label party with labels and the top, and as a U-shape's
#: server.
_WITH_LABELS = frozenset(
    {Grant.CUTS, Grant.LEAKED_INPUTS, Grant.LABELS, Grant.TOP, Grant.BOTTOM_RECIPE}
)
_WITHOUT = frozenset(
    {Grant.CUTS, Grant.AUXILIARY, Grant.MIDDLE, Grant.TOP_RECIPE, Grant.BOTTOM_RECIPE}
)


@dataclass(frozen=True, eq=False)
class _Simulated:
    """The attack's networks after it has trained them.

    Attributes:
        scale: standardises cuts.
        inverse: decoder that maps standardised cuts to inputs.
        behind: the layers after the cut, which map cuts to logits.
    """

    scale: Callable[[Tensor], Tensor]
    inverse: nn.Module
    behind: nn.Module


class SDAR(Attack):
    """Trains a simulator of the victim's bottom and a decoder, and decodes the victim's cuts.

    In each step, the simulator learns the task: it trains on the attacker's own rows, with the
    label party's fixed top behind it. The simulator also learns to produce cuts that a
    discriminator classifies as the victim's cuts. The decoder learns to invert the simulator: to
    map its cuts back to inputs. The decoder also learns to decode the victim's cuts to rows that a
    second discriminator classifies as real rows. Both discriminators also read the label of the
    row. The attack uses columns and labels of the leaked rows, but not their cuts. So the attacker
    may use any rows of the same kind.

    With `labels=no` the attacker is the server of a U-shape, which has neither the rows' labels nor
    the last layers. In this case, the discriminators read no label, and the attack also simulates
    last layers, which follow the server's own layers. The attack `sdar_labels` predicts labels with
    these simulated last layers.

    The attack differs from the paper in four points. SDAR runs after the training, on the last cut
    of each row. The decoder reads no label, so that it cannot answer with the mean of a class. The
    discriminators have dense layers. Labels of the attacker's rows are not randomly flipped; the
    authors' code can do this. The victim must be the only party that feeds the top.

    Source: Zhu, Luo, Wu, Jiang, Xiao, Ooi 2025, "Passive inference attacks on split learning via
    adversarial regularization" (NDSS), the attacks on vanilla and on U-shaped split learning. For
    the U-shape, we followed the authors' code. The attack `pseudo_client` is similar; it matches
    means and covariances instead of using discriminators.

    Args:
        steps: number of Adam steps for all networks, each on 64 rows.
        learning_rate: Adam's learning rate.
        alike: weight, in the simulator's loss, of the term from the discriminator of cuts.
        real: weight, in the decoder's loss, of the term from the discriminator of rows.
        labels: whether the attacker is the label party, with labels and top; otherwise it is a
            U-shape's server.

    >>> Grant.OTHERS_BOTTOM in SDAR(steps=100).needs, Grant.MIDDLE in SDAR(labels=False).needs
    (False, True)

    Raises:
        BadOptionError: an option is out of range.
    """

    goal: Goal = "inputs"
    needs = _WITH_LABELS

    def __init__(
        self,
        steps: int = 1000,
        learning_rate: float = 0.001,
        alike: float = 1.0,
        real: float = 0.001,
        labels: bool = True,
    ) -> None:
        require_at_least(0, steps=steps, learning_rate=learning_rate, alike=alike, real=real)
        self.steps = steps
        self.learning_rate = learning_rate
        self.alike = alike
        self.real = real
        self.labels = labels
        self.needs = _WITH_LABELS if labels else _WITHOUT

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        found = self._simulated(view, draw)
        return through(found.inverse, found.scale(view.targets.cuts))

    def _simulated(self, view: View, draw: torch.Generator) -> _Simulated:
        known, targets, classes = view.leaked, view.targets, view.classes
        inputs, labels = known.inputs, one_hot(known.labels, classes).float()
        cuts, theirs = targets.cuts, self._beside(targets, classes)
        scale, beside = scale_by("standard", cuts), classes if self.labels else 0
        with scoped(key_of(draw)):
            behind, tail = self._behind(view, cuts)
            simulator = view.new_bottom().train()
            inverse = decoder(cuts.shape[1], tuple(inputs.shape[1:])).train()
            of_cuts = discriminator(cuts.shape[1] + beside)
            of_rows = discriminator(inputs[0].numel() + beside)
            step_of = {one: adam([*one.parameters(), *more], self.learning_rate) for one, more in (
                (simulator, tail), (inverse, []), (of_cuts, []), (of_rows, [])
            )}  # fmt: skip
            for _ in range(self.steps):
                own = torch.randint(len(inputs), (_BATCH_SIZE,), generator=draw)
                other = torch.randint(len(cuts), (_BATCH_SIZE,), generator=draw)
                rows, own_label, label = inputs[own], labels[own], theirs[other]
                simulated, cut, read = simulator(rows), scale(cuts[other]), own_label[:, :beside]
                made = torch.cat([scale(simulated), read], 1)
                task = cross_entropy(behind(simulated), own_label)
                descend(step_of[simulator], task + self.alike * taken_for_real(of_cuts, made))
                descend(
                    step_of[of_cuts], told_apart(of_cuts, torch.cat([cut, label], 1), made.detach())
                )
                decoded = inverse(cut)
                written = torch.cat([decoded.flatten(1), label], 1)
                error = mse_loss(inverse(scale(simulated.detach())), rows)
                descend(step_of[inverse], error + self.real * taken_for_real(of_rows, written))
                real = torch.cat([rows.flatten(1), read], 1)
                descend(step_of[of_rows], told_apart(of_rows, real, written.detach()))
        return _Simulated(scale, inverse, behind)

    def _beside(self, targets: GrantedRows, classes: int) -> Tensor:
        """Return the victim's rows' labels, which discriminators read, axes (rows, classes)."""
        if self.labels:
            return one_hot(targets.labels, classes).float()
        return torch.empty(targets.rows, 0)

    def _behind(self, view: View, cuts: Tensor) -> tuple[nn.Module, list[nn.Parameter]]:
        """Return the layers behind the cut, and those of their weights that the attack trains."""
        held = (view.top() if self.labels else view.middle()).eval().requires_grad_(False)
        if self.labels:
            return held, []
        tail = view.new_top(through(held, cuts[:1]).shape[1]).train()
        return nn.Sequential(held, tail), list(tail.parameters())


class SDARLabels(SDAR):
    """Predicts the labels in a U-shape with the last layers that `sdar:labels=no` simulates.

    The victim's cuts pass through the server's own layers, and then through the simulated last
    layers.

    Only the distributions of cuts determine which cut belongs to which class. For convolutional
    bottoms, this is sufficient. For dense bottoms, and for similar classes, the attack confuses
    classes with each other.

    Source: see `SDAR`.

    Args:
        steps: number of Adam steps for all networks, each on 64 rows.
        learning_rate: Adam's learning rate.
        alike: weight, in the simulator's loss, of the term from the discriminator of cuts.

    >>> Grant.LEAKED in SDARLabels(steps=100).needs
    False

    Raises:
        BadOptionError: an option is out of range.
    """

    goal = "labels"

    def __init__(self, steps: int = 1000, learning_rate: float = 0.001, alike: float = 1.0) -> None:
        super().__init__(steps, learning_rate, alike, labels=False)

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        found = self._simulated(view, draw)
        return through(found.behind, view.targets.cuts)


def discriminator(width: int) -> nn.Module:
    """Return an untrained discriminator of rows; real rows get high outputs."""
    return nn.Sequential(
        nn.Linear(width, _HIDDEN),
        nn.LeakyReLU(0.2),
        nn.Linear(_HIDDEN, _HIDDEN),
        nn.LeakyReLU(0.2),
        nn.Linear(_HIDDEN, 1),
    )


def taken_for_real(judge: nn.Module, made: Tensor) -> Tensor:
    """Return the mean cross-entropy of generated rows with the class "real"."""
    return softplus(-judge(made)).mean()


def told_apart(judge: nn.Module, real: Tensor, made: Tensor) -> Tensor:
    """Return the discriminator's mean cross-entropy on real rows plus that on generated rows."""
    return taken_for_real(judge, real) + softplus(judge(made)).mean()


def adam(weights: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Adam:
    """Return Adam with a first-moment decay of 0.5, for discriminators (Radford et al. 2016)."""
    return torch.optim.Adam(weights, lr=learning_rate, betas=(0.5, 0.999))
