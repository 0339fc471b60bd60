"""From a run folder to its page."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from vfl.grid import GridFolder, is_grid
from vfl.report.compare_page import ComparisonPage, comparison_page
from vfl.report.folder import read_run
from vfl.report.page import Page, page_of
from vfl.storage import write_text

PAGE = "report.html"


def build_report(run_folder: Path) -> Path:
    """Write `report.html` into the folder of a run or a comparison, from what it holds.

    The page is one static file: no script, nothing fetched, and the same bytes every time.

    Args:
        run_folder: a folder that training or comparing wrote.

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
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    if is_grid(run_folder) and GridFolder(run_folder).kind == "attacks":
        return "<p>soon</p>"
    if is_grid(run_folder):
        page: Page | ComparisonPage = comparison_page(GridFolder(run_folder))
        return environment.get_template("compare.html").render(page=page)
    page = page_of(read_run(run_folder))
    return environment.get_template("template.html").render(page=page)
