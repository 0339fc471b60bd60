"""Labels from gradients: by their norm, direction, similarity, training effect, and signs."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, one_hot

from vfl.attacks.base import Attack, fit, key_of, rarest, require_two_classes, through
from vfl.attacks.labels.orientation import by_shares, is_upward
from vfl.attacks.transcript import RecordedExchange, Transcript
from vfl.attacks.view import Grant, View
from vfl.core.errors import DataError, UserError
from vfl.core.registry import require_range
from vfl.core.seeds import scoped
from vfl.defenses.components import principal

_HIDDEN, _BATCH = 128, 256
#: Below this probability a line continues the logarithm. A correction may make it negative, but the
#: order of such rows is still informative.
_SMALL = 0.05
_SHARES = 100.0  # leaked rows that quite unequal shares of classes are worth


class GradientAttack(Attack):
    """An attack that reads the gradients of the first epochs of a training, or of all epochs.

    Without noise, early gradients reveal most: the gradient of a fitted row is small and depends
    little on its label. With noise, every epoch adds information.

    Attributes:
        uses: grants that the attack needs in addition to gradients.
        fewest: smallest number of epochs that the attack must read; 0 means all epochs.

    Args:
        epochs: number of epochs to read.

    Raises:
        BadOptionError: the number of epochs is too small.
    """

    uses: ClassVar[frozenset[Grant]] = frozenset()
    fewest: ClassVar[int] = 1

    def __init__(self, epochs: int = 1) -> None:
        require_range("epochs", epochs, self.fewest)
        self.epochs = epochs
        self.needs = frozenset({Grant.GRADIENTS}) | self.uses

    def transcript(self, view: View) -> Transcript[RecordedExchange]:
        """Return the messages of the epochs in use, for targets and leaked rows.

        Raises:
            DataError: the recording holds no training exchange.
        """
        seen = view.transcript.first(self.epochs)
        if not seen.messages:
            raise DataError(
                "no training exchange was recorded", fix="record them: [trace] phases = train"
            )
        return seen


def width_of(seen: Transcript[RecordedExchange]) -> int:
    """Return the width of the cut whose gradients were recorded."""
    return seen.messages[0].gradients.shape[1]


def directions(one: RecordedExchange) -> Tensor:
    """Return the gradients of an exchange, scaled to length 1; zero gradients stay zero."""
    return normalize(one.gradients, dim=1)


class GradientNorm(GradientAttack):
    """Scores a row by the norm of its gradient relative to other rows of its batch.

    A network has learned little about a rare class, so each of its rows has a larger loss. Several
    epochs are averaged. The attack looks for the rarer class.

    Source: Li et al. 2022, "Label leakage and protection in two-party split learning".

    Args:
        epochs: number of epochs to read.
    """

    goal = "scores"

    def check(self, classes: int, width: int) -> None:
        require_two_classes(classes, "gradient_similarity or surrogate")

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        seen = self.transcript(view)
        self.check(view.classes, width_of(seen))
        return seen.mean(_loudness)[: view.targets.rows, 0]


def _loudness(one: RecordedExchange) -> Tensor:
    """Return each row's norm divided by the mean of its batch, axes (rows, 1)."""
    norms: Tensor = one.gradients.norm(dim=1, keepdim=True)
    mean: Tensor = norms.mean().clamp(min=torch.finfo(norms.dtype).tiny)
    return norms / mean


class GradientDirection(GradientAttack):
    """Scores a row by the cosine between its gradient and those of leaked rows of the rarer class.

    Gradients of one class have nearly the same direction, and those of the other class the opposite
    one. Cosines are computed within an epoch, in which the top changes little, and averaged over
    the epochs.

    Source: Li et al. 2022, "Label leakage and protection in two-party split learning".

    Args:
        epochs: number of epochs to read.
    """

    goal = "scores"
    uses = frozenset({Grant.LEAKED, Grant.PRIOR})

    def check(self, classes: int, width: int) -> None:
        require_two_classes(classes, "gradient_similarity or surrogate")

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        seen = self.transcript(view)
        self.check(view.classes, width_of(seen))
        leaked, rows = view.leaked, view.targets.rows
        sought = rarest(view.prior)
        positive = rows + torch.nonzero(leaked.labels == sought)[:, 0]
        if not len(positive):
            raise DataError(
                "no leaked row is positive",
                got=f"{leaked.rows} leaked rows, all of class {1 - sought}",
                want=f"at least one leaked row of class {sought}, the rarer one",
            )
        scores = torch.zeros(rows)
        for epoch in seen.each_epoch():
            found = epoch.mean(directions)
            scores += found[:rows] @ found[positive].mean(0)
        return scores


