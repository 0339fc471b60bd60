"""What Gaussian steps on one record cost: accountants, and the way back from a budget.

Two are references (`moments`, `strong_composition`), as Abadi et al. 2016 compare them. `rdp` needs
no other package and is what a training uses; `pld` is the tightest, of Google's dp-accounting.

SciPy's special functions are imported where they are needed: every session imports this file, and
few account for noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from vfl.core.errors import MissingPackageError, PrivacyError
from vfl.core.registry import require, require_choice

#: Steps of a search for a noise or a number of steps; each halves what is left.
_HALVINGS = 60
_MOST_STEPS = 10**9
_ORDERS = (*range(2, 65), *range(72, 257, 8), 320, 384, 512, 768, 1024)
_REFERENCE_ORDERS = tuple(range(2, 34))  # lambda of 1 to 32


@dataclass(frozen=True, slots=True)
class GaussianSteps:
    """Steps of Gaussian noise on a sum of records, as one record meets them.

    Attributes:
        noise: deviation of the noise over the sensitivity.
        steps: how many.
        sampling_rate: probability that a step has the record, for each record by itself (Poisson
            sampling); 1 is a record in every step.

    Raises:
        BadOptionError: a number out of range.
    """

    noise: float
    steps: int
    sampling_rate: float = 1.0

    def __post_init__(self) -> None:
        require("noise", self.noise, "above 0", 0 < self.noise < math.inf)
        require("steps", self.steps, f"0 to {_MOST_STEPS}", 0 <= self.steps <= _MOST_STEPS)
        rate = self.sampling_rate
        require("sampling_rate", rate, "above 0, at most 1", 0 < rate <= 1)


#: Steps of one kind, or of several kinds one after the other.
Steps = GaussianSteps | Sequence[GaussianSteps]
#: Epsilon of steps at a delta.
Accountant = Callable[[Steps, float], float]


def _kinds(mechanism: Steps) -> Sequence[GaussianSteps]:
    return [mechanism] if isinstance(mechanism, GaussianSteps) else mechanism


def _all_moments(mechanism: Steps, orders: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Orders, and the log-moments of all steps at each: those of independent steps add up."""
    total = np.zeros(len(orders))
    for one in _kinds(mechanism):
        total += one.steps * _log_moments(one.sampling_rate, one.noise, orders)
    return np.array(orders, dtype=float), total


def moments(mechanism: Steps, delta: float) -> float:
    """The moments accountant as first published, of moments up to 32.

    Abadi et al. 2016, theorem 2 and section 3.2.

    >>> round(moments(GaussianSteps(4.0, 10_000, 0.01), 1e-5), 4)
    1.2586
    """
    orders, logs = _all_moments(mechanism, _REFERENCE_ORDERS)
    found = (logs - math.log(delta)) / (orders - 1)
    return float(found.min())


def strong_composition(mechanism: Steps, delta: float) -> float:
    """Strong composition of amplified Gaussian steps, delta shared out as well as can be.

    Dwork, Rothblum and Vadhan 2010, theorem III.3; a step has q epsilon and q delta. Steps of
    several kinds share delta evenly, and their epsilons add up.

    >>> round(strong_composition(GaussianSteps(4.0, 10_000, 0.01), 1e-5), 3)
    9.353
    """
    if len(kinds := _kinds(mechanism)) > 1:
        return sum(strong_composition(one, delta / len(kinds)) for one in kinds)
    rate, steps, noise = kinds[0].sampling_rate, kinds[0].steps, kinds[0].noise
    share = 1 / (1 + np.exp(np.linspace(-12, 12, 4001)))
    one = rate * np.sqrt(2 * np.log(1.25 * rate * steps / (share * delta))) / noise
    left = (1 - share) * delta
    with np.errstate(over="ignore"):  # infinite where a step has a large epsilon
        total = one * np.sqrt(2 * steps * np.log(1 / left)) + steps * one * np.expm1(one)
    return float(total.min())


def rdp(mechanism: Steps, delta: float) -> float:
    """Renyi differential privacy of the sampled Gaussian mechanism.

    Mironov, Talwar and Zhang 2019, section 3.3, at whole orders; between them the log-moments are
    convex, so a straight line bounds them. To an epsilon: Canonne, Kamath and Steinke 2020,
    proposition 12.

    >>> round(rdp(GaussianSteps(4.0, 10_000, 0.01), 1e-5), 4)
    1.0355
    """
    whole, logs = _all_moments(mechanism, _ORDERS)
    orders = np.concatenate([np.arange(1.1, 12, 0.1), whole])
    logs = np.interp(orders, np.append(1, whole), np.append(0, logs))
    renyi = logs / (orders - 1)
    found = renyi + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return max(0.0, float(found.min()))


def pld(mechanism: Steps, delta: float) -> float:
    """Privacy loss distributions, by Google's dp-accounting.

    Koskela, Jalko and Honkela 2020; Doroshenko et al. 2022.

    Raises:
        MissingPackageError: dp-accounting is not installed.
    """
    try:
        import dp_accounting as events
        from dp_accounting.pld import PLDAccountant
    except ImportError:
        raise MissingPackageError(
            "the accountant 'pld' needs dp-accounting",
            fix="pip install 'vfl[dp]', or the accountant rdp, whose bound is a little higher",
        ) from None
    account = PLDAccountant()
    for one in _kinds(mechanism):
        step = events.GaussianDpEvent(one.noise)
        if one.sampling_rate < 1:
            step = events.PoissonSampledDpEvent(one.sampling_rate, step)
        account.compose(events.SelfComposedDpEvent(step, one.steps))
    return float(account.get_epsilon(delta))


