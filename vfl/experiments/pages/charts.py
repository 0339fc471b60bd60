"""Charts as inline SVG without scripts or fonts; the page's style sheet sets the colours.

Every chart has a title and a description for screen readers, and each point shows its name as a
tooltip. Lines also differ in dash pattern, so that they can be distinguished on paper. The end of
this file has functions for positions of ticks on axes, and for thinning curves with many points.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from vfl.experiments.statistics import Estimate

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 44, 428, 34, 212
_DOTS_UP_TO, _DOTS_IN_ALL = 30, 90
STYLES = 8
_BAR_ROW, _BAR_HEIGHT = 50, 16
_BAR_LEFT, _BAR_RIGHT = 4, WIDTH - 4
_ROOM = 4  # in units of the y axis; how far a chart extends below the top of a shaded area

Position = tuple[float, float]

#: A position on an axis, and the text of the tick at this position.
Tick = tuple[float, str]


@dataclass(frozen=True, slots=True)
class Drawing:
    """A chart with its caption; the legend is a list of (line or dot sample, text)."""

    title: str
    caption: str
    chart: Markup
    legend: Sequence[tuple[Markup, str]] = ()


@dataclass(frozen=True, slots=True)
class Series:
    """One line.

    Attributes:
        name: text of the line's entry in the legend.
        points: points (x, y) of the line, finite, with x in ascending order; a line with a single
            point is drawn as a dot.
        style: number from 1 to 8 that selects colour and dash pattern in the style sheet; a codec
            or attack has the same style in all charts.
        whiskers: intervals of the points, as (x, low, high).
    """

    name: str
    points: Sequence[Position]
    style: int = 1
    whiskers: Sequence[tuple[float, float, float]] = ()

    @classmethod
    def of(
        cls,
        name: str,
        found: Iterable[tuple[float, Estimate | None]],
        style: int,
        factor: float = 1.0,
    ) -> Series:
        """Return a line through estimates, with their intervals; unknown estimates are left out.

        Args:
            name: text of the line's entry in the legend.
            found: pairs of x and estimate.
            style: see `Series`.
            factor: factor by which the estimates are multiplied.
        """
        known = [(x, one) for x, one in found if one is not None]
        whiskers = [
            (x, factor * one.low, factor * one.high)
            for x, one in known
            if one.half_width is not None
        ]
        return cls(name, [(x, factor * one.mean) for x, one in known], style, whiskers)


@dataclass(frozen=True, slots=True)
class Scale:
    """Linear map from a range of values to a range of pixel positions."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        """Return the pixel position of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)


def line_drawing(
    title: str,
    caption: str,
    lines: Sequence[Series],
    x_label: str,
    description: str = "",
    *,
    x_from: float | None = None,
    whole_x: bool = False,
    x_ticks: Sequence[Tick] | None = None,
) -> Drawing:
    """Draw lines in a chart with two axes; the legend contains the lines' names.

    Args:
        title: title of the chart: a few words.
        caption: caption of the chart, which explains the y axis.
        lines: lines to draw, of which at least one has a point.
        x_label: text under the x axis.
        description: text about the lines for screen readers; by default it states the last value of
            each line.
        x_from: largest value at which the x axis may start; None starts at the first point.
        whole_x: whether x is a count, so that its ticks are integers.
        x_ticks: positions and texts of the ticks on the x axis, for a non-linear axis.
    """
    drawn = [each for each in lines if each.points]
    xs = [x for each in drawn for x, _ in each.points] + ([] if x_from is None else [x_from])
    ys = [y for each in drawn for _, y in each.points]
    ys += [end for each in drawn for _, *ends in each.whiskers for end in ends]
    x_range = widened(min(xs), max(xs))
    x_ticks = x_ticks or _ticks(*x_range, tick_step(*x_range, 6, whole_x))
    x_scale, y_scale, axes = _axes(x_range, ys, x_label, x_ticks)
    dotted = sum(len(each.points) for each in drawn) <= _DOTS_IN_ALL
    parts = [
        *axes,
        *(_whiskers(each, x_scale, y_scale) for each in drawn if each.whiskers),
        *(_line(each, x_scale, y_scale, dotted, dict(x_ticks)) for each in drawn),
    ]
    legend = [(swatch(line.style), line.name) for line in drawn]
    return Drawing(title, caption, svg(title, description or f"{ends_of(drawn)}.", parts), legend)


