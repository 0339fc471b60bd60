"""Charts as inline SVG: no script, no fonts of their own, colours from the page's style sheet.

Every chart has a title and a description for readers who do not see it. Lines differ in dash as
well as in colour, so that they can be told apart on paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from vfl.report.axes import (
    Point,
    enclosing,
    thinned,
    tick_step,
    tick_text,
    ticks_inside,
    widened,
)

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 44, 428, 34, 212
_DOTS_UP_TO, _DOTS_IN_ALL = 30, 90
STYLES = 8
_LEGEND_STEP = 104


#: A place on an axis and its words.
Tick = tuple[float, str]


@dataclass(frozen=True, slots=True)
class Series:
    """One line.

    Attributes:
        name: its word in the legend.
        points: (x, y), finite, x ascending; a single one is drawn as a dot.
        style: 1 to 8, colour and dash in the style sheet, so one thing looks alike in all charts.
        whiskers: (x, low, high), an interval each.
    """

    name: str
    points: Sequence[Point]
    style: int = 1
    whiskers: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True, slots=True)
class Scale:
    """A range of values laid on a range of pixels."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)


def line_chart(
    key: str,
    title: str,
    description: str,
    series: Sequence[Series],
    x_label: str,
    x_from: float | None = None,
    whole_x: bool = False,
    x_ticks: Sequence[Tick] | None = None,
    legend: bool = True,
) -> Markup:
    """Lines over two axes.

    Args:
        key: makes the ids of this chart unique in its page.
        title: for screen readers, a few words.
        description: for screen readers, what the lines show.
        series: at least one point in all.
        x_label: written under the axis.
        x_from: where the x axis begins at the latest; None is the first point.
        whole_x: the x axis counts things, so no tick lies between two of them.
        x_ticks: places and words of the ticks, for an axis that is not linear.
        legend: whether the names stand above the lines.

    Returns:
        An <svg> element.
    """
    heights = [y for each in series for y in _heights(each)]
    starts = [x for each in series for x, _ in each.points]
    starts += [] if x_from is None else [x_from]
    x_low, x_high = widened(min(starts), max(starts))
    y_low, y_high = widened(min(heights), max(heights))
    y_step = tick_step(y_low, y_high)
    x_scale = Scale(x_low, x_high, LEFT, RIGHT)
    y_scale = Scale(*enclosing(y_low, y_high, y_step), BOTTOM, TOP)
    drawn = [each for each in series if each.points]
    dotted = sum(len(each.points) for each in drawn) <= _DOTS_IN_ALL
    parts = [
        *y_axis(y_scale, y_step),
        *x_axis(x_scale, x_ticks or _ticks(x_low, x_high, whole_x), x_label),
        *(_whiskers(each, x_scale, y_scale) for each in drawn if each.whiskers),
        *(_line(each, x_scale, y_scale, dotted) for each in drawn),
        *(_legend(drawn) if legend else ()),
    ]
    return svg(key, title, description, HEIGHT, parts)


def _heights(series: Series) -> list[float]:
    ends = [end for _, *ends in series.whiskers for end in ends]
    return [*ends, *(y for _, y in series.points)]


def _ticks(low: float, high: float, whole: bool) -> list[Tick]:
    step = tick_step(low, high, 6, whole)
    return [(tick, tick_text(tick, step)) for tick in ticks_inside(low, high, step)]


def y_axis(scale: Scale, step: float) -> list[Markup]:
    """Rules and numbers at the multiples of a step."""
    rows = [
        (scale(tick), tick_text(tick, step)) for tick in ticks_inside(scale.low, scale.high, step)
    ]
    rules = "".join(f"M{LEFT} {y:.1f}H{RIGHT}" for y, _ in rows)
    words = [
        Markup('<text x="{}" y="{:.1f}" class="end">{}</text>').format(LEFT - 7, y + 4, text)
        for y, text in rows
    ]
    return [Markup('<path class="grid" d="{}"/>').format(rules), *words]


def x_axis(scale: Scale, ticks: Sequence[Tick], label: str) -> list[Markup]:
    """The ticks' words and what the axis shows."""
    words = [
        Markup('<text x="{:.1f}" y="{}" class="mid">{}</text>').format(
            scale(tick), BOTTOM + 17, text
        )
        for tick, text in ticks
    ]
    middle = (LEFT + RIGHT) // 2
    name = Markup('<text x="{}" y="{}" class="mid label">{}</text>')
    return [*words, name.format(middle, HEIGHT - 4, label)]


def _line(series: Series, x_scale: Scale, y_scale: Scale, dotted: bool) -> Markup:
    places = [(x_scale(x), y_scale(y)) for x, y in thinned(series.points)]
    drawn = Markup("")
    if len(places) > 1:
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        drawn = Markup('<path class="line s{}" d="{}"/>').format(series.style, path)
    dot = Markup('<circle class="dot s{}" cx="{:.1f}" cy="{:.1f}" r="{}"/>')
    radius = 4 if len(places) == 1 else 2.2
    dots = places if dotted and len(places) <= _DOTS_UP_TO else places[-1:]
    return drawn + Markup("").join(dot.format(series.style, x, y, radius) for x, y in dots)


def _whiskers(series: Series, x_scale: Scale, y_scale: Scale) -> Markup:
    path = "".join(
        f"M{x_scale(x) - 4:.1f} {y_scale(low):.1f}h8m-4 0V{y_scale(high):.1f}m-4 0h8"
        for x, low, high in series.whiskers
    )
    return Markup('<path class="whisker" d="{}"/>').format(path)


def _legend(series: Sequence[Series]) -> list[Markup]:
    text = Markup('<text x="{}" y="18" class="label">{}</text>')
    starts = range(LEFT, LEFT + _LEGEND_STEP * len(series), _LEGEND_STEP)
    return [
        _swatch(each, start) + text.format(start + 28, each.name)
        for start, each in zip(starts, series, strict=True)
    ]


def _swatch(series: Series, start: int) -> Markup:
    if len(series.points) == 1:
        return Markup('<circle class="dot s{}" cx="{}" cy="14" r="4"/>').format(
            series.style, start + 18
        )
    return Markup('<path class="line s{}" d="M{} 14h22"/>').format(series.style, start)


def swatch(style: int) -> Markup:
    """A short line of a style, for a legend outside of a chart."""
    return Markup(
        '<svg viewBox="0 0 26 8" aria-hidden="true"><path class="line s{}" d="M2 4h22"/></svg>'
    ).format(style)


def svg(key: str, title: str, description: str, height: int, parts: Sequence[Markup]) -> Markup:
    """An <svg> element with its title and description; it takes the width of its place."""
    head = Markup(
        '<svg role="img" viewBox="0 0 {} {}" aria-labelledby="{key}-title {key}-desc">'
        '<title id="{key}-title">{}</title><desc id="{key}-desc">{}</desc>'
    ).format(WIDTH, height, title, description, key=key)
    return head + Markup("").join(parts) + Markup("</svg>")
