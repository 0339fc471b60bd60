"""Means over repeats (such as seeds or victims), and their uncertainty.

SciPy is imported only where a quantile is needed, so a report of a single run does not need SciPy.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and the half-width of its 95 % interval.

    Attributes:
        mean: mean over the repeats.
        half_width: half-width of the interval from Student's t distribution; None for a single
            repeat.
        count: repeats.
    """

    mean: float
    half_width: float | None
    count: int

    @property
    def low(self) -> float:
        """Lower end of the interval; unbounded for a single repeat."""
        return -math.inf if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float:
        """Upper end of the interval; unbounded for a single repeat."""
        return math.inf if self.half_width is None else self.mean + self.half_width

    @property
    def standard_error(self) -> float:
        """Standard error of the mean; infinite for a single repeat."""
        if self.half_width is None:
            return math.inf
        return self.half_width / _quantile(self.count)


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the mean of independent repeats with its 95 % interval; None without values.

    The interval is mean +/- t(0.975, n - 1) s / sqrt(n), where s is the sample standard deviation
    (Student 1908).

    >>> found = estimate([0.70, 0.72, 0.74])
    >>> f"{found.mean:.2f} +- {found.half_width:.4f}"  # t = 4.3027, s = 0.02
    '0.72 +- 0.0497'
    """
    if not values:
        return None
    count, mean = len(values), statistics.fmean(values)
    if count == 1:
        return Estimate(mean, None, 1)
    half_width = _quantile(count) * statistics.stdev(values) / math.sqrt(count)
    return Estimate(mean, half_width, count)


def resampled(values: Sequence[float], test_to_train: float) -> Estimate | None:
    """Return the mean and 95 % interval of repeats that each draw training and test rows again.

    The interval is mean +/- t(0.975, n - 1) s sqrt(1 / n + n_test / n_train). The training rows of
    several repeats overlap, so the repeats are not independent. Student's interval would therefore
    be too short (Nadeau and Bengio 2003, "Inference for the Generalization Error", section 3.2).

    >>> found = resampled([0.70, 0.72, 0.74], test_to_train=0.25)
    >>> f"{found.half_width:.4f}"  # 4.3027 * 0.02 * sqrt(1 / 3 + 1 / 4)
    '0.0657'
    """
    plain = estimate(values)
    if plain is None or plain.half_width is None:
        return plain
    wider = math.sqrt(1 + plain.count * test_to_train)
    return Estimate(plain.mean, plain.half_width * wider, plain.count)


def paired_difference(ours: Mapping[Any, float], reference: Mapping[Any, float]) -> Estimate | None:
    """Return the mean of `ours` minus `reference`, over the repeats that both have.

    In each repeat, the two have the same rows and seed, so differences vary less than values.
    """
    return estimate([ours[repeat] - reference[repeat] for repeat in ours if repeat in reference])


def _quantile(count: int) -> float:
    """Return the 0.975 quantile of Student's t for an interval over this number of repeats."""
    return _student(count - 1, (1 + CONFIDENCE) / 2)


