"""Which codecs nothing beats at their bytes: the first drawing of a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from vfl.grid import Group
from vfl.grid.results import SHARES
from vfl.report.axes import powers, widened
from vfl.report.charts import Tick
from vfl.report.compare_curves import score_word
from vfl.report.parts import Drawing
from vfl.report.scatter import Point, scatter_chart

_BEST, _OTHER = 1, 2
#: Points of the score; a codec further below the best one is no choice, and would flatten the rest.
_NEAR = 10.0


@dataclass(frozen=True, slots=True)
class Placed:
    """A codec with its bytes and its score.

    Attributes:
        group: the codec.
        share: of dense float32, mean of both directions, percent.
        score: mean over the repeats, percent.
    """

    group: Group
    share: float
    score: float


def frontiers(groups: Sequence[Group], measure: str) -> Iterator[Drawing]:
    """One drawing a variant, for scores that are shares; others may be better when lower."""
    if measure not in SHARES:
        return
    for number, variant in enumerate(dict.fromkeys(group.variant for group in groups)):
        placed = [one for group in groups if group.variant == variant for one in _placed(group)]
        near = [one for one in placed if one.score >= max(other.score for other in placed) - _NEAR]
        if len(near) > 1:
            yield _drawing(near, measure, variant, f"frontier-{number}")


def frontier(placed: Sequence[Placed]) -> list[Placed]:
    """Those with a higher score than all that send as much or less, by bytes."""
    best: list[Placed] = []
    for one in sorted(placed, key=lambda one: (one.share, -one.score)):
        if not best or one.score > best[-1].score:
            best.append(one)
    return best


def _placed(group: Group) -> Iterator[Placed]:
    forward = group.mean(lambda one: one.forward_ratio)
    backward = group.mean(lambda one: one.backward_ratio)
    if group.score is not None and forward is not None and backward is not None:
        yield Placed(group, 50 * (forward + backward), 100 * group.score.mean)


def _drawing(placed: Sequence[Placed], measure: str, variant: str, key: str) -> Drawing:
    best = frontier(placed)
    others = [one for one in placed if one not in best]
    points = [Point("", math.log10(one.share), one.score, _OTHER) for one in others]
    points += [
        Point(str(number), math.log10(one.share), one.score, _BEST)
        for number, one in enumerate(best, 1)
    ]
    legend = [
        (_number(number), f"{one.group.codec}: {one.score:.1f} % at {one.share:.2f} %")
        for number, one in enumerate(best, 1)
    ]
    words = f"{score_word(measure)} by bytes, all codecs"
    title = f"{words}, {variant}" if variant else words
    chart = scatter_chart(
        key,
        title,
        "Best at their bytes: " + "; ".join(words for _, words in legend) + ".",
        points,
        "percent of dense float32, both directions, logarithmic",
        x_ticks=_ticks([one.share for one in placed]),
    )
    caption = (
        f"percent, test rows, mean over repeats, within {_NEAR:g} points of the best; numbered: "
        "nothing that sends less is better"
    )
    return Drawing(title, caption, chart, legend)


def _ticks(shares: Sequence[float]) -> list[Tick]:
    low, high = widened(min(shares), max(shares))
    return [(math.log10(share), f"{share:g} %") for share in powers(low, high)]


def _number(number: int) -> Markup:
    """A point of the chart, for its legend."""
    return Markup(
        '<svg viewBox="0 0 26 16" aria-hidden="true">'
        '<circle class="dot s{}" cx="13" cy="8" r="7.5"/>'
        '<text class="mid inside" x="13" y="11.6">{}</text></svg>'
    ).format(_BEST, number)
