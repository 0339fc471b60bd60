"""Accuracy against label leakage: defenses compared with bottom models trained without labels.

    python -m benchmarks.frontier --task fashion            # goes on where it was left
    python -m benchmarks.frontier --task bank --seeds 5
    python -m benchmarks.frontier --task bank --families mixing --again      # added attacks
    python -m benchmarks.frontier --redraw                  # page and pictures of the stored rows

The page shows some defenses of each task. The file `frontier_places.csv`, beside the page, contains
all defenses.

A task is a grid file of `examples/frontier`, which names the task's defenses, most of them at five
strengths. Each defense is trained, and then attacked by a feature party that keeps all it has: its
bottom model, every gradient, and a few leaked labels. The defense `gradient_averaging:rows=0`
stands for a secure top model: labels and top model are computed by multi-party computation, and
only the sum of the batch's gradients is disclosed. The defense sends a feature party exactly this
sum.

The label leakage of a defense is the result of the strongest attack minus the result of the best
attack that uses nothing computed from labels. The latter attacks use inputs, or bottom models
trained without labels, so every party that has the inputs can run them. The result rows of all
tasks are in one CSV file; the page, `frontier_places.csv` and the pictures are made from this file
only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import nan
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from benchmarks import frontier_tops, harness
from benchmarks.studies import (
    EXAMPLES,
    Dot,
    Families,
    StudyPage,
    added,
    by_seed,
    family_of,
    highest,
    over,
    picture,
    played_alone,
    points_text,
    read_rows,
    row_count,
    store,
    stored,
    study_of,
    write_rows,
)
from vfl.config import GridSettings
from vfl.core.errors import BadOptionError
from vfl.core.registry import require_choice
from vfl.experiments.cells import GridFolder, grid_settings_of
from vfl.experiments.leaderboard import (
    by_attack,
    by_baseline,
    fitting_measure,
    label_measure,
    utility_of,
)
from vfl.experiments.results import LoadedGrid
from vfl.experiments.statistics import (
    FALSE_CLAIMS,
    Estimate,
    Values,
    advantage,
    below_best,
    by_victim,
    chance_above,
    claims,
    leaking,
    protected,
    rivals_of,
)
from vfl.experiments.tables import MEASURES, Table
from vfl.training.specs import read_checked

FOLDER = EXAMPLES / "frontier"
TASKS = ("fashion", "mnist", "cifar", "bank", "credit", "reviews")
#: Percentage points by which a defense may leak more than label-free bottoms, and still count as
#: leaking no more.
MARGIN = 0.01
LEAKED = 10
#: Columns that identify a result row.
KEY = ("task", "family", "defense", "seed", "attack")
COLUMNS = (*KEY[:4], "utility", "attack", "access", "reaches")
#: Names that stand in place of a family: attacks without a model, no defense, label-free bottoms.
NO_MODEL, UNDEFENDED, LABEL_FREE = "no model", "undefended", "label-free bottom"
FAMILIES: Families = {
    "none": (UNDEFENDED, 0),
    "label_free": (LABEL_FREE, 1),
    "few_rounds": ("few rounds", 2),
    "few_rounds:steps=40,epsilon": ("few rounds with label DP", 3),
    "label_dp": ("label DP", 4),
    "gradient_noise": ("noise on gradients", 5),
    "tpsl": ("noise on gradients", 5),
    "marvell": ("of two classes", 5),
    "max_norm": ("of two classes", 5),
    "potential": ("losses on cuts", 6),
    "dcor": ("losses on cuts", 6),
    "anchored": ("losses on cuts", 6),
    "gradient_averaging:rows=0": ("secure top", 7),
    "gradient_averaging": ("averaged gradients", 7),
    "mixup": ("mixing", 8),
}

Verdict = Literal["reference", "beats it", "leaks", "no better", "undecided"]
#: Verdicts, in the order in which more victims or attacks would be most useful.
_ORDER: Sequence[Verdict] = ("reference", "undecided", "beats it", "no better", "leaks")


def settings_of(task: str) -> GridSettings:
    """Return the grid settings of a task."""
    return grid_settings_of(read_checked(FOLDER / f"{task}.toml", [])[0])


def families_of(task: str) -> dict[str, list[str]]:
    """Return the defenses of a task, grouped by family."""
    found: dict[str, list[str]] = {}
    for spec in settings_of(task).defenses:
        found.setdefault(family_of(spec, FAMILIES), []).append(spec)
    return found


#: Type: the seeds of the victims that must still be trained, by defense.
Left = dict[str, list[int]]


def left_of(task: str, seeds: int, families: Sequence[str], done: pd.DataFrame) -> Left:
    """Return the victims without stored rows in some families of a task, or in all families.

    Args:
        task: key of TASKS.
        seeds: number of victims of each defense; their seeds count from 0.
        families: names in `families_of`; if empty, all families. The reference family comes first.
        done: stored result rows.
    """
    known = set(done[done.task == task][["defense", "seed"]].itertuples(index=False, name=None))
    chosen = families_of(task)
    return _lacking(
        (spec, [seed for seed in range(seeds) if (spec, str(seed)) not in known])
        for one in dict.fromkeys((UNDEFENDED, LABEL_FREE, *(families or chosen)))
        for spec in chosen[one]
    )


def added_attacks(
    task: str, seeds: int, families: Sequence[str], done: pd.DataFrame
) -> tuple[Left, list[str]]:
    """Return victims without rows of some attack in the task's file, and these attacks.

    Args:
        task: key of TASKS.
        seeds: number of victims of each defense.
        families: see `left_of`.
        done: stored result rows.
    """
    own = done[done.task == task]
    known = set(own[["defense", "seed", "attack"]].itertuples(index=False, name=None))
    every = left_of(task, seeds, families, done.iloc[:0])
    lacking = {
        attack: _lacking(
            (spec, [seed for seed in victims if (spec, str(seed), attack) not in known])
            for spec, victims in every.items()
        )
        for attack in settings_of(task).attacks
    }
    left = _lacking(
        (spec, sorted({seed for each in lacking.values() for seed in each.get(spec, ())}))
        for spec in every
    )
    return left, [attack for attack, victims in lacking.items() if victims]


def _lacking(victims: Iterable[tuple[str, list[int]]]) -> Left:
    return {spec: seeds for spec, seeds in victims if seeds}


# --- rows -----------------------------------------------------------------------------------------


def rows_of(task: str, folder: GridFolder) -> Iterator[dict[str, Any]]:
    """Yield the result of every attack on every victim of a grid, averaged over leaked-label draws.

    Rows of attacks without a model have the attack's name in place of the defense, and no utility.
    """
    grid = LoadedGrid(folder)
    records = grid.records
    measure = fitting_measure(records, grid_settings_of(grid.experiment).measure)
    judged = "auc" if measure == "auc" else "accuracy"
    attacks = [one for one in records if label_measure(one) == measure]
    access = {one.attacker: one.access for one in attacks}
    for family, specs in families_of(task).items():
        for spec in specs:
            good = utility_of(records, judged, spec)
            own = [one for one in attacks if one.training == spec]
            for attack, values in by_attack(own).items():
                for seed, reached in by_victim(values).items():
                    yield {
                        "task": task, "family": family, "defense": spec, "seed": seed,
                        "utility": round(good[str(seed)], 5), "attack": attack,
                        "access": access[attack], "reaches": round(reached, 5),
                    }  # fmt: skip
    for name, values in by_baseline(attacks).items():
        for seed, reached in by_victim(values).items():
            yield {
                "task": task, "family": NO_MODEL, "defense": name, "seed": seed,
                "utility": "", "attack": name, "access": "", "reaches": round(reached, 5),
            }  # fmt: skip


# --- comparison of the defenses -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """One defense of a task, as a point of the task's picture.

    Attributes:
        family, defense: family and spec of the defense.
        utility: utility of the victims' own predictions for test rows, over seeds.
        gain: difference of the utility from the best label-free bottom's utility, paired by seed.
        attack, access, reaches: spec of the strongest attack, its attacker's access, and its mean
            result.
        leak: difference of `reaches` from the best attack that uses nothing computed from labels,
            paired by seed.
        verdict: whether the defense is better than every label-free bottom; one of the claims of
            `Claims`.
        is_ahead: whether the data show that the defense is more accurate than the best label-free
            bottom.
        claims: corrected p-values; None for the reference.
    """

    family: str
    defense: str
    utility: Estimate
    gain: Estimate
    attack: str
    access: str
    reaches: Estimate
    leak: Estimate
    verdict: Verdict
    is_ahead: bool
    claims: Claims | None

    @property
    def above(self) -> float:
        """The leakage, or 0 if it is negative."""
        return max(0.0, self.leak.mean)


@dataclass(frozen=True, slots=True)
class Frontier:
    """All defenses of a task, with their reference.

    Attributes:
        task: its name.
        reference: the best attack that uses nothing computed from labels, and its mean result.
        best: the label-free bottom with the highest utility.
        places: the defenses, sorted by falling utility.
        lacking: for each attack of the task's file, the defenses on which it was not run.
        unsettled: defenses whose verdicts these attacks could change; see `unsettled_of`.
    """

    task: str
    reference: str
    reference_reaches: Estimate
    best: Place
    places: Sequence[Place]
    lacking: Mapping[str, frozenset[str]]
    unsettled: Sequence[str]

    @property
    def victims(self) -> str:
        """Number of victims of each defense."""
        counts = sorted({one.utility.count for one in self.places})
        return " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))

    def nearest_first(self, defenses: Sequence[str]) -> list[str]:
        """Sort defenses by verdict, in the order of `_ORDER`, then by their smallest p-value."""
        places = {one.defense: one for one in self.places}

        def rank(defense: str) -> tuple[int, float]:
            one = places.get(defense)
            if one is None:
                return len(_ORDER), 0.0
            known = one.claims
            least = 0.0 if known is None else min(known.leaks, known.behind, known.beats)
            return _ORDER.index(one.verdict), least

        return sorted(defenses, key=rank)

    @property
    def front(self) -> list[Place]:
        """Return the defenses that no defense beats in both mean accuracy and mean leakage."""
        found: list[Place] = []
        for one in sorted(self.places, key=lambda one: (one.above, -one.utility.mean)):
            if not found or one.utility.mean > found[-1].utility.mean:
                found.append(one)
        return found

    def named(self, verdict: Verdict) -> list[Place]:
        """Return the defenses with this verdict."""
        return [one for one in self.places if one.verdict == verdict]


@dataclass(frozen=True, slots=True)
class Claims:
    """p-values of the possible claims about a defense; a small p-value supports its claim.

    Attributes:
        leaks: p-value of the claim: some attack reaches more than the reference plus the margin.
            The p-value accounts for the number of attacks.
        ahead: p-value of the claim: the defense is more accurate than the best label-free bottom.
        behind: p-value of the claim: the defense is not more accurate than the best label-free
            bottom.
        beats: p-value of the claim: the defense is more accurate, and no attack reaches more than
            the reference plus the margin.
    """

    leaks: float
    ahead: float
    behind: float
    beats: float

    @classmethod
    def of(
        cls, attacks: Sequence[Values], blind: Sequence[Values], utility: Values,
        free: Sequence[Values],
    ) -> Claims:  # fmt: skip
        """Return the p-values for one defense.

        Args:
            attacks: results of each attack, by seed.
            blind: results of attacks that use nothing computed from labels; the best attack comes
                first.
            utility: utility of the victims, by seed.
            free: utility of the label-free bottoms, by seed; the best bottom comes first.
        """
        ahead = chance_above(advantage(utility, free[0]), 0.0)
        return cls(
            leaking(attacks, blind[0], MARGIN), ahead, below_best(utility, rivals_of(free)),
            max(ahead, protected(attacks, blind, MARGIN)),
        )  # fmt: skip


def corrected(found: Mapping[str, Claims]) -> dict[str, Claims]:
    """Return p-values corrected for all claims of a kind in a task, by defense; see `claims`."""
    adjusted = {
        kind.name: claims({one: getattr(of, kind.name) for one, of in found.items()})
        for kind in fields(Claims)
    }
    return {one: Claims(*(adjusted[kind.name][one] for kind in fields(Claims))) for one in found}


def unsettled_of(
    leaks: Mapping[str, float], rivals: Mapping[str, int], more: Mapping[str, int]
) -> list[str]:
    """Return the defenses whose verdicts could change if more attacks were run on some defenses.

    A strong attack lowers the p-value of "leaks" to 0. Further rivals that infer little multiply
    Simes' p-value of r rivals by (r + n) / r. Both bounds are corrected over all defenses.

    >>> unsettled_of({"a": 0.001, "b": 0.03, "c": 0.5}, dict.fromkeys("abc", 1), {"a": 1, "b": 1})
    ['b']

    Args:
        leaks: p-values before the correction, by defense.
        rivals: number of attacks of each defense that may be the best.
        more: number of attacks that were not run on each defense; other defenses lack none.
    """
    least = claims({one: 0.0 if more.get(one) else chance for one, chance in leaks.items()})
    most = claims({
        one: min(1.0, chance * (1 + more.get(one, 0) / rivals[one]))
        for one, chance in leaks.items()
    })  # fmt: skip
    return [one for one in leaks if least[one] <= FALSE_CLAIMS < most[one]]


def _verdict(chances: Claims) -> Verdict:
    if chances.beats <= FALSE_CLAIMS:
        return "beats it"
    if chances.leaks <= FALSE_CLAIMS:
        return "leaks"
    return "no better" if chances.behind <= FALSE_CLAIMS else "undecided"


def _values(found: pd.Series[float]) -> dict[tuple[str, int], float]:
    return {(str(seed), 0): float(value) for seed, value in found.items()}


def frontier_of(rows: pd.DataFrame) -> Frontier:
    """Compare the defenses of one task.

    Args:
        rows: result rows of this task; seeds for which an attack without labels has no row are left
            out. A defense is compared over the seeds for which it was run.
    """
    without = rows[rows.family.isin((NO_MODEL, LABEL_FREE))]
    of_each = [set(own.seed) for _, own in without.groupby("defense")]
    rows = rows[rows.seed.isin(set.intersection(*of_each))]
    reached = by_seed(rows, ["family", "defense", "attack"], "reaches")
    utility = by_seed(rows[rows.family != NO_MODEL], ["defense"], "utility")
    blind = {key: one for key, one in reached.items() if key[0] in (NO_MODEL, LABEL_FREE)}
    free = {(key[1],): utility[key[1],] for key in blind if key[0] == LABEL_FREE}
    reference, best = highest(blind), highest(free)
    access = dict(zip(rows.attack, rows.access, strict=True))
    unlabelled, bottoms = _ranked(blind), _ranked(free)
    defenses = [key for key in dict.fromkeys(key[:2] for key in reached) if key[0] != NO_MODEL]
    task = str(rows.task.iloc[0])
    reaches = {
        defense: {key[2]: one for key, one in reached.items() if key[:2] == (family, defense)}
        for family, defense in defenses
    }
    attacks = {
        defense: [_values(one) for one in reaches[defense].values()]
        for family, defense in defenses if family != LABEL_FREE
    }  # fmt: skip
    uncorrected = {
        defense: Claims.of(own, unlabelled, _values(utility[defense,]), bottoms)
        for defense, own in attacks.items()
    }
    chances = corrected(uncorrected)
    lacking = {
        attack: frozenset(one for one, own in reaches.items() if attack not in own)
        for attack in settings_of(task).attacks
    }
    unsettled = unsettled_of(
        {defense: one.leaks for defense, one in uncorrected.items()},
        {defense: len(rivals_of(own)) for defense, own in attacks.items()},
        {defense: sum(defense in some for some in lacking.values()) for defense in attacks},
    )
    places = []
    for family, defense in defenses:
        own, known = reaches[defense], chances.get(defense)
        worst = highest(own)
        places.append(
            Place(
                family, defense, over(utility[defense,]), _less(utility[defense,], free[best]),
                worst, access[worst], over(own[worst]), _less(own[worst], blind[reference]),
                "reference" if known is None else _verdict(known),
                known is not None and known.ahead <= FALSE_CLAIMS, known,
            )
        )  # fmt: skip
    places.sort(key=lambda one: -one.utility.mean)
    chosen = next(one for one in places if (one.defense,) == best)
    of, on, by = reference
    called = by if of == NO_MODEL else f"{by} on {on}"
    whole = over(blind[reference])
    return Frontier(task, called, whole, chosen, places, lacking, unsettled)


def _less(found: pd.Series[float], reference: pd.Series[float]) -> Estimate:
    """Return the difference from a reference, over the seeds that have results for both."""
    return over((found - reference).dropna())


def _ranked(found: Mapping[Any, pd.Series[float]]) -> list[Values]:
    """Return the results by seed; the entry with the highest mean comes first."""
    return [_values(one) for one in sorted(found.values(), key=lambda one: -float(one.mean()))]


# --- page and pictures ----------------------------------------------------------------------------


def measure_of(task: str) -> str:
    """Return the name of the measure for models and attacks on a task."""
    return MEASURES[settings_of(task).measure]


def summary_of(found: Sequence[Frontier], by_tops: Sequence[str] = ()) -> str:
    """Return the summary of all tasks: the answer, and a line for each task.

    Args:
        found: results, one for each task.
        by_tops: tasks in which another top model on a label-free bottom is better than the
            reference's top model.
    """
    beating = [one for each in found for one in each.named("beats it")]
    head = [
        "task", "best label-free bottom", "reaches", "undefended", "its leak",
        "more accurate", "of them leak", "undecided", "best few rounds not shown to leak",
    ]  # fmt: skip
    lines = []
    for each in found:
        plain = next(one for one in each.places if one.family == UNDEFENDED)
        learned = [one for one in each.places if one.family not in (UNDEFENDED, LABEL_FREE)]
        ahead = [one for one in learned if one.is_ahead]
        leaking = [one for one in ahead if one.verdict == "leaks"]
        few = [one for one in learned if one.family.startswith("few rounds")]
        still = [one for one in few if one.verdict != "leaks"]
        best = max(still, key=lambda one: one.utility.mean, default=None)
        gained = "" if best is None else points_text(best.gain, "+")
        lines.append(
            [
                *(each.task, f"`{each.best.defense}`"),
                f"{points_text(each.best.utility)} ({measure_of(each.task)})",
                *(points_text(one, "+") for one in (plain.gain, plain.leak)),
                *(f"{len(ahead)} of {len(learned)}", str(len(leaking))),
                str(len(each.named("undecided"))),
                f"`{best.defense}`: {gained}" if best else "none" if few else "",
            ]
        )
    tries = sum(one.claims is not None for each in found for one in each.places)
    shown = _listed(beating) if beating else f"Nothing of {tries} tries"
    link = "(#other-tops-on-label-free-bottoms)"
    also = f" On {', '.join(by_tops)} [its own top was too weak]{link}." if by_tops else ""
    return (
        "The most accurate bottom model that never saw a label is the reference of each task. "
        f"**{shown} is shown to beat it.**{also} "
        "Gains and leaks are in points, with 95 % intervals over victims. "
        "A defense counts as more accurate, or as leaking, only where a test shows it. Tables show "
        "the most accurate of different families, first those not shown to leak.\n\n"
        + Table(head, lines).markdown()
    )


def _listed(places: Sequence[Place]) -> str:
    return ", ".join(f"`{one.defense}`" for one in places) or "none"


def _missing(found: Frontier) -> str:
    """Return a sentence about what was not run, and the verdicts that it could change, or ""."""
    run, said = {one.defense for one in found.places}, list[str]()
    for family, specs in families_of(found.task).items():
        left = [spec for spec in specs if spec not in run]
        if left:
            some = "" if len(left) == len(specs) else f" ({len(left)} of {len(specs)} strengths)"
            said.append(family + some)
    lacking: dict[frozenset[str], list[str]] = {}
    for attack, defenses in found.lacking.items():
        if defenses:
            lacking.setdefault(defenses, []).append(f"`{attack}`")
    for defenses, attacks in lacking.items():
        said.append(f"{' and '.join(attacks)} on {len(defenses)} of {len(run)} defenses")
    if lacking:
        count = len(found.unsettled)
        said[-1] += f"; they could change {count or 'no'} verdict{'s' * (count > 1)}"
        free = {one.defense for one in found.places if one.family == LABEL_FREE}
        if any(free & defenses for defenses in lacking):
            said[-1] += f", {'and' if count else 'but'} this best attack"
    return f" Not run: {', '.join(said)}." if said else ""


@dataclass(frozen=True, slots=True)
class PlaceRow:
    """One row of the CSV file with all defenses: fractions, and half widths of intervals."""

    task: str
    family: str
    defense: str
    utility: float
    utility_half_width: float
    gain: float
    gain_half_width: float
    attack: str
    access: str
    reaches: float
    reaches_half_width: float
    leak: float
    leak_half_width: float
    verdict: str
    front: str


def place_rows(found: Frontier) -> list[PlaceRow]:
    """Return the rows of all defenses of a task, sorted by falling utility."""

    def figures(one: Estimate) -> tuple[float, float]:
        return one.mean, nan if one.half_width is None else one.half_width

    return [
        PlaceRow(
            found.task, one.family, one.defense, *figures(one.utility), *figures(one.gain),
            one.attack, one.access, *figures(one.reaches), *figures(one.leak), one.verdict,
            "yes" if one in found.front else "",
        )
        for one in found.places
    ]  # fmt: skip


#: Number of defenses of a task on the page, besides the undefended model and the reference.
LINES = 2


def for_readers(found: Frontier) -> list[Place]:
    """Return the defenses that the page shows, sorted by falling utility.

    The page shows the undefended model, the best label-free bottom, and the most accurate defenses
    of different families; defenses that are not shown to leak come first.
    """
    chosen: dict[str, Place] = {found.best.family: found.best}
    for one in sorted(found.places, key=lambda one: (one.verdict == "leaks", -one.utility.mean)):
        if len(chosen) < LINES + 1 or one.family == UNDEFENDED:
            chosen.setdefault(one.family, one)
    return [one for one in found.places if one in chosen.values()]


def table_of(found: Frontier) -> Table:
    """Format the defenses of `for_readers` as a table, sorted by falling utility."""
    head = ["defense", f"test {measure_of(found.task)}", "gain", "leak", "verdict"]
    lines = [
        [
            *(f"`{one.defense}`", points_text(one.utility), points_text(one.gain, "+")),
            *(points_text(one.leak, "+"), one.verdict),
        ]
        for one in for_readers(found)
    ]
    return Table(head, lines)


def picture_of(found: Frontier) -> str:
    """Draw the defenses of a task, and a line through the best of them, as an SVG file."""
    measure = measure_of(found.task)
    dots = [
        Dot(
            one.family,
            f"{one.defense}: {measure} {points_text(one.utility)}, "
            f"leaks {points_text(one.leak, '+')}",
            one.leak, one.utility, one.above,
        )
        for one in found.places
    ]  # fmt: skip
    corners: list[tuple[float, float]] = []
    for one in found.front:
        x, y = 100 * one.above, 100 * one.utility.mean
        corners += [(x, corners[-1][1]), (x, y)] if corners else [(x, y)]
    front = "; ".join(
        f"{one.defense} {100 * one.utility.mean:.1f} at {100 * one.above:.1f}"
        for one in found.front
    )
    return picture(
        f"{found.task}: test {measure} against leaked labels",
        f"test {measure}, percent", f"On the front: {front}.", dots,
        f"points of {measure} by which labels leak", FAMILIES, corners,
    )  # fmt: skip


METHOD = f"""
## What was measured

