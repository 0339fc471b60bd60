"""Evidence on which of two classes has the higher scores, from leaked rows and class shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import torch
from torch import Tensor

from vfl.attacks.transcript import RecordedExchange, Transcript

_EARLY = 10  # number of first exchanges to use, before a network has learned the class shares
_DISTANCE = 1.0  # prior standard deviation of the class distance, relative to a score's
_FIRST = 0.1  # standard deviation, around 1/2, of a new network's mean probability
_DRIFT = 10.0  # prior variance of a drift, relative to the variance of its estimate
_ODDS = 4.0  # prior odds that a drift exists
_OTHER = 0.02  # share of drifts that have another cause
_CERTAIN = 1e-6
_PENALTIES = tuple(10.0 ** (power / 2) for power in range(-2, 13))
_NORMAL = NormalDist()


def is_upward(parts: Sequence[Tensor], labels: Tensor, *further: float) -> bool:
    """Return whether rows of class 1 probably have higher scores than rows of class 0.

    Args:
        parts: independent components of the scores, in each of which leaked rows come last; NaN for
            a row without a score.
        labels: classes of the leaked rows, 0 or 1.
        further: further evidence, as log odds that class 1 has the higher scores.
    """
    return sum(by_leaked(part, labels) for part in parts) + sum(further) >= 0


def by_leaked(scores: Tensor, labels: Tensor) -> float:
    """Return log odds that class 1 has the higher scores, from the mean scores of leaked rows.

    The model assumes that the scores have the same standard deviation in both classes. The distance
    between the two class means has a normal prior with mean 0.

    >>> scores = torch.tensor([-1.0, 1.0, -1.0, 1.0, -1.0, 1.0])
    >>> round(by_leaked(scores, torch.tensor([0, 1])), 2), by_leaked(scores, torch.tensor([0, 0]))
    (1.34, 0.0)

    Args:
        scores: scores, axes (rows,), in which leaked rows come last; NaN for a row without a score.
        labels: classes of the leaked rows, 0 or 1.
    """
    known = scores[len(scores) - len(labels) :]
    sides = [known[(labels == code) & known.isfinite()] for code in (0, 1)]
    deviation = float(scores[scores.isfinite()].std(correction=0))
    if not (len(sides[0]) and len(sides[1]) and deviation > 0):
        return 0.0
    distance = float(sides[1].mean() - sides[0].mean()) / deviation
    variance = 1 / len(sides[0]) + 1 / len(sides[1])
    known_by = _DISTANCE / math.sqrt(variance * (_DISTANCE**2 + variance))
    return _log_odds(_NORMAL.cdf(distance * known_by))


def by_shares(
    seen: Transcript[RecordedExchange],
    value: Callable[[RecordedExchange], Tensor],
    axis: Tensor,
    share: float,
) -> float:
    """Return log odds that class 1 has the higher values along an axis, from first gradients.

    The gradient of a row's cross-entropy is (predicted probability - label) times a direction,
    which depends on the top. A new network predicts a probability near 1/2 for class 1. So, until
    the network has learned the class shares, the mean of its first gradients lies on the side of
    the more frequent class. A mean over whole batches contains little noise of single rows. The
    prior assumes that in four of five trainings this mean deviates from 0 for this reason (a
    drift). With class shares of 1/2, the mean gives no evidence. The top's direction changes while
    it learns, so a mean that is nearly orthogonal to the axis gives little evidence.

    Args:
        seen: messages of a training, starting with its first exchange.
        value: function that returns a message's gradients in the unit of the axis, axes (rows of
            the message, width).
        axis: axes (width,).
        share: share of class 1.
    """
    sent = sorted(seen.messages, key=lambda one: one.step)[:_EARLY]
    whole = [value(one).double().mean(0) for one in sent if one.gradients.any()]
    if len(whole) < 2:
        return 0.0
    means = torch.stack(whole)
    along = means @ axis.double()
    if not (error := float(along.std()) / math.sqrt(len(means))):
        return 0.0
    drift = float(along.mean()) / error
    exponent = min(drift**2 * _DRIFT / (1 + _DRIFT) / 2, 700.0)
    odds = _ODDS * math.exp(exponent) / math.sqrt(1 + _DRIFT)  # prior odds times the Bayes factor
    exists = (1 - _OTHER) * odds / (1 + odds) * _alignment(means, axis.double())
    learns = 2 * _NORMAL.cdf((share - 0.5) / _FIRST) - 1
    return _log_odds((1 + exists * learns * (2 * _NORMAL.cdf(drift) - 1)) / 2)


def _alignment(means: Tensor, axis: Tensor) -> float:
    """Return the squared cosine between an axis and the mean of vectors, corrected for noise.

    Args:
        means: the vectors, axes (vectors, width).
        axis: axes (width,).
    """
    axis = axis / axis.norm().clamp_min(1e-12)
    noise = means.var(0) / len(means)
    mean = means.mean(0)
    whole = float(mean.square().sum() - noise.sum())
    along = float((mean @ axis).square() - axis.square() @ noise)
    return min(1.0, max(0.0, along) / max(whole, 1e-12))


def _log_odds(chance: float) -> float:
    chance = min(max(chance, _CERTAIN), 1 - _CERTAIN)
    return math.log(chance / (1 - chance))


def ridge(inputs: Tensor, wanted: Tensor) -> Tensor:
    """Return the slopes of a ridge regression, whose penalty generalised cross-validation chooses.

    Source: Golub et al. 1979.

    >>> ridge(torch.eye(3).double() * 100, torch.tensor([[100.0], [0], [0]]).double()).round()
    tensor([[1.],
            [0.],
            [0.]], dtype=torch.float64)

    Args:
        inputs: inputs, float64, axes (rows, columns).
        wanted: target values, float64, axes (rows, dimensions).

    Returns:
        Slopes, axes (columns, dimensions).
    """
    variances, axes = torch.linalg.eigh(inputs.T @ inputs)
    variances = variances.clamp_min(1e-9)
    along = axes.T @ (inputs.T @ wanted)
    squares, count = wanted.square().sum(), len(wanted)

    def error(penalty: float) -> float:
        """Generalised cross-validation."""
        kept = variances / (variances + penalty)
        explained = along.square() / variances[:, None]
        left = squares - ((2 * kept - kept.square())[:, None] * explained).sum()
        freedom = (1 - kept.sum() / count).clamp_min(1e-6)
        return float(left / freedom.square())

    best = min(_PENALTIES, key=error)
    found: Tensor = axes @ (along / (variances + best)[:, None])
    return found
