"""Builds the page of a folder: loads the content, arranges the sections, renders HTML."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from vfl.core.errors import ConfigError, RunFolderError, VFLError
from vfl.core.storage import stamp, write_json, write_text
from vfl.core.text import printable_lines
from vfl.experiments.cells import CONFIG, GRID, GridFolder, is_grid
from vfl.experiments.folders import grid_status
from vfl.experiments.glance import Glance
from vfl.experiments.loaded_run import LoadedRun
from vfl.experiments.pages.attack_page import attack_page
from vfl.experiments.pages.comparison_page import comparison_page
from vfl.experiments.pages.run_page import run_page
from vfl.experiments.pages.sections import Content
from vfl.experiments.pages.stale import beside_stale
from vfl.experiments.pages.value_page import value_page
from vfl.experiments.provenance import provenance
from vfl.experiments.results import LoadedGrid, write_records
from vfl.experiments.tables import date_text

#: The only script that a page contains, and the hash of this script for the content security
#: policy. The page runs no other script and loads no file.
_SCRIPT = (Path(__file__).parent / "sort.js").read_text(encoding="utf-8")
_DIGEST = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
PAGE = "report.html"
_TEXT_LIMIT = 1_000_000  # most characters of a text on a page


def _shown(value: object) -> object:
    """Remove invisible characters from a text; the template engine escapes the text later.

    Charts are markup, not texts, so this function returns them unchanged.
    """
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable_lines(value, _TEXT_LIMIT)
    return value


ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    finalize=_shown,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.globals |= {"script": Markup(_SCRIPT), "script_hash": f"sha256-{_DIGEST}"}


def build_report(run_folder: Path, missed_cost: float | None = None) -> Path:
    """Write `report.html` into the folder of a run or a study, from the folder's content.

    The page is one static file. Its only script sorts and filters tables and shows one of several
    tables; it loads nothing, and has the same bytes on every page.

    Args:
        run_folder: folder that a training, a comparison, a grid or a value study wrote.
        missed_cost: cost of one missed positive, as a number of false alarms; this cost determines
            a run's threshold.

    Returns:
        The path of the written page.

    Raises:
        RunFolderError: the folder contains no run, or a run that this version cannot read.
        ConfigError: the cost is not above 0, or the folder contains no single run.
    """
    target = Path(run_folder) / PAGE
    write_text(target, render(Path(run_folder), missed_cost))
    return target


def write_results(folder: GridFolder) -> tuple[str, dict[str, Any]]:
    """Write `table.md`, `results.json` and `results.csv` of a study from its cells.

    Returns:
        The tables as Markdown text with notes on omissions, and the content of the JSON file.

    Raises:
        RunFolderError: the folder contains no grid, or a file of the grid is damaged.
    """
    grid = LoadedGrid(folder)
    page = _study_page(grid)
    below = (f"{line}\n" for line in (*page.said, *page.notes))
    table = "\n".join([*(one.markdown() for one in page.tables), *below])
    whole = stamp() | provenance(grid) | dict(page.json)
    write_records(folder.path, grid.records)
    write_json(folder.path / "results.json", whole)
    write_text(folder.path / "table.md", table)
    return table, whole


def render(run_folder: Path, missed_cost: float | None = None) -> str:
    """Return the page of a run folder as text.

    Raises:
        RunFolderError: see `build_report`.
    """
    return ENVIRONMENT.get_template("page.html").render(page=_content(run_folder, missed_cost))


def build_index(folder: Path) -> tuple[list[Listed], Path]:
    """Write `index.html` into a folder of runs and grids, with a line and a link for each.

    Returns:
        The listed runs and grids, newest first, and the path of the page.

    Raises:
        RunFolderError: the folder does not exist.
    """
    runs, target = list_runs(folder), folder / "index.html"
    page = {"name": str(folder.name or folder), "meta": f"{len(runs)} runs", "runs": runs}
    write_text(target, ENVIRONMENT.get_template("index.html").render(page=page))
    return runs, target


def glance(run_folder: Path) -> Glance:
    """Return the summary at the top of a run folder's page.

    Raises:
        RunFolderError: see `build_report`.
    """
    found: Glance = _content(Path(run_folder))["content"].glance
    return found


#: Name of each kind of study, and the function that returns the page's content for this kind.
_STUDIES = {
    "attacks": ("grid", attack_page),
    "codecs": ("comparison", comparison_page),
    "value": ("value", value_page),
}


def _study_page(grid: LoadedGrid) -> Content:
    """Return the content of a study's page."""
    return beside_stale(_STUDIES[grid.folder.kind][1](grid), grid)


