"""Accuracy against what labels leak: where defenses stand beside bottoms that never saw a label.

    python -m benchmarks.frontier --task fashion            # goes on where it was left
    python -m benchmarks.frontier --task bank --seeds 5
    python -m benchmarks.frontier --redraw                  # page and pictures of the stored rows

A task is a file of `examples/frontier`. Every defense of `families_of` is trained, and attacked by
a feature party that keeps what it received: its own bottom, every gradient, a few leaked labels.
The trainings and attacks are those of `vfl grid`, in a folder that a killed run goes on in.

What labels leak is what the worst of these attacks reaches above the best that reads nothing a
label is in: attacks on inputs, and on label-free bottoms, which whoever has the inputs can make.
Rows of every task lie in one CSV file, and page and pictures are made of it alone.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from benchmarks.leaderboard import TABLES, say
from vfl.core.text import csv_text
from vfl.core.version import VERSION
from vfl.experiments.attack_tables import ACCESS
from vfl.experiments.cells import GridFolder, grid_settings_of
from vfl.experiments.leaderboard import (
    by_attack,
    by_baseline,
    fitting_measure,
    label_measure,
    utility_of,
)
from vfl.experiments.pages.charts import Point, dot_swatch, scatter_drawing, standalone
from vfl.experiments.records import records_of
from vfl.experiments.statistics import Estimate, by_victim, estimate, paired_difference
from vfl.experiments.study import Study, overrides_of, plan_study, run_study
from vfl.experiments.tables import Table, estimate_text
from vfl.training.specs import read_checked

#: A line of the CSV file, as text.
Row = Mapping[str, str]

EXAMPLES = Path(__file__).parents[1] / "examples" / "frontier"
Kind = Literal["table", "pictures", "text"]
#: Tasks by the names of their files, and what their rows are.
TASKS: dict[str, Kind] = {
    "fashion": "pictures", "mnist": "pictures", "cifar": "pictures",
    "bank": "table", "credit": "table", "reviews": "text",
}  # fmt: skip
#: Of those that read a table, the table.
SOURCES = {"bank": "bank_marketing", "credit": "credit_default"}
#: Their rows, all of which are used.
WHOLE = {"bank": 45_211, "credit": 30_000}
#: Points that a defense may leak and still stand where label-free bottoms do.
MARGIN = 0.01
LEAKED, DRAWS = 10, 1
#: Of self-supervision, over the rows; texts, whose rows are long, take as much of one.
EPOCHS = {"pictures": 3, "table": 3, "text": 1}
COLUMNS = ("task", "family", "defense", "seed", "utility", "attack", "access", "reaches")
#: What tells one row from another.
KEY = ("task", "family", "defense", "seed", "attack")
#: In the place of a family: attackers that hold no model.
NO_MODEL, UNDEFENDED, LABEL_FREE = "no model", "undefended", "label-free bottom"
#: Self-supervision by what rows are; the second begins the few rounds. Numbers of words have no
#: distances, so nothing rebuilds or rotates those: corrupted texts are told from others.
_LEARNED = {
    "pictures": ("autoencoder", "simclr", "vicreg"),
    "table": ("autoencoder", "vime", "scarf"),
    "text": ("simclr", "scarf"),
}

Verdict = Literal["reference", "beats it", "leaks", "no better", "undecided"]


def families_of(task: str) -> dict[str, tuple[str, ...]]:
    """The defenses of a task by what they are, most at five strengths.

    A secure top, with labels and top under multi-party computation and the sum of the batch's
    gradients disclosed, is `gradient_averaging:rows=0`, which sends a feature party just that.
    """
    kind = TASKS[task]
    of_rows = [f"kind={one},epochs={EPOCHS[kind]}" for one in _LEARNED[kind]]
    begun = of_rows[1]
    free = ["label_free:kind=random", *(f"label_free:{one}" for one in of_rows)]
    if kind != "text":
        free[1:1] = ["label_free:features=0", "label_free"]
    few = (10, 20, 40, 80, 130) if kind == "pictures" else (5, 10, 20, 40, 80)
    found = {
        UNDEFENDED: ("none",),
        LABEL_FREE: tuple(free),
        "few rounds": tuple(f"few_rounds:steps={steps},{begun}" for steps in few),
        "few rounds with label DP": tuple(
            f"few_rounds:steps=40,epsilon={epsilon},{begun}" for epsilon in (0.5, 1, 2, 3, 5)
        ),
        "label DP": tuple(f"label_dp:epsilon={epsilon}" for epsilon in (0.5, 1, 2, 4, 8)),
        "noise on gradients": (
            *(f"gradient_noise:sigma={sigma}" for sigma in (0.25, 0.5, 1, 2, 4)),
            *(f"tpsl:epsilon={epsilon}" for epsilon in (1, 2, 4, 8, 16)),
        ),
        "losses on cuts": (
            *(f"potential:alpha={alpha}" for alpha in (1, 2, 4, 8, 16)),
            *(f"dcor:alpha={alpha}" for alpha in (0.5, 1, 2, 4, 8)),
        ),
        "secure top": ("gradient_averaging:rows=0",),
        "averaged gradients": tuple(
            f"gradient_averaging:rows={rows}" for rows in (2, 4, 8, 16, 32)
        ),
    }
    if kind != "text":
        anchored = "anchored:rate=0.02+potential:alpha={},norm=no"
        found["losses on cuts"] += tuple(anchored.format(one) for one in (0.5, 1, 2, 4, 8))
        found["mixing"] = tuple(f"mixup:alpha={alpha}" for alpha in (0.1, 0.2, 0.5, 1, 2))
    if kind != "pictures":
        powers = (1, 2, 4, 8, 16)
        found["of two classes"] = (*(f"marvell:power={power}" for power in powers), "max_norm")
    return found


def attacks_of(task: str, epochs: int) -> list[str]:
    """What the attacker tries; gradients of all epochs, for what is noisy once is less so often."""
    found = ["fine_tuning", "logistic", "logistic:scaler=whiten", "kmeans", "gradient_similarity"]
    found += [f"gradient_similarity:epochs={epochs}", f"gradient_teacher:epochs={epochs},steps=300"]
    if TASKS[task] != "pictures":
        return [*found, f"gradient_norm:epochs={epochs}", f"gradient_direction:epochs={epochs}"]
    return [*found, "label_propagation:at=cut+inputs,neighbours=5,scaler=whiten,mix=0.5"]


def left_of(
    task: str, seeds: int, families: Sequence[str] = (), done: Sequence[Row] = ()
) -> list[str]:
    """Defenses of a task, of some families or all, without those whose rows are there.

    Args:
        task: of TASKS.
        seeds: victims of each defense, from seed 0 on.
        families: of `families_of`; all unless they are given. What all are set against comes first.
        done: rows that are stored.
    """
    known = {(one["defense"], one["seed"]) for one in done if one["task"] == task}
    chosen = families_of(task)
    return [
        spec
        for one in dict.fromkeys((UNDEFENDED, LABEL_FREE, *(families or chosen)))
        for spec in chosen[one]
        if not all((spec, str(seed)) in known for seed in range(seeds))
    ]


def study_of(task: str, seeds: int, defenses: Sequence[str]) -> Study:
    """The grid of a task with some defenses, and without any."""
    overrides = []
    if task in SOURCES:
        table = Path(os.environ["VFL_DATA"]) / TABLES[SOURCES[task]]
        overrides.append(f"data.source={table}")
    file = EXAMPLES / f"{task}.toml"
    epochs = read_checked(file, overrides)[0].train.epochs
    given = {
        "defenses": list(defenses), "attacks": attacks_of(task, epochs),
        "baselines": ["scratch", "raw", "pca"], "leaks": [LEAKED], "draws": DRAWS,
        "seeds": list(range(seeds)), "pictures": 0,
    }  # fmt: skip
    return plan_study("grid", *read_checked(file, overrides + overrides_of("grid", given)))


# --- rows -----------------------------------------------------------------------------------------


def rows_of(task: str, path: Path) -> Iterator[dict[str, Any]]:
    """What every attack reached on every victim of a grid, means over draws of leaked labels.

    Those without a model have a name in the place of the defense, and no utility.
    """
    records, folder = list(records_of(path)), GridFolder(path)
    settings = grid_settings_of(folder.experiment())
    measure = fitting_measure(records, settings.measure)
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


def added(rows: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """The rows that were there, as they were, and those that are new; task by task."""
    known = {tuple(one[name] for name in KEY) for one in rows}
    found = [*rows, *(one for one in new if tuple(one[name] for name in KEY) not in known)]
    return sorted(found, key=lambda one: list(TASKS).index(one["task"]))


def stored(file: Path) -> list[dict[str, str]]:
    """The rows that are there."""
    if not file.exists():
        return []
    with file.open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


# --- where everything stands ----------------------------------------------------------------------

BySeed = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Place:
    """One defense on the picture of a task.

    Attributes:
        family, defense: what it is.
        utility: of the victims' own answers for test rows, over seeds.
        gain: of that beside the best label-free bottom's, seed by seed.
        attack, access, reaches: the worst attack, what its attacker holds, and its mean.
        leak: of that beside the best that reads nothing with a label in it, seed by seed.
        verdict: whether it stands where no label-free bottom does.
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

    @property
    def above(self) -> float:
        """What it leaks, at least nothing."""
        return max(0.0, self.leak.mean)


