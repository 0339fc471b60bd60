"""Leaderboard of defenses against attacks: the reference grid of four tasks, and its page.

    make leaderboard                                     # all of it, where it was left
    python -m benchmarks.leaderboard --tasks bank_marketing --attack light --seeds 0,1,2
    python -m benchmarks.leaderboard --tasks fashion_mnist --defenses tpsl    # others stay
    python -m benchmarks.leaderboard --plan              # time and memory; nothing is trained

The tasks are `examples/leaderboard/*.toml`: two tables, pictures, and a text. Every defense is
trained with the settings in these files: once with honest parties, and once with a feature party
that tampers with its messages. Cells that were trained and attacked before are not repeated, so the
same command continues after it was stopped. Tables are read from the folder that `VFL_DATA` names.

The page shows four lines of each task. All result rows are in files beside it: `leaderboard.csv`
has the strongest attack on each defense for each number of leaked labels. `leaderboard_access.csv`
has the strongest attack for each kind of access of the attacker, and `leaderboard_tasks.csv` has
one row for each task. The page is made from these files only; `--redraw` makes it again without
training.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from shutil import which
from typing import Any, Literal

from benchmarks import harness
from benchmarks.pages import records
from benchmarks.studies import EXAMPLES, StudyPage, played, points_text, row_count, study_of
from vfl.core.registry import require_choice
from vfl.core.text import csv_text
from vfl.experiments.attack_tables import ACCESS, boards_by_access
from vfl.experiments.cells import GridFolder, grid_settings_of
from vfl.experiments.leaderboard import (
    UNDEFENDED,
    LeaderboardEntry,
    fitting_measure,
    leaderboard,
)
from vfl.experiments.results import LoadedGrid
from vfl.experiments.scores import BASELINES
from vfl.experiments.statistics import Estimate
from vfl.experiments.study import Results, Study
from vfl.experiments.tables import MEASURES, Table, seconds_text
from vfl.training.specs import read_checked

FOLDER = EXAMPLES / "leaderboard"
TASKS = ("bank_marketing", "credit_default", "fashion_mnist", "review_polarity")
#: Measured mean seconds of a cell (one training with its attacks) on one core, with a light pack of
#: attacks. Factor by which a heavy pack takes longer on an undefended victim (the same for both
#: tables). Memory of each training process in GB.
SECONDS = {
    "bank_marketing": 7.4, "credit_default": 5.5, "fashion_mnist": 26, "review_polarity": 9.2,
}  # fmt: skip
HEAVIER = {"bank_marketing": 2, "credit_default": 2, "fashion_mnist": 8, "review_polarity": 42}
GIGABYTES = 1.1


def grid_of(
    task: str, pack: str, seeds: Sequence[int], defenses: Sequence[str] | None = None,
    without: Sequence[str] = (),
) -> Study:  # fmt: skip
    """Return the grid of a task with a pack of attacks, for all of its defenses or some of them.

    Args:
        task: name of a file of examples/leaderboard.
        pack: the pack.
        seeds: seeds of the victims.
        defenses: defenses; by default, those of the task's file.
        without: attacks of the task's file to leave out.
    """
    file = FOLDER / f"{task}.toml"
    settings = grid_settings_of(read_checked(file, [])[0])
    attacks = [pack if one == "light" else one for one in settings.attacks if one not in without]
    return study_of(
        file, attacks=attacks, seeds=list(seeds),
        defenses=list(settings.defenses if defenses is None else defenses),
    )  # fmt: skip


def entries_of(path: Path) -> list[LeaderboardEntry]:
    """Return the leaderboard entries of one task."""
    grid = LoadedGrid(GridFolder(path))
    settings = grid_settings_of(grid.experiment)
    measure = fitting_measure(grid.records, settings.measure)
    return leaderboard(grid.records, settings.margin, measure)


# --- rows -----------------------------------------------------------------------------------------

Row = Mapping[str, str]


def task_row(path: Path, entries: Sequence[LeaderboardEntry]) -> dict[str, Any]:
    """Return the row that counts the trained and attacked cells of one task."""
    grid, results = LoadedGrid(GridFolder(path)), Results.of(path)
    settings = grid_settings_of(grid.experiment)
    victims = [cell for cell in grid.cells if cell.victim != BASELINES]
    attacked = {one.cell for one in grid.records if one.evaluator == "attack"}
    failed = [
        f"{cell.title}: {grid.failures[cell.title]['what']}"
        for cell in victims
        if cell.title in grid.failures
    ]
    return {
        "task": path.name,
        "judged_by": MEASURES[entries[0].judged_by],
        "margin": settings.margin,
        "attacked": len(attacked),
        "victims": len(victims),
        "seeds": len(settings.seeds),
        "draws": settings.draws,
        "attacks": ", ".join(settings.attacks),
        "failed": "; ".join(failed),
        "sentence": results.sentence,
    }


@cache
def commit() -> str:
    """Return the commit of this checkout; empty where there is no git."""
    if which("git") is None:
        return ""
    command = ["git", "-C", str(EXAMPLES), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def standings_of(task: str, entries: Sequence[LeaderboardEntry]) -> Iterator[dict[str, Any]]:
    """Yield, as fractions, the strongest attack on each defense by number of leaked labels.

    `not_run` is for attacks that are added to the task's file after a defense was attacked.
    """
    for entry in entries:
        for one in entry.standings:
            less = entry.difference
            yield {
                "task": task,
                "defense": entry.defense,
                "k": one.k,
                "utility": entry.utility.mean,
                "utility_half_width": entry.utility.half_width,
                "attack": one.attack,
                "reaches": one.value.mean,
                "guess": one.guess.mean,
                "no_model": one.baseline_value.mean,
                "above": one.advantage.mean,
                "above_half_width": one.advantage.half_width,
                "victims": one.advantage.count,
                "verdict": one.verdict,
                "reaches_half_width": one.value.half_width,
                "no_model_half_width": one.baseline_value.half_width,
                "less_none": None if less is None else less.mean,
                "less_none_half_width": None if less is None else less.half_width,
                "affordable": entry.affordable,
                "not_run": "",
                "date": str(datetime.now(UTC).date()),
                "commit": commit(),
            }


def access_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield, as fractions, the strongest attack on each defense for each access of the attacker."""
    grid = LoadedGrid(GridFolder(path))
    settings = grid_settings_of(grid.experiment)
    measure = fitting_measure(grid.records, settings.measure)
    for holds, board in boards_by_access(grid.records, settings.margin, measure).items():
        for entry in board:
            one = entry.worst
            yield {
                "task": path.name,
                "defense": entry.defense,
                "holds": holds,
                "above": one.advantage.mean,
                "above_half_width": one.advantage.half_width,
                "verdict": one.verdict,
                "attack": one.attack,
                "k": one.k,
            }