class GradientSimilarity(GradientAttack):
    """Clusters rows by the cosine of their gradients, starting at the leaked rows of each class.

    Source: Liu et al. 2024, "Similarity-based label inference attack against training and
    inference of split learning"; the centres then move as in k-means.

    Args:
        epochs: number of epochs to read; the directions of a row in all of them are compared.
        rounds: number of updates of the centres.

    Raises:
        BadOptionError: an option is out of range.
    """

    uses = frozenset({Grant.LEAKED})

    def __init__(self, epochs: int = 1, rounds: int = 10) -> None:
        require_range("rounds", rounds, 0)
        super().__init__(epochs)
        self.rounds = rounds

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        return self.clustered(view)[0][: view.targets.rows]

    def clustered(self, view: View) -> tuple[Tensor, Tensor]:
        """Cosines to each class, axes (targets + leaked, classes), and which rows had a gradient.

        A row with only zero gradients, or in no batch, has the same distance from every class.
        """
        rows, leaked = view.targets.rows, view.leaked
        found = self.transcript(view).by_epoch(directions).flatten(1)
        sides = normalize(found, dim=1)
        targets, known = sides[:rows], sides[rows:]
        fixed = one_hot(leaked.labels, view.classes).float()
        centres = normalize(fixed.T @ known, dim=1)
        for _ in range(self.rounds):
            near = one_hot((targets @ centres.T).argmax(1), view.classes).float()
            centres = normalize(fixed.T @ known + near.T @ targets, dim=1)
        return sides @ centres.T, found.norm(dim=1) > 0


class GradientTeacher(GradientSimilarity):
    """Trains a network on the attacker's columns with labels that gradients reveal for some rows.

    A defense may send gradients of few rows, or of labels that were randomised. The first leave
    most rows to be guessed, by what the others look like; the second are wrong about single rows,
    and right about all together. So the guesses of `gradient_similarity` are labels that a network
    learns from the inputs; how often they are true follows from the shares of the classes among
    them, and from leaked rows that had gradients. What the network believes is corrected for it
    (Patrini et al. 2017, backward correction). Of a row with a gradient, both count. The side that
    the first gradients drift to and leaked rows say which of two classes is which.

    Args:
        epochs: number of epochs to read.
        rounds: number of updates of the cluster centres.
        components: number of principal components of the inputs that the network sees.
        steps: number of Adam steps.

    Raises:
        BadOptionError: an option is out of range.
    """

    uses = frozenset({Grant.LEAKED, Grant.INPUTS, Grant.PRIOR})

    def __init__(
        self, epochs: int = 1, rounds: int = 10, components: int = 64, steps: int = 600
    ) -> None:
        require_range("components", components, 1)
        require_range("steps", steps, 1)
        super().__init__(epochs, rounds)
        self.components = components
        self.steps = steps

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        scores, has_gradient = self.clustered(view)
        rows, truth, classes = view.targets.rows, view.leaked.labels, view.classes
        guesses = scores.argmax(1)
        if classes == 2 and has_gradient.any():
            guesses = self._upright(view, scores[:, 1] - scores[:, 0], has_gradient)
        known = has_gradient[:rows]
        right, weight = right_by_shares(guesses[:rows][known], view.prior.double())
        # A row more of either kind, so that a few that agree are not taken for certainty.
        agreed = (guesses[rows:] == truth)[has_gradient[rows:]].double()
        right = (agreed.sum() + 1 + weight * right) / (len(agreed) + 2 + weight)
        right = right.clamp(min=1.1 / classes)  # guesses that are no better teach nothing anyway
        wrong = (1 - right) / (classes - 1)
        inputs = torch.cat([view.targets.inputs, view.leaked.inputs]).flatten(1)
        seen = components_of(inputs, self.components)
        labels = torch.cat([guesses[:rows], truth])
        known = torch.cat([known, torch.ones(len(truth), dtype=torch.bool)])
        network = student(seen[known], labels[known], classes, self.steps, draw)
        believed = through(network, seen[:rows]).double().softmax(1)
        believed = (believed - wrong) / (right - wrong)
        line = math.log(_SMALL) + believed / _SMALL - 1
        answers = torch.where(one_hot(guesses[:rows], classes).bool(), right, wrong)
        answers[~has_gradient[:rows]] = 1.0
        shares = torch.where(believed < _SMALL, line, believed.clamp_min(_SMALL).log())
        return (shares + answers.log()).float()

    def _upright(self, view: View, above: Tensor, has_gradient: Tensor) -> Tensor:
        """Guesses of two classes, after the likelier of the two orders.

        Args:
            view: the attacker's view.
            above: similarity to class 1 less that to class 0, axes (rows,).
            has_gradient: whether a row had a gradient, axes (rows,).
        """
        guesses, first = (above > 0).long(), self.transcript(view).first(1)
        sides = one_hot(guesses, 2).float()[has_gradient].T @ first.mean(directions)[has_gradient]
        drift = by_shares(first, directions, sides[1] - sides[0], float(view.prior[1]))
        scores = torch.where(has_gradient, above, torch.nan)
        return guesses if is_upward([scores], view.leaked.labels, drift) else 1 - guesses


