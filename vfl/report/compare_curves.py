"""Curves of a comparison: the score by epoch and by bytes, and how often each unit is sent."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from vfl.grid import Group
from vfl.grid.results import SHARES, Epoch, Measured
from vfl.report.axes import powers
from vfl.report.charts import STYLES, Series, Tick, line_chart, swatch
from vfl.report.parts import Drawing
from vfl.report.units import bytes_text

#: A codec that sends this share of its units in an average row leaves none out.
_NEARLY_ALL = 0.99


@dataclass(frozen=True, slots=True)
class Scene:
    """The groups that stand in one chart: those of a level, and those that have none.

    Attributes:
        words: which variant and level, for the titles.
        groups: with a style each, the same in all charts.
    """

    words: str
    groups: Sequence[tuple[Group, int]]


def scenes(groups: Sequence[Group]) -> list[Scene]:
    """What belongs into one chart each, in the order of the table."""
    methods = list(dict.fromkeys(group.method for group in groups))
    style = {method: 1 + (place + 1) % STYLES for place, method in enumerate(methods)}
    found = []
    for variant in dict.fromkeys(group.variant for group in groups):
        mine = [group for group in groups if group.variant == variant]
        for level in list(dict.fromkeys(group.level for group in mine if group.level)) or [""]:
            words = ", ".join(filter(None, (variant, f"at {level} %" if level else "")))
            shown = [(one, style[one.method]) for one in mine if one.level in ("", level)]
            found.append(Scene(words, shown))
    return found


def curves(groups: Sequence[Group], measure: str) -> Iterator[Drawing]:
    """The drawings of every scene, as far as there is something to draw."""
    for number, scene in enumerate(scenes(groups)):
        yield from by_epoch(scene, measure, f"epoch-{number}")
        yield from by_bytes(scene, measure, f"bytes-{number}")
        yield from usage(scene, f"usage-{number}")


def by_epoch(scene: Scene, measure: str, key: str) -> Iterator[Drawing]:
    """The score of the validation rows after each epoch."""
    lines = _lines(scene, measure)
    if lines:
        title = _title(f"{score_word(measure)} by epoch", scene)
        chart = line_chart(key, title, ends(lines), lines, "epoch", whole_x=True, legend=False)
        yield Drawing(title, caption(measure, "validation rows"), chart, legend_of(lines))


def by_bytes(scene: Scene, measure: str, key: str) -> Iterator[Drawing]:
    """The same score by the bytes that had crossed the wire until then."""
    lines = _lines(scene, measure, over_bytes=True)
    if lines:
        places = [x for line in lines for x, _ in line.points]
        title = _title(f"{score_word(measure)} by bytes", scene)
        chart = line_chart(
            key,
            title,
            ends(lines),
            lines,
            "on the wire, both directions, logarithmic",
            x_ticks=_byte_ticks(min(places), max(places)),
            legend=False,
        )
        yield Drawing(title, caption(measure, "validation rows"), chart, legend_of(lines))


def usage(scene: Scene, key: str) -> Iterator[Drawing]:
    """In how many test rows each unit is sent, for codecs that leave units out."""
    shown = [(group, style) for group, style in scene.groups if _leaves_units_out(group)]
    if shown:
        lines = [Series(one.codec, _sorted_shares(one.trained), style) for one, style in shown]
        title = _title("How often each unit is sent", scene)
        words = "percent of test rows, units in order of use, mean over repeats"
        chart = line_chart(key, title, ends(lines), lines, "unit", whole_x=True, legend=False)
        legend = [(swatch(style), f"{one.codec}, {_never(one)}") for one, style in shown]
        yield Drawing(title, words, chart, legend)


def legend_of(lines: Sequence[Series]) -> list[tuple[Markup, str]]:
    """A swatch and the name of each line."""
    return [(swatch(line.style), line.name) for line in lines]


def score_word(measure: str) -> str:
    """A measure as it stands in a title."""
    return measure.replace("_", " ").capitalize()


def percent(measure: str) -> float:
    """What a score is multiplied by to be drawn."""
    return 100.0 if measure in SHARES else 1.0


def caption(measure: str, rows: str) -> str:
    """Unit and rows of a score."""
    return f"{'percent, ' if measure in SHARES else ''}{rows}, mean over repeats"


def mean_by_epoch(
    group: Group, figure: Callable[[Epoch], float | None], over_bytes: bool = False
) -> list[tuple[float, float]]:
    """A figure as a mean over the repeats, for the epochs that every repeat has gone through.

    Args:
        group: whose epochs.
        figure: None where it was not measured.
        over_bytes: x is the logarithm of the mean bytes until then, instead of the epoch.
    """
    points = []
    for epochs in zip(*(one.epochs for one in group.trained), strict=False):
        found = [value for epoch in epochs if (value := figure(epoch)) is not None]
        if found:
            sent = statistics.fmean(epoch.total_bytes for epoch in epochs)
            x = math.log10(sent) if over_bytes else epochs[0].epoch
            points.append((x, statistics.fmean(found)))
    return points


def _lines(scene: Scene, measure: str, over_bytes: bool = False) -> list[Series]:
    factor = percent(measure)

    def figure(epoch: Epoch) -> float | None:
        return None if epoch.score is None else factor * epoch.score

    lines = [
        Series(one.codec, mean_by_epoch(one, figure, over_bytes), style)
        for one, style in scene.groups
    ]
    return [line for line in lines if line.points]


def _sorted_shares(trained: Sequence[Measured]) -> list[tuple[float, float]]:
    each = [
        [100 * count / one.test_rows for count in sorted(one.usage, reverse=True)]
        for one in trained
    ]
    return [(unit, statistics.fmean(rank)) for unit, rank in enumerate(zip(*each, strict=True), 1)]


def _leaves_units_out(group: Group) -> bool:
    return any(one.nonzeros < _NEARLY_ALL * one.units for one in group.trained)


def _never(group: Group) -> str:
    """How many units no test row sends."""
    never = group.mean(lambda one: one.never_sent)
    units = group.mean(lambda one: one.units)
    return f"{never:.3g} of {units:.3g} never"


def _title(words: str, scene: Scene) -> str:
    return f"{words}, {scene.words}" if scene.words else words


def ends(lines: Sequence[Series]) -> str:
    """What the lines show, for readers who do not see them."""
    return "; ".join(f"{line.name} ends at {line.points[-1][1]:.4g}" for line in lines) + "."


def _byte_ticks(low: float, high: float) -> list[Tick]:
    return [(math.log10(value), bytes_text(value)) for value in powers(10**low, 10**high)]
