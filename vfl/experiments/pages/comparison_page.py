"""The page of a comparison: the best codecs at each size of frames, tables, and curves.

The curves show the score by epoch and by bytes, and how often the codec sends each unit. For
randomised top-k, charts show the effect of the option alpha on the score (thesis figure 3.6), on
the training loss and on the generalisation gap (figure 3.7).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from markupsafe import Markup

from vfl.config import CompareSettings
from vfl.core.registry import parse
from vfl.core.traffic import size
from vfl.experiments.cells import settings_of
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
from vfl.experiments.pages.sections import Content, Section
from vfl.experiments.results import (
    ALL,
    LOWER_IS_BETTER,
    TEST,
    TRAIN,
    TRAINING,
    Line,
    LoadedGrid,
    bytes_to,
    usage_of,
)
from vfl.experiments.statistics import Estimate, judge
from vfl.experiments.tables import SHARES, Table, bytes_text, figures_of, list_text, score_text
from vfl.experiments.value import gains_over_alone

#: A codec counts as one that sends all units if its mean number of sent units per row is at least
#: this share of all units.
_NEARLY_ALL = 0.99


@dataclass(frozen=True, slots=True)
class Panel:
    """The codecs in one chart: codecs of one level (frame size), and codecs without a level.

    Attributes:
        words: variant and level of the codecs, for the chart's title.
        lines: result lines of the codecs with their style; a codec has the same style in all
            charts.
    """

    words: str
    lines: Sequence[tuple[Line, int]]

    def title(self, words: str) -> str:
        """Return the title of a chart with these codecs."""
        return f"{words}, {self.words}" if self.words else words


def panels(lines: Sequence[Line]) -> list[Panel]:
    """Return the groups of codecs, one group for each chart, in the order of the table."""
    methods = list(dict.fromkeys(line.about["method"] for line in lines))
    style = {method: 1 + (place + 1) % STYLES for place, method in enumerate(methods)}
    found = []
    for variant in dict.fromkeys(line.about["variant"] for line in lines):
        mine = [(line, line.about["level"]) for line in lines if line.about["variant"] == variant]
        for level in list(dict.fromkeys(level for _, level in mine if level)) or [""]:
            words = ", ".join(filter(None, (variant, f"at {level} %" if level else "")))
            shown = [(one, style[one.about["method"]]) for one, own in mine if own in ("", level)]
            found.append(Panel(words, shown))
    return found


def curves(lines: Sequence[Line], measure: str) -> Iterator[Drawing]:
    """Yield charts of the score by epoch and by bytes, and of how often codecs send each unit."""
    word, words = score_word(measure), caption(measure, "validation rows")
    for panel in panels(lines):
        title = panel.title(f"{word} by epoch")
        yield from _drawn(title, words, _curves(panel, measure), "epoch", whole_x=True)
        drawn = _curves(panel, measure, over_bytes=True)
        logarithms = [x for line in drawn for x, _ in line.points] or [0.0]
        sizes = powers(10 ** min(logarithms), 10 ** max(logarithms))
        ticks = [(math.log10(value), bytes_text(value)) for value in sizes]
        label = "on the wire, both directions, logarithmic"
        yield from _drawn(panel.title(f"{word} by bytes"), words, drawn, label, x_ticks=ticks)
        yield from usage(panel)


def usage(panel: Panel) -> Iterator[Drawing]:
    """Yield charts of the share of test rows with each unit, for codecs that drop units."""
    shown = [(line, style) for line, style in panel.lines if _leaves_out(line)]
    drawn = [Series(one.about["codec"], _sorted_shares(one), style) for one, style in shown]
    title = panel.title("How often each unit is sent")
    words = "percent of test rows, units in order of use, mean over repeats"
    for drawing in _drawn(title, words, drawn, "unit", whole_x=True):
        yield replace(drawing, legend=[(swatch(style), _never(one)) for one, style in shown])


def _leaves_out(line: Line) -> bool:
    sent, units = (line.values(name, ALL) for name in ("nonzeros", "units"))
    return any(sent[repeat] < _NEARLY_ALL * units[repeat] for repeat in sent)


def score_word(measure: str) -> str:
    """Return a measure's name, for the title of a chart."""
    return measure.replace("_", " ").capitalize()


def percent(measure: str) -> float:
    """Return the factor by which charts multiply scores of a measure."""
    return 100.0 if measure in SHARES else 1.0


