"""Studies of several tasks: grid files, stored result rows, and their pictures.

A task is a grid file of `examples`. `vfl grid` runs its trainings and attacks in a folder, from
which a killed run can resume. Result rows are in one CSV file, and pages are made from that file.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pandas as pd

from benchmarks import pages
from vfl.cli.study import say_cell
from vfl.core.errors import MissingDataError
from vfl.core.text import csv_text
from vfl.core.version import VERSION
from vfl.experiments.cells import Cell, GridFolder
from vfl.experiments.pages.charts import Point, Position, dot_swatch, scatter_drawing, standalone
from vfl.experiments.scores import BASELINES
from vfl.experiments.statistics import Estimate, estimate
from vfl.experiments.study import Study, overrides_of, plan_study, run_study
from vfl.training.specs import read_checked

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

EXAMPLES = Path(__file__).parents[1] / "examples"
Key = TypeVar("Key", bound=Hashable)
#: Type variable: the result of a study for one task.
Found = TypeVar("Found")
#: Type variable: a dataclass whose fields are texts, integers and floats.
Row = TypeVar("Row", bound="DataclassInstance")
#: Path of each table below the folder of data sets; data sets without a file are named.
TABLES = {
    "bank-full.csv.gz": "bank-marketing/bank-full.csv.gz",
    "UCI_Credit_Card.csv.gz": "credit-default/UCI_Credit_Card.csv.gz",
}
#: Number of rows of each data source that a task uses as a whole.
WHOLE = {"bank-full.csv.gz": 45_211, "UCI_Credit_Card.csv.gz": 30_000, "review_polarity": 2_000}


def source_of(file: Path) -> list[str]:
    """Return the setting with the path of a task's table, if the task reads a table.

    Raises:
        MissingDataError: VFL_DATA does not name a folder of tables.
    """
    table = TABLES.get(Path(read_checked(file, [])[0].data.source).name)
    if table is not None and "VFL_DATA" not in os.environ:
        raise MissingDataError("the table does not exist", where="VFL_DATA", want=table)
    return [] if table is None else [f"data.source={Path(os.environ['VFL_DATA']) / table}"]


def row_count(file: Path) -> int:
    """Return the number of rows of a task, all parts of the split together."""
    data = read_checked(file, [])[0].data
    return data.rows or WHOLE[Path(data.source).name]


def study_of(file: Path, *overrides: str, **changes: object) -> Study:
    """Return the grid of a task, with some of its settings changed."""
    changed = [*source_of(file), *overrides, *overrides_of("grid", changes)]
    return plan_study("grid", *read_checked(file, changed))


def played(
    study: Study, path: Path, jobs: int, wanted: Callable[[Cell], bool] | None = None
) -> GridFolder:
    """Run the missing trainings and attacks of a study, and return its folder.

    Args:
        study: result of `study_of`.
        path: its folder.
        jobs: number of trainings with their attacks (cells of the grid) that run at the same time,
            each in its own process.
        wanted: function that chooses cells; by default, all cells.
    """
    cells = None if wanted is None else [one for one in study.cells if wanted(one)]
    run_study(study, path, shlex.join(sys.argv), cells, jobs=jobs, on_end=say_cell)
    return GridFolder(path)


def played_alone(study: Study, path: Path, jobs: int, victims: Sequence[str]) -> GridFolder:
    """Run some victims of a study without the undefended model, which a grid would train too."""
    return played(study, path, jobs, lambda one: one.victim in (BASELINES, *victims))


@dataclass(frozen=True)
class StudyPage(Generic[Found]):
    """The page of a study, with sections that are made from the result of each task.

    Attributes:
        title: title of the page.
        note: text after the day and the version of vfl.
        shown: function that returns the sections about all tasks together.
        of_task: function that returns the sections about one task; it may write pictures beside the
            page.
        method: text at the end of the page, which does not depend on the results.
    """

    title: str
    note: Callable[[Sequence[Found]], str]
    shown: Callable[[Sequence[Found]], Iterable[str]]
    of_task: Callable[[Found, Path], Iterable[str]]
    method: str = ""

    def write(self, page: Path, found: Sequence[Found], measured: bool = True) -> None:
        """Write the page, and print its path.

        Args:
            page: its file.
            found: results, one for each task.
            measured: whether this call measured new results; if not, the page keeps its former day
                and version.
        """
        about = f"{datetime.now(UTC).date()}, vfl {VERSION}"
        if not measured and page.exists():
            known = re.search(r"^\d{4}-\d\d-\d\d, vfl [\d.]+\d", page.read_text("utf-8"), re.M)
            about = known[0] if known else about
        about += f"{self.note(found)}\n"
        parts = [f"# {self.title}\n", about, *self.shown(found)]
        parts += [part for one in found for part in self.of_task(one, page)]
        pages.keep(page, "\n".join(parts) + self.method)


def stored(file: Path, columns: Sequence[str]) -> pd.DataFrame:
    """Return the rows of a CSV file with all cells as texts; no rows if there is no file."""
    if not file.exists():
        return pd.DataFrame(columns=list(columns))
    found: pd.DataFrame = pd.read_csv(file, dtype=str, keep_default_na=False)
    return found


def store(file: Path, rows: pd.DataFrame) -> None:
    """Write rows in the form that `stored` reads."""
    columns = list(rows.columns)
    lines = (dict(zip(columns, line, strict=True)) for line in rows.itertuples(index=False))
    file.write_text(csv_text(columns, lines), encoding="utf-8")


def read_rows(file: Path, kind: type[Row]) -> list[Row]:
    """Return the rows of a CSV file as records; an empty list if there is no file."""
    made: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float}
    types = {one.name: made[str(one.type)] for one in fields(kind)}
    lines = stored(file, list(types)).itertuples(index=False)
    return [
        kind(**{name: types[name](text) for name, text in zip(types, line, strict=True)})
        for line in lines
    ]


def write_rows(file: Path, kind: type[Row], rows: Iterable[Row]) -> None:
    """Write records in the form that `read_rows` reads; numbers get four decimal places."""
    lines = [pages.cells_of(row, 4) for row in rows]
    file.write_text(csv_text([one.name for one in fields(kind)], lines), encoding="utf-8")


def added(
    rows: pd.DataFrame, new: pd.DataFrame, key: Sequence[str], tasks: Sequence[str]
) -> pd.DataFrame:
    """Return the existing rows, and those new rows whose key does not exist yet, task by task."""
    whole = pd.concat([rows, new.astype(str)]).drop_duplicates(list(key))
    order = whole.task.map(tasks.index)
    return whole.iloc[order.argsort(kind="stable")].reset_index(drop=True)


def by_seed(
    rows: pd.DataFrame, names: Sequence[str], figure: str
) -> dict[tuple[str, ...], pd.Series[float]]:
    """Return a value by seed for each key, which has the columns `names`; keys keep their order."""
    return {
        tuple(map(str, key)): own.drop_duplicates("seed").set_index("seed")[figure].astype(float)
        for key, own in rows.groupby(list(names), sort=False)
    }


def highest(found: Mapping[Key, pd.Series[float]]) -> Key:
    """Return the key with the highest mean over seeds; for equal means, the first key."""
    return max(found, key=lambda one: float(found[one].mean()))


def over(values: Iterable[float]) -> Estimate:
    """Return the mean of a value over its repetitions, with its confidence interval."""
    found = estimate([float(one) for one in values])
    assert found is not None, "a repeat at least"
    return found


def points_text(found: Estimate, sign: str = "") -> str:
    """Format a fraction in percentage points, without a unit.

    >>> points_text(Estimate(0.7213, 0.0131, 3)), points_text(Estimate(0.5, None, 1), "+")
    ('72.1 ± 1.3', '+50.0')
    """
    half = "" if found.half_width is None else f" ± {100 * found.half_width:.1f}"
    return f"{100 * found.mean:{sign}.1f}{half}"


#: Families of defenses or protections, by the prefix of their names, with colours; the longest
#: matching prefix counts.
Families = Mapping[str, tuple[str, int]]


def family_of(name: str, families: Families) -> str:
    """Return the family of a defense or a protection."""
    return families[max(filter(name.startswith, families), key=len)][0]


@dataclass(frozen=True, slots=True)
class Dot:
    """One point of a picture, with its intervals.

    Attributes:
        family: family of the point, which determines its colour.
        what: tooltip.
        x, y: shares.
        at: position on the x axis, if it is not the mean of `x`.
    """

    family: str
    what: str
    x: Estimate
    y: Estimate
    at: float | None = None


def picture(
    title: str,
    caption: str,
    description: str,
    dots: Sequence[Dot],
    x_label: str,
    families: Families,
    through: Sequence[Position] = (),
) -> str:
    """Draw points on two percent axes, with a legend of their families, as SVG."""
    styles = dict(families.values())
    points = [
        Point(
            "", 100 * (one.x.mean if one.at is None else one.at), 100 * one.y.mean,
            styles[one.family], one.what, 100 * (one.x.half_width or 0),
            100 * (one.y.half_width or 0),
        )
        for one in dots
    ]  # fmt: skip
    shown = {one.family for one in dots}
    legend = [(dot_swatch(style), family) for family, style in styles.items() if family in shown]
    return standalone(
        scatter_drawing(
            title, caption, description, points, x_label, legend=legend, through=through
        )
    )
