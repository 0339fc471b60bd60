"""Which defense holds against what: the reference grid of four tasks, and its page.

    make leaderboard                                     # all of it, where it was left
    python -m benchmarks.leaderboard --tasks bank_marketing --attack light --seeds 0,1,2
    python -m benchmarks.leaderboard --plan              # time and memory; nothing is trained
    make verify-claims                                   # a random tenth of the page again

The tasks are `examples/leaderboard/*.toml`: two tables, pictures, a text. Every defense is trained
as it stands there, honestly and against a feature party that tampers. What was trained and
attacked before is not done again, so that the same command goes on after it was stopped. Tables are
looked for in `VFL_DATA`.

`--verify 0.1` draws a tenth of the defenses on the page, trains their victims again, with the seeds
of the page, and compares utility, the worst attack's reach and the verdict with the rows that are
stored beside the page. Exit code 1 where one does not come out again.
"""

from __future__ import annotations

import csv
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks import harness
from benchmarks.studies import EXAMPLES, StudyPage, played, study_of
from vfl.core.registry import require_choice
from vfl.core.text import csv_text
from vfl.experiments.attack_tables import access_table, board_table
from vfl.experiments.cells import GridFolder, grid_settings_of
from vfl.experiments.leaderboard import (
    UNDEFENDED,
    LeaderboardEntry,
    fitting_measure,
    leaderboard,
)
from vfl.experiments.results import LoadedGrid
from vfl.experiments.scores import BASELINES
from vfl.experiments.study import Results, Study
from vfl.experiments.tables import seconds_text
from vfl.training.specs import read_checked

FOLDER = EXAMPLES / "leaderboard"
TASKS = ("bank_marketing", "credit_default", "fashion_mnist", "review_polarity")
#: Measured: seconds of a cell on one core with a light pack, mean over all, and how many times as
#: long a heavy pack takes on an undefended victim (both tables taken as alike); GB of memory.
SECONDS = {
    "bank_marketing": 7.4, "credit_default": 5.5, "fashion_mnist": 26, "review_polarity": 9.2,
}  # fmt: skip
HEAVIER = {"bank_marketing": 2, "credit_default": 2, "fashion_mnist": 8, "review_polarity": 42}
GIGABYTES = 1.1


def grid_of(
    task: str, pack: str, seeds: Sequence[int], defenses: Sequence[str] | None = None
) -> Study:
    """The grid of one task, with a pack of attacks, and some of its defenses or all."""
    file = FOLDER / f"{task}.toml"
    settings = grid_settings_of(read_checked(file, [])[0])
    attacks = [pack if one == "light" else one for one in settings.attacks]
    return study_of(
        file, attacks=attacks, seeds=list(seeds),
        defenses=list(settings.defenses if defenses is None else defenses),
    )  # fmt: skip


def entries_of(path: Path) -> list[LeaderboardEntry]:
    """The leaderboard of one task."""
    grid = LoadedGrid(GridFolder(path))
    settings = grid_settings_of(grid.experiment)
    measure = fitting_measure(grid.records, settings.measure)
    return leaderboard(grid.records, settings.margin, measure)


def summary_of(task: str, entries: Sequence[LeaderboardEntry]) -> str:
    """Which defenses are shown to leak, and which are not, in a line."""
    defended = [one for one in entries if one.defense != UNDEFENDED]
    safe = [one.defense for one in defended if one.worst.verdict != "leaks"]
    leaks = f"{len(defended) - len(safe)} of {len(defended)} defenses are shown to give labels away"
    return f"- **{task}**: {leaks}; not shown to: {', '.join(safe) or 'none'}."


