"""The page of `vfl value`: the scores of each party alone and of all together, and the cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from vfl.core.traffic import size
from vfl.experiments.glance import Card, Glance
from vfl.experiments.pages.charts import STYLES, Drawing, Series, line_drawing
from vfl.experiments.pages.sections import Content, Section
from vfl.experiments.results import LOWER_IS_BETTER, TRAINING, Line, LoadedGrid
from vfl.experiments.tables import (
    MEASURES,
    NOT_MEASURED,
    SHARES,
    Table,
    bytes_text,
    figures_of,
    score_text,
)
from vfl.experiments.value import BOOSTING, CENTRAL, SPLIT, measure_of

#: Smallest number of seeds for which the interval is not mainly due to Student's t quantile (2.8
#: for 5 seeds).
_ENOUGH_SEEDS = 5


def value_page(grid: LoadedGrid) -> Content:
    """Return the content of the page of a value study."""
    experiment = grid.experiment
    measure = measure_of(experiment)
    lines = value_lines(grid)
    trained = [line for line in lines if line.values(measure)]
    seeds = max((len(line.repeats) for line in lines), default=0)
    table = value_table(lines, measure)
    section = Section(
        title="Alone, split, and in one place",
        drawings=[_drawing(trained, measure)] if trained else [],
        tables=[table],
        roomy=True,
        below="All trainings use the rows that all parties have; for each seed, they use the same "
        "test rows. After ±: half of a 95 % interval over the seeds. Seeds have different test "
        "rows but overlapping training rows, so the interval is widened (Nadeau and Bengio "
        "2003). Differences are taken seed by seed. Gradient boosting is that of "
        "scikit-learn; the validation rows determine its number of trees. Bytes are those of "
        "a whole training, in both directions.",
    )
    said = value_sentences(lines, measure)
    trainings = [
        {
            "training": line.about["what"],
            measure: figures_of(line.over(measure)),
            "less_split": figures_of(line.difference(measure)),
            "scores": dict(line.values(measure)),
            "bytes": sent_by(line),
            "of_dense": share_of(line),
        }
        for line in lines
    ]
    return Content(
        _glance(lines, measure),
        f"{sum(len(line.values(measure)) for line in lines)} trainings",
        f"What {len(experiment.parties)} parties with columns reach alone and together, on the "
        f"rows that all of them share, over {seeds} seeds.",
        grid.unfinished,
        [section],
        [table],
        {"measure": measure, "trainings": trainings, "sentences": said},
        said,
    )


def value_lines(grid: LoadedGrid) -> list[Line]:
    """Return the kinds of training in the order of cells, each compared with split training."""
    found = []
    for line in grid.lines(grid.current):
        tested, learned = (line.mean(name, TRAINING) for name in ("test_rows", "train_rows"))
        found.append(replace(line, ratio=tested / learned if tested and learned else 0.0))
    split = next(line for line in found if line.about["what"] == SPLIT)
    return [one if one is split else replace(one, reference=split) for one in found]


def _is_alone(line: Line) -> bool:
    """Return whether a single party, or a stand-in for several, has all columns of a cell."""
    return bool(line.about["party"]) or line.about["what"] == CENTRAL


def sent_by(line: Line) -> float:
    """Return the bytes of a whole training, as a mean over seeds; 0 for a party's own training."""
    return 0.0 if _is_alone(line) else line.mean("bytes", TRAINING) or 0.0


def share_of(line: Line) -> float | None:
    """Return the mean size of frames relative to dense float32; None for a party's own training."""
    return None if _is_alone(line) else line.mean("wire_ratio", TRAINING)


