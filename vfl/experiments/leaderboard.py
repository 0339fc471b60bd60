"""The worst case over attacks: how each defense stands at each number of leaked labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from vfl.experiments.cells import HONEST
from vfl.experiments.scores import SCRATCH, Row, scratch_of
from vfl.experiments.statistics import (
    ONE_SIDED,
    Estimate,
    Values,
    advantage,
    equivalence,
    holm,
    leaking,
    over_victims,
    paired_difference,
    protected,
    rivals_of,
)

#: "inconclusive": no attack succeeds here, nor on the undefended model, so nothing is shown.
#: "undecided": several could be true; of a single victim always.
Verdict = Literal["protected", "leaks", "undecided", "inconclusive"]
#: Measures of attacks on labels, which one worst case is taken over.
OF_LABELS = ("accuracy", "matched_accuracy")
UNDEFENDED = "none"
_EQUAL = 0.05

#: Values of the attacks that an attacker with k leaked labels can run, by attack.
ByAttack = Mapping[str, Values]


@dataclass(frozen=True, slots=True)
class Standing:
    """One defense at one number of leaked labels.

    Attributes:
        k: leaked labels of each class.
        attack, value: the attack with the highest mean, and what it reached.
        baseline, baseline_value: the highest mean of all baselines, whatever attack they are of.
        advantage: value less baseline_value, victim by victim.
        over_scratch: value less training from scratch on the leaked rows; of an attack that uses
            none, less the same attack on the inputs (thesis eq 4-2). None without either.
        chance: p-value of perfect protection from every attack, adjusted over k, and over the
            baselines of which any may be the best.
        verdict: what follows.
    """

    k: int
    attack: str
    value: Estimate
    baseline: str
    baseline_value: Estimate
    advantage: Estimate
    over_scratch: Estimate | None
    chance: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class LeaderboardEntry:
    """One defense on the leaderboard.

    Attributes:
        defense: its spec.
        accuracy: on test rows, over victims.
        difference: of it to the undefended model's, victim by victim; None for that itself.
        equal: whether the difference is within the margin (two one-sided tests); None where
            that cannot be said, for there is no difference, or its spread is not known.
        standings: by k, ascending.
    """

    defense: str
    accuracy: Estimate
    difference: Estimate | None
    equal: bool | None
    standings: Sequence[Standing]

    @property
    def worst(self) -> Standing:
        """The standing with the largest advantage."""
        return max(self.standings, key=lambda one: one.advantage.mean)


def leaderboard(rows: Sequence[Row], margin: float) -> list[LeaderboardEntry]:
    """Every defense that was attacked, the best protected first.

    Args:
        rows: of a grid.
        margin: points of accuracy that a defense may cost.
    """
    labels = [row for row in rows if is_ranked(row)]
    leaks = sorted({row.k for row in labels if row.k}) or [0]
    plain = [row for row in labels if row.defense == UNDEFENDED]
    found = []
    for defense in dict.fromkeys(row.defense for row in labels):
        own = [row for row in labels if row.defense == defense]
        found.append(_entry(defense, own, plain, leaks, margin))
    return sorted(found, key=lambda entry: entry.worst.advantage.mean)


def is_ranked(row: Row) -> bool:
    """Whether a row is about labels and stands beside baselines."""
    return row.measure in OF_LABELS and bool(row.baselines)


def leaked(rows: Iterable[Row], k: int) -> list[Row]:
    """The rows of attacks that k leaked labels allow: those with k, and those that use none."""
    return [row for row in rows if row.k in (0, k)]


def by_attack(rows: Iterable[Row]) -> dict[str, dict[tuple[int, int], float]]:
    """Values by attack and what went before it, each by victim and draw."""
    found: dict[str, dict[tuple[int, int], float]] = {}
    for row in rows:
        found.setdefault(row.attacker, {})[row.seed, row.draw] = row.value
    return found


def by_baseline(rows: Iterable[Row]) -> dict[str, dict[tuple[int, int], float]]:
    """Values of the baselines, by what they are called, each by victim and draw."""
    found: dict[str, dict[tuple[int, int], float]] = {}
    for row in rows:
        for name, value in row.baselines.items():
            found.setdefault(_called(row, name), {})[row.seed, row.draw] = value
    return found


def _called(row: Row, name: str) -> str:
    """What a baseline of an attack is called.

    Training from scratch is the same beside all attacks, but for that of parties who pool. Where no
    labels leak it is the attack itself on the inputs.
    """
    if name in SCRATCH and row.k > 0:
        spec = scratch_of(row.attack, name)
        return name if spec == SCRATCH[name] else spec
    return f"{row.attack} on {'raw' if name == 'scratch' else name}"


def highest(found: ByAttack) -> str:
    """The one with the highest mean over victims."""
    return max(found, key=lambda name: mean_of(found[name]))


def mean_of(values: Values) -> float:
    """The mean over victims."""
    estimate = over_victims(values)
    assert estimate is not None
    return estimate.mean


def _entry(
    defense: str, own: Sequence[Row], plain: Sequence[Row], leaks: Sequence[int], margin: float
) -> LeaderboardEntry:
    chances = {k: _chance(leaked(own, k)) for k in leaks if leaked(own, k)}
    adjusted = holm(chances)
    standings = [_standing(k, leaked(own, k), leaked(plain, k), adjusted[k]) for k in chances]
    accuracy, undefended = _accuracy(own), _accuracy(plain)
    difference = None if defense == UNDEFENDED else paired_difference(accuracy, undefended)
    whole = over_victims({(seed, 0): value for seed, value in accuracy.items()})
    assert whole is not None
    equal = None
    if difference is not None and difference.half_width:
        equal = equivalence(difference, margin / 100) <= _EQUAL
    return LeaderboardEntry(defense, whole, difference, equal, standings)


def _standing(k: int, own: Sequence[Row], plain: Sequence[Row], chance: float) -> Standing:
    attacks, baselines = by_attack(own), by_baseline(own)
    attack, baseline = highest(attacks), highest(baselines)
    value, beside = over_victims(attacks[attack]), over_victims(baselines[baseline])
    above = advantage(attacks[attack], baselines[baseline])
    assert value is not None
    assert beside is not None
    assert above is not None
    itself = next(row for row in own if row.attacker == attack)
    scratch = baselines.get(_called(itself, "scratch"))
    over_scratch = None if scratch is None else advantage(attacks[attack], scratch)
    verdict = _verdict(above, chance, _leaks(own), _leaks(plain))
    return Standing(k, attack, value, baseline, beside, above, over_scratch, chance, verdict)


def _verdict(above: Estimate, chance: float, leaks: bool, conclusive: bool) -> Verdict:
    if leaks:
        return "leaks"
    if above.half_width is None:
        return "undecided"
    if not conclusive:
        return "inconclusive"
    return "protected" if chance <= ONE_SIDED else "undecided"


def _leaks(rows: Sequence[Row]) -> bool:
    """Whether some attack succeeds."""
    if not rows:
        return False
    baselines = by_baseline(rows)
    attacks = list(by_attack(rows).values())
    return leaking(attacks, baselines[highest(baselines)]) <= ONE_SIDED


def _chance(rows: Sequence[Row]) -> float:
    baselines = by_baseline(rows)
    best = baselines[highest(baselines)]
    advantages = [advantage(values, best) for values in by_attack(rows).values()]
    return protected(advantages, rivals_of(best, baselines.values()))


def _accuracy(rows: Iterable[Row]) -> dict[int, float]:
    honest = {row.seed: row.test_accuracy for row in rows if row.adversary == HONEST}
    return {seed: accuracy for seed, accuracy in honest.items() if accuracy is not None}
