"""The cells of a comparison that differ in their repeat alone, as one line of its table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vfl.grid.interval import Estimate, estimate, paired_difference
from vfl.grid.results import Measured, Result


@dataclass(frozen=True)
class Group:
    """One codec under one variant at one level.

    Attributes:
        variant, method, codec, level: as `vfl.grid.compare` says them.
        results: its cells, whole or not.
        reference: the cells it is set against; empty where there are none, or it is them.
    """

    variant: str
    method: str
    codec: str
    level: str
    results: tuple[Result, ...]
    reference: tuple[Result, ...] = ()

    @property
    def trained(self) -> list[Measured]:
        """What is known of the cells that are whole."""
        return [one.measured for one in self.results if one.measured is not None]

    @property
    def score(self) -> Estimate | None:
        """The measure on test rows, over repeats."""
        return estimate(list(_scores(self.results).values()))

    @property
    def difference(self) -> Estimate | None:
        """Of the score to the reference's, repeat by repeat; None for the reference itself."""
        return paired_difference(_scores(self.results), _scores(self.reference))

    def over(self, figure: Callable[[Measured], float | None]) -> Estimate | None:
        """A figure over the repeats that have it."""
        found = [value for one in self.trained if (value := figure(one)) is not None]
        return estimate(found)

    def mean(self, figure: Callable[[Measured], float | None]) -> float | None:
        """The mean of a figure over the repeats that have it."""
        found = self.over(figure)
        return None if found is None else found.mean

    def reached(self, position: int) -> tuple[float | None, int]:
        """Mean bytes until the accuracy at a position of the list, and how many repeats got there.

        The mean is over those repeats alone, so it means little if some did not get there.
        """
        found = [one.reached[position] for one in self.trained]
        there = [count for count in found if count is not None]
        return (sum(there) / len(there) if there else None), len(there)


def grouped(results: Sequence[Result], reference: str) -> list[Group]:
    """The lines of a table, in the order of the cells.

    Args:
        results: of all cells.
        reference: the method all others are set against, at their own level where both have one.
    """
    groups: dict[tuple[str, str, str, str], list[Result]] = {}
    for one in results:
        groups.setdefault((one.variant, one.method, one.codec, one.level), []).append(one)
    found = [Group(*key, results=tuple(cells)) for key, cells in groups.items()]
    return [
        Group(
            one.variant,
            one.method,
            one.codec,
            one.level,
            one.results,
            _beside(one, found, reference),
        )
        for one in found
    ]


def _beside(group: Group, groups: Sequence[Group], reference: str) -> tuple[Result, ...]:
    if group.method == reference:
        return ()
    beside = [one for one in groups if (one.method, one.variant) == (reference, group.variant)]
    if len(beside) == 1 and "" in (group.level, beside[0].level):
        return beside[0].results
    return next((one.results for one in beside if one.level == group.level), ())


def _scores(results: Sequence[Result]) -> dict[str, float]:
    return {
        one.repeat: one.measured.score
        for one in results
        if one.measured is not None and one.measured.score is not None
    }
