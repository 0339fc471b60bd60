"""The worst case over attacks: how each defense stands at each number of leaked labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from vfl.config.grid import LabelMeasure
from vfl.experiments.cells import HONEST
from vfl.experiments.scores import SCRATCH, Row, scratch_of
from vfl.experiments.statistics import (
    ONE_SIDED,
    Estimate,
    Values,
    advantage,
    chance_above,
    chance_below,
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
#: What models are judged by.
Utility = Literal["accuracy", "auc"]
#: Measures of attacks on labels; one worst case is taken over all rows of the same one.
OF_LABELS: tuple[LabelMeasure, ...] = get_args(LabelMeasure)
#: A class with a larger share makes accuracy a poor measure: who names it always is right so often.
IMBALANCED = 0.65
UNDEFENDED = "none"
#: The baseline that every attack has: the best answer without any evidence.
GUESS = "guess"
_ONE_IN_TWENTY = 0.05

#: Values of the attacks that an attacker with k leaked labels can run, by attack.
ByAttack = Mapping[str, Values]


@dataclass(frozen=True, slots=True)
class Standing:
    """One defense at one number of leaked labels.

    Attributes:
        k: leaked labels of each class.
        attack, value: the attack with the highest mean, and what it reached.
        guess: what the best answer without any evidence reaches.
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
    guess: Estimate
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
        utility: of the victims' own answers for test rows, over victims.
        judged_by: what that is: AUC if the attacks are ranked by a measure that does not depend on
            how frequent the classes are, and it is known; else accuracy.
        difference: of that to the undefended model's, victim by victim; None for that itself.
        affordable: whether the defense costs at most the margin (non-inferiority, one-sided at
            5 %); what is better than undefended costs nothing. None of the undefended model.
        standings: by k, ascending.
    """

    defense: str
    utility: Estimate
    judged_by: Utility
    difference: Estimate | None
    affordable: Literal["yes", "no", "undecided"] | None
    standings: Sequence[Standing]

    @property
    def worst(self) -> Standing:
        """The standing with the largest advantage, of those that are shown to leak if any is."""
        return max(self.standings, key=lambda one: (one.verdict == "leaks", one.advantage.mean))


def label_measure(row: Row) -> str | None:
    """The measure of an attack on labels, clusters too; None of one on anything else."""
    measure = row.measure.removeprefix("matched_")
    return measure if measure in OF_LABELS else None


def in_measure(rows: Iterable[Row], measure: LabelMeasure) -> list[Row]:
    """Rows of attacks on labels by one measure, and of all other attacks."""
    return [row for row in rows if label_measure(row) in (None, measure)]


def fitting_measure(rows: Sequence[Row], asked: LabelMeasure | Literal["auto"]) -> LabelMeasure:
    """The measure that attacks on labels are ranked by.

    Args:
        rows: of a grid; the guesses beside them tell how many classes there are, and the largest.
        asked: "auto" is AUC where there are two classes or one is large, else accuracy.
    """
    if asked != "auto":
        return asked
    guesses = {name: row.guess for row in rows if (name := label_measure(row))}
    binary = guesses.get("balanced_accuracy", 0) >= 0.5
    large = guesses.get("accuracy", 0) > IMBALANCED
    return "auc" if (binary or large) and "auc" in guesses else "accuracy"


def _judge_of(rows: Sequence[Row], measure: LabelMeasure) -> Utility:
    """By what models are judged beside attacks; AUC is unknown where test rows lack a class."""
    known = all(row.test_auc is not None for row in rows if row.test_accuracy is not None)
    return "auc" if measure != "accuracy" and known else "accuracy"


def leaderboard(
    rows: Sequence[Row], margin: float, measure: LabelMeasure = "accuracy"
) -> list[LeaderboardEntry]:
    """Every defense that was attacked, the best protected first.

    Args:
        rows: of a grid.
        margin: points of utility that a defense may cost.
        measure: of attacks on labels; see `fitting_measure`.
    """
    labels = [row for row in rows if label_measure(row) == measure]
    leaks = sorted({row.k for row in labels if row.k}) or [0]
    plain = [row for row in labels if row.defense == UNDEFENDED]
    found, judge = [], _judge_of(labels, measure)
    for defense in dict.fromkeys(row.defense for row in labels):
        own = [row for row in labels if row.defense == defense]
        found.append(_entry(defense, own, plain, leaks, margin, judge))
    return sorted(
        found, key=lambda entry: (entry.worst.verdict == "leaks", entry.worst.advantage.mean)
    )


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
    """Values of the baselines and of the guess, by what they are called, by victim and draw."""
    found: dict[str, dict[tuple[int, int], float]] = {}
    for row in rows:
        found.setdefault(GUESS, {})[row.seed, row.draw] = row.guess
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
    defense: str,
    own: Sequence[Row],
    plain: Sequence[Row],
    leaks: Sequence[int],
    margin: float,
    judge: Utility,
) -> LeaderboardEntry:
    chances = {k: _chance(leaked(own, k)) for k in leaks if leaked(own, k)}
    adjusted = holm(chances)
    standings = [_standing(k, leaked(own, k), leaked(plain, k), adjusted[k]) for k in chances]
    good, undefended = _utility(own, judge), _utility(plain, judge)
    difference = None if defense == UNDEFENDED else paired_difference(good, undefended)
    whole = over_victims({(seed, 0): value for seed, value in good.items()})
    assert whole is not None
    affordable = None if difference is None else _affordable(difference, margin / 100)
    return LeaderboardEntry(defense, whole, judge, difference, affordable, standings)


def _affordable(difference: Estimate, margin: float) -> Literal["yes", "no", "undecided"]:
    if chance_above(difference, -margin) <= _ONE_IN_TWENTY:
        return "yes"
    return "no" if chance_below(difference, -margin) <= _ONE_IN_TWENTY else "undecided"


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
    guess = over_victims(baselines[GUESS])
    assert guess is not None
    verdict = _verdict(above, chance, _leaks(own), _leaks(plain))
    return Standing(k, attack, value, guess, baseline, beside, above, over_scratch, chance, verdict)


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


def _utility(rows: Iterable[Row], judge: Utility) -> dict[int, float]:
    honest = {row.seed: getattr(row, f"test_{judge}") for row in rows if row.adversary == HONEST}
    return {seed: value for seed, value in honest.items() if value is not None}
