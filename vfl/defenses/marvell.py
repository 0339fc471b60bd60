"""Two defenses that add noise to the gradients of two classes (Li et al. 2022).

`Marvell` adds the Gaussian noise that makes the two classes' gradients hardest to distinguish.
`MaxNorm` adds noise along each row's gradient, so that every expected squared norm equals the
largest squared norm in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from vfl.compression import StepContext
from vfl.core.registry import MOST_WEIGHT, require_choice, require_range
from vfl.core.seeds import fingerprint
from vfl.defenses.base import (
    Defense,
    LabelKind,
    require_two_classes,
)
from vfl.privacy import PrivacyStatement

Shape = Literal["optimal", "iso"]
_GOLDEN = (math.sqrt(5) - 1) / 2
_STEPS = 30


class Gradients(NamedTuple):
    """A model of a batch's gradients: one isotropic Gaussian for each class.

    Attributes:
        distance2: squared distance between the classes' mean gradients.
        spread0, spread1: variance of the gradients of class 0, and of class 1, around the class's
            mean; mean over the units of the cut.
        share1: share of rows of class 1.
        width: number of units of the cut.
    """

    distance2: float
    spread0: float
    spread1: float
    share1: float
    width: int


class Noise(NamedTuple):
    """Variances of each class's noise, parallel and orthogonal to the difference of means."""

    along0: float
    across0: float
    along1: float
    across1: float


class Marvell(Defense):
    """Adds Gaussian noise that makes two classes' gradients hard to distinguish (Li et al. 2022).

    Each class gets Gaussian noise with its own covariance. The covariances minimise the sum of the
    two Kullback-Leibler divergences between the noisy gradients of the classes (thesis eq 2-6 has
    only one of the two divergences). The mean squared norm of the noise is `power` times the
    squared distance between the mean gradients of the classes. For this, the defense models each
    class's gradients in a batch as an isotropic Gaussian. If all rows of a batch are of one class,
    they get isotropic noise, whose mean squared norm is `power` times the squared norm of the mean
    gradient. The defense does not change cuts, so an attacker may infer labels from them.

    Args:
        power: mean squared norm of the noise, relative to the squared distance between the classes'
            mean gradients.
        shape: "optimal" (the covariances described above), or "iso" for isotropic noise of the same
            `power`.

    >>> far = Gradients(distance2=1.0, spread0=0.1, spread1=0.1, share1=0.5, width=4)
    >>> round(divergence(far, Noise(0, 0, 0, 0)), 3), round(divergence(far, best(far, 4.0)), 3)
    (10.0, 0.244)

    Raises:
        BadOptionError: an option is out of range.
    """

    side = "label"
    once = True

    def __init__(self, power: float = 4.0, shape: Shape = "optimal") -> None:
        require_range("power", power, 0, MOST_WEIGHT)
        require_choice("shape", shape, get_args(Shape))
        self.power = power
        self.shape = shape

    def prepare(self, kind: LabelKind) -> None:
        require_two_classes("marvell", kind)

    def gradient(self, grad: Tensor, labels: Tensor, context: StepContext) -> Tensor:
        assert context.secret is not None, "gradients are sent only in training"
        purpose = "marvell", context.step, fingerprint(grad)
        draws = torch.from_numpy(context.secret.normal(tuple(grad.shape), *purpose))
        return (grad + self._scaled(draws, grad.double(), labels == 1)).to(grad.dtype)

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        against = "a feature party that scores norms or directions of gradients; not of cuts"
        return (PrivacyStatement("labels", against),)

    def _scaled(self, draws: Tensor, grad: Tensor, is_one: Tensor) -> Tensor:
        width = grad.shape[1]
        if is_one.all() or not is_one.any():
            power = self.power * float(grad.mean(0).square().sum()) if len(grad) else 0.0
            return draws * math.sqrt(power / width)
        difference = grad[is_one].mean(0) - grad[~is_one].mean(0)
        found = measure(grad, is_one, float(difference.square().sum()))
        power = self.power * found.distance2
        if self.shape == "iso" or power == 0:
            return draws * math.sqrt(power / width)
        noise = best(found, power)
        direction = difference / math.sqrt(found.distance2)
        along = torch.where(is_one, noise.along1, noise.along0).sqrt()[:, None]
        across = torch.where(is_one, noise.across1, noise.across0).sqrt()[:, None]
        on_axis = (draws @ direction)[:, None] * direction
        return across * draws + (along - across) * on_axis


