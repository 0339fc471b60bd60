"""Leaderboard: the most successful attack on each defense, at each number of leaked labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from vfl.config.grid import LabelMeasure
from vfl.experiments.cells import HONEST
from vfl.experiments.results import IMBALANCED, TEST, Record, grouped
from vfl.experiments.scores import SCRATCH, scratch_of
from vfl.experiments.statistics import (
    ONE_SIDED,
    Estimate,
    Judgement,
    Values,
    advantage,
    chance_above,
    chance_below,
    claims,
    estimate,
    gains,
    holm,
    judge,
    leaking,
    over_victims,
    paired_difference,
    protected,
)

#: Verdicts. "inconclusive": no attack succeeds on the defended or on the undefended model, so the
#: results show nothing about the defense. "undecided": several verdicts are compatible with the
#: results, as always if there is a single victim.
Verdict = Literal["protected", "leaks", "undecided", "inconclusive"]
#: Measures of the quality of a model's predictions.
Utility = Literal["accuracy", "auc", "r2"]
#: Measures of attacks on labels; the worst attack is chosen among all records with the same
#: measure.
OF_LABELS: tuple[LabelMeasure, ...] = get_args(LabelMeasure)
UNDEFENDED = "none"
#: Name of the baseline that exists for every attack: the best answer without any evidence.
GUESS = "guess"
_ONE_IN_TWENTY = 0.05

#: Values of the attacks that are possible with k leaked labels, by name of the attack, then by
#: victim and draw.
ByAttack = Mapping[str, Values]


@dataclass(frozen=True, slots=True)
class Standing:
    """The result of one defense at one number k of leaked labels per class.

    Attributes:
        k: number of leaked labels of each class.
        attack, value: the attack with the highest mean value, and this mean value.
        guess: value of the best answer without any evidence.
        baseline, baseline_value: the baseline with the highest mean value among the baselines of
            all attacks, and this mean value.
        advantage: value of the attack minus value of the baseline, per victim.
        over_scratch: value of the attack minus value of training from scratch on the leaked rows;
            for an attack without leaked rows, minus the value of the same attack on the inputs
            (thesis, equation 4-2). None if neither baseline exists.
        chance: p-value for the claim that the defense protects perfectly from every attack,
            adjusted over k, baselines and defenses (`claims`); a small value supports the claim.
        leak_chance: p-value of the claim that an attack succeeds, adjusted over attacks, and over
            defenses and k.
        verdict: the conclusion.
        judged: test of the advantage against a margin of one point, see `judge`; the test states
            how many more victims would decide.
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
    leak_chance: float
    verdict: Verdict
    judged: Judgement


@dataclass(frozen=True, slots=True)
class LeaderboardEntry:
    """A defense's results on the leaderboard.

    Attributes:
        defense: its spec.
        utility: quality of predictions on test rows, as a mean over victims.
        judged_by: measure of `utility`: R2 for numeric labels; AUC if attacks are ranked by another
            measure than accuracy and all victims have an AUC; else accuracy.
        difference: quality of the defended model minus quality of the undefended model, per victim;
            None for the undefended model.
        affordable: whether the defense costs at most the margin (non-inferiority test, one-sided at
            5 %); a defended model that is better than the undefended one costs nothing. None for
            the undefended model.
        standings: results of the defense in ascending order of the number of leaked labels.
    """

    defense: str
    utility: Estimate
    judged_by: Utility
    difference: Estimate | None
    affordable: Literal["yes", "no", "undecided"] | None
    standings: Sequence[Standing]

    @property
    def worst(self) -> Standing:
        """Result with the largest advantage; results with the verdict "leaks" come first."""
        return max(self.standings, key=lambda one: (one.verdict == "leaks", one.advantage.mean))


def label_measure(one: Record) -> str | None:
    """Return the measure of a record of an attack on labels or clusters; None for other records."""
    measure = one.measure.removeprefix("matched_")
    return measure if one.evaluator == "attack" and measure in (*OF_LABELS, "mae") else None


def in_measure(records: Iterable[Record], measure: LabelMeasure) -> list[Record]:
    """Return the records of label attacks with this measure, and those of all other attacks."""
    attacks = (one for one in records if one.evaluator == "attack")
    return [one for one in attacks if label_measure(one) in (None, measure)]