def caption(measure: str, rows: str) -> str:
    """Return the unit of a measure's scores, and the rows on which the scores were measured."""
    return f"{'percent, ' if measure in SHARES else ''}{rows}, mean over repeats"


def mean_by_epoch(
    line: Line, figure: str, over_bytes: bool = False, factor: float = 1.0
) -> list[tuple[float, float]]:
    """Return the mean of a metric over repeats, for epochs that all repeats have completed.

    Args:
        line: results of the codec whose epochs are read.
        figure: name of a metric in `metrics.jsonl`. An epoch has no point if one of the repeats has
            no finite value in it.
        over_bytes: whether x is the logarithm of the mean bytes sent so far, instead of the epoch.
        factor: factor by which the metric's values are multiplied.
    """
    points = []
    for epochs in zip(*(run.epochs for run in line.runs.values()), strict=False):
        if found := [one[figure] for one in epochs if figure in one]:
            sent = statistics.fmean(one["sent"] for one in epochs) if over_bytes else 0.0
            x = math.log10(sent) if over_bytes else epochs[0]["epoch"]
            points.append((x, factor * statistics.fmean(found)))
    return points


def _curves(panel: Panel, measure: str, over_bytes: bool = False) -> list[Series]:
    figure, factor = f"validation_{measure}", percent(measure)
    return [
        Series(one.about["codec"], mean_by_epoch(one, figure, over_bytes, factor), style)
        for one, style in panel.lines
    ]


def _sorted_shares(line: Line) -> list[tuple[float, float]]:
    each = []
    for run in line.runs.values():
        parties = list(run.codec["parties"].values())
        rows = parties[0]["rows"]
        each.append([100 * count / rows for count in sorted(usage_of(parties), reverse=True)])
    return [(unit, statistics.fmean(rank)) for unit, rank in enumerate(zip(*each, strict=True), 1)]


def _never(line: Line) -> str:
    """Return a codec's name, and the number of units that it sends for no test row."""
    never, units = line.mean("never_sent", ALL), line.mean("units", ALL)
    return f"{line.about['codec']}, {never:.3g} of {units:.3g} never"


def _drawn(
    title: str, words: str, lines: Sequence[Series], x_label: str, **axis: Any
) -> Iterator[Drawing]:
    """Yield a chart with those lines that have points; yield nothing without such lines."""
    if lines := [line for line in lines if line.points]:
        yield line_drawing(title, words, lines, x_label, **axis)


_BEST, _OTHER = 1, 2
#: Largest distance in points from the best score; the chart leaves out codecs with a larger
#: distance, because they would flatten it.
_NEAR = 10.0


@dataclass(frozen=True, slots=True)
class CodecPoint:
    """A codec with its bytes and its score, as a point of the chart of score by bytes.

    Attributes:
        codec: its spec.
        share: sent bytes in percent of dense float32, as the mean of both directions.
        score: score in percent, as the mean over the repeats.
    """

    codec: str
    share: float
    score: float

    def __str__(self) -> str:
        return f"{self.codec}: {self.score:.1f} % at {self.share:.2f} %"


def frontiers(lines: Sequence[Line], measure: str) -> Iterator[Drawing]:
    """Yield a chart for each variant, if the measure is a share (higher is better)."""
    if measure not in SHARES:
        return
    for variant in dict.fromkeys(line.about["variant"] for line in lines):
        mine = [line for line in lines if line.about["variant"] == variant]
        placed = [one for line in mine for one in _placed(line, measure)]
        near = [one for one in placed if one.score >= max(other.score for other in placed) - _NEAR]
        if len(near) > 1:
            yield _frontier_drawing(near, measure, variant)


def frontier(placed: Sequence[CodecPoint]) -> list[CodecPoint]:
    """Return codecs that no codec with at most their bytes beats, ordered by bytes."""
    best: list[CodecPoint] = []
    for one in sorted(placed, key=lambda one: (one.share, -one.score)):
        if not best or one.score > best[-1].score:
            best.append(one)
    return best


def _placed(line: Line, measure: str) -> Iterator[CodecPoint]:
    if (score := line.mean(measure)) is not None:
        yield CodecPoint(line.about["codec"], line.sent_percent, 100 * score)