def measure(grad: Tensor, is_one: Tensor, distance2: float) -> Gradients:
    """Fit the model to a batch's gradients, axes (rows, width); both classes must occur."""
    rows, width = grad.shape
    spreads = [float(grad[one].var(0, correction=0).mean()) for one in (~is_one, is_one)]
    return Gradients(distance2, spreads[0], spreads[1], float(is_one.sum()) / rows, width)


def divergence(found: Gradients, noise: Noise) -> float:
    """Return the sum of the two Kullback-Leibler divergences between the noisy gradients."""
    along0, across0 = found.spread0 + noise.along0, found.spread0 + noise.across0
    along1, across1 = found.spread1 + noise.along1, found.spread1 + noise.across1
    across = across0 / across1 + across1 / across0
    along = (along0 + found.distance2) / along1 + (along1 + found.distance2) / along0
    return ((found.width - 1) * across + along) / 2 - found.width


def best(found: Gradients, power: float) -> Noise:
    """Return the noise of mean squared norm at most `power` that has the smallest `divergence`.

    In directions orthogonal to the difference of the class means, only the class with the smaller
    variance gets noise. The noise raises this variance at most to that of the other class. The
    problem is convex in the logarithms of the noise variances. So two nested golden-section
    searches find the two noise variances of the class with the smaller variance. The noise variance
    of the other class, parallel to the difference, has a closed form.
    """
    if found.spread0 > found.spread1:
        mirrored = found._replace(
            spread0=found.spread1, spread1=found.spread0, share1=1 - found.share1
        )
        noise = best(mirrored, power)
        return Noise(noise.along1, noise.across1, noise.along0, noise.across0)
    floor = 1e-9 * (found.distance2 + power)  # equal gradients have zero variance
    found = found._replace(spread0=max(found.spread0, floor), spread1=max(found.spread1, floor))
    share0 = 1 - found.share1

    def along(across0: float) -> Noise:
        """Return the best noise for a given variance orthogonal to the difference of the means."""
        left = power - share0 * (found.width - 1) * across0

        def at(along0: float) -> Noise:
            wide = found.spread0 + along0
            wished = math.sqrt(wide * (wide + found.distance2)) - found.spread1
            most = (left - share0 * along0) / found.share1
            return Noise(along0, across0, min(max(wished, 0.0), max(most, 0.0)), 0.0)

        least = golden(lambda along0: divergence(found, at(along0)), across0, left / share0)
        return at(least)

    most = min(found.spread1 - found.spread0, power / (share0 * found.width))
    return along(golden(lambda across0: divergence(found, along(across0)), 0.0, most))


def golden(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the minimiser on [low, high] of a function with one minimum, to 1e-6 (Kiefer 1953)."""
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(_STEPS):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = function(right)
    return (low + high) / 2


class MaxNorm(Defense):
    """Adds noise along each row's own gradient (Li et al. 2022, max_norm).

    A row g becomes g (1 + s n), where n is standard normal and s^2 = max |g|^2 / |g|^2 - 1. The
    maximum is over the rows g of the batch. So the expected squared norm of every row equals the
    largest squared norm in the batch. If its norm is small, a gradient may also be reversed by the
    noise. The row with the largest norm does not change.

    >>> spread(torch.tensor([[3.0, 4.0], [0.0, 1.0]])).tolist()  # sqrt(25 / 1 - 1)
    [0.0, 4.898979663848877]
    """

    side = "label"
    label_free = True
    once = True

    def prepare(self, kind: LabelKind) -> None:
        require_two_classes("max_norm", kind)

    def gradient(self, grad: Tensor, labels: Tensor, context: StepContext) -> Tensor:
        assert context.secret is not None, "gradients are sent only in training"
        purpose = "max_norm", context.step, fingerprint(grad)
        draws = torch.from_numpy(context.secret.normal((len(grad),), *purpose))
        factors = 1 + spread(grad.double()) * draws
        return (grad * factors[:, None]).to(grad.dtype)

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        against = (
            "a feature party that scores norms of gradients; less if it scores directions or cuts"
        )
        return (PrivacyStatement("labels", against),)


def spread(grad: Tensor) -> Tensor:
    """Return the factor s of every row, axes (rows,); a row of zeros has s = 0."""
    squares = grad.square().sum(1)
    if not len(squares):
        return squares
    ratio = squares.max() / squares.clamp_min(torch.finfo(grad.dtype).tiny)
    return torch.where(squares > 0, (ratio - 1).clamp_min(0), 0.0).sqrt()
