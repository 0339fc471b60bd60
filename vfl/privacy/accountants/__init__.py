"""Accountants: the epsilon of Gaussian noise steps for a record, and the noise for a given epsilon.

>>> projection, training = GaussianSteps(7.0, 1), GaussianSteps(4.0, 10_000, 0.01)
>>> round(epsilon_by([projection, training], 1e-5, "moments"), 3)
1.447

`moments` and `strong_composition` are references for comparison: Abadi et al. 2016 compare these
two. `rdp` needs no other package and is the default of a training; `pld` gives the smallest
epsilon. `vfl.privacy.events` defines the noise steps whose epsilon the accountants compute.

To add an accountant, write a file with a subclass of `Accountant` and add a line to `ACCOUNTANTS`
below. Another package adds an entry point in the group ``vfl.accountants`` instead. Test the
accountant with `vfl.testing.AccountantContract`.

SciPy's special functions are imported only inside the functions that call them: every session
imports this file, but few sessions need an accountant.
"""

from __future__ import annotations

import math
from dataclasses import replace

from vfl.core.errors import PrivacyError
from vfl.core.registry import Registry, require
from vfl.privacy.accountants.base import Accountant
from vfl.privacy.events import MOST_STEPS, GaussianSteps, Steps, poisson_steps

ACCOUNTANTS: Registry[Accountant] = Registry(
    kind="accountant",
    contract=Accountant,  # type: ignore[type-abstract]
    members={
        "moments": "vfl.privacy.accountants.moments:Moments",
        "strong_composition": "vfl.privacy.accountants.strong_composition:StrongComposition",
        "rdp": "vfl.privacy.accountants.rdp:RenyiDP",
        "pld": "vfl.privacy.accountants.pld:PrivacyLoss",
    },
    group="vfl.accountants",
)
#: Make the accountant that a spec names, such as ``pld:interval=1e-3``.
make = ACCOUNTANTS.make
#: Name that reports give in place of an accountant's name if every step includes the record; the
#: epsilon is then exact.
ANALYTIC = "analytic Gaussian mechanism"
#: Largest number of iterations of a search for a noise multiplier or a number of steps; each
#: iteration halves the interval.
_HALVINGS = 60

__all__ = [
    "ACCOUNTANTS",
    "ANALYTIC",
    "Accountant",
    "GaussianSteps",
    "Steps",
    "epsilon_by",
    "epsilon_of",
    "gaussian_epsilon",
    "make",
    "noise_for",
    "poisson_steps",
    "steps_for",
]


def epsilon_by(mechanism: Steps, delta: float, accountant: str) -> float:
    """Return the epsilon of noise steps, computed by the accountant that a spec names.

    >>> projection, training = GaussianSteps(7.0, 1), GaussianSteps(4.0, 10_000, 0.01)
    >>> round(epsilon_by([projection, training], 1e-5, "moments"), 3)
    1.447

    Raises:
        SpecError: the accountant's name or an option is unknown.
        BadOptionError: a number is out of range.
        MissingPackageError: a package that the accountant needs is not installed.
    """
    require("delta", delta, "between 0 and 1", 0 < delta < 1)
    kinds = [mechanism] if isinstance(mechanism, GaussianSteps) else mechanism
    taken, made = [one for one in kinds if one.steps], make(accountant)
    return made.epsilon(taken, delta) if taken else 0.0


def epsilon_of(mechanism: GaussianSteps, delta: float, accountant: str = "rdp") -> float:
    """Return the epsilon of noise steps; the result is exact if every step includes the record.

    In that case no accountant is needed: n steps with noise s are equivalent to one step with noise
    s / sqrt(n).

    Raises:
        SpecError, BadOptionError, MissingPackageError: see `epsilon_by`.
    """
    if mechanism.sampling_rate < 1 or not mechanism.steps:
        return epsilon_by(mechanism, delta, accountant)
    require("delta", delta, "between 0 and 1", 0 < delta < 1)
    return gaussian_epsilon(mechanism.noise, math.sqrt(mechanism.steps), delta)


def noise_for(
    epsilon: float, delta: float, steps: int, sampling_rate: float = 1.0, accountant: str = "rdp"
) -> float:
    """Return the smallest noise multiplier for which the noise steps cost at most `epsilon`.

    >>> round(noise_for(2.0, 1e-5, 10_000, 0.01), 2)
    2.28

    Raises:
        BadOptionError: a number is out of range.
        PrivacyError: no noise multiplier is large enough.
    """
    require("epsilon", epsilon, "above 0", 0 < epsilon < math.inf)

    def costs(noise: float) -> float:
        return epsilon_of(GaussianSteps(noise, steps, sampling_rate), delta, accountant)

    low, high = 0.0, 1.0
    while costs(high) > epsilon:
        low, high = high, 2 * high
        if high > 2**40:
            raise PrivacyError(
                f"no noise multiplier keeps {steps} steps within epsilon {epsilon:g}"
            )
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if high - low <= 1e-6 * high or not middle:
            break
        low, high = (middle, high) if costs(middle) > epsilon else (low, middle)
    return high


def steps_for(
    epsilon: float, delta: float, noise: float, sampling_rate: float = 1.0, accountant: str = "rdp"
) -> int:
    """Return the largest number of noise steps that cost at most `epsilon`, below `MOST_STEPS`.

    >>> steps_for(2.0, 1e-5, noise=4.0, sampling_rate=0.01)
    33377
    """
    require("epsilon", epsilon, "above 0", 0 < epsilon < math.inf)
    one = GaussianSteps(noise, 1, sampling_rate)

    def fits(steps: int) -> bool:
        return epsilon_of(replace(one, steps=steps), delta, accountant) <= epsilon

    low, high = 0, 1
    while high < MOST_STEPS and fits(high):
        low, high = high, min(2 * high, MOST_STEPS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def gaussian_epsilon(sigma: float, sensitivity: float, delta: float) -> float:
    """Return the exact, smallest epsilon of the Gaussian mechanism at a delta.

    The epsilon is the root e of Phi(s/2 - e/s) - exp(e) Phi(-s/2 - e/s) = delta. In this equation,
    s = sensitivity / sigma, and Phi is the normal distribution function (Balle and Wang 2018). The
    classic formula for Gaussian noise holds only for epsilon below 1.

    >>> round(gaussian_epsilon(sigma=3.7306, sensitivity=1.0, delta=1e-5), 4)
    1.0
    """
    from scipy.special import log_ndtr

    ratio = sensitivity / sigma

    def excess(epsilon: float) -> float:
        near, far = ratio / 2 - epsilon / ratio, -ratio / 2 - epsilon / ratio
        # The second exponential is mathematically at most 1, but rounding may give more for huge
        # numbers.
        return math.exp(log_ndtr(near)) - math.exp(min(0.0, epsilon + log_ndtr(far))) - delta

    if excess(0.0) <= 0:
        return 0.0
    low, high = 0.0, 1.0
    while excess(high) > 0:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high
