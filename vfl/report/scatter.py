"""Numbered points over two axes, with an area that is shaded and lines across."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from vfl.report.axes import enclosing, tick_step, tick_text, ticks_inside, widened
from vfl.report.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    Scale,
    Tick,
    svg,
    x_axis,
    y_axis,
)

_ROOM = 4  # of the y axis, below the top of a shaded area


@dataclass(frozen=True, slots=True)
class Point:
    """One point.

    Attributes:
        number: stands in it; empty for a plain dot.
        x, y: its place.
        style: 1 to 8, its colour.
    """

    number: str
    x: float
    y: float
    style: int = 2


@dataclass(frozen=True, slots=True)
class Area:
    """A shaded corner: from `left` to the right, below `top`."""

    left: float
    top: float


def scatter_chart(
    key: str,
    title: str,
    description: str,
    points: Sequence[Point],
    x_label: str,
    area: Area | None = None,
    lines: Sequence[tuple[float, str]] = (),
    x_ticks: Sequence[Tick] | None = None,
) -> Markup:
    """Points over two axes.

    Args:
        key: makes the ids of this chart unique in its page.
        title: for screen readers, a few words.
        description: for screen readers, what the points show.
        points: at least one.
        x_label: written under the axis.
        area: shaded.
        lines: heights that are drawn across, with their words.
        x_ticks: places on the x axis and their words; round numbers if not given.

    Returns:
        An <svg> element.
    """
    xs = [point.x for point in points] + ([area.left] if area else [])
    ys = [point.y for point in points] + [height for height, _ in lines]
    ys += [area.top - _ROOM] if area else []
    x_low, x_high = widened(min(xs), max(xs))
    y_low, y_high = widened(min(ys), max(ys))
    x_step, y_step = tick_step(x_low, x_high, 6), tick_step(y_low, y_high)
    x_scale = Scale(*enclosing(x_low, x_high, x_step), LEFT, RIGHT)
    y_scale = Scale(*enclosing(y_low, y_high, y_step), BOTTOM, TOP)
    places = ticks_inside(x_scale.low, x_scale.high, x_step)
    ticks = x_ticks or [(one, tick_text(one, x_step)) for one in places]
    parts = [
        *([_shaded(area, x_scale, y_scale)] if area else []),
        *y_axis(y_scale, y_step),
        *x_axis(x_scale, ticks, x_label),
        *(_across(y_scale(height), words) for height, words in lines),
        *(_point(point, x_scale, y_scale) for point in points),
    ]
    return svg(key, title, description, HEIGHT, parts)


def map_chart(key: str, title: str, description: str, points: Sequence[Point]) -> Markup:
    """Small plain dots without axes, for a map whose distances have no unit."""
    x_low, x_high = widened(min(one.x for one in points), max(one.x for one in points))
    y_low, y_high = widened(min(one.y for one in points), max(one.y for one in points))
    x_scale, y_scale = Scale(x_low, x_high, 8, RIGHT), Scale(y_low, y_high, HEIGHT - 8, 8)
    dot = Markup('<circle class="dot s{}" cx="{:.1f}" cy="{:.1f}" r="1.8"/>')
    dots = [dot.format(one.style, x_scale(one.x), y_scale(one.y)) for one in points]
    return svg(key, title, description, HEIGHT, dots)


def _shaded(area: Area, x_scale: Scale, y_scale: Scale) -> Markup:
    left, top = max(LEFT, x_scale(area.left)), max(TOP, y_scale(area.top))
    return Markup(
        '<rect class="safe" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>'
    ).format(left, top, RIGHT - left, max(0.0, BOTTOM - top))


def _across(height: float, words: str) -> Markup:
    return Markup(
        '<path class="whisker" stroke-dasharray="3 3" d="M{} {:.1f}H{}"/>'
        '<text x="{}" y="{:.1f}">{}</text>'
    ).format(LEFT, height, RIGHT, LEFT + 4, height - 4, words)


def _point(point: Point, x_scale: Scale, y_scale: Scale) -> Markup:
    x, y = x_scale(point.x), y_scale(point.y)
    if not point.number:
        return Markup('<circle class="dot s{}" cx="{:.1f}" cy="{:.1f}" r="3"/>').format(
            point.style, x, y
        )
    return Markup(
        '<circle class="dot s{}" cx="{:.1f}" cy="{:.1f}" r="7.5"/>'
        '<text class="mid inside" x="{:.1f}" y="{:.1f}">{}</text>'
    ).format(point.style, x, y, x, y + 3.6, point.number)