ACCOUNTANTS: Mapping[str, Accountant] = {
    "moments": moments,
    "strong_composition": strong_composition,
    "rdp": rdp,
    "pld": pld,
}
#: What `epsilon_of` says it used where every step has the record.
ANALYTIC = "analytic Gaussian mechanism"


def epsilon_by(mechanism: Steps, delta: float, accountant: str) -> float:
    """What the steps cost by one accountant.

    >>> projection, training = GaussianSteps(7.0, 1), GaussianSteps(4.0, 10_000, 0.01)
    >>> round(epsilon_by([projection, training], 1e-5, "moments"), 3)
    1.447

    Raises:
        BadOptionError: an unknown accountant, or delta out of range.
        MissingPackageError: the accountant's package is not installed.
    """
    require_choice("accountant", accountant, tuple(ACCOUNTANTS))
    require("delta", delta, "between 0 and 1", 0 < delta < 1)
    taken = [one for one in _kinds(mechanism) if one.steps]
    return ACCOUNTANTS[accountant](taken, delta) if taken else 0.0


def poisson_steps(rows: int, batch_size: int) -> int:
    """Steps of an epoch of Poisson sampling; each has a row with probability batch_size / rows.

    >>> poisson_steps(60_000, 600), poisson_steps(5, 600)
    (100, 1)
    """
    return max(1, round(rows / batch_size))


def epsilon_of(mechanism: GaussianSteps, delta: float, accountant: str = "rdp") -> float:
    """What the steps cost; where every step has the record, exactly and by no accountant.

    So many steps of noise s are then one of s / sqrt(steps).

    Raises:
        BadOptionError, MissingPackageError: see `epsilon_by`.
    """
    if mechanism.sampling_rate < 1 or not mechanism.steps:
        return epsilon_by(mechanism, delta, accountant)
    require("delta", delta, "between 0 and 1", 0 < delta < 1)
    return gaussian_epsilon(mechanism.noise, math.sqrt(mechanism.steps), delta)


def noise_for(
    epsilon: float, delta: float, steps: int, sampling_rate: float = 1.0, accountant: str = "rdp"
) -> float:
    """The least noise whose steps cost no more than `epsilon`.

    >>> round(noise_for(2.0, 1e-5, 10_000, 0.01), 2)
    2.28

    Raises:
        BadOptionError: a number out of range.
        PrivacyError: no noise is enough.
    """
    require("epsilon", epsilon, "above 0", 0 < epsilon < math.inf)

    def costs(noise: float) -> float:
        return epsilon_of(GaussianSteps(noise, steps, sampling_rate), delta, accountant)

    low, high = 0.0, 1.0
    while costs(high) > epsilon:
        low, high = high, 2 * high
        if high > 2**40:
            raise PrivacyError(f"no noise keeps {steps} steps within epsilon {epsilon:g}")
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if high - low <= 1e-6 * high or not middle:
            break
        low, high = (middle, high) if costs(middle) > epsilon else (low, middle)
    return high


def steps_for(
    epsilon: float, delta: float, noise: float, sampling_rate: float = 1.0, accountant: str = "rdp"
) -> int:
    """The most steps that cost no more than `epsilon`; 0 where not even one does.

    >>> steps_for(2.0, 1e-5, noise=4.0, sampling_rate=0.01)
    33377
    """
    require("epsilon", epsilon, "above 0", 0 < epsilon < math.inf)
    one = GaussianSteps(noise, 1, sampling_rate)

    def fits(steps: int) -> bool:
        return epsilon_of(replace(one, steps=steps), delta, accountant) <= epsilon

    low, high = 0, 1
    while high < _MOST_STEPS and fits(high):
        low, high = high, min(2 * high, _MOST_STEPS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def gaussian_epsilon(sigma: float, sensitivity: float, delta: float) -> float:
    """The least epsilon of Gaussian noise, exact for every epsilon.

    The root of Phi(s/2 - e/s) - exp(e) Phi(-s/2 - e/s) = delta in e, s = sensitivity / sigma
    (Balle and Wang 2018). The classic formula holds below epsilon 1 only.

    >>> round(gaussian_epsilon(sigma=3.7306, sensitivity=1.0, delta=1e-5), 4)
    1.0
    """
    from scipy.special import log_ndtr

    ratio = sensitivity / sigma

    def excess(epsilon: float) -> float:
        near, far = ratio / 2 - epsilon / ratio, -ratio / 2 - epsilon / ratio
        # Never above 1, but rounding may say so of huge numbers.
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


@lru_cache(maxsize=256)
def _log_moments(rate: float, noise: float, orders: tuple[int, ...]) -> np.ndarray:
    """(order - 1) times the Renyi divergence of one step at each order.

    ln sum_i binom(a, i) (1 - q)^(a - i) q^i exp((i^2 - i) / (2 noise^2)) at order a.
    """
    if rate == 1:
        exact = np.array(orders, dtype=float)
        logs: np.ndarray = exact * (exact - 1) / (2 * noise**2)
        return logs
    from scipy.special import gammaln, logsumexp

    def of(order: int) -> float:
        i = np.arange(order + 1, dtype=float)
        binomial = gammaln(order + 1) - gammaln(i + 1) - gammaln(order - i + 1)
        terms = binomial + (order - i) * math.log1p(-rate) + i * math.log(rate)
        return float(logsumexp(terms + (i * i - i) / (2 * noise**2)))

    return np.array([of(order) for order in orders])