def fitting_measure(rows: Sequence[Record], asked: LabelMeasure | Literal["auto"]) -> LabelMeasure:
    """Return the measure that ranks attacks on labels.

    Args:
        rows: records of a run or a grid; the guesses in the records show whether there are two
            classes, and the share of the largest class.
        asked: requested measure; "auto" means AUC if there are two classes or one class is large,
            R2 if labels are numbers, and accuracy otherwise.
    """
    if asked != "auto":
        return asked
    found = ((label_measure(one), one.guess) for one in rows)
    guesses = {name: guess for name, guess in found if name and guess is not None}
    if "r2" in guesses:
        return "r2"
    binary = guesses.get("balanced_accuracy", 0) >= 0.5
    large = guesses.get("accuracy", 0) > IMBALANCED
    return "auc" if (binary or large) and "auc" in guesses else "accuracy"


def utility_of(
    records: Iterable[Record], measure: str, training: str, adversary: str = HONEST
) -> dict[str, float]:
    """Return a defense's scores on test rows by seed; empty if a party stopped the training."""
    return {
        one.repeat: one.value
        for one in records
        if (one.subject, one.measure) == (TEST, measure)
        and (one.training, one.adversary) == (training, adversary)
    }


def _judge_of(records: Sequence[Record], measure: LabelMeasure) -> Utility:
    """Return the measure of quality that fits the attacks'; AUC only if all victims have it."""
    if measure == "r2":
        return "r2"
    cells = {
        name: {one.cell for one in records if (one.subject, one.measure) == (TEST, name)}
        for name in ("accuracy", "auc")
    }
    return "auc" if measure != "accuracy" and cells["accuracy"] <= cells["auc"] else "accuracy"


def leaderboard(
    records: Sequence[Record], margin: float, measure: LabelMeasure = "accuracy"
) -> list[LeaderboardEntry]:
    """Return an entry for every attacked defense; the best protected defense comes first.

    Args:
        records: records of a grid or a run.
        margin: percentage points of quality that a defense may cost without being worse.
        measure: measure of attacks on labels; see `fitting_measure`.
    """
    labels = [one for one in records if label_measure(one) == measure]
    leaks = sorted({one.k for one in labels if one.k}) or [0]
    attacked = {defense: own for (defense,), own in grouped(labels, "training").items()}
    plain = attacked.get(UNDEFENDED, [])
    found, judge = [], _judge_of(records, measure)
    undefended = utility_of(records, judge, UNDEFENDED)
    chances = _chances(attacked, leaks)
    for defense, own in attacked.items():
        good = utility_of(records, judge, defense)
        difference = None if defense == UNDEFENDED else paired_difference(good, undefended)
        found.append(
            LeaderboardEntry(
                defense=defense,
                utility=_known(estimate(list(good.values()))),
                judged_by=judge,
                difference=difference,
                affordable=None if difference is None else _affordable(difference, margin / 100),
                standings=[
                    _standing(k, leaked(own, k), leaked(plain, k), one)
                    for k, one in chances[defense].items()
                ],
            )
        )
    return sorted(
        found, key=lambda entry: (entry.worst.verdict == "leaks", entry.worst.advantage.mean)
    )


def leaked(rows: Iterable[Record], k: int) -> list[Record]:
    """Return records of attacks with k leaked labels, and of attacks that use no leaked labels."""
    return [row for row in rows if row.k in (0, k)]


def by_attack(rows: Iterable[Record]) -> dict[str, dict[tuple[str, int], float]]:
    """Return scores by attack and adversary, then by victim and draw of leaked rows."""
    found: dict[str, dict[tuple[str, int], float]] = {}
    for row in rows:
        found.setdefault(row.attacker, {})[row.repeat, row.draw] = row.value
    return found


def by_baseline(rows: Iterable[Record]) -> dict[str, dict[tuple[str, int], float]]:
    """Return scores of baselines and the guess by name, then by victim and draw."""
    found: dict[str, dict[tuple[str, int], float]] = {}
    for row in rows:
        assert row.guess is not None, "an attack has one"
        found.setdefault(GUESS, {})[row.repeat, row.draw] = row.guess
        for name, value in row.baselines.items():
            found.setdefault(_called(row, name), {})[row.repeat, row.draw] = value
    return found


