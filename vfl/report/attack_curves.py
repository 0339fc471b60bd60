"""Drawings of a grid of attacks: accuracy against attacks, advantage by leaks, angles, maps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from vfl.grid.attack_rows import Row
from vfl.grid.leaderboard import (
    UNDEFENDED,
    Place,
    Standing,
    by_attack,
    leaked,
    mean_of,
)
from vfl.report.charts import STYLES, Series, line_chart, swatch
from vfl.report.parts import Drawing
from vfl.report.scatter import Area, Point, map_chart, scatter_chart

_LINES = STYLES  # of one chart
_ANGLE_TICKS = [(0.0, "0"), (math.pi / 4, "π/4"), (math.pi / 2, "π/2"), (3 * math.pi / 4, "3π/4"),
                (math.pi, "π")]  # fmt: skip


def numbered(places: Sequence[Place]) -> dict[str, int]:
    """The number each defense has in all drawings: its place on the leaderboard."""
    return {place.defense: number for number, place in enumerate(places, 1)}


def style_of(number: int) -> int:
    """The colour of a number."""
    return 1 + number % STYLES


def tradeoffs(places: Sequence[Place], rows: Sequence[Row], margin: float) -> Iterator[Drawing]:
    """Accuracy against the worst attack at each k, then against each attack at the middle k."""
    numbers = numbered(places)
    leaks = [one.k for one in places[0].standings]
    for place, k in enumerate(leaks):
        standings = {one.defense: one.standings[place] for one in places}
        words = f"The worst attack at k = {k}" if k else "The worst attack"
        values = {name: one.value.mean for name, one in standings.items()}
        first = next(iter(standings.values()))
        yield _tradeoff(f"worst-{k}", words, places, numbers, values, first, margin)
    middle = leaks[len(leaks) // 2]
    for order, attack in enumerate(dict.fromkeys(row.attacker for row in leaked(rows, middle))):
        values = {}
        for one in places:
            own = [row for row in leaked(rows, middle) if row.defense == one.defense]
            if attack in (found := by_attack(own)):
                values[one.defense] = mean_of(found[attack])
        standing = places[0].standings[leaks.index(middle)]
        title = f"{attack} at k = {middle}"
        yield _tradeoff(f"attack-{order}", title, places, numbers, values, standing, margin)


def _tradeoff(
    key: str,
    title: str,
    places: Sequence[Place],
    numbers: Mapping[str, int],
    values: Mapping[str, float],
    standing: Standing,
    margin: float,
) -> Drawing:
    known = [place for place in places if place.defense in values]
    points = [
        Point(
            str(numbers[one.defense]),
            100 * one.accuracy.mean,
            100 * values[one.defense],
            style_of(numbers[one.defense]),
        )
        for one in known
    ]
    baseline = 100 * standing.baseline_value.mean
    undefended = next((one for one in places if one.defense == UNDEFENDED), None)
    area = Area(100 * undefended.accuracy.mean - margin, baseline) if undefended else None
    told = "; ".join(
        f"{one.defense} {100 * one.accuracy.mean:.1f} and {100 * values[one.defense]:.1f}"
        for one in known
    )
    chart = scatter_chart(
        key,
        title,
        f"Test accuracy and attack success in percent: {told}.",
        points,
        "test accuracy, percent",
        area,
        [(baseline, "best baseline")],
    )
    return Drawing(title, "attack success, percent; shaded: perfect protection", chart, ())


def advantages(places: Sequence[Place]) -> Iterator[Drawing]:
    """The worst case above the best baseline, by leaked labels."""
    numbers = numbered(places)
    ticks = [(float(x), str(one.k)) for x, one in enumerate(places[0].standings)]
    for start in range(0, len(places), _LINES):
        lines = [_line(place, numbers) for place in places[start : start + _LINES]]
        title = "Advantage by leaked labels"
        words = "points of the worst attack above the best baseline, 95 % intervals"
        told = "; ".join(f"{line.name} ends at {line.points[-1][1]:.1f}" for line in lines)
        label = "leaked labels of each class"
        chart = line_chart(
            f"advantage-{start}", title, told, lines, label, x_ticks=ticks, legend=False
        )
        yield Drawing(title, words, chart, [(swatch(line.style), line.name) for line in lines])


def attack_advantages(rows: Sequence[Row], places: Sequence[Place]) -> Iterator[Drawing]:
    """For each defense, every attack above the best baseline by leaked labels."""
    for number, place in enumerate(places):
        own = [row for row in rows if row.defense == place.defense]
        lines = _attack_lines(own, place)
        ticks = [(float(x), str(one.k)) for x, one in enumerate(place.standings)]
        for start in range(0, len(lines), _LINES):
            part = lines[start : start + _LINES]
            told = "; ".join(f"{line.name} ends at {line.points[-1][1]:.1f}" for line in part)
            label = "leaked labels of each class"
            chart = line_chart(
                f"attacks-{number}-{start}", place.defense, told, part, label,
                x_ticks=ticks, legend=False,
            )  # fmt: skip
            words = "points of each attack above the best baseline"
            legend = [(swatch(line.style), line.name) for line in part]
            yield Drawing(place.defense, words, chart, legend)


def _attack_lines(own: Sequence[Row], place: Place) -> list[Series]:
    points: dict[str, list[tuple[float, float]]] = {}
    for x, one in enumerate(place.standings):
        best = one.baseline_value.mean
        for attack, values in by_attack(leaked(own, one.k)).items():
            points.setdefault(attack, []).append((float(x), 100 * (mean_of(values) - best)))
    return [
        Series(attack, found, style_of(order))
        for order, (attack, found) in enumerate(points.items())
    ]


def _line(place: Place, numbers: Mapping[str, int]) -> Series:
    points, whiskers = [], []
    for x, one in enumerate(place.standings):
        points.append((float(x), 100 * one.advantage.mean))
        if one.advantage.half_width is not None:
            whiskers.append((float(x), 100 * one.advantage.low, 100 * one.advantage.high))
    name = f"{numbers[place.defense]} {place.defense}"
    return Series(name, points, style_of(numbers[place.defense]), whiskers)


def pictures(drawn: Mapping[str, Mapping[str, Any]]) -> Iterator[Drawing]:
    """Angles between cuts, and t-SNE maps, by defense."""
    for number, (defense, told) in enumerate(drawn.items()):
        bins = len(told["same"])
        lines = [
            Series(
                word,
                [(math.pi * (x + 0.5) / bins, 100 * share) for x, share in enumerate(told[name])],
                style,
            )
            for name, word, style in (("same", "same class", 2), ("different", "two classes", 1))
        ]
        title = f"Angles, {defense}"
        means = (told["same_mean"], told["different_mean"])
        words = "percent of pairs of test cuts; mean " + " and ".join(
            "none" if mean is None else f"{mean:.2f}" for mean in means
        )
        chart = line_chart(
            f"angles-{number}", title, f"{words} rad.", lines, "angle, rad",
            x_ticks=_ANGLE_TICKS, legend=False,
        )  # fmt: skip
        yield Drawing(
            title, f"{words} rad", chart, [(swatch(one.style), one.name) for one in lines]
        )
        yield from _map(number, defense, told)


def _map(number: int, defense: str, told: Mapping[str, Any]) -> Iterator[Drawing]:
    if told["map"]:
        points = [
            Point("", x, y, 1 + label % STYLES)
            for (x, y), label in zip(told["map"], told["labels"], strict=True)
        ]
        title = f"t-SNE, {defense}"
        words = f"{len(points)} test cuts, a colour a class" + (
            "" if max(told["labels"]) < STYLES else f"; class {STYLES} and up share them"
        )
        chart: Markup = map_chart(f"map-{number}", title, words, points)
        yield Drawing(title, words, chart, ())