FILES = ("", "_tasks", "_access")


def beside(page: Path, kind: str) -> Path:
    """Return the file beside a page that stores one kind of rows, a key of FILES."""
    return page.with_name(f"{page.stem}{kind}.csv")


def store_rows(paths: Sequence[Path], page: Path, some: bool = False) -> None:
    """Write the rows of some tasks' grids beside the page; keep the rows of other tasks.

    Args:
        paths: folders of the grids.
        page: see `beside`.
        some: whether the grids have only some defenses of their tasks. Then the rows of their other
            defenses are kept too, and the task's row gets only the names of the attacks.
    """
    new: dict[str, list[dict[str, Any]]] = {kind: [] for kind in FILES}
    for path in paths:
        if entries := entries_of(path):
            new[""] += standings_of(path.name, entries)
            new["_tasks"].append(task_row(path, entries))
            new["_access"] += access_rows(path)
    for kind, rows in new.items():
        known = records(beside(page, kind)) if rows else []
        if some and kind == "_tasks":
            before = {row["task"]: row for row in known}
            rows = [before[row["task"]] | {"attacks": row["attacks"]} for row in rows]
        done = {_identity(row, some) for row in rows}
        kept = [row for row in known if _identity(row, some) not in done]
        whole = sorted([*kept, *rows], key=lambda row: TASKS.index(row["task"]))
        if rows:
            text = csv_text(list(rows[0]), whole)
            beside(page, kind).write_text(text, encoding="utf-8")


def _identity(row: Row, some: bool) -> tuple[str, str]:
    """Return what new rows replace: all rows of a task, or those of a defense."""
    return row["task"], row.get("defense", "") if some else ""


# --- page -----------------------------------------------------------------------------------------

LINES = 4


