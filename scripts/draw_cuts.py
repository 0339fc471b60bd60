"""Draw the angles and maps of a grid's report as a page of which a browser can take a picture.

    python scripts/draw_cuts.py runs/cuts cuts.html

docs/results/labels.md contains one of these pictures.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from vfl.experiments import GridFolder, LoadedGrid
from vfl.experiments import pages as report
from vfl.experiments.pages.attack_page import drawings_of_cuts
from vfl.experiments.staleness import stale_cells

PAGE = """{% import "macros.html" as ui %}<!doctype html><meta charset="utf-8">
<style>{% include "style.css" %} .figures { grid-template-columns: repeat(3, 1fr); margin: 1rem }
</style>{{ ui.figures(drawings, "Angles and maps") }}"""


def main() -> None:
    """Write a page with the chart of angles for every defense, and below each its t-SNE maps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="what vfl grid printed")
    parser.add_argument("page", type=Path)
    arguments = parser.parse_args()
    grid = LoadedGrid(GridFolder(arguments.folder))
    current = {cell.name for cell in grid.cells} - stale_cells(grid.folder).keys()
    drawings = drawings_of_cuts(grid, current)
    looks = Environment(loader=FileSystemLoader(Path(report.__file__).parent), autoescape=True)
    page = looks.from_string(PAGE).render(drawings=[*drawings[::2], *drawings[1::2]])
    arguments.page.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