- One feature party attacks, with every gradient, its bottom, its inputs and {LEAKED} leaked labels
  of each class. On tables the label party has columns of its own.
- *Gain* is the test utility less the reference's.
- *Leak* is what the worst attack infers, less the best attack without a model that saw labels.
  The latter trains from scratch or uses inputs, components and label-free bottoms.
- Attacks on cuts infer labels of test rows, attacks on gradients those of training rows.
- *Verdict*: "beats it" is a gain above 0 and a leak of at most {100 * MARGIN:g} point; "leaks" is a
  leak above that; "no better" is a gain of at most 0. On average 5 % of a task's claims of
  one kind are false, with correction for the choice of attack and baseline.
- Attacks that were not run could change leaks, and on label-free bottoms their reference.
- `few_rounds` sends no gradient after its first exchanges. Rows without an epsilon are
  undefended.
- `gradient_averaging:rows=0` sends the sum over a batch, as a *secure top* would.
- `adaptive`, the heavy pack and tampering were not tried. `batch_sums:penalty=1` is an
  earlier version on mnist. So is `gradient_direction` on reviews.
"""


def _note(found: Sequence[Frontier]) -> str:
    left = [task for task in TASKS if task not in {one.task for one in found}]
    not_run = f" Tasks not run: {', '.join(left)}." if left else ""
    return (
        f"; `python -m benchmarks.frontier --task NAME`.{not_run} "
        "[Places](frontier_places.csv), [attacks](frontier.csv)."
    )


def task_section(found: Frontier, page: Path) -> Iterator[str]:
    """Return the page's section on one task; its picture lies beside the page."""
    drawn = page.with_name(f"{page.stem}_{found.task}.svg")
    drawn.write_text(picture_of(found), encoding="utf-8")
    yield f"\n## {found.task}\n"
    yield (
        f"{row_count(FOLDER / f'{found.task}.toml')} rows, {found.victims} victims of each "
        f"defense, `examples/frontier/{found.task}.toml`. The best attack without labels: "
        f"`{found.reference}`, {points_text(found.reference_reaches)}.{_missing(found)}\n"
    )
    yield f"![{found.task}: accuracy against leaked labels]({drawn.name})\n"
    yield table_of(found).markdown()


