"""How long the rest of a grid takes, from what its cells have taken so far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean

from vfl.grid.cells import Cell

_Tries = frozenset[tuple[str, str]]


class Pace:
    """Seconds of cells by what they try: baselines take minutes where a victim takes seconds.

    Args:
        jobs: cells at a time.

    >>> pace = Pace(jobs=1)
    >>> pace.left_s([])
    0.0
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._took: defaultdict[_Tries, list[float]] = defaultdict(list)

    def took(self, cell: Cell, seconds: float) -> None:
        """A cell has ended after so many seconds."""
        self._took[_tries(cell)].append(seconds)

    def left_s(self, cells: Iterable[Cell]) -> float:
        """Seconds until these have ended; what was never tried counts as the mean of the others."""
        means = {tries: fmean(seconds) for tries, seconds in self._took.items()}
        usual = fmean(means.values()) if means else 0.0
        return sum(means.get(_tries(cell), usual) for cell in cells) / self._jobs


def _tries(cell: Cell) -> _Tries:
    """What a cell is about, whatever its seed."""
    return frozenset((what, value) for what, value in cell.about.items() if what != "seed")