@dataclass(frozen=True, slots=True)
class Board:
    """The stored rows of one task.

    Attributes:
        about: the task's row of `leaderboard_tasks.csv`.
        worst: for each defense, the row for the number of leaked labels at which the defense leaks
            most; the defense that leaks least comes first.
        cuts: for each defense, the row for an attacker that has only cuts.
    """

    about: Row
    worst: Sequence[Row]
    cuts: Mapping[str, Row]

    @classmethod
    def of(cls, page: Path, task: str) -> Board:
        """Return the stored rows of a task."""
        found: dict[str, list[Row]] = {}
        for row in records(page.with_suffix(".csv")):
            if row["task"] == task:
                found.setdefault(row["defense"], []).append(row)
        worst = [max(rows, key=_badness) for rows in found.values()]
        cuts = {
            row["defense"]: row
            for row in records(beside(page, "_access"))
            if (row["task"], row["holds"]) == (task, ACCESS["cut"])
        }
        about = next(row for row in records(beside(page, "_tasks")) if row["task"] == task)
        return cls(about, sorted(worst, key=_badness), cuts)

    @property
    def defended(self) -> list[Row]:
        """Rows of all defenses; the row of the undefended model is left out."""
        return [row for row in self.worst if row["defense"] != UNDEFENDED]

    @property
    def undefended(self) -> Row:
        """Row of the undefended model."""
        return next(row for row in self.worst if row["defense"] == UNDEFENDED)

    @property
    def safe(self) -> list[str]:
        """Names of the defenses that are not shown to leak."""
        return [row["defense"] for row in self.defended if row["verdict"] != "leaks"]

    @property
    def lacking(self) -> dict[str, list[str]]:
        """Names of defenses on which some attacks of the task were not run, by these attacks."""
        found: dict[str, list[str]] = {}
        for row in self.defended:
            if row["not_run"]:
                found.setdefault(row["not_run"], []).append(row["defense"])
        return found


def _badness(row: Row) -> tuple[bool, float]:
    return row["verdict"] == "leaks", float(row["above"])


def _points(row: Row, name: str, sign: str = "") -> str:
    if not row[name]:
        return ""
    half = row[f"{name}_half_width"]
    return points_text(Estimate(float(row[name]), float(half) if half else None, 1), sign)


def _note(boards: Sequence[Board]) -> str:
    return (
        "; `make leaderboard` writes this page. All rows: [every defense](leaderboard.csv), "
        "[by what the attacker holds](leaderboard_access.csv), [tasks](leaderboard_tasks.csv)."
    )


def summaries(boards: Sequence[Board]) -> Iterator[str]:
    """Yield the summary of all tasks: the answer, and a line for each task."""
    head = ["task", "undefended", "its leak", "shown to leak", "not shown to leak"]
    lines = [
        [
            *(
                one.about["task"],
                f"{_points(one.undefended, 'utility')} ({one.about['judged_by']})",
            ),
            _points(one.undefended, "above", "+"),
            f"{len(one.defended) - len(one.safe)} of {len(one.defended)}",
            ", ".join(f"`{name}`" for name in one.safe) or "none",
        ]
        for one in boards
    ]
    open_ = [
        f"`{name}` on {one.about['task']}"
        for one in boards
        for some in one.lacking.values()
        for name in some
        if name in one.safe
    ]
    left = ""
    if open_:
        left = f" Not all attacks were run on {', '.join(open_)}."
    elif any(one.lacking for one in boards):
        left = " Attacks were left out only on defenses that leak without them."
    yield (
        "A feature party attacks labels. A *leak* says how many points the "
        "worst attack is above the best attack without the model, with 95 % "
        "intervals over victims. A defense that is not shown to leak is not shown to "
        "protect: verdicts hold for these attacks, rows and seeds "
        f"([how verdicts are made](../attacking.md)).{left}\n\n" + Table(head, lines).markdown()
    )


def _by_cause(failed: str) -> str:
    """Return how many victims failed, by cause.

    >>> _by_cause("x seed=0: it ends; x seed=1: it ends")
    '2 victims, it ends'
    """
    causes = [one.partition(": ")[2] for one in failed.split("; ")]
    return "; ".join(f"{causes.count(one)} victims, {one}" for one in dict.fromkeys(causes))