def right_by_shares(guesses: Tensor, prior: Tensor) -> tuple[Tensor, float]:
    """Share of right guesses where wrong ones are alike in all classes, and what it is worth.

    A class of share p is guessed with a share of p r + (1 - p)(1 - r)/(K - 1). Least squares over
    the classes give r. Equal shares are no evidence.

    >>> right, _ = right_by_shares(torch.tensor([1] * 26 + [0] * 74), torch.tensor([0.9, 0.1]))
    >>> round(float(right), 4)  # .1 * .8 + .9 * .2 is .26
    0.8

    Args:
        guesses: codes, axes (rows,).
        prior: share of each class.

    Returns:
        The share of correct guesses, and the number of leaked rows that would give equal evidence.
    """
    classes = len(prior)
    if not len(guesses):
        return torch.tensor(0.0), 0.0
    shares = guesses.bincount(minlength=classes) / len(guesses)
    apart = prior - (1 - prior) / (classes - 1)
    size = float(apart.square().sum())
    right = ((shares - (1 - prior) / (classes - 1)) * apart).sum() / max(size, 1e-12)
    return right.clamp(1 / classes, 1), _SHARES * size


def components_of(inputs: Tensor, count: int) -> Tensor:
    """Return the first principal components, scaled to first variance 1; axes (rows, count)."""
    centred, variances, axes = principal(inputs)
    kept = int((variances[:count] > 1e-9 * variances[0]).sum())
    return (centred @ axes[:, :kept] / variances[0].clamp_min(1e-12).sqrt()).float()


def student(
    inputs: Tensor, labels: Tensor, classes: int, steps: int, draw: torch.Generator
) -> nn.Module:
    """Train the attacker's own network, from columns to logits, on labels from gradients.

    Args:
        inputs: axes (rows, features).
        labels: int64 codes, axes (rows,), or shares of the classes, axes (rows, classes).
        classes: number of classes.
        steps: number of Adam steps.
        draw: everything random comes from here.
    """
    with scoped(key_of(draw)):
        hidden = nn.Linear(inputs.shape[1], _HIDDEN)
        network = nn.Sequential(hidden, nn.ReLU(), nn.Linear(_HIDDEN, classes))
    return fit(network, inputs, labels, steps, 1e-3, draw, batch=_BATCH)


class DirectLabel(GradientAttack):
    """Reads the label as the class whose gradient entry is negative.

    If cuts are summed and the sum is the output (`merge = "sum"`, `top = "identity"`), the gradient
    of the cross-entropy is p - y, which is negative only at the true class.

    Source: Liu et al. 2022, "Batch label inference and replacement attacks in black-boxed vertical
    federated learning"; Fu et al. 2022, "Label inference attacks against vertical federated
    learning" (direct label inference).

    Args:
        epochs: number of epochs to read.
    """

    def check(self, classes: int, width: int) -> None:
        if width != classes:
            raise UserError(
                "the signs disclose labels only if the cut has one column per class",
                got=f"a cut of width {width} and {classes} classes",
                fix="gradient_similarity or surrogate, which allow for a top model",
            )

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        seen = self.transcript(view)
        self.check(view.classes, width_of(seen))
        return seen.mean(_negative_share)[: view.targets.rows]


def _negative_share(one: RecordedExchange) -> Tensor:
    return -normalize(one.gradients, p=1.0, dim=1)
