"""Infers labels from gradients: by norm, direction, similarity, a trained network, or signs."""

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
#: Below this probability, a straight line replaces the logarithm. The correction of probabilities
#: can give negative values, but the order of such rows still carries information.
_SMALL = 0.05
_APART = 0.1  # least difference of the two classes' rates; avoids a division by nearly 0
_UNLIKE = 0.15  # prior deviation of the difference between the two classes' shares of wrong guesses
_SHARES = 100.0  # leaked rows that give as much evidence as very unequal class shares


class GradientAttack(Attack):
    """Base class of attacks that read the gradients of the first epochs, or of all epochs.

    Without noise, early gradients disclose most, because the gradient of a row that the network has
    fitted is small and depends little on the row's label. If gradients are noisy, each further
    epoch adds information about the label.

    Attributes:
        uses: grants that the attack needs besides gradients.
        fewest: smallest allowed value of `epochs`; if it is 0, `epochs` may be 0, which reads all
            epochs.

    Args:
        epochs: number of epochs to read, from the first one.

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
        """Return the messages about targets and leaked rows from the epochs that the attack reads.

        Raises:
            DataError: the recording holds no training exchange.
        """
        return require_messages(view.transcript.first(self.epochs))


def require_messages(seen: Transcript[RecordedExchange]) -> Transcript[RecordedExchange]:
    """Return a transcript, unless it is empty.

    Raises:
        DataError: the recording holds no training exchange.
    """
    if not seen.messages:
        raise DataError("no training exchange was recorded", fix="train with -s trace.phases=train")
    return seen


def width_of(seen: Transcript[RecordedExchange]) -> int:
    """Return the width of the cut whose gradients were recorded."""
    return seen.messages[0].gradients.shape[1]


def directions(one: RecordedExchange) -> Tensor:
    """Return the gradients of an exchange, each scaled to length 1; zero gradients stay zero."""
    return normalize(one.gradients, dim=1)


class GradientNorm(GradientAttack):
    """Scores a row by its gradient's norm, relative to the other rows of its batch.

    A network has learned less about a rare class, so rows of this class have larger losses and
    gradients. The attack averages a row's scores over several epochs. A high score means that the
    row is probably of the rarer class.

    Source: Li et al. 2022, "Label leakage and protection in two-party split learning".

    Args:
        epochs: number of epochs to read, from the first one.
    """

    goal = "scores"

    def check(self, classes: int, width: int) -> None:
        require_two_classes(classes, "gradient_similarity or surrogate")

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        seen = self.transcript(view)
        self.check(view.classes, width_of(seen))
        return seen.mean(_loudness)[: view.targets.rows, 0]


def _loudness(one: RecordedExchange) -> Tensor:
    """Return each row's gradient norm relative to its batch's mean norm, axes (rows, 1)."""
    norms: Tensor = one.gradients.norm(dim=1, keepdim=True)
    mean: Tensor = norms.mean().clamp(min=torch.finfo(norms.dtype).tiny)
    return norms / mean


class GradientDirection(GradientAttack):
    """Scores a row by the cosine of its gradient and the leaked gradients of the rarer class.

    Gradients of the rows of one class have nearly the same direction; gradients of the other class
    have nearly the opposite direction. The attack compares gradients of the same epoch, during
    which the top changes little, and averages the cosines over the epochs. With few leaked rows,
    noise may reverse the mean direction of these rows. The attack therefore computes the principal
    direction, which depends on no label; all leaked rows and the first gradients determine its
    sign.

    Source: Li et al. 2022, "Label leakage and protection in two-party split learning".

    Args:
        epochs: number of epochs to read, from the first one.
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
        is_sought = (leaked.labels == sought).long()
        positive = rows + torch.nonzero(is_sought)[:, 0]
        if not len(positive):
            raise DataError(
                "no leaked row is positive",
                got=f"{leaked.rows} leaked rows, all of class {1 - sought}",
                want=f"at least one leaked row of class {sought}, the rarer one",
            )
        epochs = [one.mean(directions) for one in seen.each_epoch()]
        scores = torch.stack([found @ found[positive].mean(0) for found in epochs]).sum(0)
        return scores[:rows] * self._side(view, epochs, scores, is_sought)

    def _side(self, view: View, epochs: list[Tensor], scores: Tensor, is_sought: Tensor) -> float:
        """Return 1 or -1: the sign with which high scores mean the sought class.

        The principal direction of each epoch depends on no label; only its sign is chosen by the
        scores. All leaked rows and the first gradients show whether this sign is right.

        Args:
            view: the attacker's view.
            epochs: mean direction of each row's gradients, one tensor per epoch, axes (rows,
                width).
            scores: similarity to the leaked rows of the sought (rarer) class, axes (rows,).
            is_sought: for each leaked row, 1 if it is of the sought class, otherwise 0.
        """
        first, along, axes = self.transcript(view).first(1), torch.zeros(len(scores)), []
        there = torch.stack(epochs).abs().sum((0, 2)) > 0
        if not there.any():
            return 1.0
        for found in epochs:
            centred, _, every = principal(found[there])
            axis = every[:, 0].float() * float(
                (centred @ every[:, 0] @ scores[there].double()).sign()
            )
            axes.append(axis)
            along += found @ axis
        drift = by_shares(first, directions, axes[0], float(view.prior[rarest(view.prior)]))
        along[~there] = torch.nan
        return 1.0 if is_upward([along], is_sought, drift) else -1.0


