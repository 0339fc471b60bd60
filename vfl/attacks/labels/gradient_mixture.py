"""Infers labels from the gradients of all epochs, by a mixture model and a student network."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from vfl.attacks.base import through
from vfl.attacks.labels.gradients import GradientAttack, components_of, directions, student
from vfl.attacks.labels.orientation import by_shares, is_upward, ridge
from vfl.attacks.transcript import RecordedExchange, Transcript, at_scale
from vfl.attacks.view import Grant, View
from vfl.core.registry import require_range
from vfl.defenses.components import principal

#: Degrees of freedom of the two noise distributions that are fitted: None is the normal
#: distribution, a number is Student's t distribution with heavy tails.
_TAILS = (None, 4.0)
_LEAST = 1e-6  # smallest share of a class
_RIDGE = 1e-4  # number added to variances, relative to their mean
_UNSURE = 0.1  # weight of the prior in the initial class probabilities


class GradientMixture(GradientAttack):
    """Fits one mixture of classes to the gradients of all rows in all epochs.

    A defense's noise, drawn anew in every epoch, averages out: over n epochs, its standard
    deviation falls to 1/sqrt(n). First the attack scales the gradients, which shrink while a
    network learns. With two classes, it divides gradients by the root mean square of their batch;
    with more classes, it scales each gradient to length 1. Then it projects the scaled gradients on
    K - 1 principal directions, where K is the number of classes. Expectation-maximisation
    (Dempster, Laird and Rubin 1977) fits, in every epoch, one mean for each class and one variance
    for all classes. A class's mean differs between epochs because training changes the top. Leaked
    rows keep their labels, so that each component of the mixture gets the class that it stands for.
    With two classes, the mean of the first gradients and a regression on the attacker's columns
    also show which component is which class. The attack fits normal noise and heavy-tailed noise
    (Student's t distribution, Peel and McLachlan 2000), and keeps the fit with the higher
    likelihood; this choice needs no labels. A student network learns the fitted class probabilities
    from the attacker's columns. A second fit uses the student's outputs as priors of the rows.

    Source: Li et al. 2022, "Label leakage and protection in two-party split learning", for the use
    of gradient directions with two classes.

    Args:
        epochs: number of epochs to read, from the first one; 0 reads all.
        rounds: number of expectation-maximisation rounds in the first fit; the second fit has half
            as many.
        components: number of principal components of the attacker's columns that the student reads.
        steps: number of Adam steps of the student; 0 trains no student.

    Raises:
        BadOptionError: an option is out of range.
    """

    uses = frozenset({Grant.LEAKED, Grant.PRIOR, Grant.INPUTS})
    fewest = 0

    def __init__(
        self, epochs: int = 0, rounds: int = 10, components: int = 64, steps: int = 600
    ) -> None:
        require_range("rounds", rounds, 1)
        require_range("components", components, 1)
        require_range("steps", steps, 0)
        super().__init__(epochs)
        if not steps:
            self.needs -= {Grant.INPUTS}
        self.rounds, self.components, self.steps = rounds, components, steps

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        rows, leaked = view.targets.rows, view.leaked
        known = one_hot(leaked.labels, view.classes).double()
        prior = view.prior.double().clamp_min(_LEAST).log()
        columns = torch.zeros(rows + leaked.rows, 0)
        if self.steps:
            inputs = torch.cat([view.targets.inputs, leaked.inputs]).flatten(1)
            columns = components_of(inputs, self.components)
        points, seen, drift = _points(self.transcript(view), view.prior)
        if not seen.any():  # without gradients, the student learns only from leaked rows
            found = prior.expand(rows + leaked.rows, -1)
        else:
            start = _first_guess(points, seen, known, view.prior.double(), columns, drift)
            found = fitted(points, seen, known, prior, start, self.rounds)
        if self.steps:
            taught = seen.any(1)
            taught[rows:] = True
            shares = found.softmax(1)
            shares[rows:] = known
            network = student(
                columns[taught], shares[taught].float(), view.classes, self.steps, draw
            )
            believed = through(network, columns).double().log_softmax(1)
            found = fitted(points, seen, known, believed, shares, self.rounds // 2)
        return found[:rows].log_softmax(1).float()


def _points(seen: Transcript[RecordedExchange], prior: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return projected gradients by row and epoch, a mask of existing gradients, and log odds.

    Returns:
        The points, float64, axes (rows, epochs, dimensions). The mask of rows that have a gradient
        in an epoch, bool, axes (rows, epochs). The log odds that, of two classes, class 1 has the
        points with higher values, see `by_shares`.
    """
    classes = len(prior)

    def had(one: RecordedExchange) -> Tensor:
        return (one.gradients != 0).any(1, keepdim=True).float()

    value = at_scale if classes == 2 else directions
    means, any_seen = seen.mean(value), seen.mean(had)[:, 0] > 0
    if not any_seen.any():
        unseen = torch.zeros(seen.rows, 1, dtype=torch.bool)
        return torch.zeros(seen.rows, 1, 1).double(), unseen, 0.0
    _, _, axes = principal(means[any_seen])
    axes = axes[:, : classes - 1].float()
    points = seen.by_epoch(lambda one: value(one) @ axes)
    drift = by_shares(seen, value, axes[:, 0], float(prior[1])) if classes == 2 else 0.0
    return points.double(), seen.by_epoch(had)[:, :, 0] > 0, drift


def _first_guess(
    points: Tensor, seen: Tensor, known: Tensor, prior: Tensor, columns: Tensor, drift: float
) -> Tensor:
    """Return the class probabilities with which the fit starts.

    With two classes, the prior gives the number of rows in each class. With more classes, k-means
    steps start from the classes' means of leaked rows, and each row gets the class of its nearest
    mean.

    Args:
        points: points that `_points` returned.
        seen: mask that `_points` returned.
        known: one-hot labels of the leaked rows, which come last; axes (leaked, classes).
        prior: share of each class, axes (classes,).
        columns: the attacker's columns, or no columns, axes (rows, columns).
        drift: log odds that `_points` returned.
    """
    if len(prior) == 2:
        above, there = (points.sum(1) / seen.sum(1, keepdim=True).clamp(min=1))[:, 0], seen.any(1)
        above = torch.where(there, above - above[there].mean(), torch.nan)
        centred = columns.double() - columns[there].double().mean(0)
        explained = (centred @ ridge(centred[there], above[there][:, None]))[:, 0]
        if not is_upward([explained, above - explained], known.argmax(1), drift):
            above = -above
        codes = (above > above[there].quantile(prior[0])).long()
    else:
        sides = normalize(points.flatten(1), dim=1)
        codes = nearness(sides, known, rounds=10).argmax(1)
    return (1 - _UNSURE) * one_hot(codes, len(prior)).double() + _UNSURE * prior


def nearness(points: Tensor, known: Tensor, rounds: int) -> Tensor:
    """Return x m - m m / 2 of each row x and class mean m, (rows, classes); highest = nearest.

    >>> points = torch.tensor([[1.0], [-3.0], [2.0], [-2.0]])
    >>> nearness(points, torch.eye(2), rounds=0).argmax(1).tolist()
    [0, 1, 0, 1]

    Args:
        points: points of the rows, axes (rows, dimensions).
        known: one-hot labels of the leaked rows, which are the last rows of `points`; axes (leaked,
            classes).
        rounds: number of k-means steps, in which each mean moves to the rows nearest to it.
    """
    classes, leaked = known.shape[1], points[-len(known) :]
    sums, counts = known.T @ leaked, known.sum(0)[:, None]
    centres = sums / counts.clamp(min=1)
    for _ in range(rounds):
        codes = (points[: -len(known)] @ centres.T - centres.square().sum(1) / 2).argmax(1)
        near = one_hot(codes, classes).to(points.dtype)
        all_counts = counts + near.sum(0)[:, None]
        centres = (sums + near.T @ points[: -len(known)]) / all_counts.clamp(min=1)
    return points @ centres.T - centres.square().sum(1) / 2


def fitted(
    points: Tensor, seen: Tensor, known: Tensor, prior: Tensor, start: Tensor, rounds: int
) -> Tensor:
    """Return log(prior x likelihood) of each class, axes (rows, classes), for the best mixture.

    Args:
        points: points of the rows, axes (rows, epochs, dimensions).
        seen: mask of rows that have a point in an epoch, axes (rows, epochs).
        known: one-hot labels of the leaked rows, which are the last rows of `points`; axes (leaked,
            classes).
        prior: log prior of each class, axes (classes,) or (rows, classes).
        start: class probabilities at the start of the fit, axes (rows, classes).
        rounds: number of expectation-maximisation rounds.
    """
    found: list[tuple[float, Tensor]] = []
    for tail in _TAILS:
        shares = start.clone()
        for _ in range(max(1, rounds)):
            shares[-len(known) :] = known
            joint = prior.expand_as(start).clone()
            for epoch in range(points.shape[1]):
                here = seen[:, epoch]
                joint[here] += densities(points[here, epoch], shares[here], tail)
            shares = joint.softmax(1)
        found.append((float(joint.logsumexp(1).mean()), joint))
    return max(found, key=lambda one: one[0])[1]


def densities(points: Tensor, shares: Tensor, tail: float | None) -> Tensor:
    """Return log densities of the points, axes (rows, classes); all classes have the same variance.

    >>> points = torch.tensor([[-1.0], [1.0]]).double()
    >>> shares = torch.eye(2).double() * 0.98 + 0.01
    >>> densities(points, shares, None).argmax(1).tolist()
    [0, 1]

    Args:
        points: points of the rows, axes (rows, dimensions).
        shares: posterior class probabilities of each row, axes (rows, classes).
        tail: degrees of freedom of Student's t distribution; None is the normal distribution.
    """
    width, weights = points.shape[1], shares
    for _ in range(1 if tail is None else 2):
        means = weights.T @ points / weights.sum(0)[:, None].clamp_min(_LEAST)
        away = points[:, None] - means
        spread = torch.einsum("rc,rci,rcj->ij", weights, away, away) / len(points)
        mean_variance = spread.diagonal().mean().clamp_min(1e-12)
        spread = spread + _RIDGE * mean_variance * torch.eye(width).double()
        squares = torch.einsum("rci,ij,rcj->rc", away, torch.linalg.inv(spread), away)
        if tail is not None:
            weights = shares * (tail + width) / (tail + squares)
    volume = float(torch.linalg.slogdet(spread).logabsdet) / 2
    if tail is None:
        return -squares / 2 - volume - width / 2 * math.log(2 * math.pi)
    constant = math.lgamma((tail + width) / 2) - math.lgamma(tail / 2)
    constant -= width / 2 * math.log(tail * math.pi)
    return constant - volume - (tail + width) / 2 * (squares / tail).log1p()