def _student(freedom: int, probability: float) -> float:
    """Return a quantile of Student's t distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))


Key = TypeVar("Key", bound=Hashable)
#: Values of a measure by (victim, draw of leaked rows).
Values = Mapping[tuple[Any, int], float]
#: Level of a one-sided test that is equivalent to one end of a two-sided 95 % interval.
ONE_SIDED = (1 - CONFIDENCE) / 2


def by_victim(values: Values) -> dict[int, float]:
    """Return the mean over the draws of leaked rows, for each victim.

    >>> by_victim({(0, 0): 0.5, (0, 1): 0.7, (1, 0): 0.9})
    {0: 0.6, 1: 0.9}
    """
    victims = dict.fromkeys(victim for victim, _ in values)
    return {
        one: statistics.fmean(value for (victim, _), value in values.items() if victim == one)
        for one in victims
    }


def over_victims(values: Values) -> Estimate | None:
    """Return the mean over victims, with its 95 % interval; None without values."""
    return estimate(list(by_victim(values).values()))


def advantage(attack: Values, baseline: Values) -> Estimate | None:
    """Return the mean of an attack's value minus a baseline's, over the same victims."""
    return paired_difference(by_victim(attack), by_victim(baseline))


def chance_below(found: Estimate | None, bound: float) -> float:
    """Return the one-sided p-value of the hypothesis that the mean is at least `bound`.

    The p-value is P(T <= (mean - bound) / standard error) for Student's T with n - 1 degrees of
    freedom. The p-value is 1 for fewer than two victims, which show no standard deviation. It is
    also 1 if all victims have exactly the same value, because equal values (shares of a few rows,
    for example) do not prove a small variance.

    >>> round(chance_below(Estimate(-0.02, 0.0248, 3), 0.0), 4)  # t = -3.470
    0.037
    """
    if found is None or found.half_width is None:
        return 1.0
    from scipy.special import stdtr

    error = found.standard_error
    return float(stdtr(found.count - 1, (found.mean - bound) / error)) if error else 1.0


def chance_above(found: Estimate | None, bound: float) -> float:
    """Return the one-sided p-value of the hypothesis that the mean is at most `bound`."""
    return chance_below(_mirrored(found), -bound)


def holm(chances: Mapping[Key, float]) -> dict[Key, float]:
    """Return p-values adjusted so as to bound the probability of any wrong rejection (Holm 1979).

    The i-th smallest of m p-values is multiplied by m - i + 1; the result is then raised to the
    largest adjusted value before it.

    >>> holm({1: 0.01, 5: 0.04, 10: 0.03})
    {1: 0.03, 5: 0.06, 10: 0.06}
    """
    adjusted: dict[Key, float] = {}
    largest = 0.0
    for place, key in enumerate(sorted(chances, key=lambda one: chances[one])):
        largest = max(largest, min(1.0, (len(chances) - place) * chances[key]))
        adjusted[key] = largest
    return {key: adjusted[key] for key in chances}


#: Mean share of a page's claims that may be false.
FALSE_CLAIMS = 0.05


def claims(chances: Mapping[Key, float]) -> dict[Key, float]:
    """Adjust the p-values of a page's claims, so as to bound the mean share of false claims.

    The method controls the false discovery rate (Benjamini and Hochberg 1995). It multiplies the
    i-th smallest of m p-values by m / i; the result is then lowered to the smallest adjusted value
    after it. A page makes those claims whose adjusted p-value is at most `FALSE_CLAIMS` or a lower
    level. Claims about several defenses use the same baselines, so the claims' p-values depend
    positively on each other. The bound on false claims also holds under this dependence (Benjamini
    and Yekutieli 2001, theorem 1.2).

    >>> found = claims({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.5})
    >>> {key: round(chance, 4) for key, chance in found.items()}
    {'a': 0.04, 'b': 0.0533, 'c': 0.0533, 'd': 0.5}
    """
    adjusted: dict[Key, float] = {}
    least, count = 1.0, len(chances)
    order = sorted(chances, key=lambda one: chances[one])
    for place, key in reversed(list(enumerate(order, start=1))):
        least = min(least, chances[key] * count / place)
        adjusted[key] = least
    return {key: adjusted[key] for key in chances}


def protected(attacks: Sequence[Values], baselines: Sequence[Values], margin: float = 0.0) -> float:
    """Return the p-value for the claim that every attack is at most a margin above all baselines.

    A small value supports the claim. The result is the largest p-value among the attacks. The claim
    must hold for each attack separately, so the number of attacks needs no adjustment
    (intersection-union test, Berger 1982). If one baseline is clearly the best, a p-value of at
    most `ONE_SIDED` means that the interval of each attack's advantage ends at or below 0.

    Args:
        attacks: values of each attack.
        baselines: values of each baseline; any baseline may be the best.
        margin: largest advantage of an attack that does not count as a leak.
    """
    rivals = rivals_of(baselines)
    return max((below_best(one, rivals, margin) for one in attacks), default=1.0)


def below_best(values: Values, rivals: Sequence[Values], margin: float = 0.0) -> float:
    """Return the p-value for the claim that a mean is at most a margin above the best baseline.

    A mean above the best baseline's mean is above every baseline's mean. So the test against each
    single baseline is valid, and Simes' method combines these tests. The highest mean of several
    equally good baselines is too high by chance. A test against only the apparently best of ten
    baselines would judge one in nine equally good attacks as worse.

    Args:
        values: values of an attack or another quantity.
        rivals: values of the baselines that may be the best; see `rivals_of`.
        margin: largest difference from the best baseline that does not count.
    """
    return simes([chance_below(advantage(values, one), margin) for one in rivals])


def simes(chances: Sequence[float]) -> float:
    """Return Simes' p-value of r hypotheses together: the minimum of r / i times the i-th smallest.

    The r p-values are in ascending order; the test is valid for independent and for positively
    dependent p-values (Simes 1986, Sarkar 1998).

    >>> simes([0.04, 0.03]), simes([0.01, 0.9]), simes([])
    (0.04, 0.02, 1.0)
    """
    ordered = sorted(chances)
    return min([1.0, *(len(ordered) / i * one for i, one in enumerate(ordered, start=1))])


def rivals_of(among: Sequence[Values]) -> list[Values]:
    """Return the values in `among` that are not clearly below the values with the largest mean."""
    best = max(among, key=_mean)
    return [one for one in among if chance_below(advantage(one, best), 0.0) > ONE_SIDED]


def _mean(values: Values) -> float:
    return statistics.fmean(by_victim(values).values())


def leaking(attacks: Sequence[Values], baseline: Values, margin: float = 0.0) -> float:
    """Return the p-value for the claim that some attack is more than a margin above a baseline.

    A small value supports the claim. The result is Simes' p-value over the attacks that may be the
    best, because the highest value of many useless attacks exceeds the attack's true mean by
    chance.

    Args:
        attacks: values of each attack.
        baseline: values of the baseline with the highest mean.
        margin: largest advantage of an attack that does not count as a leak.
    """
    return simes([chance_above(advantage(one, baseline), margin) for one in rivals_of(attacks)])


def _mirrored(found: Estimate | None) -> Estimate | None:
    return None if found is None else Estimate(-found.mean, found.half_width, found.count)


Judged = Literal["no easier", "easier", "undecided"]
#: Nominal error probability of one end of the interval from `steady_interval`. With Student's
#: quantile at this level, the true error is at most 5 % for 3 to 10 victims whose values are
#: exponentially distributed (`python -m benchmarks.verdicts`).
_SKEWED = 0.0045
_MISSED = 0.05
#: Smallest number of victims for a verdict: with fewer victims, all of them would have equal values
#: by chance in more than 5 % of studies, even if half of all possible victims differ.
_FEWEST = 5
_MOST = 10_000
#: Smallest number of victims whose standard deviation allows a forecast.
_SPREAD = 3


@dataclass(frozen=True, slots=True)
class Judgement:
    """Verdict on how much the model helps an attacker who already has the inputs.

    Attributes:
        verdict: "no easier": the attacker's gain is below the margin; "easier": the gain is above
            0. Each verdict is wrong in at most 5 % of studies if victims' values are normally or
            exponentially distributed; for two-point distributions see `unseen`. Otherwise
            "undecided".
        gain: value of an attack on inputs and cut minus value of an attack on inputs alone, as a
            mean over victims.
        low, high: ends of the gain's interval from `steady_interval`.
        margin: largest gain that does not count as help.
        victims: number of trained victims (attacked models).
        more: number of further victims that would lead to a verdict, if they resemble the trained
            victims; None if there is a verdict, or if fewer than three victims show the standard
            deviation.
    """

    verdict: Judged
    gain: float
    low: float
    high: float
    margin: float
    victims: int
    more: int | None

    @property
    def unseen(self) -> float:
        """Largest share of victims that may differ from the trained ones (confidence 95 %).

        The value 1 - 0.05^(1 / n) is the exact bound if none of n victims differs (Clopper and
        Pearson 1934). No rule can detect a leak in a smaller share of possible victims, because a
        sample without such a victim looks like a sample without any leak.
        """
        return float(1 - _MISSED ** (1 / self.victims))

    @property
    def sentence(self) -> str:
        """The verdict as a clause, with its margin."""
        no = "no easier to infer than without the model"
        return self.words(no, "easier to infer", "victims")

    def words(self, no: str, yes: str, repeats: str) -> str:
        """Return the verdict as a clause with words for "no", "yes" and the kind of repeats.

        >>> judge([0.0, 0.004, 0.002]).words("as good", "worse", "seeds")
        'undecided: 2 more seeds would decide (margin 1.0 points)'
        >>> judge([0.0]).words("as good", "worse", "seeds")
        'undecided: one result does not show how much seeds differ (margin 1.0 points)'
        """
        if self.verdict == "no easier":
            return f"{no} (margin {_points(self.margin)})"
        if self.verdict == "easier":
            return f"{yes} by {_points(self.gain)} ({_points(self.low)} or more)"
        if self.more is None:
            few = f"{self.victims} {repeats} are too few to show how much {repeats} differ"
            few = few if self.victims > 1 else f"one result does not show how much {repeats} differ"
            return f"undecided: {few} (margin {_points(self.margin)})"
        return f"undecided: {self.more} more {repeats} would decide (margin {_points(self.margin)})"


def judge(found: Sequence[float], margin: float = 0.01) -> Judgement:
    """Test whether the model helps an attacker who has the inputs (non-inferiority test).

    With at least five victims, the verdict is "no easier" if the upper end of `steady_interval` is
    at most the margin; it is "easier" if the lower end is above 0. With fewer than five victims,
    "no easier" is not possible, and "easier" requires that each gain is at least margin (0.05^(-1 /
    n) - 1). The second rule assumes that having the cut costs an attacker no more than the margin.
    Then, by Markov's inequality, the gains of all n victims exceed this bound with a probability of
    at most 5 % if their mean is 0.

    Args:
        found: gain of each victim as a share (`gains`): the attack's measure with inputs and cut,
            minus its measure with inputs alone.
        margin: largest gain that does not count as help.

    Raises:
        ValueError: there is no victim.

    >>> judge([0.001, -0.002, 0.0, 0.002, -0.001]).sentence
    'no easier to infer than without the model (margin 1.0 points)'
    >>> judge([0.2, 0.21, 0.19, 0.2, 0.22]).verdict
    'easier'
    """
    if not found:
        raise ValueError("a verdict requires at least one victim")
    count, mean = len(found), statistics.fmean(found)
    spread = math.inf if count == 1 else max(statistics.stdev(found), margin / 4)
    low, high = _ends(mean, spread, count)
    verdict = _judged(mean, spread, count, margin)
    least = margin * (_MISSED ** (-1 / count) - 1)
    if count < _FEWEST and min(found) < least:
        verdict = "undecided"
    more = None
    if verdict == "undecided" and count >= _SPREAD:
        later = range(max(count + 1, _FEWEST), _MOST)
        decided = (n for n in later if _judged(mean, spread, n, margin) != "undecided")
        more = next(decided, _MOST) - count
    return Judgement(verdict, mean, low, high, margin, count, more)


def gains(joined: Values, alone: Values) -> list[float]:
    """Return, for each victim, the gain of using inputs and cut over using inputs alone."""
    ours, reference = by_victim(joined), by_victim(alone)
    return [ours[one] - reference[one] for one in ours if one in reference]


def steady_interval(values: Sequence[float], resolution: float = 0.0) -> tuple[float, float]:
    """Return a two-sided 95 % interval of a mean that is also valid for skewed values.

    Student's interval contains the mean in only 88 % of cases for five exponentially distributed
    victims, because their sample standard deviation is small whenever their mean is small. Each end
    of this interval is wrong in at most 5 % of cases for exponential and in 0.45 % for normal
    distributions; for two-point distributions see `Judgement.unseen`.

    Args:
        values: value of each victim.
        resolution: smallest standard deviation to assume, because equal values are little evidence
            of a small standard deviation.

    >>> low, high = steady_interval([0.70, 0.72, 0.74])
    >>> f"{low:.2f} to {high:.2f}"
    '0.60 to 0.84'
    """
    count = len(values)
    spread = math.inf if count == 1 else max(statistics.stdev(values), resolution)
    return _ends(statistics.fmean(values), spread, count)


def _ends(mean: float, spread: float, count: int) -> tuple[float, float]:
    if math.isinf(spread):
        return -math.inf, math.inf
    half = -_student(count - 1, _SKEWED) * spread / math.sqrt(count)
    return mean - half, mean + half


def _judged(mean: float, spread: float, count: int, margin: float) -> Judged:
    low, high = _ends(mean, spread, count)
    if high <= margin and count >= _FEWEST:
        return "no easier"
    return "easier" if low > 0 else "undecided"


def _points(share: float) -> str:
    return f"{100 * share:.1f} points"