def _axes(
    x_range: tuple[float, float],
    ys: Sequence[float],
    x_label: str,
    x_ticks: Sequence[Tick],
) -> tuple[Scale, Scale, list[Markup]]:
    """Return scales and markup of both axes; the y axis begins and ends at a grid line."""
    y_low, y_high = widened(min(ys), max(ys))
    y_step = tick_step(y_low, y_high)
    x_scale = Scale(*x_range, LEFT, RIGHT)
    y_scale = Scale(*enclosing(y_low, y_high, y_step), BOTTOM, TOP)
    rows = [(y_scale(one), text) for one, text in _ticks(y_scale.low, y_scale.high, y_step)]
    rules = "".join(f"M{LEFT} {y:.1f}H{RIGHT}" for y, _ in rows)
    number = Markup('<text x="{}" y="{:.1f}" class="end">{}</text>')
    word = Markup('<text x="{:.1f}" y="{}" class="mid">{}</text>')
    name = Markup('<text x="{}" y="{}" class="mid label">{}</text>')
    return (
        x_scale,
        y_scale,
        [
            Markup('<path class="grid" d="{}"/>').format(rules),
            *(number.format(LEFT - 7, y + 4, text) for y, text in rows),
            *(word.format(x_scale(tick), BOTTOM + 17, text) for tick, text in x_ticks),
            name.format((LEFT + RIGHT) // 2, HEIGHT - 4, x_label),
        ],
    )


def _ticks(low: float, high: float, step: float) -> list[Tick]:
    return [(tick, tick_text(tick, step)) for tick in ticks_inside(low, high, step)]


def _line(
    series: Series, x_scale: Scale, y_scale: Scale, dotted: bool, words: Mapping[float, str]
) -> Markup:
    shown = list(thinned(series.points))
    locations = [(x_scale(x), y_scale(y)) for x, y in shown]
    drawn = Markup("")
    if len(locations) > 1:
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in locations)
        drawn = Markup('<path class="line s{}" d="{}"/>').format(series.style, path)
    radius = 4 if len(locations) == 1 else 2.2
    dots = shown if dotted and len(locations) <= _DOTS_UP_TO else shown[-1:]
    spread = {x: f" ({low:.4g} to {high:.4g})" for x, low, high in series.whiskers}
    for x, y in dots:
        what = f"{series.name}, {words.get(x, f'{x:.4g}')}: {y:.4g}{spread.get(x, '')}"
        drawn += _dot(series.style, x_scale(x), y_scale(y), radius, what)
    return drawn


def _dot(style: int, x: float, y: float, radius: float, what: str) -> Markup:
    """Return the markup of a point with a tooltip."""
    said = Markup("<title>{}</title>").format(what) if what else ""
    dot = Markup('<circle class="dot s{}" cx="{:.1f}" cy="{:.1f}" r="{}">{}</circle>')
    return dot.format(style, x, y, radius, said)


def _whiskers(series: Series, x_scale: Scale, y_scale: Scale) -> Markup:
    path = "".join(
        f"M{x_scale(x) - 4:.1f} {y_scale(low):.1f}h8m-4 0V{y_scale(high):.1f}m-4 0h8"
        for x, low, high in series.whiskers
    )
    return Markup('<path class="whisker" d="{}"/>').format(path)


def swatch(style: int) -> Markup:
    """Return a short sample of a line style, for a legend."""
    return Markup(
        '<svg viewBox="0 0 26 8" aria-hidden="true"><path class="line s{}" d="M2 4h22"/></svg>'
    ).format(style)


def ends_of(lines: Sequence[Series], digits: str = ".4g") -> str:
    """Return the last value of each line, for readers who cannot see the chart."""
    return "; ".join(f"{line.name} ends at {line.points[-1][1]:{digits}}" for line in lines)


def svg(title: str, description: str, parts: Sequence[Markup], height: int = HEIGHT) -> Markup:
    """Return an <svg> element with title and description, which fills its container's width."""
    head = Markup('<svg role="img" viewBox="0 0 {} {}"><title>{}</title><desc>{}</desc>')
    return (
        head.format(WIDTH, height, title, description) + Markup("").join(parts) + Markup("</svg>")
    )