def _briefly(some: str, attacks: str) -> str:
    """Return the names of some attacks, or their number if they are the last of all attacks.

    >>> _briefly("b, c", "a, b, c")
    'the last 2'
    """
    return f"the last {some.count(', ') + 1}" if attacks.endswith(f", {some}") else some


def task_lines(board: Board, page: Path) -> Iterator[str]:
    """Return the section of one task: the undefended model, and the least leaking defenses."""
    about, chosen = board.about, board.defended[: LINES - 1]
    yield f"\n## {about['task']}\n"
    failed = f" Ended early: {_by_cause(about['failed'])}." if about["failed"] else ""
    commits = ", ".join(dict.fromkeys(row["commit"] for row in board.worst))
    lacking = "".join(
        f" On {len(some)} defense{'s' if len(some) > 1 else ''}, not run: "
        f"{_briefly(not_run, about['attacks'])}."
        for not_run, some in board.lacking.items()
    )
    yield (
        f"{row_count(FOLDER / (about['task'] + '.toml'))} rows, {about['attacked']} of "
        f"{about['victims']} victims, {about['seeds']} seeds, {about['draws']} draws "
        f"of leaked labels, commit {commits}; attacks: {about['attacks']}.{lacking}{failed}\n"
    )
    head = [
        "defense", f"test {about['judged_by']}", "less none", "leak to cuts alone", "leak",
        "worst attack", "at k", "verdict",
    ]  # fmt: skip
    shown = [row for row in board.worst if row in chosen or row is board.undefended]
    lines = [
        [
            *(f"`{row['defense']}`", _points(row, "utility"), _points(row, "less_none", "+")),
            _points(board.cuts[row["defense"]], "above", "+")
            if row["defense"] in board.cuts
            else "",
            *(_points(row, "above", "+"), row["attack"], row["k"], row["verdict"]),
        ]
        for row in shown
    ]
    yield Table(head, lines).markdown()


PAGE = StudyPage("Leaderboard: which defense holds against what", _note, summaries, task_lines)


def write_page(page: Path, measured: bool = True) -> list[dict[str, str]]:
    """Write the page from the stored rows, and return these rows."""
    rows = records(page.with_suffix(".csv"))
    there = {row["task"] for row in rows}
    PAGE.write(page, [Board.of(page, task) for task in TASKS if task in there], measured)
    return rows


def bench_leaderboard(
    tasks: Sequence[str] | None = None,
    attack: Literal["light", "heavy"] = "light",
    seeds: Sequence[harness.OrZero] = (0, 1, 2),
    jobs: int = 2,
    out: Path = Path("runs/leaderboard"),
    page: Path = Path("docs/results/leaderboard.md"),
    plan: bool = False,
    redraw: bool = False,
    defenses: Sequence[str] | None = None,
) -> Sequence[dict[str, Any]]:
    """Run the missing cells of the reference grid, and write its page.

    Args:
        tasks: names of files of examples/leaderboard.
        attack: the pack.
        seeds: number of seeds; each defense has one victim per seed.
        jobs: number of trainings with their attacks (cells of the grid) that run at the same time,
            each in its own process.
        out: folder for the grids.
        page: file of the page; its rows are in CSV files next to it.
        plan: only print the expected time and memory, without training.
        redraw: only write the page from stored rows, without training.
        defenses: defenses to run, beside the undefended model. The stored rows of others stay, but
            the correction for many tests then counts only the defenses that were run.
    """
    tasks = TASKS if tasks is None else tasks
    for task in tasks:
        require_choice("task", task, TASKS)
    if redraw:
        return write_page(page, measured=False)
    studies = {task: grid_of(task, attack, seeds, defenses) for task in tasks}
    for task, study in studies.items():
        seconds = SECONDS[task] * len(study.cells) / jobs
        seconds *= HEAVIER[task] if attack == "heavy" else 1
        harness.say(f"{task}: {len(study.cells)} cells, about {seconds_text(seconds)}")
    harness.say(f"about {GIGABYTES * jobs:.1f} GB of memory, {jobs} processes")
    found: Sequence[dict[str, Any]] = []
    for task, study in () if plan else studies.items():
        played(study, out / task, jobs)
        store_rows([out / task], page, some=defenses is not None)
        found = write_page(page)
    return found


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the number of rows as text."""
    return f"{len(rows)} rows"


main = harness.command(bench_leaderboard, shown)


if __name__ == "__main__":
    main()
