"""Plans and runs all trainings of a study of one experiment, for commands and notebooks.

A study is a comparison of codecs, a grid of attacks on defenses, or a measurement of what each
party gains from training together. A study has a plan of cells (trainings), results that are
computed from finished cells, and a page.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vfl.config import Experiment, Locations, ValueSettings, with_overrides
from vfl.config.toml import several
from vfl.config.validate import STUDIES
from vfl.core.errors import DataError, RunFolderError
from vfl.core.registry import command_of
from vfl.experiments.attack_grid import grid_cells
from vfl.experiments.cells import Cell, GridFolder
from vfl.experiments.comparison import comparison_of, plan_lines
from vfl.experiments.glance import Glance
from vfl.experiments.latex import latex_table
from vfl.experiments.module_grid import Recipe, check_study, variant_name
from vfl.experiments.outside import is_stored, list_attackers, load_attackers
from vfl.experiments.pages import build_report, glance, write_results
from vfl.experiments.pages.build import render
from vfl.experiments.results import LoadedGrid, records_of, table_of
from vfl.experiments.scheduler import FinishedCell, run_cells
from vfl.experiments.value import alone_folder, plan_alone, value_cells

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from vfl.experiments.on_ray import RayCluster

Kind = Literal["compare", "grid", "value"]


@dataclass(frozen=True)
class Study:
    """The planned trainings of a study, with notes about the plan.

    Attributes:
        kind: name of the experiment's table that defines the study.
        experiment: the experiment; of its tables for studies, it has only this one.
        cells: all cells, in the order of training.
        notes: notes about trainings that the plan leaves out, with reasons.
    """

    kind: Kind
    experiment: Experiment
    cells: Sequence[Cell]
    notes: Sequence[str]

    def lines(self, cells: Sequence[Cell]) -> list[str]:
        """Return the lines about some of the cells that `--dry-run` prints."""
        about = plan_lines(cells) if self.kind == "compare" else (cell.title for cell in cells)
        return [*about, *self.notes]


def plan_study(kind: Kind, experiment: Experiment, locations: Locations | None = None) -> Study:
    """Plan the cells of a study; by default, rows with class labels are split by class.

    Args:
        kind: table of the experiment that defines the study: "compare", "grid" or "value".
        experiment: the experiment to train.
        locations: file and line of each setting, for error messages.

    Raises:
        ConfigError: the experiment has no such table ([value] may be missing), or the study would
            train nothing.
        SpecError: a plug-in cannot be built, or does not fit the experiment.
    """
    locations = locations or Locations()
    alone: dict[str, Any] = dict.fromkeys(one for one in STUDIES if one != kind)
    if kind == "value":
        alone["value"] = experiment.value or ValueSettings()
    if experiment.data.split is None and experiment.label.task == "classification":
        alone["data"] = experiment.data.model_copy(update={"split": "stratified"})
    experiment = experiment.model_copy(update=alone)
    if kind == "compare":
        comparison = comparison_of(experiment, locations)
        return Study(kind, experiment, comparison.cells, comparison.notes)
    with locations.located(Experiment):
        cells = grid_cells(experiment) if kind == "grid" else value_cells(experiment)
    return Study(kind, experiment, cells, ())


def plan_modules(
    kind: Kind, recipe: Recipe, name: str, codec: str, defense: str, options: Mapping[str, object]
) -> Study:
    """Plan the cells of a study whose modules a caller's function builds.

    Args:
        kind: "compare" or "grid".
        recipe: builds them.
        name: name of the study.
        codec: codec of all modules, if the study does not compare codecs.
        defense: defense of all modules, if the study does not compare defenses.
        options: settings of `[compare]` or `[grid]`; for a comparison also `defenses`.

    Raises:
        ConfigError, SpecError: see `plan_study`; or a setting has no effect on modules, or no
            module can be built with a codec or a defense.
        DataError: each row has several labels, which a grid does not support.
    """
    given = dict(options)
    if kind == "grid" and (axes := recipe.rows(0).labels[0].shape)[1:]:
        raise DataError(
            "an attack needs a label for each row",
            where="the loader",
            got=f"labels of axes {tuple(axes)}",
            fix="vfl.compare trains and tests such a module",
        )
    against: Sequence[str] = ()
    if kind == "compare":
        against = several(given.pop("defenses", ()))
    made = with_overrides(recipe.experiment(name, codec, defense), overrides_of(kind, given))
    check_study(kind, made)
    if against and made.compare is not None:
        variants = {variant_name(one): (f"defense={one}",) for one in against}
        compared = made.compare.model_copy(update={"variants": variants})
        made = made.model_copy(update={"compare": compared})
    study = plan_study(kind, made)
    for one in dict.fromkeys(
        (cell.experiment.codec, cell.experiment.defense) for cell in study.cells
    ):
        recipe.module(*one, study.cells[0].experiment.seed)
    return study


def run_study(
    study: Study,
    path: Path,
    command: str,
    cells: Sequence[Cell] | None = None,
    jobs: int = 1,
    device: str = "cpu",
    on_end: Callable[[FinishedCell], None] = lambda ended: None,
    ray: str | None = None,
    recipe: Recipe | None = None,
) -> Results:
    """Train all cells that are not trained yet, and write tables and page.

    If all cells of a comparison or grid of an experiment file are trained, the function also trains
    each party alone on this machine (`train_alone`); the page shows what each party gains.

    Args:
        study: the study to run.
        path: folder of the study; trainings that it already contains are kept.
        command: command that repeats the study.
        cells: the cells to train; by default all cells of the study.
        jobs: number of cells that run at the same time, each in its own process; 1 uses this
            process.
        device: device on which the models are trained.
        on_end: callback that receives each cell when it ends.
        ray: address of a Ray cluster that runs the cells: "auto" for the cluster that runs on this
            machine, "local" for a cluster that exists only during this call. The resources of each
            cell follow after commas, as in "auto,cpus=2,memory=2GB"
            (`vfl.experiments.on_ray.CellResources`). None trains without Ray.
        recipe: functions that build and train the modules, for a study of modules.
    """
    folder = GridFolder(path)
    modules = None if recipe is None else recipe.record
    chosen = study.cells if cells is None else cells
    with _cluster(ray) as cluster:
        folder.write(study.experiment, study.cells, command, study.notes, modules)
        failed = run_cells(folder, chosen, jobs, device, on_end, cluster, recipe=recipe)
    whole = len(chosen) == len(study.cells) and recipe is None
    if study.kind != "value" and whole and len(study.experiment.parties) > 1:
        failed += train_alone(path, jobs, device, on_end)
    return write_study(folder, failed)


def _cluster(ray: str | None) -> AbstractContextManager[RayCluster | None]:
    if ray is None:
        return nullcontext()
    from vfl.experiments.on_ray import RayCluster

    return RayCluster.of(ray)


def train_alone(
    path: Path,
    jobs: int = 1,
    device: str = "cpu",
    on_end: Callable[[FinishedCell], None] = lambda ended: None,
) -> list[FinishedCell]:
    """Train a network for each party alone, on the data of a run or study.

    The trainings are stored in a folder below `path`; trainings that it already contains are kept.

    Args:
        path: the folder.
        jobs: number of trainings at the same time, each in its own process.
        device: device on which the networks are trained.
        on_end: callback that receives each training when it ends.

    Returns:
        The cells whose trainings failed.

    Raises:
        ConfigError, RunFolderError: see `vfl.experiments.value.plan_alone`.
    """
    experiment, cells = plan_alone(path)
    folder = alone_folder(path)
    folder.write(experiment, cells, command_of("report", str(path), "--alone"))
    return run_cells(folder, cells, jobs, device, on_end)


def add_attack(
    path: Path,
    file: Path,
    specs: Sequence[str] = (),
    jobs: int = 1,
    device: str = "cpu",
    on_end: Callable[[FinishedCell], None] = lambda ended: None,
) -> Results:
    """Score an attack from a user's file ("from outside") on every stored victim of a grid.

    Scores that exist are kept, so the same call continues where an earlier call stopped.

    Args:
        path: folder of the grid.
        file: Python file that registers attacks and states their author.
        specs: specs of attacks that the file registers; if empty, each attack runs with its default
            options.
        jobs: number of cells that run at the same time, each in its own process.
        device: device on which the models are trained.
        on_end: callback that receives each cell when it ends.

    Returns:
        The grid's tables including the new attack; `content` has the attack's result records.

    Raises:
        RunFolderError: the folder contains no grid of attacks, or no stored victim.
        UserError: the file does not run, lacks an author or a date, or its attack does not fit the
            grid.
        SpecError: an attack cannot be built.
    """
    folder = GridFolder(path)
    if folder.modules is not None:
        raise RunFolderError(
            "the victims of this grid are modules, which only the caller's functions can build",
            where=str(path),
            fix="register the attack, and call vfl.grid(build, loader, attacks=...) on this folder",
        )
    found = load_attackers(file, specs)
    list_attackers(folder, found)
    stored = [one for one in folder.cells() if is_stored(one, folder)]
    if not stored:
        raise RunFolderError(
            "no victim is stored in this folder", where=str(path), fix=folder.head("command")
        )
    failed = run_cells(folder, stored, jobs, device, on_end, outside=True)
    results = write_study(folder, failed)
    mine = {one.spec for one in found}
    results.content["rows"] = [row for row in results.content["rows"] if row["subject"] in mine]
    return results


def write_study(folder: GridFolder, failed: Sequence[FinishedCell] = ()) -> Results:
    """Write tables, results and page of a study from its finished cells; see `write_results`.

    Raises:
        RunFolderError: the folder contains no grid, or a file of the grid is damaged.
    """
    text, content = write_results(folder)
    build_report(folder.path)
    return Results(folder.path, text, content, failed)


class Results:
    """Results of a study.

    Attributes:
        path: folder of the study, with `report.html`, `results.csv` and one run folder per
            training.
        text: the study's tables in Markdown.
        content: content that `--json` prints, as a dict.
        failed: cells whose trainings failed.
    """

    def __init__(
        self, path: Path, text: str, content: dict[str, Any], failed: Sequence[FinishedCell] = ()
    ) -> None:
        self.path, self.text, self.content, self.failed = path, text, content, failed

    @classmethod
    def of(cls, path: str | Path) -> Results:
        """Return the results in a study's folder; tables and page are written again from the cells.

        Raises:
            RunFolderError: the folder contains no grid, or a file of the grid is damaged.
        """
        return write_study(GridFolder(Path(path)))

    @property
    def table(self) -> pd.DataFrame:
        """The results as a table with one row per measure and training; see `Record`.

        A text in the column `stale` says that the data or code behind the value has changed since.
        """
        return table_of(records_of(self.path))

    @property
    def glance(self) -> Glance:
        """Summary of the study: four numbers and a sentence."""
        return glance(self.path)

    @property
    def sentence(self) -> str:
        """The main result as one sentence; if a cell failed, with the first failure's reason."""
        if not self.failed:
            return self.glance.sentence
        count, first = len(self.failed), self.failed[0]
        cells = "1 cell" if count == 1 else f"{count} cells"
        why = (first.failure or {}).get("what", "")
        said = f"{cells} failed: {first.cell.title}: {why}."
        return f"{self.glance.sentence} {said}".strip()

    def to_latex(
        self,
        measures: Sequence[str] = (),
        caption: str | None = None,
        label: str | None = None,
    ) -> str:
        r"""Return a LaTeX table for a paper, with `booktabs`; see `latex_table`.

        Args:
            measures: measures of test rows and of attacks; if empty, the measure that fits the
                task.
            caption: caption below the table; with None, the result is only the `tabular`
                environment.
            label: LaTeX label of the table, for references.
        """
        return latex_table(LoadedGrid(GridFolder(self.path)), measures, caption, label)

    @property
    def page(self) -> Path:
        """Path of the study's page, a self-contained HTML file."""
        return self.path / "report.html"

    def plot(self) -> Figure:
        """Plot each training's quality against its worst attack, or against bytes without attacks.

        Raises:
            UserError: matplotlib is not installed, or the study has no result that is not stale.
        """
        from vfl.experiments.plots import plot_study

        table = self.table
        return plot_study(self.path, table[table.stale == ""])

    def __repr__(self) -> str:
        return f"<results of {self.path}: {self.sentence}>"

    def _repr_html_(self) -> str:
        return framed(self.path)


def framed(path: Path) -> str:
    """Return a folder's page as HTML for a notebook, isolated from the notebook's own page."""
    inside = html.escape(render(path), quote=True)
    return f'<iframe srcdoc="{inside}" width="100%" height="640" sandbox="allow-scripts"></iframe>'


def overrides_of(table: Kind | None, given: Mapping[str, object]) -> list[str]:
    """Return named options as overrides of settings, so that options get the same checks.

    >>> overrides_of("grid", {"draws": 3, "seeds": None, "attacks": ["kmeans"]})
    ['grid.draws=3', 'grid.attacks=["kmeans"]']

    An option replaces the file's value of the same setting, even if the option is an empty list.

    >>> overrides_of("grid", {"defenses": []})
    ['grid.defenses=[]']
    """
    prefix = f"{table}." if table else ""
    return [
        f"{prefix}{key}={json.dumps(value)}" for key, value in given.items() if value is not None
    ]