def _frontier_drawing(placed: Sequence[CodecPoint], measure: str, variant: str) -> Drawing:
    best = frontier(placed)
    others = [one for one in placed if one not in best]
    points = [Point("", math.log10(one.share), one.score, _OTHER, str(one)) for one in others]
    points += [
        Point(str(number), math.log10(one.share), one.score, _BEST, str(one))
        for number, one in enumerate(best, 1)
    ]
    legend = [(_number(number), str(one)) for number, one in enumerate(best, 1)]
    shares = [one.share for one in placed]
    low, high = widened(min(shares), max(shares))
    words = f"{score_word(measure)} by bytes, all codecs"
    return scatter_drawing(
        f"{words}, {variant}" if variant else words,
        f"percent, test rows, mean over repeats, within {_NEAR:g} points of the best; numbered: "
        "no codec that sends less is better",
        "Best at their bytes: " + "; ".join(words for _, words in legend) + ".",
        points,
        "percent of dense float32, both directions, logarithmic",
        legend=legend,
        x_ticks=[(math.log10(share), f"{share:g} %") for share in powers(low, high)],
    )


def _number(number: int) -> Markup:
    """Return the numbered dot of a chart's point, for the chart's legend."""
    return Markup(
        '<svg viewBox="0 0 26 16" aria-hidden="true">'
        '<circle class="dot s{}" cx="13" cy="8" r="7.5"/>'
        '<text class="mid inside" x="13" y="11.6">{}</text></svg>'
    ).format(_BEST, number)


_RANDOM, _PLAIN = "randtopk", "topk"


@dataclass(frozen=True, slots=True)
class Family:
    """Randomised top-k codecs that differ only in alpha.

    Attributes:
        name: part that the codecs' specs have in common.
        members: result lines by alpha; plain top-k has alpha = 0.
        style: style of the family's line; see `Series`.
    """

    name: str
    members: dict[float, Line]
    style: int


def families(lines: Sequence[Line]) -> list[Family]:
    """Return families with two values of alpha or more, including plain top-k (alpha 0)."""
    from vfl.compression import CODECS  # imported late, because the imported module needs torch

    found: dict[tuple[str, ...], dict[float, Line]] = {}
    plain: dict[tuple[str, ...], Line] = {}
    for line in lines:
        name, given = parse(line.about["codec"])
        if name == _PLAIN:
            plain[(line.about["variant"], *_shared(given))] = line
        elif name == _RANDOM:
            known = {key: str(one.default) for key, one in CODECS.options(name).items()} | given
            key = (line.about["variant"], f"law={known['law']}", *_shared(given))
            found.setdefault(key, {})[float(known["alpha"])] = line
    for (variant, _, *shared), members in found.items():
        if beside := plain.get((variant, *shared)):
            members.setdefault(0.0, beside)
    # the family's name contains the option `law` only if its values differ
    first = 2 if len({law for _, law, *_ in found}) == 1 else 1
    several = [(key, members) for key, members in found.items() if len(members) > 1]
    return [
        Family(", ".join(filter(None, (key[0], *key[first:]))), members, 1 + (place + 1) % STYLES)
        for place, (key, members) in enumerate(several)
    ]


def alpha_drawings(lines: Sequence[Line], measure: str) -> Iterator[Drawing]:
    """Draw charts over alpha, and over epochs for each alpha, if the comparison has such codecs."""
    known = [one for one in families(lines) if any(line.runs for line in one.members.values())]
    if not known:
        return
    bars = "; bars: 95 % intervals"
    score = [_series(one, lambda line: line.over(measure), percent(measure)) for one in known]
    words = caption(measure, "test rows") + bars
    yield from _drawn(f"{score_word(measure)} by alpha", words, score, "alpha")
    losses = [_series(one, lambda line: line.over("loss", TRAINING)) for one in known]
    words = "with training's random draws, mean over repeats"
    yield from _drawn("Training loss by alpha", words + bars, losses, "alpha")
    gaps = [_series(one, lambda line: gap(line, measure), percent(measure)) for one in known]
    beside = caption(measure, "training rows minus test rows, without random draws") + bars
    yield from _drawn("Generalisation gap by alpha", beside, gaps, "alpha")
    for family in known:
        by_epoch = [
            Series(
                f"alpha = {alpha:g}", mean_by_epoch(line, "train_loss"), 1 + (place + 1) % STYLES
            )
            for place, (alpha, line) in enumerate(sorted(family.members.items()))
        ]
        title = f"Training loss by epoch, {family.name}"
        yield from _drawn(title, words, by_epoch, "epoch", whole_x=True)


