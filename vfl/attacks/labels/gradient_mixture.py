"""Labels from the gradients of all epochs: a mixture of classes, and a student on own columns."""

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

#: Degrees of freedom of Student's law, for noise with heavy tails; None is normal.
_TAILS = (None, 4.0)
_LEAST = 1e-6  # share of a class
_RIDGE = 1e-4  # of the mean variance
_UNSURE = 0.1  # of the first guess, which the prior has


class GradientMixture(GradientAttack):
    """Fits one mixture of classes to each row's gradients of all epochs.

    Noise that is drawn anew in every epoch averages out: n epochs leave 1/sqrt(n) of it. Gradients
    of two classes are divided by the root mean square of their batch, for they shrink while a
    network learns; those of more classes count by their directions. They are projected on the
    principal directions of their means by row, one fewer than classes. Expectation maximisation
    (Dempster, Laird and Rubin 1977) finds a mean of each class in each epoch, for the top moves,
    and one spread around it; leaked rows keep their labels. They say which class is which; of two,
    so do the side that the first gradients drift to and a regression on own columns. Noise may
    be normal or heavy-tailed (Student's law, Peel and McLachlan 2000): that of the higher
    likelihood counts, so that no label chooses. A student learns the posterior of all rows from the
    attacker's own columns, and its answers are the prior of the rows in a second fit.

    Source: Li et al. 2022, "Label leakage and protection in two-party split learning", for the
    directions of gradients of two classes.

    Args:
        epochs: number of epochs to read; 0 reads all.
        rounds: rounds of expectation-maximisation in each of the two fits.
        components: number of principal components of the columns that the student sees.
        steps: Adam steps of the student model; 0 trains no student.

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
        if not seen.any():  # no gradient at all: leaked rows teach the student
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
    """Return each row's gradients by epoch in a few dimensions, and a mask of rows with one.

    Returns:
        float64, axes (rows, epochs, dimensions), and bool, axes (rows, epochs); log odds that
        class 1 of two has the higher points, see `by_shares`.
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
    """Shares of the classes by the nearest leaked rows; of two classes as many as the prior says.

    Args:
        points: first result of `_points`.
        seen: second result of `_points`.
        known: codes of the last rows, one-hot, axes (leaked, classes).
        prior: share of each class.
        columns: the attacker's columns, or none, axes (rows, columns).
        drift: third result of `_points`.
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
    """Return each row's nearness to each class's mean, axes (rows, classes): x m - m m / 2.

    >>> points = torch.tensor([[1.0], [-3.0], [2.0], [-2.0]])
    >>> nearness(points, torch.eye(2), rounds=0).argmax(1).tolist()
    [0, 1, 0, 1]

    Args:
        points: axes (rows, dimensions).
        known: codes of the last rows, one-hot, axes (leaked, classes).
        rounds: number of k-means steps, which move the means to their nearest rows.
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
    """Logarithms of prior times likelihood under the mixture that fits best, axes (rows, classes).

    Args:
        points: axes (rows, epochs, dimensions).
        seen: whether a row has a point in an epoch, axes (rows, epochs).
        known: codes of the last rows, one-hot, axes (leaked, classes).
        prior: logarithms, axes (classes,) or (rows, classes).
        start: shares of the classes to begin with, axes (rows, classes).
        rounds: rounds of expectation-maximisation.
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
    """Return log densities of points under classes with a common spread, axes (rows, classes).

    >>> points = torch.tensor([[-1.0], [1.0]]).double()
    >>> shares = torch.eye(2).double() * 0.98 + 0.01
    >>> densities(points, shares, None).argmax(1).tolist()
    [0, 1]

    Args:
        points: axes (rows, dimensions).
        shares: posterior class probabilities of each row, axes (rows, classes).
        tail: degrees of freedom of Student's law; None is normal.
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
