"""From a run folder to its page."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from vfl.grid import GridFolder, is_grid
from vfl.grid.attack_run import read_run_rows
from vfl.report.attack_page import attack_page
from vfl.report.compare_page import comparison_page
from vfl.report.folder import read_run
from vfl.report.page import page_of
from vfl.storage import write_text
from vfl.text import printable_lines

PAGE = "report.html"
_TEXT_LIMIT = 1_000_000  # characters of one text, such as a configuration


def build_report(run_folder: Path) -> Path:
    """Write `report.html` into the folder of a run or a grid, from what it holds.

    The page is one static file: no script, nothing fetched, and the same bytes every time.

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


def render(run_folder: Path) -> str:
    """The page of a run folder as text.

    Raises:
        RunFolderError: as `build_report`.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    if is_grid(run_folder):
        folder = GridFolder(run_folder)
        if folder.kind == "attacks":
            return environment.get_template("attack.html").render(page=attack_page(folder))
        return environment.get_template("compare.html").render(page=comparison_page(folder))
    page = page_of(read_run(run_folder), read_run_rows(run_folder))
    return environment.get_template("run.html").render(page=page)


def _shown(value: object) -> object:
    """Text without what hides or steers; the engine escapes it afterwards. Charts are markup."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable_lines(value, _TEXT_LIMIT)
    return value
