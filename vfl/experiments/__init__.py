"""Many trainings that belong together: what is trained, how far it is, and what came out.

A grid is a folder with a list of cells; each cell is an ordinary run folder, named by what it
trains, so that whatever was trained before is found again. `comparison` and `attack_grid` make
cells, `scheduler` runs them, `pages` shows what came out; what is listed here reads them, and needs
no torch.
"""

from __future__ import annotations

from vfl.experiments.cells import (
    Cell,
    GridFolder,
    chosen,
    failure_of,
    is_done,
    is_grid,
    settings_of,
)
from vfl.experiments.lines import Line, lines_of
from vfl.experiments.pages import write_results
from vfl.experiments.records import Record, records_of
from vfl.experiments.statistics import Estimate, estimate, paired_difference

__all__ = [
    "Cell",
    "Estimate",
    "GridFolder",
    "Line",
    "Record",
    "chosen",
    "estimate",
    "failure_of",
    "is_done",
    "is_grid",
    "lines_of",
    "paired_difference",
    "records_of",
    "settings_of",
    "write_results",
]
