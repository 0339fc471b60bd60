"""Lower bound of a training's epsilon, from guesses about which rows were in the training.

A claimed epsilon is an upper bound of a training's cost for one row. If the guesses are right more
often than the claimed epsilon allows, they refute the claimed epsilon. In any case, the guesses
prove a lower bound of epsilon, at a given confidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.special import bdtrc, betaincinv, gammaln

from vfl.core.registry import require

_HALVINGS = 40
_MOST = 50.0
#: Fractions of the canary rows about which the audit guesses; it guesses about the most certain
#: rows first.
_SHARES = (0.05, 0.1, 0.2, 0.4, 1.0)
#: Smallest number of guesses for which a test makes sense.
_FEWEST = 8


@dataclass(frozen=True, slots=True)
class LowerBound:
    """The lower bound of a training's epsilon that an audit proves.

    Attributes:
        epsilon: lower bound of epsilon, at this confidence.
        confidence: probability that the bound holds, over the audit's coin flips and the training's
            noise.
        method: "one run" (one training with many canary rows) or "many runs" (many trainings, each
            with or without one canary row).
        score: name of the score from which the guesses were made; the confidence accounts for all
            scores among which this one is the best.
        guesses, right: number of guesses, and number of right guesses.
        canaries: number of canary rows, whose inclusion in the training a coin flip decided.
        trainings: number of trainings that the audit ran.
    """

    epsilon: float
    confidence: float
    method: str
    score: str
    guesses: int
    right: int
    canaries: int
    trainings: int

    def as_dict(self) -> dict[str, Any]:
        """Return the bound as a dictionary for JSON."""
        return asdict(self)


def one_run_epsilon(
    canaries: int, guesses: int, right: int, delta: float, confidence: float = 0.95
) -> float:
    """Return the smallest epsilon for which this number of right guesses is plausible.

    Source: Steinke, Nasr and Jagielski 2023, theorem 5.2. An independent coin flip decides whether
    each canary row is included in the training. Let e = exp(epsilon) and p = e / (1 + e). Except
    with probability `2 delta m max_i P[v - i <= W < v] / i`, the number of right guesses is at most
    W ~ Binomial(r, p), where m counts canaries, r guesses, and v right guesses.

    >>> round(one_run_epsilon(1000, 300, 300, 1e-5), 2)
    4.57
    >>> one_run_epsilon(1000, 300, 150, 1e-5)
    0.0

    Raises:
        BadOptionError: there are more right guesses than guesses, or a number is out of range.
    """
    require("guesses", guesses, "0 to the canaries", 0 <= guesses <= canaries)
    require("right", right, "0 to the guesses", 0 <= right <= guesses)
    require("delta", delta, "0 to below 1", 0 <= delta < 1)
    require("confidence", confidence, "between 0 and 1", 0 < confidence < 1)
    if not right:
        return 0.0
    behind = np.arange(1, right + 1)
    below = right - behind
    ways = gammaln(guesses + 1) - gammaln(below + 1) - gammaln(guesses - below + 1)

    def surprise(epsilon: float) -> float:
        p, q = 1 / (1 + math.exp(-epsilon)), 1 / (1 + math.exp(epsilon))
        laws = np.exp(ways + below * math.log(p) + (guesses - below) * math.log(q))
        slack = float((np.cumsum(laws) / behind).max())
        return float(bdtrc(right - 1, guesses, p)) + 2 * canaries * delta * slack

    return _least(lambda epsilon: surprise(epsilon) > 1 - confidence)


def many_runs_epsilon(
    scores: Sequence[float],
    included: Sequence[bool],
    delta: float,
    confidence: float = 0.95,
) -> tuple[float, int, int]:
    """Return a lower bound of epsilon from many trainings, each with or without one canary row.

    Source: Jagielski, Ullman and Oprea 2020, section 4; Nasr et al. 2021. The scores of the first
    half of the trainings determine a threshold of the score. The second half of the trainings
    yields exact bounds of the guess's two error rates at this threshold (Clopper and Pearson 1934).

    Returns:
        The lower bound of epsilon, the number of guesses, and the number of right guesses.
    """
    value, truth = np.asarray(scores, float), np.asarray(included, bool)
    first = np.arange(len(value)) < len(value) // 2
    best, threshold = -1.0, 0.0
    for at in np.unique(value[first]):
        found = _by_rates(value[first] >= at, truth[first], delta, 0.5)
        if found > best:
            best, threshold = found, at
    guessed, told = value[~first] >= threshold, truth[~first]
    epsilon = _by_rates(guessed, told, delta, confidence)
    return epsilon, len(told), int((guessed == told).sum())


def bound_of(
    scores: Mapping[str, np.ndarray], included: np.ndarray, delta: float, confidence: float
) -> LowerBound:
    """Return the best lower bound from one training, over all scores and numbers of guesses.

    All combinations of score and number of guesses share the error probability (Bonferroni), so the
    confidence also holds for the best combination.

    Args:
        scores: scores by name, axes (canaries,); a higher score means that the training more
            likely included the canary row.
        included: whether the training included each canary row, axes (canaries,).
        delta: delta for which epsilon is bounded.
        confidence: confidence of the bound.
    """
    canaries = len(included)
    counts = sorted({max(min(_FEWEST, canaries), int(share * canaries)) for share in _SHARES})
    risk = (1 - confidence) / (len(scores) * len(counts))
    found = []
    for name, values in scores.items():
        order = np.argsort(-values, kind="stable")
        for count in counts:
            there, absent = order[: count - count // 2], order[canaries - count // 2 :]
            right = int(included[there].sum() + (~included[absent]).sum())
            epsilon = one_run_epsilon(canaries, count, right, delta, 1 - risk)
            found.append((epsilon, -count, name, count, right))
    epsilon, _, name, count, right = max(found)
    return LowerBound(epsilon, confidence, "one run", name, count, right, canaries, 1)


def bound_of_many(
    scores: Mapping[str, np.ndarray], included: np.ndarray, delta: float, confidence: float
) -> LowerBound:
    """Return the best lower bound from many trainings with one canary row; see `bound_of`."""
    risk = (1 - confidence) / len(scores)
    found = []
    for name, values in scores.items():
        epsilon, guesses, right = many_runs_epsilon(
            values.tolist(), included.tolist(), delta, 1 - risk
        )
        found.append((epsilon, name, guesses, right))
    epsilon, name, guesses, right = max(found)
    runs = len(included)
    return LowerBound(epsilon, confidence, "many runs", name, guesses, right, 1, runs)


def _by_rates(guessed: np.ndarray, told: np.ndarray, delta: float, confidence: float) -> float:
    """Return a lower bound of epsilon: ln((right rate - delta) / wrong rate).

    Each of the guesses "included" and "not included" gives such a bound; the larger one holds.
    """
    risk = (1 - confidence) / 2
    there, absent = int(told.sum()), int((~told).sum())
    if not there or not absent:
        return 0.0
    best = 0.0
    for kind, of, others in ((True, told, absent), (False, ~told, there)):
        right = int((guessed[of] == kind).sum())
        wrong = int((guessed[~of] == kind).sum())
        least = float(betaincinv(right, int(of.sum()) - right + 1, risk)) if right else 0.0
        most = float(betaincinv(wrong + 1, others - wrong, 1 - risk)) if wrong < others else 1.0
        if least > delta:
            best = max(best, math.log((least - delta) / most))
    return best


def _least(allowed: Callable[[float], bool]) -> float:
    """Return the smallest epsilon for which `allowed` is true.

    `allowed` must be true for every larger epsilon.
    """
    if allowed(0.0):
        return 0.0
    low, high = 0.0, _MOST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if allowed(middle) else (middle, high)
    return low