def _called(row: Record, name: str) -> str:
    """Return the name under which an attack's baseline competes with other baselines.

    The baseline "training from scratch" has one name for all attacks, except for an attack by
    parties that pool their data. Without leaked labels, the baseline is the same attack on the
    attacker's inputs.
    """
    if name in SCRATCH and row.k > 0:
        spec = scratch_of(row.subject, name)
        return name if spec == SCRATCH[name] else spec
    return f"{row.subject} on {'raw' if name == 'scratch' else name}"


def highest(found: ByAttack) -> str:
    """Return the name of the attack whose scores have the highest mean over victims."""
    return max(found, key=lambda name: mean_of(found[name]))


def mean_of(values: Values) -> float:
    """Return the mean of values over victims."""
    return _known(over_victims(values)).mean


def _known(found: Estimate | None) -> Estimate:
    assert found is not None, "an attacked victim has finished its training, and has scores"
    return found


@dataclass(frozen=True, slots=True)
class _Chances:
    """p-values of a defense at one k, of the claims of protection and of leakage."""

    protects: float
    leaks: float


def _chances(
    attacked: Mapping[str, Sequence[Record]], leaks: Sequence[int]
) -> dict[str, dict[int, _Chances]]:
    """Return p-values by defense and k; all claims about defenses are one family of tests."""
    found: dict[str, dict[int, _Chances]] = {}
    for defense, rows in attacked.items():
        of_each = {k: own for k in leaks if (own := leaked(rows, k))}
        protects = holm({k: _chance(own) for k, own in of_each.items()})
        found[defense] = {k: _Chances(protects[k], _leak_chance(own)) for k, own in of_each.items()}
    pairs = {(d, k): one for d, own in found.items() for k, one in own.items() if d != UNDEFENDED}
    leaks_all = claims({pair: one.leaks for pair, one in pairs.items()})
    for k in leaks:  # the p-value of protection is already adjusted over k
        here = {d: one.protects for (d, other), one in pairs.items() if other == k}
        for defense, chance in claims(here).items():
            found[defense][k] = _Chances(chance, leaks_all[defense, k])
    return found


def _affordable(difference: Estimate, margin: float) -> Literal["yes", "no", "undecided"]:
    if chance_above(difference, -margin) <= _ONE_IN_TWENTY:
        return "yes"
    return "no" if chance_below(difference, -margin) <= _ONE_IN_TWENTY else "undecided"


def _standing(
    k: int, own: Sequence[Record], plain: Sequence[Record], chances: _Chances
) -> Standing:
    attacks, baselines = by_attack(own), by_baseline(own)
    attack, baseline = highest(attacks), highest(baselines)
    scores, best = attacks[attack], baselines[baseline]
    above = _known(advantage(scores, best))
    itself = next(row for row in own if row.attacker == attack)
    scratch = baselines.get(_called(itself, "scratch"))
    conclusive = bool(plain) and _leak_chance(plain) <= ONE_SIDED
    return Standing(
        k=k,
        attack=attack,
        value=_known(over_victims(scores)),
        guess=_known(over_victims(baselines[GUESS])),
        baseline=baseline,
        baseline_value=_known(over_victims(best)),
        advantage=above,
        over_scratch=None if scratch is None else advantage(scores, scratch),
        chance=chances.protects,
        leak_chance=chances.leaks,
        verdict=_verdict(above, chances, conclusive),
        judged=judge(gains(scores, best)),
    )


def _verdict(above: Estimate, chances: _Chances, conclusive: bool) -> Verdict:
    if chances.leaks <= ONE_SIDED:
        return "leaks"
    if above.half_width is None:
        return "undecided"
    if not conclusive:
        return "inconclusive"
    return "protected" if chances.protects <= ONE_SIDED else "undecided"


def _leak_chance(rows: Sequence[Record]) -> float:
    """Return the p-value of the claim that at least one attack succeeds."""
    baselines = by_baseline(rows)
    attacks = list(by_attack(rows).values())
    return leaking(attacks, baselines[highest(baselines)])


def _chance(rows: Sequence[Record]) -> float:
    return protected(list(by_attack(rows).values()), list(by_baseline(rows).values()))
