"""Horizontal bars: one row a party, one segment a direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from vfl.report.charts import WIDTH, svg

ROW, BAR = 50, 16
LEFT, RIGHT = 4, WIDTH - 4


@dataclass(frozen=True, slots=True)
class Bar:
    """One row.

    Attributes:
        name: its label, shortened where it is long.
        values: lengths of its segments, not negative.
        text: what is written at its end.
    """

    name: str
    values: Sequence[float]
    text: str


def bar_chart(key: str, title: str, description: str, bars: Sequence[Bar]) -> Markup:
    """Stacked bars on one scale; segment n has style n + 1.

    Returns:
        An <svg> element as high as its bars need.
    """
    longest = max((sum(bar.values) for bar in bars), default=0) or 1
    rows = [_row(bar, ROW * position, longest) for position, bar in enumerate(bars)]
    return svg(key, title, description, ROW * len(bars), rows)


def _row(bar: Bar, top: int, longest: float) -> Markup:
    words = Markup(
        '<text x="{}" y="{}" class="label">{}</text><text x="{}" y="{}" class="end">{}</text>'
    ).format(LEFT, top + 14, shortened(bar.name), RIGHT, top + 14, bar.text)
    segment = Markup('<rect class="bar s{}" x="{:.1f}" y="{}" width="{:.1f}" height="{}"/>')
    start, drawn = float(LEFT), words
    for style, value in enumerate(bar.values, 1):
        length = (RIGHT - LEFT) * value / longest
        drawn += segment.format(style, start, top + 20, length, BAR)
        start += length
    return drawn


def shortened(name: str, most: int = 36) -> str:
    """A name that fits its row.

    >>> shortened("left"), shortened("a-very-long-name", most=8)
    ('left', 'a-very-…')
    """
    return name if len(name) <= most else f"{name[: most - 1]}…"
