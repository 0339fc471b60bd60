"""Repeats a random part of the result rows of generated pages, and compares the results.

    make verify-claims                                            # a tenth
    python -m benchmarks.verify --pages frontier --tasks bank --share 0.02 --draw 3
    python -m benchmarks.verify --plan                 # what is drawn; nothing is trained

The program draws a random fraction of the trained rows of each page in `PAGES`. The program trains
these rows again with the seeds of the page, and attacks them. Trainings that were repeated before
with the same draw are not repeated once more. A result is confirmed if it differs from the stored
result by at most the sum of the half widths of both intervals, or by at most one percentage point.
A training in one process derives its protective noise from its seed, so most results are equal if
machine and versions are those of the stored row. Other machines and versions, and attacks with a
time limit, give other results. Times are not compared. The exit code is 1 if less than 95 % of the
results are confirmed.
"""

from __future__ import annotations

import json
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from math import ceil
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import pandas as pd

from benchmarks import columns, frontier, frontier_tops, frozen_tops, harness, leaderboard
from benchmarks import trees_attacks as trees
from benchmarks.pages import records
from benchmarks.studies import (
    EXAMPLES,
    by_seed,
    over,
    played,
    played_alone,
    points_text,
    read_rows,
    source_of,
    stored,
    study_of,
)
from vfl.core.registry import require_choice
from vfl.experiments.cells import HONEST, Cell
from vfl.experiments.results import TEST, LoadedGrid
from vfl.experiments.statistics import Estimate, over_victims
from vfl.experiments.study import plan_study
from vfl.training.specs import read_checked

#: Fraction of the results that must be confirmed.
WANTED = 0.95
#: Difference that is always allowed, whatever the intervals are.
_ROOM = 0.01
#: Type variable: identity of one training in a task, such as a defense, a protection, or a tuple of
#: settings.
Trained = TypeVar("Trained")
#: Grids of attacks on labels: their file of `examples` and changed settings, by the name of the
#: file with their rows.
GRIDS: Mapping[str, tuple[str, Sequence[str]]] = {
    "labels_mnist": ("thesis/labels_mnist", ()),
    "labels_mnist_inner": ("thesis/labels_mnist_inner", ()),
    "hidden_labels_fashion": ("hidden_labels", ()),
    "hidden_labels_mnist": ("hidden_labels", ("data.source=mnist",)),
}
#: Files of rows that name the file of `examples` which trains them again.
TRAININGS = ("training_attacks", "defenses")
#: Comparisons of codecs: names of the files in `examples/thesis`, and of the files with their rows.
COMPARISONS = ("fm20", "review_polarity", "yoochoose_filtered", "tiny_imagenet_32")
#: For each stored column of a comparison: the rows and the measure that this column contains.
_OF_CODEC = {"test_accuracy": (TEST, "accuracy"), "test_hit_rate": (TEST, "hit_rate")}
#: Results of a command that do not depend on time.
_SENT = frozenset({"bytes_online", "bytes_offline", "online_mib", "offline_mib", "messages"})
#: Texts of a stored row about its run; the other texts name the row among those of its command.
_OF_RUN = frozenset({"bench", "line", "command", "day"})


@dataclass(frozen=True, slots=True)
class Figure:
    """One stored result, and its repetition.

    Attributes:
        page, task, defense, what: page, task, defense and name of the result.
        stored, again: the stored and the repeated result; `again` is None if no victim was trained
            completely, or if the command no longer prints this result.
    """

    page: str
    task: str
    defense: str
    what: str
    stored: Estimate
    again: Estimate | None

    @property
    def holds(self) -> bool:
        """Return whether the results differ by at most both half widths together, or by a point."""
        if self.again is None:
            return False
        room = (self.stored.half_width or 0) + (self.again.half_width or 0)
        return abs(self.stored.mean - self.again.mean) <= max(_ROOM, room)

    def __str__(self) -> str:
        """One line."""
        again = "not repeated" if self.again is None else points_text(self.again)
        line = f"{self.page}  {self.task}  {self.defense}  {self.what}  "
        line += f"{points_text(self.stored)} -> {again}"
        return line + ("" if self.holds else "  FALLEN")