def task_lines(path: Path, entries: Sequence[LeaderboardEntry]) -> Iterator[str]:
    """What the page says of one task."""
    grid, results = LoadedGrid(GridFolder(path)), Results.of(path)
    settings = grid_settings_of(grid.experiment)
    measure = fitting_measure(grid.records, settings.measure)
    yield f"\n## {grid.experiment.name}\n"
    yield f"{results.sentence}\n"
    if entries:
        yield board_table(entries, settings.margin).markdown()
    if (access := access_table(grid.records, settings.margin, measure)) is not None:
        yield "Points above the best without the model, by what the attacker holds:\n"
        yield access.markdown()
    victims = [cell for cell in grid.cells if cell.victim != BASELINES]
    attacked = {one.cell for one in grid.records if one.evaluator == "attack"}
    yield (
        f"{len(attacked)} of {len(victims)} victims, {len(settings.seeds)} seeds, "
        f"{settings.draws} draws; attacks: {', '.join(settings.attacks)}.\n"
    )
    for cell in victims:
        if (failure := grid.failures.get(cell.title)) is not None:
            yield f"- {cell.title} ended early: {failure['what']}"


def standings_of(task: str, entries: Sequence[LeaderboardEntry]) -> Iterator[dict[str, Any]]:
    """The worst attack on each defense at each number of leaked labels, as shares."""
    for entry in entries:
        for one in entry.standings:
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
            }


@dataclass(frozen=True, slots=True)
class Board:
    """A task's grid and its leaderboard."""

    path: Path
    entries: Sequence[LeaderboardEntry]

    @classmethod
    def of(cls, path: Path) -> Board:
        """That of a grid's folder."""
        return cls(path, entries_of(path))


def _note(boards: Sequence[Board]) -> str:
    import torch

    python = sys.version.split()[0]
    return f", torch {torch.__version__}, Python {python}; `make leaderboard` writes this page."


def summaries(boards: Sequence[Board]) -> Iterator[str]:
    """What a reader of the page must know, and a line a task."""
    yield (
        "Each task has a feature party that attacks the labels of the label party. A defense is "
        "judged by the worst of all attacks that the attacker can run, beside the best it reaches "
        'without the model; "protected" is a verdict about these attacks, on these rows, for '
        "these seeds. docs/attacking.md says how verdicts are made.\n"
    )
    yield from (summary_of(one.path.name, one.entries) for one in boards)


PAGE = StudyPage(
    "Leaderboard: which defense holds against what",
    _note,
    summaries,
    lambda board, page: task_lines(board.path, board.entries),
)


def write_board(paths: Sequence[Path], page: Path) -> list[dict[str, Any]]:
    """Write the page, and the rows it is made of beside it."""
    boards = [Board.of(path) for path in paths]
    PAGE.write(page, boards)
    rows = [row for one in boards for row in standings_of(one.path.name, one.entries)]
    if rows:
        page.with_suffix(".csv").write_text(csv_text(list(rows[0]), rows), encoding="utf-8")
    return rows


# --- a part of the page again ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Check:
    """One stored row of the page beside the same one again.

    Attributes:
        stored, again: as in the page's CSV file; `again` is None where no victim came out.
    """

    stored: Mapping[str, str]
    again: Mapping[str, Any] | None

    @property
    def holds(self) -> bool:
        """Whether utility and reach lie within a point, or both half widths; and the verdict.

        Noise that protects is never drawn twice alike, so that such rows differ by chance; a
        verdict may then become undecided, and no more. A row of one victim has no half width.
        """
        if self.again is None:
            return False
        pairs = [("utility", "utility_half_width"), ("reaches", "above_half_width")]
        for name, width in pairs:
            room = max(0.01, float(self.stored[width] or 0) + float(self.again[width] or 0))
            if not abs(float(self.stored[name]) - float(self.again[name])) <= room:
                return False
        verdicts = {self.stored["verdict"], self.again["verdict"]}
        return len(verdicts - {"undecided", "inconclusive"}) <= 1

    def __str__(self) -> str:
        """One line."""
        of = self.stored
        line = f"{of['task']}  {of['defense']}  k={of['k']}  "
        if self.again is None:
            return line + "has no victim any more  FALLEN"
        line += f"utility {float(of['utility']):.3f} -> {self.again['utility']:.3f}  "
        line += f"reaches {float(of['reaches']):.3f} -> {self.again['reaches']:.3f}  "
        line += f"{of['verdict']} -> {self.again['verdict']}"
        return line + ("" if self.holds else "  FALLEN")


