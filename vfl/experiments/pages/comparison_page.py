"""The page of a comparison: which codecs nothing beats at their bytes, tables, and curves.

Curves show the score by epoch and by bytes, how often each unit is sent, and what alpha of
randomised top-k does: score (thesis figure 3.6), training loss and generalisation gap (3.7).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from vfl.config import CompareSettings
from vfl.core.registry import parse
from vfl.experiments import Estimate, GridFolder, Group, grouped, read_results, settings_of
from vfl.experiments.comparison_results import Epoch, Measured, tables, unfinished
from vfl.experiments.glance import of_comparison
from vfl.experiments.pages.charts import (
    STYLES,
    Drawing,
    Point,
    Series,
    line_drawing,
    powers,
    scatter_drawing,
    swatch,
    widened,
)
from vfl.experiments.tables import SHARES, bytes_text, list_text

#: A codec that sends this share of its units in an average row leaves none out.
_NEARLY_ALL = 0.99


@dataclass(frozen=True, slots=True)
class Panel:
    """The groups that stand in one chart: those of a level, and those that have none.

    Attributes:
        words: which variant and level, for the titles.
        groups: with a style each, the same in all charts.
    """

    words: str
    groups: Sequence[tuple[Group, int]]

    def title(self, words: str) -> str:
        """Of a chart of these groups."""
        return f"{words}, {self.words}" if self.words else words


def panels(groups: Sequence[Group]) -> list[Panel]:
    """What belongs into one chart each, in the order of the table."""
    methods = list(dict.fromkeys(group.method for group in groups))
    style = {method: 1 + (place + 1) % STYLES for place, method in enumerate(methods)}
    found = []
    for variant in dict.fromkeys(group.variant for group in groups):
        mine = [group for group in groups if group.variant == variant]
        for level in list(dict.fromkeys(group.level for group in mine if group.level)) or [""]:
            words = ", ".join(filter(None, (variant, f"at {level} %" if level else "")))
            shown = [(one, style[one.method]) for one in mine if one.level in ("", level)]
            found.append(Panel(words, shown))
    return found


def curves(groups: Sequence[Group], measure: str) -> Iterator[Drawing]:
    """The score by epoch and by bytes, and how often units are sent, as far as there is any."""
    word, words = score_word(measure), caption(measure, "validation rows")
    for panel in panels(groups):
        title = panel.title(f"{word} by epoch")
        yield from _drawn(title, words, _lines(panel, measure), "epoch", whole_x=True)
        lines = _lines(panel, measure, over_bytes=True)
        logarithms = [x for line in lines for x, _ in line.points] or [0.0]
        sizes = powers(10 ** min(logarithms), 10 ** max(logarithms))
        ticks = [(math.log10(value), bytes_text(value)) for value in sizes]
        label = "on the wire, both directions, logarithmic"
        yield from _drawn(panel.title(f"{word} by bytes"), words, lines, label, x_ticks=ticks)
        yield from usage(panel)


def usage(panel: Panel) -> Iterator[Drawing]:
    """In how many test rows each unit is sent, for codecs that leave units out."""
    shown = [
        (group, style)
        for group, style in panel.groups
        if any(one.nonzeros < _NEARLY_ALL * one.units for one in group.trained)
    ]
    lines = [Series(one.codec, _sorted_shares(one.trained), style) for one, style in shown]
    title = panel.title("How often each unit is sent")
    words = "percent of test rows, units in order of use, mean over repeats"
    for drawing in _drawn(title, words, lines, "unit", whole_x=True):
        yield replace(drawing, legend=[(swatch(style), _never(one)) for one, style in shown])


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


def _lines(panel: Panel, measure: str, over_bytes: bool = False) -> list[Series]:
    factor = percent(measure)

    def figure(epoch: Epoch) -> float | None:
        return None if epoch.score is None else factor * epoch.score

    return [
        Series(one.codec, mean_by_epoch(one, figure, over_bytes), style)
        for one, style in panel.groups
    ]


def _sorted_shares(trained: Sequence[Measured]) -> list[tuple[float, float]]:
    each = [
        [100 * count / one.test_rows for count in sorted(one.usage, reverse=True)]
        for one in trained
    ]
    return [(unit, statistics.fmean(rank)) for unit, rank in enumerate(zip(*each, strict=True), 1)]


def _never(group: Group) -> str:
    """A codec, and how many units no test row sends."""
    never = group.mean(lambda one: one.never_sent)
    units = group.mean(lambda one: one.units)
    return f"{group.codec}, {never:.3g} of {units:.3g} never"


def _drawn(
    title: str, words: str, lines: Sequence[Series], x_label: str, **axis: Any
) -> Iterator[Drawing]:
    """A drawing of the lines that have points, if there are any."""
    if lines := [line for line in lines if line.points]:
        yield line_drawing(title, words, lines, x_label, **axis)


_BEST, _OTHER = 1, 2
#: Points of the score; a codec further below the best one is no choice, and would flatten the rest.
_NEAR = 10.0


@dataclass(frozen=True, slots=True)
class CodecPoint:
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
    for variant in dict.fromkeys(group.variant for group in groups):
        placed = [one for group in groups if group.variant == variant for one in _placed(group)]
        near = [one for one in placed if one.score >= max(other.score for other in placed) - _NEAR]
        if len(near) > 1:
            yield _frontier_drawing(near, measure, variant)


def frontier(placed: Sequence[CodecPoint]) -> list[CodecPoint]:
    """Those with a higher score than all that send as much or less, by bytes."""
    best: list[CodecPoint] = []
    for one in sorted(placed, key=lambda one: (one.share, -one.score)):
        if not best or one.score > best[-1].score:
            best.append(one)
    return best


def _placed(group: Group) -> Iterator[CodecPoint]:
    forward = group.mean(lambda one: one.forward_ratio)
    backward = group.mean(lambda one: one.backward_ratio)
    if group.score is not None and forward is not None and backward is not None:
        yield CodecPoint(group, 50 * (forward + backward), 100 * group.score.mean)


def _frontier_drawing(placed: Sequence[CodecPoint], measure: str, variant: str) -> Drawing:
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
    shares = [one.share for one in placed]
    low, high = widened(min(shares), max(shares))
    words = f"{score_word(measure)} by bytes, all codecs"
    return scatter_drawing(
        f"{words}, {variant}" if variant else words,
        f"percent, test rows, mean over repeats, within {_NEAR:g} points of the best; numbered: "
        "nothing that sends less is better",
        "Best at their bytes: " + "; ".join(words for _, words in legend) + ".",
        points,
        "percent of dense float32, both directions, logarithmic",
        legend=legend,
        x_ticks=[(math.log10(share), f"{share:g} %") for share in powers(low, high)],
    )


def _number(number: int) -> Markup:
    """A point of the chart, for its legend."""
    return Markup(
        '<svg viewBox="0 0 26 16" aria-hidden="true">'
        '<circle class="dot s{}" cx="13" cy="8" r="7.5"/>'
        '<text class="mid inside" x="13" y="11.6">{}</text></svg>'
    ).format(_BEST, number)


_RANDOM, _PLAIN = "randtopk", "topk"


@dataclass(frozen=True, slots=True)
class Family:
    """Codecs that differ in alpha alone.

    Attributes:
        name: what they share.
        members: by alpha; plain top-k is alpha = 0.
        style: of its line.
    """

    name: str
    members: dict[float, Group]
    style: int


def families(groups: Sequence[Group]) -> list[Family]:
    """The families with at least two of randomised top-k, or one and plain top-k."""
    from vfl.compression import CODECS  # needs torch, which a page without alpha does not

    found: dict[tuple[str, ...], dict[float, Group]] = {}
    plain: dict[tuple[str, ...], Group] = {}
    for group in groups:
        name, given = parse(group.codec)
        if name == _PLAIN:
            plain[(group.variant, *_shared(given))] = group
        elif name == _RANDOM:
            known = {key: str(one.default) for key, one in CODECS.options(name).items()} | given
            key = (group.variant, f"law={known['law']}", *_shared(given))
            found.setdefault(key, {})[float(known["alpha"])] = group
    for (variant, _, *shared), members in found.items():
        if beside := plain.get((variant, *shared)):
            members.setdefault(0.0, beside)
    first = 2 if len({law for _, law, *_ in found}) == 1 else 1  # a single law needs no name
    several = [(key, members) for key, members in found.items() if len(members) > 1]
    return [
        Family(", ".join(filter(None, (key[0], *key[first:]))), members, 1 + (place + 1) % STYLES)
        for place, (key, members) in enumerate(several)
    ]


def alpha_drawings(groups: Sequence[Group], measure: str) -> Iterator[Drawing]:
    """Charts over alpha, and over epochs for each; none where no codecs differ in it alone."""
    known = [one for one in families(groups) if any(m.trained for m in one.members.values())]
    if not known:
        return
    bars = "; bars: 95 % intervals"
    score = [_series(one, lambda group: group.score, percent(measure)) for one in known]
    words = caption(measure, "test rows") + bars
    yield from _drawn(f"{score_word(measure)} by alpha", words, score, "alpha")
    losses = [_series(one, lambda group: group.over(lambda cell: cell.train_loss)) for one in known]
    words = "with the draws of training, mean over repeats"
    yield from _drawn("Training loss by alpha", words + bars, losses, "alpha")
    gaps = [_series(one, lambda group: group.over(gap), percent(measure)) for one in known]
    beside = caption(measure, "training rows less test rows, without draws") + bars
    yield from _drawn("Generalisation gap by alpha", beside, gaps, "alpha")
    for family in known:
        lines = [
            Series(
                f"alpha = {alpha:g}",
                mean_by_epoch(group, lambda epoch: epoch.train_loss),
                1 + (place + 1) % STYLES,
            )
            for place, (alpha, group) in enumerate(sorted(family.members.items()))
        ]
        title = f"Training loss by epoch, {family.name}"
        yield from _drawn(title, words, lines, "epoch", whole_x=True)


def gap(one: Measured) -> float | None:
    """The score of the training rows less that of the test rows."""
    if one.train_score is None or one.score is None:
        return None
    return one.train_score - one.score


def _series(
    family: Family, figure: Callable[[Group], Estimate | None], scale: float = 1.0
) -> Series:
    found = [(alpha, figure(group)) for alpha, group in sorted(family.members.items())]
    known = [(alpha, one) for alpha, one in found if one is not None]
    whiskers = [
        (alpha, scale * one.low, scale * one.high)
        for alpha, one in known
        if one.half_width is not None
    ]
    points = [(alpha, scale * one.mean) for alpha, one in known]
    return Series(family.name, points, family.style, whiskers)


def _shared(given: dict[str, str]) -> list[str]:
    """The options that plain and randomised top-k both have, as they are spelt."""
    return sorted(f"{key}={value}" for key, value in given.items() if key not in ("alpha", "law"))


def comparison_page(folder: GridFolder) -> dict[str, Any]:
    """What the template of a comparison prints, from what its cells hold.

    Raises:
        RunFolderError: a file of it is damaged.
    """
    settings = settings_of(folder.experiment())
    results = read_results(folder)
    groups = grouped(results, settings.reference)
    quality, work = tables(settings, groups)
    whole = sum(one.measured is not None for one in results)
    return {
        "glance": of_comparison(settings, groups),
        "count": f"{whole} trainings",
        "sentence": _sentence(settings, groups),
        "notes": [*folder.head("notes"), *unfinished(results)],
        "best": list(frontiers(groups, settings.measure)),
        "quality": quality,
        "work": work,
        "drawings": [
            *curves(groups, settings.measure),
            *alpha_drawings(groups, settings.measure),
        ],
    }


def _sentence(settings: CompareSettings, groups: Sequence[Group]) -> str:
    methods = len({group.method for group in groups})
    repeats = len(settings.repeats)
    times = f"{repeats} {'folds' if settings.folds else 'seeds'}" if repeats > 1 else "one seed"
    levels = list_text(tuple(f"{level:g} %" for level in settings.levels), shown=8)
    matched = (
        f" The number behind each ? is the largest whose training frames take at most {levels} of "
        "dense float32 on the way to the label party."
        if levels
        else ""
    )
    return f"{methods} codecs, each trained on {times}.{matched}"
