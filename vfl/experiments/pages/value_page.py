"""The page of `vfl value`: what each party reaches alone, what all reach, and its price."""

from __future__ import annotations

from typing import Any

from vfl.experiments.cells import GridFolder
from vfl.experiments.comparison_results import LOWER_IS_BETTER, score_text
from vfl.experiments.glance import Card, Glance
from vfl.experiments.pages.charts import Drawing, Series, line_drawing
from vfl.experiments.tables import MEASURES, NOT_MEASURED, SHARES, bytes_text
from vfl.experiments.value import (
    CENTRAL,
    SPLIT,
    Line,
    measure_of,
    sentences,
    value_lines,
    value_table,
)


def value_page(folder: GridFolder) -> dict[str, Any]:
    """What the template prints, from what the cells hold.

    Raises:
        RunFolderError: a file of it is damaged.
    """
    experiment = folder.experiment()
    measure = measure_of(experiment)
    lines, missing = value_lines(folder)
    trained = [line for line in lines if line.scores]
    seeds = max((line.cells for line in lines), default=0)
    return {
        "glance": _glance(lines, measure),
        "count": f"{sum(len(line.scores) for line in lines)} trainings",
        "sentence": f"What {len(experiment.parties)} parties with columns reach alone and "
        f"together, on the rows that all of them share, over {seeds} seeds.",
        "notes": missing,
        "table": value_table(lines, measure),
        "drawings": [_drawing(trained, measure)] if trained else [],
    }


def _glance(lines: list[Line], measure: str) -> Glance:
    """What joining buys beside the label party alone, what it costs beside one place, and bytes."""
    named = {line.what: line for line in lines if line.scores}
    split = named.get(SPLIT)
    word = MEASURES.get(measure, measure.replace("_", " "))
    if split is None:
        return Glance([Card(f"Test {word}, split", NOT_MEASURED)], "")
    unit = " points" if measure in SHARES else ""

    def beside(title: str, what: str) -> Card:
        less = split.less(named[what]) if what in named else None
        found = NOT_MEASURED if less is None else f"{score_text(less, measure, '+')}{unit}"
        return Card(title, found, what)

    alone = [what for what in named if what.endswith(" alone")]
    best = max(alone, key=lambda what: _gain(named[what], measure), default=f"{SPLIT} alone")
    cards = [
        Card(f"Test {word}, split", score_text(split.score, measure), f"{len(split.scores)} seeds"),
        beside("Beside the best party alone", best),
        beside("Beside one place", CENTRAL),
        Card("On the wire", bytes_text(split.sent), "a training, without a codec"),
    ]
    return Glance(cards, ". ".join(sentences(lines, measure)) + ".")


def _gain(line: Line, measure: str) -> float:
    assert line.score is not None, "it has scores"
    return -line.score.mean if measure in LOWER_IS_BETTER else line.score.mean


def _drawing(lines: list[Line], measure: str) -> Drawing:
    factor, unit = (100, ", percent") if measure in SHARES else (1, "")
    series = []
    for place, line in enumerate(lines, 1):
        found = line.score
        assert found is not None, "it has scores"
        whiskers = []
        if found.half_width is not None:
            whiskers = [(float(place), factor * found.low, factor * found.high)]
        name = f"{place} {line.what}"
        style = 1 + (place - 1) % 8
        series.append(Series(name, [(float(place), factor * found.mean)], style, whiskers))
    caption = f"{measure.replace('_', ' ')} of the test rows{unit}, with 95 % intervals"
    return line_drawing("How good each training is", caption, series, "training", whole_x=True)