@dataclass(frozen=True, slots=True)
class Frontier:
    """A task's picture.

    Attributes:
        task: its name.
        seeds: victims of each defense.
        reference: the best attack that reads nothing with a label in it, and its mean.
        best: the label-free bottom of the highest utility.
        places: the highest utility first.
    """

    task: str
    seeds: int
    reference: str
    reference_reaches: Estimate
    best: Place
    places: Sequence[Place]

    @property
    def front(self) -> list[Place]:
        """Those beside which none is as accurate and leaks less, by their means; rising."""
        found: list[Place] = []
        for one in sorted(self.places, key=lambda one: (one.above, -one.utility.mean)):
            if not found or one.utility.mean > found[-1].utility.mean:
                found.append(one)
        return found

    def named(self, verdict: Verdict) -> list[Place]:
        """The places of a verdict."""
        return [one for one in self.places if one.verdict == verdict]


def frontier_of(rows: Sequence[Row]) -> Frontier:
    """Where the defenses of one task stand.

    Args:
        rows: of that task; seeds that some defense lacks are left out.
    """
    defenses = dict.fromkeys((one["family"], one["defense"]) for one in rows)
    known = [{one["seed"] for one in rows if one["defense"] == name} for _, name in defenses]
    seeds = set.intersection(*known)
    reached: dict[tuple[str, str], dict[str, BySeed]] = {}
    for family, name in defenses:
        own = [one for one in rows if one["defense"] == name and one["seed"] in seeds]
        reached[family, name] = {
            attack: {r["seed"]: float(r["reaches"]) for r in own if r["attack"] == attack}
            for attack in dict.fromkeys(one["attack"] for one in own)
        }
    utility = {
        name: {r["seed"]: float(r["utility"]) for r in rows
               if r["defense"] == name and r["seed"] in seeds}
        for family, name in defenses if family != NO_MODEL
    }  # fmt: skip
    blind: dict[str, BySeed] = {}
    for (family, name), attacks in reached.items():
        if family == NO_MODEL:
            blind[name] = attacks[name]
        elif family == LABEL_FREE:
            blind |= {f"{attack} on {name}": values for attack, values in attacks.items()}
    reference = max(blind, key=lambda one: _mean(blind[one]))
    free = [name for family, name in defenses if family == LABEL_FREE]
    best = max(free, key=lambda name: _mean(utility[name]))
    access = {one["attack"]: one["access"] for one in rows}
    places = []
    for (family, name), attacks in reached.items():
        if family == NO_MODEL:
            continue
        worst = max(attacks, key=lambda attack: _mean(attacks[attack]))
        gain = _known(paired_difference(utility[name], utility[best]))
        leak = _known(paired_difference(attacks[worst], blind[reference]))
        places.append(
            Place(
                family, name, _over(utility[name]), gain, worst, access[worst],
                _over(attacks[worst]), leak, _verdict(family, gain, leak),
            )
        )  # fmt: skip
    places.sort(key=lambda one: -one.utility.mean)
    chosen = next(one for one in places if one.defense == best)
    task = rows[0]["task"]
    return Frontier(task, len(seeds), reference, _over(blind[reference]), chosen, places)


