"""A random part of the rows of generated pages again: do trainings and attacks give them anew?

    make verify-claims                                            # a tenth
    python -m benchmarks.verify --pages frontier --tasks bank --share 0.02 --draw 3

Pages are the leaderboard, the frontier and the columns. Of each page a share of the trained
defenses is drawn, trained with the seeds of the page, and attacked. What was trained before with
the same draw is not trained again. A figure holds where it differs from the stored one by at most
both half widths, or by a point: noise that protects is never drawn twice alike. The exit code is 1
where less than 95 % of the figures hold.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import fmean

import pandas as pd

from benchmarks import columns, frontier, harness, leaderboard
from benchmarks.studies import by_seed, over, played, points_text, read_rows, stored, study_of
from vfl.core.registry import require_choice
from vfl.experiments.statistics import Estimate

#: Share of the figures that must hold.
WANTED = 0.95
#: Room of a figure whatever its intervals.
_ROOM = 0.01
#: A task and a defense or protection.
Trained = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Figure:
    """One stored figure beside the same one again.

    Attributes:
        page, task, defense, what: identity of the figure.
        stored, again: the figure; `again` is None where no victim was trained to its end.
    """

    page: str
    task: str
    defense: str
    what: str
    stored: Estimate
    again: Estimate | None

    @property
    def holds(self) -> bool:
        """Whether the figure is the same within both half widths, or a point."""
        if self.again is None:
            return False
        room = (self.stored.half_width or 0) + (self.again.half_width or 0)
        return abs(self.stored.mean - self.again.mean) <= max(_ROOM, room)

    def __str__(self) -> str:
        """One line."""
        again = "no victim" if self.again is None else points_text(self.again)
        line = f"{self.page}  {self.task}  {self.defense}  {self.what}  "
        line += f"{points_text(self.stored)} -> {again}"
        return line + ("" if self.holds else "  FALLEN")


def drawn(known: Sequence[Trained], share: float, draw: int) -> dict[str, list[str]]:
    """Return a random share of the trained defenses by task, at least one.

    >>> drawn([("a", "x"), ("a", "y"), ("b", "x")], share=0.3, draw=0)
    {'a': ['y']}
    """
    pairs = sorted(set(known))
    found: dict[str, list[str]] = {}
    for task, defense in sorted(random.Random(draw).sample(pairs, ceil(share * len(pairs)))):
        found.setdefault(task, []).append(defense)
    return found


@dataclass(frozen=True, slots=True)
class Asked:
    """Arguments of a verification.

    Attributes:
        tasks: names; empty stands for all.
        share, draw: see `drawn`.
        jobs: trainings at a time.
        out: folder of the trainings.
        results: folder of the pages.
    """

    tasks: Sequence[str]
    share: float
    draw: int
    jobs: int
    out: Path
    results: Path

    def of(self, known: Sequence[Trained]) -> dict[str, list[str]]:
        """Return what is drawn of the trained defenses of a page."""
        return drawn(
            [one for one in known if not self.tasks or one[0] in self.tasks], self.share, self.draw
        )


def of_leaderboard(asked: Asked) -> Iterator[Figure]:
    """Yield utility and worst attack of drawn rows of the leaderboard."""
    rows = leaderboard.rows_stored(asked.results / "leaderboard.csv")
    known = [(row["task"], row["defense"]) for row in rows if row["defense"] != "none"]
    for task, defenses in asked.of(known).items():
        study = leaderboard.grid_of(task, "light", (0, 1, 2), defenses)
        path = asked.out / "leaderboard" / task
        played(study, path, asked.jobs)
        again = {
            (one["defense"], str(one["k"])): one
            for one in leaderboard.standings_of(task, leaderboard.entries_of(path))
        }
        for row in rows:
            if (row["task"], row["defense"]) not in {(task, one) for one in defenses}:
                continue
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
    """Yield utility and all attacks of drawn places of the frontier."""
    rows = stored(asked.results / "frontier.csv", frontier.COLUMNS)
    rows = rows[rows.family != frontier.NO_MODEL]
    known = list(rows[["task", "defense"]].itertuples(index=False, name=None))
    for task, defenses in asked.of(known).items():
        own = rows[(rows.task == task) & rows.defense.isin(defenses)]
        study = study_of(
            frontier.FOLDER / f"{task}.toml", defenses=defenses,
            seeds=sorted({int(seed) for seed in own.seed}),
        )  # fmt: skip
        folder = played(study, asked.out / "frontier" / task, asked.jobs)
        again = pd.DataFrame(frontier.rows_of(task, folder), columns=frontier.COLUMNS).astype(str)
        yield from _compared(task, own, again[again.defense.isin(defenses)])


def _compared(task: str, rows: pd.DataFrame, again: pd.DataFrame) -> Iterator[Figure]:
    for names, what in ((["defense"], "utility"), (["defense", "attack"], "reaches")):
        others = by_seed(again, names, what)
        for key, values in by_seed(rows, names, what).items():
            other = others.get(key)
            yield Figure(
                "frontier", task, key[0], ", ".join((what, *key[1:])), over(values),
                None if other is None else over(other),
            )  # fmt: skip


def of_columns(asked: Asked) -> Iterator[Figure]:
    """Yield utility and how well each column is read behind drawn protections."""
    rows = read_rows(asked.results / "columns.csv", columns.ColumnRow)
    for task, protections in asked.of([(row.task, row.protection) for row in rows]).items():
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


PAGES: Mapping[str, Callable[[Asked], Iterator[Figure]]] = {
    "leaderboard": of_leaderboard,
    "frontier": of_frontier,
    "columns": of_columns,
}


def bench_verify(
    pages: Sequence[str] = tuple(PAGES),
    tasks: Sequence[str] = (),
    share: float = 0.1,
    draw: int = 0,
    jobs: int = 2,
    out: Path = Path("runs/verify"),
    results: Path = Path("docs/results"),
) -> list[Figure]:
    """Train and attack a random share of the rows of pages again.

    Args:
        pages: leaderboard, frontier or columns.
        tasks: names of tasks; by default all of a page.
        share: share of the trained defenses of each page.
        draw: number of the random draw.
        jobs: trainings at a time, a process each.
        out: folder of the trainings.
        results: folder of the pages and their rows.
    """
    found = []
    for page in pages:
        require_choice("page", page, tuple(PAGES))
        for one in PAGES[page](Asked(tasks, share, draw, jobs, out / f"{draw}", results)):
            harness.say(str(one))
            found.append(one)
    return found


def shown(found: Sequence[Figure]) -> str:
    """The figures that do not hold, and the number of those that do."""
    fallen = [str(one) for one in found if not one.holds]
    return "\n".join([*fallen, f"{len(found) - len(fallen)} of {len(found)} figures hold"])


def main() -> None:
    """Exit with 1 where less than `WANTED` of the figures hold."""
    found = harness.run(bench_verify, shown)
    if found and fmean(one.holds for one in found) < WANTED:
        sys.exit(1)


if __name__ == "__main__":
    main()