def drawn(
    known: Sequence[tuple[str, Trained]], share: float, draw: int
) -> dict[str, list[Trained]]:
    """Return a random fraction of the trainings, by task.

    >>> drawn([("a", "x"), ("a", "y"), ("b", "x")], share=0.3, draw=0)
    {'a': ['y']}
    """
    pairs = sorted(set(known))
    found: dict[str, list[Trained]] = {}
    for task, one in sorted(random.Random(draw).sample(pairs, ceil(share * len(pairs)))):
        found.setdefault(task, []).append(one)
    return found


@dataclass(frozen=True, slots=True)
class Asked:
    """Arguments of the verification of a page.

    Attributes:
        page: name of the page.
        tasks: names of tasks; if empty, all tasks.
        share, draw: see `drawn`.
        jobs: number of simultaneous trainings.
        out: folder for the trainings.
        results: folder that has the pages.
        plan: whether the drawn trainings are only listed.
    """

    page: str
    tasks: Sequence[str]
    share: float
    draw: int
    jobs: int
    out: Path
    results: Path
    plan: bool

    def of(self, known: Iterable[tuple[str, Trained, Hashable]]) -> dict[str, list[Trained]]:
        """Return what the random draw selects of a page; nothing if it is only listed.

        Args:
            known: task, what is drawn, and a name of a training that it requires. Trainings of the
                same task with the same name are one training.
        """
        trainings: dict[tuple[str, Trained], set[Hashable]] = {}
        for task, one, training in known:
            if not self.tasks or task in self.tasks:
                trainings.setdefault((task, one), set()).add((task, training))
        chosen = drawn(list(trainings), self.share, self.draw)
        named = [(task, one) for task, some in chosen.items() for one in some]
        count = len(set().union(*(trainings[one] for one in named)))
        harness.say(f"{self.page}: {len(named)} of {len(trainings)} drawn, {count} trainings")
        if not self.plan:
            return chosen
        for task, one in named:
            parts = one if isinstance(one, tuple) else (one,)
            harness.say("  ".join(["", task, *filter(None, parts)]))
        return {}


def of_leaderboard(asked: Asked) -> Iterator[Figure]:
    """Yield utility and strongest attack for the drawn rows of the leaderboard."""
    rows = records(asked.results / "leaderboard.csv")
    known = (
        (row["task"], (row["not_run"], row["defense"]), (row["defense"], adversary, victim))
        for row in rows
        if row["defense"] != "none"
        for adversary in ("honest", "tampering")
        for victim in range(int(row["victims"]))
    )
    for task, pairs in asked.of(known).items():
        for not_run, some in groupby(pairs, key=itemgetter(0)):
            defenses = [defense for _, defense in some]
            own = [row for row in rows if row["task"] == task and row["defense"] in defenses]
            study = leaderboard.grid_of(task, "light", (0, 1, 2), defenses, not_run.split(", "))
            path = asked.out / "leaderboard" / task
            played(study, path, asked.jobs)
            yield from _standings(task, own, path)


def _standings(task: str, rows: Sequence[Mapping[str, str]], path: Path) -> Iterator[Figure]:
    """Yield utility and strongest attack of some rows of the leaderboard."""
    again = {
        (one["defense"], str(one["k"])): one
        for one in leaderboard.standings_of(task, leaderboard.entries_of(path))
    }
    for row in rows:
        other = again.get((row["defense"], row["k"]))
        for what, width in (("utility", "utility"), ("reaches", "above")):
            yield Figure(
                "leaderboard", task, row["defense"], f"{what}, k = {row['k']}",
                _estimate(row, what, width),
                None if other is None else _estimate(other, what, width),
            )  # fmt: skip


def _estimate(row: Mapping[str, object], what: str, width: str) -> Estimate:
    half = row[f"{width}_half_width"]
    known = None if half in ("", None) else float(str(half))
    return Estimate(float(str(row[what])), known, int(str(row["victims"])))


def of_frontier(asked: Asked) -> Iterator[Figure]:
    """Yield utility and all stored attacks for the drawn defenses of the frontier."""
    rows = stored(asked.results / "frontier.csv", frontier.COLUMNS)
    rows = rows[rows.family != frontier.NO_MODEL]
    known = zip(rows.task, rows.defense, rows.defense + rows.seed.astype(str), strict=True)
    for task, defenses in asked.of(known).items():
        own = rows[(rows.task == task) & rows.defense.isin(defenses)]
        study = study_of(
            frontier.FOLDER / f"{task}.toml", defenses=defenses, attacks=sorted({*own.attack}),
            seeds=sorted({int(seed) for seed in own.seed}),
        )  # fmt: skip
        folder = played_alone(study, asked.out / "frontier" / task, asked.jobs, defenses)
        again = pd.DataFrame(frontier.rows_of(task, folder), columns=frontier.COLUMNS).astype(str)
        yield from _compared("frontier", task, own, again[again.defense.isin(defenses)])