def gap(line: Line, measure: str) -> Estimate | None:
    """Return the score on training rows minus that on test rows, over repeats."""
    less = line.less(line, measure, TRAIN)
    return None if less is None else replace(less, mean=-less.mean)


def _series(
    family: Family, figure: Callable[[Line], Estimate | None], scale: float = 1.0
) -> Series:
    found = ((alpha, figure(line)) for alpha, line in sorted(family.members.items()))
    return Series.of(family.name, found, family.style, scale)


def _shared(given: dict[str, str]) -> list[str]:
    """Return the options that plain and randomised top-k have in common, as a spec has them."""
    return sorted(f"{key}={value}" for key, value in given.items() if key not in ("alpha", "law"))


def beside_method(lines: Sequence[Line], method: str) -> list[Line]:
    """Return result lines of a comparison; each is compared with the reference method's line.

    Args:
        lines: results of all codecs of the comparison.
        method: the codec that is the reference.
    """
    return [replace(one, reference=_reference(one, lines, method)) for one in lines]


def _reference(line: Line, lines: Sequence[Line], method: str) -> Line | None:
    if line.about["method"] == method:
        return None
    variant, level = line.about["variant"], line.about["level"]
    beside = [
        one for one in lines if (one.about["method"], one.about["variant"]) == (method, variant)
    ]
    if len(beside) == 1 and "" in (level, beside[0].about["level"]):
        return beside[0]
    return next((one for one in beside if one.about["level"] == level), None)


#: Texts of a table's cells by column heading, one text per line of the table.
Columns = dict[str, list[str]]


def codec_tables(
    settings: CompareSettings, lines: Sequence[Line], measure: str
) -> tuple[Table, Table]:
    """Return two tables: each codec's quality at its bytes, and the costs of sending a cut."""
    about: Columns = {"codec": [line.about["codec"] for line in lines]}
    if any(line.about["variant"] for line in lines):
        about = {"variant": [line.about["variant"] for line in lines], **about}
    if any(line.about["level"] for line in lines):
        levels = [line.about["level"] for line in lines]
        about["level"] = [f"{level} %" if level else "" for level in levels]

    def percent(name: str, subject: str = ALL) -> list[str]:
        return _written(lines, name, subject, lambda mean: f"{100 * mean:.2f} %")

    def number(name: str) -> list[str]:
        return _written(lines, name, ALL, lambda mean: f"{mean:.3g}")

    quality: Columns = {
        "formula": percent("formula_ratio", TRAINING),
        "forward": percent("wire_ratio_up", TRAINING),
        "backward": percent("wire_ratio_down", TRAINING),
        measure.replace("_", " "): [score_text(line.over(measure), measure) for line in lines],
    }
    if any(line.reference for line in lines):
        less = f"less {settings.reference}" + (", points" if measure in SHARES else "")
        quality[less] = [score_text(line.difference(measure), measure, "+") for line in lines]
        if measure in SHARES:
            quality["verdict"] = [verdict_on(line, measure) for line in lines]
    bound = "<=" if measure in LOWER_IS_BETTER else ">="
    for least in settings.accuracy:
        quality[f"bytes to {bound} {least:g}"] = [_bytes_text(line, least) for line in lines]
    quality["repeats"] = [f"{len(line.runs)} of {len(line.repeats)}" for line in lines]
    work: Columns = {
        "test frames": percent("frame_ratio"),
        "bound": percent("bound_ratio"),
        "encode ms": number("encode_ms"),
        "decode ms": number("decode_ms"),
        "values a row": number("nonzeros"),
        "units": number("units"),
        "never sent": number("never_sent"),
        "dead": number("dead_units"),
    }
    return _table(about | quality), _table(about | work)


def verdict_on(line: Line, measure: str) -> str:
    """Return the verdict on a codec compared with the reference; empty for the reference itself."""
    if line.reference is None or line.difference(measure) is None:
        return ""
    ours, theirs = line.values(measure), line.reference.values(measure)
    lost = [theirs[repeat] - ours[repeat] for repeat in ours if repeat in theirs]
    return judge(lost).words("as good", "worse", "repeats")


def _written(
    lines: Sequence[Line], name: str, subject: str, write: Callable[[float], str]
) -> list[str]:
    means = [line.mean(name, subject) for line in lines]
    return ["" if mean is None else write(mean) for mean in means]


