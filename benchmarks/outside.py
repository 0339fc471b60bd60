"""Attacks of external authors compared with the adaptive attacker, on victims of grids.

    vfl grid quick --defense potential:alpha=4 --attack adaptive:at=cut,candidates=30 --leaks 5 \
        --draws 1 --seeds 0,1,2,3,4 -s grid.baselines=raw --out runs/outside
    vfl grid --add-attack examples/outside_pipeline.py runs/outside --attack pipeline:learner=svm
    python -m benchmarks.outside runs/outside --out outside.csv

The file `--out` has one row for each attack and victim, with the result of this attack. For each
training, the printed table shows the best result of all external attacks. The column beside this
result is its difference from the result of the adaptive attacker on the same victims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks import harness
from benchmarks.studies import over, points_text, write_rows
from vfl.experiments.cells import GridFolder, grid_settings_of
from vfl.experiments.leaderboard import fitting_measure, label_measure
from vfl.experiments.results import LoadedGrid
from vfl.experiments.tables import Table

ADAPTIVE = "adaptive"


@dataclass(frozen=True)
class OutsideRow:
    """One attack on one victim.

    Attributes:
        task, defense, seed: identity of the victim.
        k: number of leaked labels of each class.
        attack: spec of the attack; `author` is empty for an attack of vfl.
        measure, value: name of the measure, and the attack's result in this measure, as a fraction.
    """

    task: str
    defense: str
    seed: str
    k: int
    attack: str
    author: str
    measure: str
    value: float

    @property
    def is_adaptive(self) -> bool:
        """Return whether the attack is the adaptive one, the reference for all others."""
        return not self.author and self.attack.startswith(ADAPTIVE)


def rows_of(run: Path) -> list[OutsideRow]:
    """Return rows of the adaptive and the external attacks in a grid's folder: means over draws."""
    grid = LoadedGrid(GridFolder(run))
    measure = fitting_measure(grid.records, grid_settings_of(grid.experiment).measure)
    of_labels = [one for one in grid.records if label_measure(one) == measure]
    found: dict[tuple[str, str, int, str, str], list[float]] = {}
    for one in of_labels:
        if one.author or one.subject.startswith(ADAPTIVE):
            key = one.defense, one.repeat, one.k, one.subject, one.author
            found.setdefault(key, []).append(one.value)
    task = grid.experiment.name
    return [OutsideRow(task, *key, measure, fmean(draws)) for key, draws in found.items()]


def differences(rows: Sequence[OutsideRow]) -> dict[str, list[float]]:
    """Return each external attack's differences from the adaptive one, by victim."""
    ours = {one.seed: one.value for one in rows if one.is_adaptive}
    found: dict[str, list[float]] = {}
    for one in rows:
        if one.author:
            found.setdefault(one.attack, []).append(one.value - ours[one.seed])
    return found


def table(rows: Sequence[OutsideRow]) -> str:
    """Return a table of all trainings: results in percentage points, and intervals over victims."""
    head = ["task", "training", "measure", "adaptive", "best from outside", "reaches",
            "it less adaptive", "the others"]  # fmt: skip
    lines = []
    for task, defense in dict.fromkeys((one.task, one.defense) for one in rows):
        of = [one for one in rows if (one.task, one.defense) == (task, defense)]
        apart = differences(of)
        best = max(apart, key=lambda attack: fmean(apart[attack]))
        others = [fmean(values) for attack, values in apart.items() if attack != best]
        reaches = [one.value for one in of if one.attack == best]
        ours = [one.value for one in of if one.is_adaptive]
        between = f"{100 * max(others):+.1f} to {100 * min(others):+.1f}" if others else ""
        lines.append(
            [
                *(task, defense, of[0].measure, points_text(over(ours)), best),
                *(points_text(over(reaches)), points_text(over(apart[best]), "+"), between),
            ]
        )
    return Table(head, lines).markdown()


def measure(runs: Sequence[Path], out: Path | None = None) -> list[OutsideRow]:
    """Compare external attacks with the adaptive attacker, on the victims of grids.

    Args:
        runs: folders of grids.
        out: CSV file for all rows.
    """
    rows = [row for run in runs for row in rows_of(run)]
    if out is not None:
        write_rows(out, OutsideRow, rows)
    return rows


main = harness.command(measure, table)


if __name__ == "__main__":
    main()