def drawn(rows: Sequence[Mapping[str, str]], share: float, draw: int) -> dict[str, list[str]]:
    """At least one defense of the page's rows, drawn without repetition, by task."""
    pairs = sorted({(row["task"], row["defense"]) for row in rows if row["defense"] != UNDEFENDED})
    chosen = random.Random(draw).sample(pairs, max(1, round(share * len(pairs))))
    return {task: [d for t, d in sorted(chosen) if t == task] for task in TASKS}


def checks_of(rows: Sequence[Mapping[str, str]], folder: GridFolder) -> list[Check]:
    """The stored rows of one task's chosen defenses beside what a grid gave."""
    found = {
        (one["defense"], str(one["k"])): one
        for one in standings_of(folder.path.name, entries_of(folder.path))
    }
    return [Check(row, found.get((row["defense"], row["k"]))) for row in rows]


def bench_leaderboard(
    tasks: Sequence[str] | None = None,
    attack: Literal["light", "heavy"] = "light",
    seeds: Sequence[harness.OrZero] = (0, 1, 2),
    jobs: int = 2,
    out: Path = Path("runs/leaderboard"),
    page: Path = Path("docs/results/leaderboard.md"),
    plan: bool = False,
    verify: float | None = None,
    draw: int = 0,
) -> Sequence[dict[str, Any] | Check]:
    """Which defense holds against what: tell time and memory, run what is left, write the page.

    Args:
        tasks: files of examples/leaderboard.
        attack: the pack.
        seeds: one victim of each defense a seed.
        jobs: cells at a time, a process each.
        out: folder of the grids.
        page: the page; rows lie beside it in a CSV file.
        plan: tell time and memory; train nothing.
        verify: a share of the page's defenses, again.
        draw: which of them; a number.
    """
    tasks = TASKS if tasks is None else tasks
    for task in tasks:
        require_choice("task", task, TASKS)
    if verify:
        rows = [row for row in _stored(page) if row["task"] in tasks]
        chosen = drawn(rows, verify, draw)
        return [
            check
            for task, defenses in chosen.items()
            if defenses
            for check in checks_of(
                [row for row in rows if row["task"] == task and row["defense"] in defenses],
                played(grid_of(task, attack, seeds, defenses), out / f"verify-{draw}" / task, jobs),
            )
        ]
    studies = {task: grid_of(task, attack, seeds) for task in tasks}
    for task, study in studies.items():
        seconds = SECONDS[task] * len(study.cells) / jobs
        seconds *= HEAVIER[task] if attack == "heavy" else 1
        harness.say(f"{task}: {len(study.cells)} cells, about {seconds_text(seconds)}")
    harness.say(f"about {GIGABYTES * jobs:.1f} GB of memory, {jobs} processes")
    found: list[dict[str, Any]] = []
    for task, study in () if plan else studies.items():
        played(study, out / task, jobs)
        found = write_board([out / one for one in TASKS if (out / one).exists()], page)
    return found


def _stored(page: Path) -> list[dict[str, str]]:
    with page.with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def shown(rows: Sequence[dict[str, Any] | Check]) -> str:
    """How many rows came out, or came out again."""
    checks = [row for row in rows if isinstance(row, Check)]
    if not checks:
        return f"{len(rows)} rows"
    held = sum(one.holds for one in checks)
    return "\n".join([*map(str, checks), f"{held} of {len(checks)} rows came out again"])


main = harness.command(
    bench_leaderboard, shown, lambda row: not isinstance(row, Check) or row.holds
)


if __name__ == "__main__":
    main()