def dot_swatch(style: int) -> Markup:
    """Return a sample of a dot style, for a legend."""
    dot = Markup('<circle class="dot s{}" cx="13" cy="4" r="3.2"/>').format(style)
    return Markup('<svg viewBox="0 0 26 8" aria-hidden="true">{}</svg>').format(dot)


#: Width in pixels of a chart that is stored as a file, and the width of the legend beside the
#: chart.
_ALONE, _LEGEND = 980, 200


def standalone(drawing: Drawing) -> str:
    """Return a chart as an SVG file, with caption along the y axis and legend on the right."""
    style = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    head = '<svg role="img" viewBox="0 0 {} {}">'
    chart, begin = str(drawing.chart), head.format(WIDTH, HEIGHT)
    assert chart.startswith(begin), "only charts of the usual size are supported"
    placed = Markup('<g transform="translate({} {})">{}</g><text x="{}" y="{}">{}</text>')
    legend = Markup("").join(
        placed.format(
            WIDTH, TOP + 20 * place,
            Markup(str(swatch).replace("<svg ", '<svg width="26" height="8" ', 1)),
            WIDTH + 32, TOP + 7 + 20 * place, words,
        )
        for place, (swatch, words) in enumerate(drawing.legend)
    )  # fmt: skip
    alone = head.format(WIDTH + _LEGEND, HEIGHT).replace(
        "<svg ", f'<svg xmlns="http://www.w3.org/2000/svg" width="{_ALONE}" ', 1
    )
    inside = chart.removeprefix(begin).removesuffix("</svg>")
    turned = Markup('<text class="mid label" transform="translate(12 {}) rotate(-90)">{}</text>')
    heights = turned.format((TOP + BOTTOM) // 2, drawing.caption)
    return f"{alone}<style>{style}</style>{inside}{heights}{legend}</svg>"


@dataclass(frozen=True, slots=True)
class Bar:
    """One row.

    Attributes:
        name: label of the bar; a long label is shortened.
        values: lengths of the bar's segments in the bars' unit, each at least 0.
        text: text behind the end of the bar.
    """

    name: str
    values: Sequence[float]
    text: str


def bar_drawing(title: str, caption: str, bars: Sequence[Bar]) -> Drawing:
    """Draw stacked bars on one scale; in every bar, segment n has style n + 1."""
    longest = max((sum(bar.values) for bar in bars), default=0) or 1
    words = Markup(
        '<text x="{}" y="{}" class="label">{}</text><text x="{}" y="{}" class="end">{}</text>'
    )
    segment = Markup('<rect class="bar s{}" x="{:.1f}" y="{}" width="{:.1f}" height="{}"/>')
    parts = []
    for position, bar in enumerate(bars):
        top, start = _BAR_ROW * position, float(_BAR_LEFT)
        parts.append(
            words.format(_BAR_LEFT, top + 14, shortened(bar.name), _BAR_RIGHT, top + 14, bar.text)
        )
        for style, value in enumerate(bar.values, 1):
            length = (_BAR_RIGHT - _BAR_LEFT) * value / longest
            parts.append(segment.format(style, start, top + 20, length, _BAR_HEIGHT))
            start += length
    description = "; ".join(f"{bar.name} {bar.text}" for bar in bars)
    return Drawing(title, caption, svg(title, description, parts, _BAR_ROW * len(bars)))


def shortened(name: str, most: int = 36) -> str:
    """Return a bar's name, shortened to fit the width of a bar.

    >>> shortened("left"), shortened("a-very-long-name", most=8)
    ('left', 'a-very-…')
    """
    return name if len(name) <= most else f"{name[: most - 1]}…"


@dataclass(frozen=True, slots=True)
class Point:
    """One point.

    Attributes:
        number: number to draw in the point's dot; empty for a plain dot.
        x, y: its place.
        style: colour style from 1 to 8; style 0 is the colour of text.
        what: text of the tooltip at the dot.
        x_half, y_half: half-width of the point's interval in each direction, drawn as whiskers; 0
            draws none.
    """

    number: str
    x: float
    y: float
    style: int = 2
    what: str = ""
    x_half: float = 0.0
    y_half: float = 0.0


@dataclass(frozen=True, slots=True)
class Area:
    """A shaded corner of a chart: all positions right of `left` and below `top`."""

    left: float
    top: float


def scatter_drawing(
    title: str,
    caption: str,
    description: str,
    points: Sequence[Point],
    x_label: str,
    *,
    legend: Sequence[tuple[Markup, str]] = (),
    area: Area | None = None,
    lines: Sequence[tuple[float, str]] = (),
    x_ticks: Sequence[Tick] | None = None,
    through: Sequence[Position] = (),
) -> Drawing:
    """Draw points in a chart with two axes.

    Args:
        title: title of the chart: a few words.
        caption: caption of the chart, which explains the y axis.
        description: text about the points for screen readers.
        points: points to draw, at least one.
        x_label: text under the x axis.
        legend: legend of the chart.
        area: shaded.
        lines: values of y at which the chart has a horizontal line, each with the line's text.
        x_ticks: positions and texts of the ticks on the x axis; by default round numbers.
        through: corner points of a line behind the points.
    """
    xs = [point.x + side * point.x_half for point in points for side in (-1, 1)]
    xs += [area.left] if area else []
    ys = [point.y + side * point.y_half for point in points for side in (-1, 1)]
    ys += [height for height, _ in lines]
    ys += [area.top - _ROOM] if area else []
    x_low, x_high = widened(min(xs), max(xs))
    x_step = tick_step(x_low, x_high, 6)
    around = enclosing(x_low, x_high, x_step)
    x_scale, y_scale, axes = _axes(around, ys, x_label, x_ticks or _ticks(*around, x_step))
    parts = [] if area is None else [_shaded(area, x_scale, y_scale)]
    parts += axes
    places = [(x_scale(point.x), y_scale(point.y)) for point in points]
    parts += [_across(y_scale(height), words, places) for height, words in lines]
    if through:
        corners = "L".join(f"{x_scale(x):.1f} {y_scale(y):.1f}" for x, y in through)
        parts.append(Markup('<path class="line s2" d="M{}"/>').format(corners))
    parts += [_spread(point, x_scale, y_scale) for point in points if point.x_half or point.y_half]
    parts += [_point(point, x_scale, y_scale) for point in points]
    return Drawing(title, caption, svg(title, description, parts), legend)


def map_drawing(title: str, caption: str, points: Sequence[Point]) -> Drawing:
    """Draw small dots without axes, for a map (such as t-SNE) whose coordinates have no unit."""
    x_low, x_high = widened(min(one.x for one in points), max(one.x for one in points))
    y_low, y_high = widened(min(one.y for one in points), max(one.y for one in points))
    x_scale, y_scale = Scale(x_low, x_high, 8, RIGHT), Scale(y_low, y_high, HEIGHT - 8, 8)
    dot = Markup('<circle class="dot s{}" cx="{:.1f}" cy="{:.1f}" r="1.8"/>')
    dots = [dot.format(one.style, x_scale(one.x), y_scale(one.y)) for one in points]
    return Drawing(title, caption, svg(title, caption, dots))


def _shaded(area: Area, x_scale: Scale, y_scale: Scale) -> Markup:
    left, top = max(LEFT, x_scale(area.left)), max(TOP, y_scale(area.top))
    return Markup(
        '<rect class="safe" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>'
    ).format(left, top, RIGHT - left, max(0.0, BOTTOM - top))


def _across(height: float, words: str, places: Sequence[Position]) -> Markup:
    """Return a horizontal line with a text, at the line's left end unless more points are there."""
    near = [x for x, y in places if abs(y - (height - 7)) < 14]
    at_left = sum(x < LEFT + 110 for x in near) <= sum(x > RIGHT - 110 for x in near)
    x, anchor = (LEFT + 4, "") if at_left else (RIGHT - 4, "end")
    return Markup(
        '<path class="whisker" stroke-dasharray="3 3" d="M{} {:.1f}H{}"/>'
        '<text class="{}" x="{}" y="{:.1f}">{}</text>'
    ).format(LEFT, height, RIGHT, anchor, x, height - 4, words)


def _point(point: Point, x_scale: Scale, y_scale: Scale) -> Markup:
    x, y = x_scale(point.x), y_scale(point.y)
    if not point.number:
        return _dot(point.style, x, y, 3, point.what)
    number = Markup('<text class="mid inside" x="{:.1f}" y="{:.1f}">{}</text>')
    return _dot(point.style, x, y, 7.5, point.what) + number.format(x, y + 3.6, point.number)


def _spread(point: Point, x_scale: Scale, y_scale: Scale) -> Markup:
    left, right = (x_scale(point.x + side * point.x_half) for side in (-1, 1))
    low, high = (y_scale(point.y + side * point.y_half) for side in (-1, 1))
    path = f"M{left:.1f} {y_scale(point.y):.1f}H{right:.1f}" if point.x_half else ""
    path += f"M{x_scale(point.x):.1f} {low:.1f}V{high:.1f}" if point.y_half else ""
    return Markup('<path class="whisker spread" d="{}"/>').format(path)


def tick_step(low: float, high: float, intervals: int = 5, whole: bool = False) -> float:
    """Return a round step (1, 2 or 5 times a power of ten) for about `intervals` intervals.

    >>> tick_step(0.0, 1.0), tick_step(1, 20, whole=True), tick_step(1, 3, whole=True)
    (0.2, 5.0, 1.0)

    Args:
        low: start of the range.
        high: end of the range, above `low`.
        intervals: largest number of intervals between ticks.
        whole: whether the step must be at least 1, for ticks at integers.
    """
    rough = (high - low) / intervals
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return max(1.0, step) if whole else step


def ticks_inside(low: float, high: float, step: float) -> list[float]:
    """Return the multiples of `step` in the range from low to high.

    >>> ticks_inside(1, 20, 5)
    [5, 10, 15, 20]
    """
    slack = 1e-9
    first, last = math.ceil(low / step - slack), math.floor(high / step + slack)
    return [step * position for position in range(first, last + 1)]


def enclosing(low: float, high: float, step: float) -> tuple[float, float]:
    """Return the smallest range of multiples of `step` that contains the given range.

    >>> enclosing(0.3, 1.7, 0.5)
    (0.0, 2.0)
    """
    slack = 1e-9
    return step * math.floor(low / step + slack), step * math.ceil(high / step - slack)


def widened(low: float, high: float, least: float = 1e-6) -> tuple[float, float]:
    """Return a non-empty range; a range with a single value is widened in both directions.

    >>> widened(2.0, 2.0), widened(0.0, 0.0)
    ((1.0, 3.0), (-0.5, 0.5))
    """
    if high - low > least * max(abs(low), abs(high)):
        return low, high
    room = abs(high) / 2 or 0.5
    return low - room, high + room


def powers(low: float, high: float) -> list[float]:
    """Return powers of ten for a logarithmic axis; if few, also 2 and 5 times each power.

    >>> powers(800, 30_000), powers(1, 1e6)
    ([1000, 2000, 5000, 10000, 20000], [1, 10, 100, 1000, 10000, 100000, 1000000])

    Args:
        low: start of the range, larger than 0.
        high: end of the range.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    found = [factor * 10**power for power in range(first, last + 1) for factor in factors]
    return [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


def tick_text(value: float, step: float) -> str:
    """Return the text of a tick, with as many decimals as the step between ticks needs.

    >>> tick_text(0.6000000000000001, 0.2), tick_text(20, 5), tick_text(3e7, 1e7)
    ('0.6', '20', '3e+07')
    """
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if decimals > 4 or abs(value) >= 1e5:
        return f"{value:.3g}"
    text = f"{value:.{decimals}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def thinned(points: Sequence[Position], most: int = 200) -> list[Position]:
    """Return at most `most` points of a curve: minimum and maximum of each group of neighbours.

    >>> thinned([(0, 5), (1, 9), (2, 1), (3, 4), (4, 4), (5, 3), (6, 8), (7, 2)], most=4)
    [(1, 9), (2, 1), (6, 8), (7, 2)]
    """
    if len(points) <= most:
        return list(points)
    stretches = most // 2
    kept: list[Position] = []
    for number in range(stretches):
        start, stop = (len(points) * n // stretches for n in (number, number + 1))
        stretch = points[start:stop]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept
