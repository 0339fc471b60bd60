"""The page of `vfl value`: what each party reaches alone, what all reach, and its price."""

from __future__ import annotations

from collections.abc import Sequence

from vfl.experiments.cells import GridFolder
from vfl.experiments.glance import Card, Glance
from vfl.experiments.lines import Line, unfinished
from vfl.experiments.pages.charts import Drawing, Series, line_drawing
from vfl.experiments.pages.sections import Content, Section
from vfl.experiments.records import LOWER_IS_BETTER, Record
from vfl.experiments.results import (
    score_text,
    sent_by,
    value_lines,
    value_sentences,
    value_table,
)
from vfl.experiments.tables import MEASURES, NOT_MEASURED, SHARES, bytes_text
from vfl.experiments.value import CENTRAL, SPLIT, measure_of


def value_page(folder: GridFolder, records: Sequence[Record]) -> Content:
    """What the page of a value says, from what the cells hold."""
    experiment = folder.experiment()
    measure = measure_of(experiment)
    lines = value_lines(folder, records)
    trained = [line for line in lines if line.values(measure)]
    seeds = max((line.repeats for line in lines), default=0)
    table = Section(
        title="Alone, split, and in one place",
        drawings=[_drawing(trained, measure)] if trained else [],
        table=value_table(lines, measure),
        roomy=True,
        below="All trainings have the same rows, those that all parties share, and the same test "
        "rows seed by seed. After ±: half a 95 % interval over the seeds, each of which draws its "
        "test rows anew, widened because their training rows overlap (Nadeau and Bengio 2003). "
        "Differences are taken seed by seed. Gradient boosting is scikit-learn's, as many trees as "
        "are best on the validation rows. Bytes are those of a whole training, both directions.",
    )
    return Content(
        _glance(lines, measure),
        f"{sum(len(line.values(measure)) for line in lines)} trainings",
        f"What {len(experiment.parties)} parties with columns reach alone and together, on the "
        f"rows that all of them share, over {seeds} seeds.",
        unfinished(folder),
        [table],
    )


def _glance(lines: Sequence[Line], measure: str) -> Glance:
    """What joining buys beside the label party alone, what it costs beside one place, and bytes."""
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
        beside("Beside the best party alone", best),
        beside("Beside one place", CENTRAL),
        Card("On the wire", bytes_text(sent_by(split)), "a training, without a codec"),
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
        found = line.over(measure)
        assert found is not None, "it has scores"
        whiskers = []
        if found.half_width is not None:
            whiskers = [(float(place), factor * found.low, factor * found.high)]
        name = f"{place} {line.about['what']}"
        style = 1 + (place - 1) % 8
        series.append(Series(name, [(float(place), factor * found.mean)], style, whiskers))
    caption = f"{measure.replace('_', ' ')} of the test rows{unit}, with 95 % intervals"
    return line_drawing("How good each training is", caption, series, "training", whole_x=True)