def _content(run_folder: Path, missed_cost: float | None = None) -> dict[str, Any]:
    """Return the values for the template of a page."""
    if missed_cost is not None and is_grid(run_folder):
        raise ConfigError("a cost selects the threshold of a single run", where="--cost")
    if is_grid(run_folder):
        grid = LoadedGrid(GridFolder(run_folder))
        kind, page = _STUDIES[grid.folder.kind][0], _study_page(grid)
        head = {key: str(grid.folder.head(key)) for key in ("created", "vfl", "command")}
        head["name"] = grid.experiment.name
        config = (grid.path / CONFIG).read_text(encoding="utf-8")
    else:
        run = LoadedRun(run_folder)
        page, head, config = run_page(run, missed_cost), dict(run.head), run.config_text
        kind = "run"
    version = f"vfl {head['vfl']}" if head["vfl"] else ""
    return {
        "kind": kind,
        "name": head["name"] or run_folder.name,
        "meta": " · ".join(filter(None, (date_text(head["created"]), page.count, version))),
        "content": page,
        "loads_pictures": any(section.strips for section in page.sections),
        "command": head["command"],
        "config_text": config.strip(),
    }


# --- several runs ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listed:
    """A run or a grid in a folder of runs, as the index page lists it.

    Attributes:
        name: name of the folder of the run or grid.
        kind: training, grid, comparison or value.
        created: time at which the run or grid was started.
        state: state of the run or grid; see `GridStatus` and `vfl.training.status.RunStatus`.
        sentence: sentence of the folder's summary; of a damaged folder, the error.
        cards: cards of the summary, as title and value; empty for a damaged folder.
        page: whether the folder contains a page.
    """

    name: str
    kind: str
    created: str
    state: str
    sentence: str
    cards: Sequence[tuple[str, str]]
    page: bool


def list_runs(folder: Path) -> list[Listed]:
    """Return the runs and grids in a folder, newest first; damaged folders are marked.

    Raises:
        RunFolderError: the folder does not exist.
    """
    if not folder.is_dir():
        raise RunFolderError(
            "this folder does not exist",
            where=str(folder),
            fix="vfl train creates the folder runs/ in the folder where it runs",
        )
    found = [path.parent for name in ("run.json", GRID) for path in folder.glob(f"*/{name}")]
    return sorted(map(_listed, found), key=lambda one: one.created, reverse=True)


def _listed(path: Path) -> Listed:
    # imported late, because the imported module needs torch, and pages do not
    from vfl.training.status import run_status

    kind = "grid" if is_grid(path) else "training"
    created, state, sentence, cards = "", "damaged", "", list[tuple[str, str]]()
    try:
        if is_grid(path):
            grid = grid_status(path)
            kind, created = grid.kind, grid.created
            state = f"{grid.state}, {grid.done} of {grid.cells}"
        else:
            created, state = LoadedRun(path).head["created"], run_status(path).state
        top = glance(path)
        sentence, cards = top.sentence, [(card.title, card.value) for card in top.cards]
    except VFLError as error:
        sentence = error.what
    return Listed(path.name, kind, created, state, sentence, cards, (path / PAGE).exists())