def _verdict(family: str, gain: Estimate, leak: Estimate) -> Verdict:
    if family == LABEL_FREE:
        return "reference"
    if gain.low > 0 and leak.high <= MARGIN:
        return "beats it"
    if leak.low > MARGIN:
        return "leaks"
    return "no better" if gain.high <= 0 else "undecided"


def _mean(values: BySeed) -> float:
    return sum(values.values()) / len(values)


def _over(values: BySeed) -> Estimate:
    return _known(estimate(list(values.values())))


def _known(found: Estimate | None) -> Estimate:
    assert found is not None, "a seed at least"
    return found


# --- page and pictures ----------------------------------------------------------------------------


def measure_of(task: str) -> str:
    """What models and attacks on a task are judged by, in words."""
    return "accuracy" if TASKS[task] == "pictures" else "AUC"


def summary_of(found: Sequence[Frontier]) -> str:
    """What all tasks show: a sentence and a line a task."""
    beating = [one for each in found for one in each.named("beats it")]
    head = [
        "task", "judged by", "the best label-free bottom", "reaches", "undefended", "its leak",
        "defenses more accurate", "of them leak", "undecided", "few rounds not shown to leak",
    ]  # fmt: skip
    lines = []
    for each in found:
        plain = next(one for one in each.places if one.family == UNDEFENDED)
        learned = [one for one in each.places if one.family not in (UNDEFENDED, LABEL_FREE)]
        ahead = [one for one in learned if one.gain.low > 0]
        leaking = [one for one in ahead if one.verdict == "leaks"]
        few = [one for one in learned if one.family.startswith("few rounds")]
        still = [one for one in few if one.verdict != "leaks"]
        best = max(still, key=lambda one: one.utility.mean, default=None)
        lines.append(
            [
                *(each.task, measure_of(each.task), f"`{each.best.defense}`"),
                *(_text(each.best.utility), _text(plain.gain, "+"), _text(plain.leak, "+")),
                *(f"{len(ahead)} of {len(learned)}", str(len(leaking))),
                str(len(each.named("undecided"))),
                f"`{best.defense}`: {_text(best.gain, '+')}" if best else "none" if few else "",
            ]
        )
    shown = f"Shown to beat it: {_listed(beating)}." if beating else "Nothing is shown to beat it."
    return (
        "Each task has the most accurate bottom that never saw a label; utility is beside that "
        f"one's, in points, with 95 % intervals over victims. **{shown}** A defense is counted as "
        "more accurate, or as leaking, by its whole interval.\n\n" + Table(head, lines).markdown()
    )


