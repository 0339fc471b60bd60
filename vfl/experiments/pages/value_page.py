"""The page of `vfl value`: what each party reaches alone, what all reach, and its price."""

from __future__ import annotations

from typing import Any

from vfl.experiments.cells import GridFolder
from vfl.experiments.pages.charts import Drawing, Series, line_drawing
from vfl.experiments.tables import SHARES
from vfl.experiments.value import Line, measure_of, sentences, value_lines, value_table


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
        "count": f"{sum(len(line.scores) for line in lines)} trainings",
        "sentence": f"What {len(experiment.parties)} parties with columns reach alone and "
        f"together, on the rows that all of them share, over {seeds} seeds.",
        "notes": [*sentences(lines, measure), *missing],
        "table": value_table(lines, measure),
        "drawings": [_drawing(trained, measure)] if trained else [],
    }


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