class GradientSimilarity(GradientAttack):
    """Clusters rows by the cosine of their gradients; a class's cluster starts at its leaked rows.

    Source: Liu et al. 2024, "Similarity-based label inference attack against training and inference
    of split learning". The centres of the clusters move as in k-means.

    Args:
        epochs: number of epochs to read, from the first one; the attack compares a row's directions
            in all these epochs.
        rounds: number of updates of the cluster centres.

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
        """Return cosines to each class, axes (targets + leaked, classes), and a mask.

        The mask selects the rows that had a gradient other than zero.

        A row that is in no batch, or has only zero gradients, gets equal cosines to all classes.
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
    """Trains a network on the attacker's columns, with labels that gradients disclose.

    A defense may send gradients of only a few rows, or gradients of randomised labels. With
    gradients of a few rows, the attack must guess most labels from the inputs. With randomised
    labels, a single row's guess may be wrong, but all guesses together still show the classes. So
    the attack trains a network on the inputs, with the guesses of `gradient_similarity` as labels.
    The attack estimates how often each class is guessed for rows of each class, see `guess_rates`.
    With these rates, it corrects the network's outputs for wrong guesses (Patrini et al. 2017,
    backward correction). For a row with a gradient, the result combines the corrected output and
    the row's guess. With two classes, the mean of the first gradients and the leaked rows show
    which class is which.

    Args:
        epochs: number of epochs to read, from the first one.
        rounds: number of updates of the cluster centres.
        components: number of principal components of the inputs that the network reads.
        steps: number of Adam steps of the network.

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
        known, sure = has_gradient[:rows], has_gradient[rows:]
        rates = guess_rates(
            guesses[:rows][known], guesses[rows:][sure], truth[sure], view.prior.double()
        )
        inputs = torch.cat([view.targets.inputs, view.leaked.inputs]).flatten(1)
        seen = components_of(inputs, self.components)
        labels = torch.cat([guesses[:rows], truth])
        known = torch.cat([known, torch.ones(len(truth), dtype=torch.bool)])
        network = student(seen[known], labels[known], classes, self.steps, draw)
        believed = through(network, seen[:rows]).double().softmax(1)
        believed = believed @ rates.inverse()
        line = math.log(_SMALL) + believed / _SMALL - 1
        answers = rates.T[guesses[:rows]]
        answers[~has_gradient[:rows]] = 1.0
        shares = torch.where(believed < _SMALL, line, believed.clamp_min(_SMALL).log())
        return (shares + answers.log()).float()

    def _upright(self, view: View, above: Tensor, has_gradient: Tensor) -> Tensor:
        """Return guesses of two classes; exchange the classes if the other order is more likely.

        Args:
            view: the attacker's view.
            above: similarity to class 1 minus similarity to class 0, axes (rows,).
            has_gradient: mask of rows that had a gradient, axes (rows,).
        """
        guesses, first = (above > 0).long(), self.transcript(view).first(1)
        sides = one_hot(guesses, 2).float()[has_gradient].T @ first.mean(directions)[has_gradient]
        drift = by_shares(first, directions, sides[1] - sides[0], float(view.prior[1]))
        scores = torch.where(has_gradient, above, torch.nan)
        return guesses if is_upward([scores], view.leaked.labels, drift) else 1 - guesses


def guess_rates(guesses: Tensor, leaked: Tensor, truth: Tensor, prior: Tensor) -> Tensor:
    """Estimate with which probability each class is guessed for a row of each class.

    With more than two classes, wrong guesses are assumed to be equally frequent in all classes. Two
    classes may have different rates: clusters of noisy gradients have similar sizes, so many rows
    of the frequent class are guessed wrong, and few rows of the rare class.

    Args:
        guesses: guessed class numbers, axes (rows,).
        leaked: guessed class numbers of leaked rows, axes (leaked rows,).
        truth: their class numbers, axes (leaked rows,).
        prior: share of each class, axes (classes,).

    Returns:
        Probabilities, axes (class, guess). The matrix can be inverted.
    """
    classes = len(prior)
    if classes == 2 and len(guesses):
        return _rates_of_two(float(guesses.double().mean()), leaked, truth, float(prior[1]))
    right, weight = right_by_shares(guesses, prior)
    # One row with a right and one with a wrong guess are added, so that a few right guesses do
    # not mean certainty.
    agreed = (leaked == truth).double()
    right = (agreed.sum() + 1 + weight * right) / (len(agreed) + 2 + weight)
    right = right.clamp(min=1.1 / classes)
    wrong = (1 - right) / (classes - 1)
    return wrong + (right - wrong) * torch.eye(classes).double()


def _rates_of_two(guessed: float, leaked: Tensor, truth: Tensor, share: float) -> Tensor:
    """Estimate the rates of two classes, see `guess_rates`.

    Let p be the share of class 1, and s the share of rows that are guessed as class 1. Let h and f
    be the probabilities of this guess for a row of class 1 and of class 0. Then s is
    p h + (1 - p) f, so only h is unknown. Its posterior mean follows from the leaked rows. A
    priori, the two classes have similar shares of wrong guesses.

    >>> none = torch.tensor([], dtype=torch.long)
    >>> _rates_of_two(0.26, none, none, 0.1).round(decimals=2)  # .1 * .76 + .9 * .2 is .26
    tensor([[0.8000, 0.2000],
            [0.2400, 0.7600]], dtype=torch.float64)

    Args:
        guessed: share of the rows that are guessed as class 1.
        leaked: guessed class numbers of leaked rows, axes (leaked rows,).
        truth: their class numbers, axes (leaked rows,).
        share: share of class 1.
    """
    hit = torch.linspace(0.005, 0.995, 199).double()
    false = (guessed - share * hit) / (1 - share)
    possible = (false > 0) & (false < 1) & (hit - false >= _APART)
    if not possible.any():  # guesses of one class only
        hit, false = torch.tensor([[0.5 + _APART / 2], [0.5 - _APART / 2]]).double()
    else:
        hit, false = hit[possible], false[possible]
    plausible = -((hit + false - 1) / _UNLIKE).square() / 2
    for rate, of_class in ((hit, leaked[truth == 1]), (false, leaked[truth == 0])):
        ones = int(of_class.sum())
        plausible = plausible + ones * rate.log() + (len(of_class) - ones) * (1 - rate).log()
    weights = plausible.softmax(0)
    one = torch.stack([(weights * false).sum(), (weights * hit).sum()])
    return torch.stack([1 - one, one], dim=1)


def right_by_shares(guesses: Tensor, prior: Tensor) -> tuple[Tensor, float]:
    """Estimate the share of right guesses from how often each class is guessed; and its weight.

    The estimate assumes that the share of wrong guesses is the same in all classes.

    Let r be the share of right guesses. Of K classes, a class with share p of the rows is then
    guessed with frequency p r + (1 - p)(1 - r)/(K - 1). Least squares over the K classes then give
    r. If all classes have equal shares, the frequencies give no evidence.

    >>> right, _ = right_by_shares(torch.tensor([1] * 26 + [0] * 74), torch.tensor([0.9, 0.1]))
    >>> round(float(right), 4)  # .1 * .8 + .9 * .2 is .26
    0.8

    Args:
        guesses: guessed class numbers, axes (rows,).
        prior: share of each class, axes (classes,).

    Returns:
        The share of right guesses; and its weight, the number of leaked rows that would give as
        much evidence.
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
    """Return principal components, axes (rows, count), scaled so that the first has variance 1."""
    centred, variances, axes = principal(inputs)
    kept = int((variances[:count] > 1e-9 * variances[0]).sum())
    return (centred @ axes[:, :kept] / variances[0].clamp_min(1e-12).sqrt()).float()