def _listed(places: Sequence[Place]) -> str:
    return ", ".join(f"`{one.defense}`" for one in places) or "none"


def _missing(found: Frontier) -> str:
    """Families of a task that were not run, and how many strengths of others."""
    run, said = {one.defense for one in found.places}, []
    for family, specs in families_of(found.task).items():
        left = [spec for spec in specs if spec not in run]
        if left:
            some = "" if len(left) == len(specs) else f" ({len(left)} of {len(specs)} strengths)"
            said.append(family + some)
    return ", ".join(said) or "nothing"


def _text(found: Estimate, sign: str = "") -> str:
    half = "" if found.half_width is None else f" ± {100 * found.half_width:.1f}"
    return f"{100 * found.mean:{sign}.1f}{half}"


def table_of(found: Frontier) -> Table:
    """One line a defense, the highest utility first."""
    head = [
        "defense", "family", f"test {measure_of(found.task)}", "less the label-free bottom",
        "worst attack", "who holds", "reaches", "leaks", "beside the label-free bottom", "front",
    ]  # fmt: skip
    lines = [
        [
            *(one.defense, one.family, estimate_text(one.utility), estimate_text(one.gain, "+")),
            *(one.attack, ACCESS[one.access], estimate_text(one.reaches)),
            *(estimate_text(one.leak, "+"), one.verdict, "yes" if one in found.front else ""),
        ]
        for one in found.places
    ]
    return Table(head, lines)


#: Colours of families; those that do alike share one.
_STYLE = {
    UNDEFENDED: 0, LABEL_FREE: 1, "few rounds": 2, "few rounds with label DP": 3, "label DP": 4,
    "noise on gradients": 5, "of two classes": 5, "losses on cuts": 6, "secure top": 7,
    "averaged gradients": 7, "mixing": 8,
}  # fmt: skip