def _compared(
    page: str, task: str, rows: pd.DataFrame, again: pd.DataFrame, attack: str = "attack"
) -> Iterator[Figure]:
    """Yield the utility of each defense, and the result of each attack."""
    for names, what in ((["defense"], "utility"), (["defense", attack], "reaches")):
        others = by_seed(again, names, what)
        for key, values in by_seed(rows, names, what).items():
            other = others.get(key)
            yield Figure(
                page, task, key[0], ", ".join((what, *key[1:])), over(values),
                None if other is None else over(other),
            )  # fmt: skip


def of_columns(asked: Asked) -> Iterator[Figure]:
    """Yield utility and the leakage of each column for the drawn protections."""
    rows = read_rows(asked.results / "columns.csv", columns.ColumnRow)
    for task, protections in asked.of(
        (row.task, row.protection, (row.protection, row.seed)) for row in rows
    ).items():
        own = [row for row in rows if row.task == task and row.protection in protections]
        again = columns.bench_columns(
            [task], protections, sorted({row.seed for row in own}), jobs=asked.jobs,
            out=asked.out / "columns", page=asked.out / "columns" / "page.md",
        )  # fmt: skip
        again = [row for row in again if row.protection in protections]
        for protection in protections:
            names = dict.fromkeys(row.column for row in own if row.protection == protection)
            for what in ("utility", *names):
                figure, other = _read(own, protection, what), _read(again, protection, what)
                assert figure is not None, "its rows are stored"
                yield Figure("columns", task, protection, what, figure, other)


def _read(rows: Sequence[columns.ColumnRow], protection: str, what: str) -> Estimate | None:
    some = [row for row in rows if row.protection == protection]
    if not some:
        return None
    if what == "utility":
        return over({row.seed: row.utility for row in some}.values())
    return over(columns.reached(some, what))


def of_tops(asked: Asked) -> Iterator[Figure]:
    """Yield the utility of other top models for the drawn label-free bottoms."""
    rows = read_rows(asked.results / frontier_tops.FILE, frontier_tops.TopRow)
    for task, bottoms in asked.of(
        (row.task, row.defense, (row.defense, row.seed)) for row in rows
    ).items():
        for bottom in bottoms:
            own = [row for row in rows if (row.task, row.defense) == (task, bottom)]
            again = frozen_tops.bench_tops(
                task, 1 + max(row.seed for row in own), list({row.top: 0 for row in own}), [bottom],
                asked.out / "tops", asked.out / "tops" / "page.md",
            )  # fmt: skip
            for top in {row.top: 0 for row in own}:
                key = (task, bottom, top)
                yield Figure("tops", *key, _top(own, key), _top(again, key))


def _top(rows: Sequence[frontier_tops.TopRow], key: tuple[str, str, str]) -> Estimate:
    return over(row.utility for row in rows if (row.task, row.defense, row.top) == key)


def of_trees(asked: Asked) -> Iterator[Figure]:
    """Yield utility and all attacks for the drawn trees."""
    rows = _of_trees(read_rows(asked.results / "trees_attacks.csv", trees.AttackRow))
    known = zip(rows.task, rows.defense, rows.defense + rows.seed.astype(str), strict=True)
    for task, models in asked.of(known).items():
        own = rows[(rows.task == task) & rows.defense.isin(models)]
        study = study_of(trees.FOLDER / f"{task}.toml", seeds=sorted({*own.seed}))
        folder = played_alone(study, asked.out / "trees" / task, asked.jobs, models)
        again = _of_trees(list(trees.rows_of(task, folder)))
        yield from _compared("trees", task, own, again, "kind")


def _of_trees(rows: Sequence[trees.AttackRow]) -> pd.DataFrame:
    found = pd.DataFrame(rows).rename(columns={"model": "defense"})
    return found.assign(kind=found.attack + " " + found.measure)


