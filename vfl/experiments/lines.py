"""A line of a table: one training over its repeats, with its figures and what it is set against."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vfl.experiments.cells import Cell, GridFolder, failure_of, is_done
from vfl.experiments.records import TEST, TRAINING, Record
from vfl.experiments.statistics import Estimate, resampled
from vfl.experiments.tables import left_out

#: What a figure is about, and the measure.
Figure = tuple[str, str]


@dataclass(frozen=True, eq=False)
class Line:
    """One training over its repeats.

    Attributes:
        about: what it is, by column; see `Cell.about`.
        repeats: how many there are to be.
        runs: run folders of those that are trained, by repeat.
        figures: by subject and measure, each by repeat; see `vfl.experiments.records.Record`.
        reference: the line it is set against; None where there is none, or it is that.
        ratio: of test rows to training rows where every repeat draws them anew; see `resampled`.
    """

    about: Mapping[str, str]
    repeats: int
    runs: Mapping[str, Path]
    figures: Mapping[Figure, Mapping[str, float]]
    reference: Line | None = None
    ratio: float = 0.0

    def values(self, measure: str, subject: str = TEST) -> Mapping[str, float]:
        """A figure by repeat, of those that have it."""
        return self.figures.get((subject, measure), {})

    def over(self, measure: str, subject: str = TEST) -> Estimate | None:
        """A figure over the repeats that have it, with its interval."""
        return resampled(list(self.values(measure, subject).values()), self.ratio)

    def mean(self, measure: str, subject: str = TEST) -> float | None:
        """The mean of a figure over the repeats that have it."""
        found = self.over(measure, subject)
        return None if found is None else found.mean

    @property
    def sent_percent(self) -> float:
        """Of dense float32, mean of both directions and of the repeats."""
        ratios = [self.mean(f"wire_ratio_{way}", TRAINING) for way in ("up", "down")]
        return 50 * sum(ratio or 0.0 for ratio in ratios)

    def less(self, other: Line | None, measure: str) -> Estimate | None:
        """Of the test rows, the difference to another line, repeat by repeat."""
        ours, theirs = self.values(measure), {} if other is None else other.values(measure)
        both = [ours[repeat] - theirs[repeat] for repeat in ours if repeat in theirs]
        return resampled(both, self.ratio)

    def difference(self, measure: str) -> Estimate | None:
        """The difference to the reference; None for the reference itself."""
        return self.less(self.reference, measure)


def lines_of(folder: GridFolder, records: Iterable[Record]) -> list[Line]:
    """The lines of a table, in the order of the cells; a run without records stands in none."""
    by_cell: dict[str, list[Record]] = {}
    for one in records:
        if one.evaluator != "attack":
            by_cell.setdefault(one.cell, []).append(one)
    cells: dict[tuple[tuple[str, str], ...], list[Cell]] = {}
    for cell in folder.cells():
        about = tuple((key, value) for key, value in cell.about.items() if key != "repeat")
        cells.setdefault(about, []).append(cell)
    found = []
    for about, own in cells.items():
        runs: dict[str, Path] = {}
        figures: dict[Figure, dict[str, float]] = {}
        for cell in own:
            path, repeat = folder.cells_path / cell.name, cell.about["repeat"]
            if not is_done(path) or cell.name not in by_cell:
                continue
            runs[repeat] = path
            for one in by_cell.get(cell.name, ()):
                figures.setdefault((one.subject, one.measure), {})[repeat] = one.value
        found.append(Line(dict(about), len(own), runs, figures))
    return found


def beside_method(lines: Sequence[Line], method: str) -> list[Line]:
    """The lines of a comparison with the reference of each: a method's, at its level if it has one.

    Args:
        lines: of all codecs.
        method: what the others are set against.
    """
    return [replace(one, reference=_reference(one, lines, method)) for one in lines]


def _reference(line: Line, lines: Sequence[Line], method: str) -> Line | None:
    if line.about["method"] == method:
        return None
    variant, level = line.about["variant"], line.about["level"]
    beside = [
        one for one in lines if (one.about["method"], one.about["variant"]) == (method, variant)
    ]
    if len(beside) == 1 and "" in (level, beside[0].about["level"]):
        return beside[0]
    return next((one for one in beside if one.about["level"] == level), None)


def unfinished(folder: GridFolder) -> list[str]:
    """What a reader of a table must know about trainings that are not in it."""
    paths = [folder.cells_path / cell.name for cell in folder.cells()]
    failed = sum(failure_of(path) is not None for path in paths)
    missing = sum(not is_done(path) for path in paths) - failed
    return left_out(len(paths), failed, missing, "trained")