def picture_of(found: Frontier) -> str:
    """The places of a task and the front through them, as a file of SVG."""
    measure = measure_of(found.task)
    points = [
        Point(
            "", 100 * one.above, 100 * one.utility.mean, _STYLE[one.family],
            f"{one.defense}: {measure} {_text(one.utility)}, leaks {_text(one.leak, '+')}",
            100 * (one.leak.half_width or 0), 100 * (one.utility.half_width or 0),
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
    shown = {one.family for one in found.places}
    legend = [(dot_swatch(style), family) for family, style in _STYLE.items() if family in shown]
    drawing = scatter_drawing(
        f"{found.task}: test {measure} against leaked labels",
        f"test {measure}, percent", f"On the front: {front}.", points,
        f"points of {measure} by which labels leak", legend=legend, through=corners,
    )  # fmt: skip
    return standalone(drawing)


METHOD = f"""
## What was measured

- One feature party attacks; on tables the label party has columns of its own. The attacker has
  everything it received in the training (every gradient), its bottom, its inputs and {LEAKED}
  leaked labels of each class, drawn anew for every victim. It does not tamper.
- *Leaks*: what the worst attack reaches less what the best attack does that reads nothing a label
  is in, seed by seed. Those are training from scratch, attacks on inputs and their components, and
  all attacks on all label-free bottoms here, which whoever has the inputs can make. Worst and best
  are the highest means.
- Attacks on cuts infer labels of test rows, attacks on gradients those of training rows.
- *Verdict*, beside the most accurate label-free bottom: "beats it" is a higher utility by the
  paired 95 % interval, and a leak whose interval ends at or below {100 * MARGIN:g} point; "leaks"
  is a leak whose interval begins above that; "no better" is a utility whose interval ends at or
  below 0; anything else is "undecided".
- `few_rounds` sends no gradient after its first exchanges. Without an epsilon, rows of those are as
  exposed as undefended ones, which a mean over all rows hides.
- *Secure top*: labels and top under multi-party computation, which tells a feature party the sum of
  a batch's gradients at the cut and no row's. `gradient_averaging:rows=0` sends it just that sum,
  so accuracy and leak are measured there; what such a protocol costs is not. One that discloses the
  sum of the gradients of the bottom's weights instead would teach as much as undefended training.
- Intervals are Student's, over victims. Strengths were fixed before the grid ran.
- By the clock of a busy machine, one cell at a time, of the cells whose times were kept: `mnist` 22
  minutes (all 156), `fashion` 46 (138, one of which stood still for 14), `cifar` (ResNet-20, 6000
  pictures of 16 x 16) 3 hours; 1.3 GB at the most in the last 38 and 108 of `mnist` and `cifar`.
- Not tried: `adaptive` and the heavy pack, which cost more than the trainings; parties that tamper.
"""


def page_of(rows: Sequence[Row], page: Path) -> None:
    """Write the page, and a picture a task beside it."""
    tasks = [task for task in TASKS if any(one["task"] == task for one in rows)]
    found = {task: frontier_of([one for one in rows if one["task"] == task]) for task in tasks}
    left = [one for one in TASKS if one not in tasks]
    lines = [
        "# Frontier: accuracy against leaked labels\n\n## What is shown\n",
        f"{datetime.now(UTC).date()}, vfl {VERSION}; `python -m benchmarks.frontier --task NAME`. "
        f"Tasks not run: {', '.join(left) or 'none'}.\n",
        summary_of(list(found.values())),
    ]
    for task, one in found.items():
        picture = page.with_name(f"{page.stem}_{task}.svg")
        picture.write_text(picture_of(one), encoding="utf-8")
        experiment, _ = read_checked(EXAMPLES / f"{task}.toml", [])
        lines += [
            f"\n## {task}\n",
            f"{experiment.data.rows or WHOLE[task]} rows, {one.seeds} victims of each defense, "
            f"`examples/frontier/{task}.toml`. The best without labels: {one.reference}, "
            f"{_text(one.reference_reaches)}. Not run: {_missing(one)}.\n",
            f"![{task}: accuracy against leaked labels]({picture.name})\n",
            table_of(one).markdown(),
        ]
    page.write_text("\n".join(lines) + METHOD, encoding="utf-8")


def main() -> None:
    """Train and attack what is left of a task, and write rows, page and pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS, help="a file of examples/frontier")
    parser.add_argument("--seeds", type=int, default=3, help="victims of each defense")
    parser.add_argument("--families", help="some of the defenses' families, between commas")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time, a process each")
    parser.add_argument("--out", type=Path, default=Path("runs/frontier"))
    parser.add_argument("--page", type=Path, default=Path("docs/results/frontier.md"))
    parser.add_argument("--redraw", action="store_true", help="train nothing")
    asked = parser.parse_args()
    file = asked.page.with_suffix(".csv")
    rows: Sequence[Row] = stored(file)
    if not asked.redraw:
        if asked.task is None:
            parser.error("--task names what to train; --redraw needs none")
        if asked.task in SOURCES and "VFL_DATA" not in os.environ:
            parser.error("VFL_DATA says where the tables lie")
        families = asked.families.split(",") if asked.families else []
        if unknown := sorted(set(families) - set(families_of(asked.task))):
            parser.error(f"no family of {asked.task}: {', '.join(unknown)}")
        left, path = left_of(asked.task, asked.seeds, families, rows), asked.out / asked.task
        command = f"python -m benchmarks.frontier --task {asked.task} --seeds {asked.seeds}"
        if left:
            study = study_of(asked.task, asked.seeds, left)
            run_study(study, path, command, jobs=asked.jobs, on_end=say)
            new = [{name: str(one[name]) for name in COLUMNS} for one in rows_of(asked.task, path)]
            rows = added(rows, new)
            file.write_text(csv_text(list(COLUMNS), rows), encoding="utf-8")
    page_of(rows, asked.page)
    print(f"{'page':<16} {asked.page}", file=sys.stderr)


if __name__ == "__main__":
    main()