def of_labels(asked: Asked) -> Iterator[Figure]:
    """Yield drawn attacks on drawn defenses, for every number of leaked labels."""
    rows = {name: records(asked.results / f"{name}.csv") for name in GRIDS}
    known = (
        (name, (r["defense"], r["attack"]), (r["defense"], victim))
        for name, own in rows.items()
        for r in own
        for victim in range(int(r["victims"]))
    )
    for name, pairs in asked.of(known).items():
        file, overrides = GRIDS[name]
        for defense, some in groupby(pairs, key=itemgetter(0)):
            attacks = [attack for _, attack in some]
            own = [r for r in rows[name] if r["defense"] == defense and r["attack"] in attacks]
            study = study_of(
                EXAMPLES / f"{file}.toml", *overrides, defenses=[defense], attacks=attacks,
                seeds=list(range(max(int(r["victims"]) for r in own))), pictures=0,
            )  # fmt: skip
            folder = played(
                study, asked.out / "labels" / name, asked.jobs,
                lambda cell: cell.victim == defense,  # noqa: B023
            )  # fmt: skip
            own = [row | {"training": defense} for row in own]
            yield from _labels("labels", name, own, LoadedGrid(folder))


def _labels(
    page: str, name: str, rows: Sequence[Mapping[str, str]], grid: LoadedGrid
) -> Iterator[Figure]:
    for row in rows:
        asked = tuple(row[one] for one in ("training", "adversary", "attack", "measure", "k"))
        values = {
            (one.repeat, one.draw): one.value
            for one in grid.records
            if (one.training, one.adversary, one.subject, one.measure, str(one.k)) == asked
        }
        half = float(row["half_width"]) if row["half_width"] else None
        what = f"{row['attack']}, k = {row['k']}"
        was = Estimate(float(row["mean"]), half, int(row["victims"]))
        yield Figure(page, name, row["training"], what, was, over_victims(values))


def of_training(asked: Asked) -> Iterator[Figure]:
    """Yield the results of drawn trainings from the pages of training attacks and defenses.

    Each row names a file of `examples` and its overrides. Rows without a file are left out.
    """
    rows = [
        row for name in TRAININGS for row in records(asked.results / f"{name}.csv") if row["file"]
    ]

    def key(row: Mapping[str, str]) -> tuple[str, str, str, str]:
        return row["file"], row["overrides"], row["training"], row["adversary"]

    known = (
        (row["task"], key(row), (key(row), victim))
        for row in rows
        for victim in range(int(row["victims"]))
    )
    for task, trainings in asked.of(known).items():
        for file, overrides, training, adversary in trainings:
            one = (file, overrides, training, adversary)
            own = [row for row in rows if (row["task"], key(row)) == (task, one)]
            study = study_of(
                EXAMPLES / f"{file}.toml", *shlex.split(overrides),
                seeds=list(range(max(int(row["victims"]) for row in own))),
            )  # fmt: skip
            wanted = training, adversary
            folder = played(
                study, asked.out / "training" / file.replace("/", "_") / _name(overrides),
                asked.jobs,
                lambda cell: (cell.victim, cell.about.get("adversary", HONEST)) == wanted,  # noqa: B023
            )  # fmt: skip
            yield from _labels("training", task, own, LoadedGrid(folder))


def _name(overrides: str) -> str:
    """Return a folder's name for some overrides."""
    return re.sub(r"[^\w.=]", "_", overrides) or "plain"


def of_codecs(asked: Asked) -> Iterator[Figure]:
    """Yield quality and bytes for the drawn trainings of the comparisons of codecs."""
    rows = {name: records(asked.results / f"{name}.csv") for name in COMPARISONS}
    known = (
        (name, one, one)
        for name, own in rows.items()
        for one in ((r["variant"], r["codec"], r["repeat"]) for r in own if not r["failure"])
    )
    for name, trainings in asked.of(known).items():
        file = EXAMPLES / "thesis" / f"{name}.toml"
        study = plan_study("compare", *read_checked(file, source_of(file)))

        def key(cell: Cell) -> tuple[str, str, str]:
            return cell.about["variant"], cell.experiment.codec, cell.about["repeat"]

        folder = played(
            study, asked.out / "codecs" / name, asked.jobs,
            lambda cell: key(cell) in trainings,  # noqa: B023
        )  # fmt: skip
        there = {key(cell): cell.name for cell in study.cells}
        measured = LoadedGrid(folder).records
        for one in trainings:
            row = next(r for r in rows[name] if (r["variant"], r["codec"], r["repeat"]) == one)
            for what, (subject, measure) in _OF_CODEC.items():
                if row.get(what):
                    found = [
                        r.value for r in measured
                        if (r.cell, r.subject, r.measure) == (there.get(one), subject, measure)
                    ]  # fmt: skip
                    again = Estimate(found[0], None, 1) if found else None
                    was = Estimate(float(row[what]), None, 1)
                    yield Figure("codecs", name, " ".join(one), what, was, again)


