"""How long the rest of a grid takes, from what its cells have taken so far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from statistics import fmean

from vfl.grid.cells import Cell

#: Whether a cell was begun by an earlier call, and what it tries.
_Kind = tuple[bool, frozenset[tuple[str, str]]]


class Pace:
    """Seconds of cells by what they try: baselines take minutes where a victim takes seconds.

    Args:
        jobs: cells at a time.
        begun: names of cells of an earlier call; what is left of them tells nothing of the others.

    >>> pace = Pace(jobs=1)
    >>> pace.left_s([])
    0.0
    """

    def __init__(self, jobs: int, begun: Collection[str] = ()) -> None:
        self._jobs = jobs
        self._begun = begun
        self._took: defaultdict[_Kind, list[float]] = defaultdict(list)

    def took(self, cell: Cell, seconds: float) -> None:
        """A cell has ended after so many seconds."""
        self._took[self._kind(cell)].append(seconds)

    def left_s(self, cells: Iterable[Cell]) -> float:
        """Seconds until these have ended; what was never tried counts as the mean of the others."""
        means = {kind: fmean(seconds) for kind, seconds in self._took.items()}
        return sum(_expected(self._kind(cell), means) for cell in cells) / self._jobs

    def _kind(self, cell: Cell) -> _Kind:
        return cell.name in self._begun, _tries(cell)


def _expected(kind: _Kind, means: Mapping[_Kind, float]) -> float:
    if kind in means or not means:
        return means.get(kind, 0.0)
    alike = [seconds for (begun, _), seconds in means.items() if begun == kind[0]]
    return fmean(alike or means.values())


def _tries(cell: Cell) -> frozenset[tuple[str, str]]:
    """What a cell is about, whatever its seed."""
    return frozenset((what, value) for what, value in cell.about.items() if what != "seed")
