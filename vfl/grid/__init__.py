"""Many trainings that belong together: what is trained, how far it is, and what came out.

A grid is a folder with a list of cells; each cell is an ordinary run folder, named by what it
trains, so that whatever was trained before is found again. `vfl.grid.compare` makes the cells of a
comparison and `vfl.grid.run` trains cells; what is listed here reads them, and needs no torch.
"""

from __future__ import annotations

from vfl.grid.cells import Cell, GridFolder, chosen, failure_of, is_done, is_grid, settings_of
from vfl.grid.groups import Group, grouped
from vfl.grid.interval import Estimate, estimate, paired_difference
from vfl.grid.results import Measured, Result, read_results
from vfl.grid.write import write_results

__all__ = [
    "Cell",
    "Estimate",
    "GridFolder",
    "Group",
    "Measured",
    "Result",
    "chosen",
    "estimate",
    "failure_of",
    "grouped",
    "is_done",
    "is_grid",
    "paired_difference",
    "read_results",
    "settings_of",
    "write_results",
]