def value_sentences(lines: Sequence[Line], measure: str) -> list[str]:
    """Return sentences with the main findings, which follow from the intervals."""
    named = {line.about["what"]: line for line in lines if line.values(measure)}
    split = named.pop(SPLIT, None)
    if split is None:
        return []
    sign, unit = (-1, "") if measure in LOWER_IS_BETTER else (1, "")
    unit = " points" if measure in SHARES else unit
    found = []
    for what, line in named.items():
        less = split.less(line, measure)
        if what.endswith(" alone") and less is not None:
            text = score_text(less, measure, "+")
            gain = sign * less.mean - (less.half_width or math.inf)
            verdict = "joining buys that" if gain > 0 else "no gain is shown"
            found.append(f"split minus {what}: {text}{unit}; {verdict}")
    for what in (CENTRAL, f"{BOOSTING}, all columns"):
        if what in named and (less := split.less(named[what], measure)) is not None:
            inside = less.half_width is not None and abs(less.mean) <= less.half_width
            verdict = "within the interval of 0" if inside else "outside the interval of 0"
            found.append(f"split minus {what}: {score_text(less, measure, '+')}{unit}; {verdict}")
    if (seeds := len(split.values(measure))) < _ENOUGH_SEEDS:
        found.append(_few(seeds))
    return found


def _few(seeds: int) -> str:
    """Return a warning about few seeds: an interval over two seeds has one degree of freedom."""
    count = {1: "one seed says", 2: "two seeds say"}.get(seeds, f"{seeds} seeds say")
    return f"{count} little: intervals are wide or missing; use at least {_ENOUGH_SEEDS} seeds"


def value_table(lines: Sequence[Line], measure: str) -> Table:
    """Return a table: per training, quality, difference to split training, and bytes."""
    less = "less split" + (", points" if measure in SHARES else "")
    head = ["training", measure.replace("_", " "), less, "bytes", "of dense", "seeds"]
    rows = [
        [
            line.about["what"],
            score_text(line.over(measure), measure),
            score_text(line.difference(measure), measure, "+"),
            size(round(sent)) if (sent := sent_by(line)) else "",
            "" if (share := share_of(line)) is None else f"{100 * share:.2f} %",
            f"{len(line.values(measure))} of {len(line.repeats)}",
        ]
        for line in lines
    ]
    return Table(head, rows)


def _glance(lines: Sequence[Line], measure: str) -> Glance:
    """Return the summary: gain over the label party alone, loss against pooled data, bytes."""
    named = {line.about["what"]: line for line in lines if line.values(measure)}
    split = named.get(SPLIT)
    word = MEASURES.get(measure, measure.replace("_", " "))
    if split is None:
        return Glance([Card(f"Test {word}, split", NOT_MEASURED)], "")
    unit = " points" if measure in SHARES else ""

    def beside(title: str, what: str) -> Card:
        less = split.less(named[what], measure) if what in named else None
        found = NOT_MEASURED if less is None else f"{score_text(less, measure, '+')}{unit}"
        return Card(title, found, what)

    alone = [what for what in named if what.endswith(" alone")]
    best = max(alone, key=lambda what: _gain(named[what], measure), default=f"{SPLIT} alone")
    cards = [
        Card(
            f"Test {word}, split", score_text(split.over(measure), measure), _seeds(split, measure)
        ),
        beside("Over the best party alone", best),
        beside("Relative to one place", CENTRAL),
        Card("On the wire", bytes_text(sent_by(split)), "per training, without a codec"),
    ]
    return Glance(cards, ". ".join(value_sentences(lines, measure)) + ".")


def _seeds(line: Line, measure: str) -> str:
    return f"{len(line.values(measure))} seeds"


def _gain(line: Line, measure: str) -> float:
    mean = line.mean(measure)
    assert mean is not None, "it has scores"
    return -mean if measure in LOWER_IS_BETTER else mean


def _drawing(lines: Sequence[Line], measure: str) -> Drawing:
    factor, unit = (100, ", percent") if measure in SHARES else (1, "")
    series = []
    for place, line in enumerate(lines, 1):
        name, found = f"{place} {line.about['what']}", [(float(place), line.over(measure))]
        series.append(Series.of(name, found, 1 + (place - 1) % STYLES, factor))
    caption = f"{measure.replace('_', ' ')} of the test rows{unit}, with 95 % intervals"
    return line_drawing("How good each training is", caption, series, "training", whole_x=True)
