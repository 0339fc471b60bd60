"""From a run folder to its page."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from vfl.core.storage import stamp, write_json, write_text
from vfl.core.text import printable_lines
from vfl.experiments.cells import CONFIG, GridFolder, is_grid
from vfl.experiments.folders import Listed, list_runs
from vfl.experiments.glance import Glance
from vfl.experiments.pages.attack_page import attack_page
from vfl.experiments.pages.comparison_page import comparison_page
from vfl.experiments.pages.run_page import run_page
from vfl.experiments.pages.sections import Content
from vfl.experiments.pages.stale import beside_stale
from vfl.experiments.pages.value_page import value_page
from vfl.experiments.records import Record, records_of, write_records
from vfl.experiments.tables import date_text

#: The one script of a page, and what lets it run: nothing else does, and nothing is fetched.
_SCRIPT = (Path(__file__).parent / "sort.js").read_text(encoding="utf-8")
_DIGEST = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
PAGE = "report.html"
_TEXT_LIMIT = 1_000_000  # characters of one text, such as a configuration


def _shown(value: object) -> object:
    """Text without what hides or steers; the engine escapes it afterwards. Charts are markup."""
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


def build_report(run_folder: Path) -> Path:
    """Write `report.html` into the folder of a run or a grid, from what it holds.

    The page is one static file: one script that sorts its tables, nothing fetched, and the same
    bytes every time.

    Args:
        run_folder: a folder that training, comparing or attacking wrote.

    Returns:
        The path of the page.

    Raises:
        RunFolderError: there is no run in it, or one this version cannot read.
    """
    target = Path(run_folder) / PAGE
    write_text(target, render(Path(run_folder)))
    return target


def write_results(folder: GridFolder) -> tuple[str, dict[str, Any]]:
    """Write `table.md`, `results.json` and `results.csv` of a study from what its cells hold.

    Returns:
        The tables in Markdown with what they leave out, and the content of the JSON file.

    Raises:
        RunFolderError: there is no grid, or a file of it is damaged.
    """
    page, records = _page_of(folder)
    below = (f"{line}\n" for line in (*page.said, *page.notes))
    table = "\n".join([*(one.markdown() for one in page.tables), *below])
    whole = stamp() | dict(page.json)
    write_records(folder.path, records)
    write_json(folder.path / "results.json", whole)
    write_text(folder.path / "table.md", table)
    return table, whole


def render(run_folder: Path) -> str:
    """The page of a run folder as text.

    Raises:
        RunFolderError: as `build_report`.
    """
    template, page = _content(run_folder)
    return ENVIRONMENT.get_template(template).render(page=page)


def build_index(folder: Path) -> tuple[list[Listed], Path]:
    """Write `index.html` into a folder of runs and grids, with a line and a link for each.

    Returns:
        What it lists, the newest first, and the path of the page.

    Raises:
        RunFolderError: there is no such folder.
    """
    runs, target = list_runs(folder), folder / "index.html"
    page = {"name": str(folder.name or folder), "meta": f"{len(runs)} runs", "runs": runs}
    write_text(target, ENVIRONMENT.get_template("index.html").render(page=page))
    return runs, target


def glance(run_folder: Path) -> Glance:
    """What the page of a run folder says first.

    Raises:
        RunFolderError: as `build_report`.
    """
    found: Glance = _content(Path(run_folder))[1]["glance"]
    return found


#: What a study of each kind is called, and what its page says.
_STUDIES = {
    "attacks": ("grid", attack_page),
    "codecs": ("comparison", comparison_page),
    "value": ("value", value_page),
}


def _page_of(folder: GridFolder) -> tuple[Content, list[Record]]:
    """What the page of a study says, of today's rows and code; and all records, stale ones too."""
    records = list(records_of(folder.path))
    page = _STUDIES[folder.kind][1](folder, [one for one in records if not one.stale])
    return beside_stale(page, folder, records), records


def _content(run_folder: Path) -> tuple[str, dict[str, Any]]:
    """The template of a page, and what it prints."""
    if not is_grid(run_folder):
        return "run.html", run_page(run_folder)
    folder = GridFolder(run_folder)
    (kind, _), (page, _) = _STUDIES[folder.kind], _page_of(folder)
    meta = (date_text(folder.head("created")), page.count, f"vfl {folder.head('vfl')}")
    return "study.html", {
        "kind": kind,
        "name": folder.experiment().name,
        "meta": " · ".join(meta),
        "glance": page.glance,
        "sentence": page.sentence,
        "notes": page.notes,
        "sections": page.sections,
        "loads_pictures": any(section.strips for section in page.sections),
        "command": folder.head("command"),
        "config_text": (folder.path / CONFIG).read_text(encoding="utf-8").strip(),
    }