def student(
    inputs: Tensor, labels: Tensor, classes: int, steps: int, draw: torch.Generator
) -> nn.Module:
    """Train a network that maps the attacker's columns to logits, on labels from gradients.

    Args:
        inputs: columns of the rows, axes (rows, features).
        labels: class numbers, int64, axes (rows,), or class probabilities, axes (rows, classes).
        classes: number of classes.
        steps: number of Adam steps.
        draw: generator from which all random numbers are drawn.
    """
    with scoped(key_of(draw)):
        hidden = nn.Linear(inputs.shape[1], _HIDDEN)
        network = nn.Sequential(hidden, nn.ReLU(), nn.Linear(_HIDDEN, classes))
    return fit(network, inputs, labels, steps, 1e-3, draw, batch=_BATCH)


class DirectLabel(GradientAttack):
    """Guesses the class whose entry in the gradient is negative.

    If the sum of all cuts is the output (`merge = "sum"`, `top = "identity"`), the gradient of the
    cross-entropy is p - y, which is negative only at the true class.

    Source: Liu et al. 2022, "Batch label inference and replacement attacks in black-boxed vertical
    federated learning"; Fu et al. 2022, "Label inference attacks against vertical federated
    learning" (direct label inference).

    Args:
        epochs: number of epochs to read, from the first one.
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