def _table(columns: Columns) -> Table:
    rows = list(zip(*columns.values(), strict=True))
    return Table(list(columns), rows, words=1 + ("variant" in columns))


def _bytes_text(line: Line, least: float) -> str:
    """Return mean bytes until a score was reached, with the number of repeats that reached it.

    The mean is over the repeats that reached the score, so means are not comparable if some repeats
    did not.
    """
    found = line.values(bytes_to(least), TRAINING)
    if not found:
        return "never" if line.runs else ""
    text = size(statistics.fmean(found.values()))
    return text + ("" if len(found) == len(line.runs) else f" ({len(found)})")


def _codec_record(line: Line, settings: CompareSettings, measure: str) -> dict[str, Any]:
    reached = {f"{one:g}": line.values(bytes_to(one), TRAINING) for one in settings.accuracy}
    figures = {
        name: line.mean(name, subject)
        for subject, name in line.figures
        if subject in (TRAINING, ALL) and not name.startswith("bytes_to_")
    }
    return {
        **{key: line.about[key] for key in ("variant", "method", "codec", "level")},
        "repeats": len(line.runs),
        measure: figures_of(line.over(measure)),
        "difference": figures_of(line.difference(measure)),
        f"train_{measure}": line.mean(measure, TRAIN),
        "test_loss": line.mean("loss", TEST),
        "bytes_to": {
            least: {
                "bytes": statistics.fmean(found.values()) if found else None,
                "repeats": len(found),
            }
            for least, found in reached.items()
        },
        **figures,
    }


def comparison_page(grid: LoadedGrid) -> Content:
    """Return the content of a comparison's page."""
    settings, measure = settings_of(grid.experiment), grid.compared
    lines = beside_method(grid.lines(grid.current), settings.reference)
    quality, work = codec_tables(settings, lines, measure)
    sections = []
    if best := list(frontiers(lines, measure)):
        sections.append(Section(title="Best at their bytes", drawings=best))
    drawn = [*curves(lines, measure), *alpha_drawings(lines, measure)]
    absent = "" if drawn else "Not measured, because no cell is trained yet."
    sections += [
        Section(
            title="Quality at the number of bytes", tables=[quality], below=_OF_QUALITY, roomy=True
        ),
        Section(title="Cost of sending a cut", tables=[work], below=_OF_WORK, roomy=True),
        Section(title="Curves", drawings=drawn, below=absent),
    ]
    return Content(
        of_comparison(settings, lines, measure, partial(gains_over_alone, grid.path)),
        f"{sum(len(line.runs) for line in lines)} trainings",
        _sentence(settings, lines),
        [*grid.folder.head("notes"), *grid.unfinished],
        sections,
        (quality, work),
        {
            "measure": measure,
            "reference": settings.reference,
            "codecs": [_codec_record(line, settings, measure) for line in lines],
            "failed": {title: failure["what"] for title, failure in grid.failures.items()},
        },
    )


_OF_QUALITY = (
    "Sizes are shares of dense float32. Formula: size of a cut as published papers count it. "
    "Forward and backward: measured size of training frames with cuts and with gradients, headers "
    "included. After ±: half of a 95 % interval (Student's t) over the repeats; differences are "
    "taken repeat by repeat. Bytes to a score count both directions, and the validation rows, "
    "until the first epoch that reaches the score. If not all repeats reached it, the number of "
    "those that did is in brackets."
)
_OF_WORK = (
    "Measured on the cuts of the test rows, in frames as large as those of training. Bound: the "
    "smallest possible size for rows of this form. Times are for one frame in this process, on one "
    "thread. Values a row: values that are not zero after decoding. Never sent: units that are "
    "zero after decoding in every test row. Dead: units that are already zero before the codec in "
    "every test row."
)


def _sentence(settings: CompareSettings, lines: Sequence[Line]) -> str:
    methods = len({line.about["method"] for line in lines})
    repeats = len(settings.repeats)
    times = f"{repeats} {'folds' if settings.folds else 'seeds'}" if repeats > 1 else "one seed"
    levels = list_text(tuple(f"{level:g} %" for level in settings.levels), shown=8)
    matched = (
        f" Each ? stands for the largest number with which training frames with cuts take at most "
        f"{levels} of dense float32."
        if levels
        else ""
    )
    return f"{methods} codecs, each trained on {times}.{matched}"
