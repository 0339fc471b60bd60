"""All defenses at all numbers of leaked labels at a glance: advantages, tinted by their verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vfl.grid.leaderboard import Place, Standing, Verdict
from vfl.report.attack_curves import numbered


@dataclass(frozen=True, slots=True)
class Tile:
    """One defense at one k.

    Attributes:
        words: points of the worst attack above the best baseline.
        verdict: what follows, which the page tints.
        hint: the attack and what it reaches, for whoever points there.
    """

    words: str
    verdict: Verdict
    hint: str


@dataclass(frozen=True, slots=True)
class Glance:
    """Tiles by defense and k; lines are as long as `ks`."""

    ks: Sequence[int]
    lines: Sequence[tuple[str, Sequence[Tile]]]


def glance(places: Sequence[Place]) -> Glance:
    """The advantage of the worst attack for every place of a leaderboard.

    >>> glance([])
    Glance(ks=[], lines=[])
    """
    ks = [one.k for one in places[0].standings] if places else []
    numbers = numbered(places)
    lines = [
        (f"{numbers[place.defense]} {place.defense}", [_tile(one) for one in place.standings])
        for place in places
    ]
    return Glance(ks, lines)


def _tile(one: Standing) -> Tile:
    hint = f"{one.verdict}: {one.attack} reaches {100 * one.value.mean:.1f} %"
    return Tile(f"{100 * one.advantage.mean:+.1f}", one.verdict, hint)