def page_of(found: Sequence[Frontier], page: Path) -> StudyPage[Frontier]:
    """Return the page; if other top models were measured, with a section on them."""
    best = {one.task: one.best.defense for one in found}
    rows = read_rows(page.with_name(frontier_tops.FILE), frontier_tops.TopRow)
    rows = [one for one in rows if one.task in best]
    gains = frontier_tops.gains_of(rows, best)
    if not gains:
        return PAGE
    tasks = list(dict.fromkeys(task for task, _, _ in frontier_tops.ahead_of(gains)))
    section = (
        "\n## Other tops on label-free bottoms\n\n"
        f"`python -m benchmarks.frozen_tops`, [rows]({frontier_tops.FILE}). Other learners on "
        "frozen label-free cuts; they leak no more. A gain over the task's own top "
        "shows only that **this top was too weak**; gains of defenses shrink by as much. "
        f"{frontier_tops.table_of(rows, best)}\n"
    )
    return replace(PAGE, shown=lambda found: [summary_of(found, tasks)], method=section + METHOD)


PAGE = StudyPage(
    "Frontier: accuracy against leaked labels\n\n## What is shown",
    _note,
    lambda found: [summary_of(found)],
    task_section,
    METHOD,
)


def bench_frontier(
    task: str | None = None,
    seeds: int = 3,
    families: Sequence[harness.Whole] = (),
    jobs: int = 1,
    out: Path = Path("runs/frontier"),
    page: Path = Path("docs/results/frontier.md"),
    redraw: bool = False,
    again: bool = False,
    defenses: Sequence[harness.Whole] = (),
) -> list[Frontier]:
    """Train and attack the missing victims of a task; write result rows, page and pictures.

    Result rows are stored after each defense; defenses whose verdicts are nearest to a decision
    come first. Ctrl-C loses the work on one defense.

    Args:
        task: name of a file of examples/frontier.
        seeds: number of victims of each defense.
        families: families of defenses to run; may be repeated.
        jobs: number of trainings with their attacks (cells of the grid) that run at the same time,
            each in its own process.
        out: folder for the grids.
        page: file of the page; its result rows are in a CSV file next to it.
        redraw: only draw the page again, without training.
        again: train again the defenses that already have rows, and run on them only the attacks
            that were added to the task's file after these rows. The stored rows stay.
        defenses: defenses to run; may be repeated.
    """
    file = page.with_suffix(".csv")
    rows = stored(file, COLUMNS)
    if not redraw:
        if task is None:
            raise BadOptionError("no task is given to train", want="--task NAME, or --redraw")
        require_choice("task", task, TASKS)
        families = [name for each in families for name in each.split(",")]
        for family in families:
            require_choice("family", family, tuple(families_of(task)))
        attacks = list(settings_of(task).attacks)
        left = left_of(task, seeds, families, rows)
        if again:
            left, attacks = added_attacks(task, seeds, families, rows)
        order = list(left)
        if task in _begun(rows):
            order = frontier_of(rows[rows.task == task]).nearest_first(order)
        for one in order:
            if defenses and one not in defenses:
                continue
            study = study_of(
                FOLDER / f"{task}.toml", defenses=[one], seeds=left[one], attacks=attacks
            )
            folder = played_alone(study, out / task, jobs, [one])
            rows = added(rows, pd.DataFrame(rows_of(task, folder), columns=COLUMNS), KEY, TASKS)
            store(file, rows)
    found = [frontier_of(rows[rows.task == one]) for one in _begun(rows)]
    page_of(found, page).write(page, found, not redraw)
    places = [row for one in found for row in place_rows(one)]
    write_rows(page.with_name(f"{page.stem}_places.csv"), PlaceRow, places)
    return found


def _begun(rows: pd.DataFrame) -> list[str]:
    """Return the tasks with stored rows of label-free bottoms, which give the reference."""
    there = set(rows[rows.family == LABEL_FREE].task)
    return [one for one in TASKS if one in there]


main = harness.command(bench_frontier, summary_of)


if __name__ == "__main__":
    main()