def of_published(asked: Asked) -> Iterator[Figure]:
    """Yield bytes and messages of the drawn commands, relative to the stored values.

    Commands that emulate a network link need the right to make network namespaces, and are left
    out. Rows of BFV are left out if tenseal is not installed (``vfl[he]``).
    """
    text = (asked.results / "published_runs.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    if not find_spec("tenseal"):
        rows = [row for row in rows if "by BFV" not in row.get("mode", "")]
    known = (
        (row["bench"], row["command"], row["command"])
        for row in rows
        if _SENT.intersection(row) and "--network tun" not in row["command"]
    )
    for bench, commands in asked.of(known).items():
        for command in commands:
            given = subprocess.run(
                [sys.executable, "-m", *command.split(), "--json"],
                check=True, capture_output=True, text=True,
            )  # fmt: skip
            repeated = json.loads(given.stdout)
            for was in (row for row in rows if row["command"] == command):
                yield from _published(bench, was, repeated)


def _published(
    bench: str, was: Mapping[str, Any], repeated: Sequence[Mapping[str, Any]]
) -> Iterator[Figure]:
    """Yield the results of a stored row, beside those of the repeated row with the same texts."""
    texts = {
        name: value
        for name, value in was.items()
        if isinstance(value, str) and name not in _OF_RUN
    }  # fmt: skip
    same = (row for row in repeated if texts == {name: row.get(name) for name in texts})
    row = next(same, None)
    for what in sorted(_SENT.intersection(was)):
        if was[what]:
            again = None if row is None else Estimate(row[what] / was[what], None, 1)
            name = " ".join(texts.values())
            yield Figure("published", bench, name, what, Estimate(1.0, None, 1), again)


PAGES: Mapping[str, Callable[[Asked], Iterator[Figure]]] = {
    "leaderboard": of_leaderboard,
    "frontier": of_frontier,
    "columns": of_columns,
    "tops": of_tops,
    "trees": of_trees,
    "labels": of_labels,
    "training": of_training,
    "codecs": of_codecs,
    "published": of_published,
}


def bench_verify(
    pages: Sequence[str] = tuple(PAGES),
    tasks: Sequence[str] = (),
    share: float = 0.1,
    draw: int = 0,
    jobs: int = 2,
    out: Path = Path("runs/verify"),
    results: Path = Path("docs/results"),
    plan: bool = False,
) -> list[Figure]:
    """Train and attack a random fraction of the pages' rows again, and compare the results.

    Args:
        pages: name of the page, a key of `PAGES`.
        tasks: names of tasks, of benchmarks or of files with rows; by default, all of a page.
        share: fraction of the trained defenses of each page to repeat.
        draw: seed of the random draw.
        jobs: number of simultaneous trainings, each in its own process.
        out: folder for the trainings.
        results: folder that has the pages and their rows.
        plan: only list what is drawn, with each page's number of trainings (undefended models that
            are trained for comparison are not counted).
    """
    found = []
    for page in pages:
        require_choice("page", page, tuple(PAGES))
        asked = Asked(page, tasks, share, draw, jobs, out / f"{draw}", results, plan)
        for count, one in enumerate(PAGES[page](asked), 1):
            harness.say(f"{count:>4}  {one}")
            found.append(one)
    return found


def shown(found: Sequence[Figure]) -> str:
    """Return the results that are not confirmed, and the number of confirmed results by page."""
    if not found:
        return "no figure was repeated"
    lines = [str(one) for one in found if not one.holds]
    for page in dict.fromkeys(one.page for one in found):
        own = [one.holds for one in found if one.page == page]
        lines.append(f"{page}: {sum(own)} of {len(own)} figures hold")
    holding = sum(one.holds for one in found)
    return "\n".join([*lines, f"{holding} of {len(found)} repeated figures hold"])


def main() -> None:
    """Exit with 1 if the fraction of confirmed results is below `WANTED`."""
    found = harness.run(bench_verify, shown)
    if found and fmean(one.holds for one in found) < WANTED:
        sys.exit(1)


if __name__ == "__main__":
    main()
