"""Many trainings that belong together: what is trained, how far it is, and what came out.

A grid is a folder with a list of cells; each cell is an ordinary run folder, named by what it
trains, so that whatever was trained before is found again.
"""

from __future__ import annotations

from vfl.grid.cells import Cell, GridFolder, chosen, is_grid
from vfl.grid.compare import Comparison, comparison_of, plan_lines, settings_of
from vfl.grid.groups import Group, grouped
from vfl.grid.interval import Estimate, estimate, paired_difference
from vfl.grid.results import Measured, Result, read_results
from vfl.grid.run import Ended, go_through
from vfl.grid.write import write_results

__all__ = [
    "Cell",
    "Comparison",
    "Ended",
    "Estimate",
    "GridFolder",
    "Group",
    "Measured",
    "Result",
    "chosen",
    "comparison_of",
    "estimate",
    "go_through",
    "grouped",
    "is_grid",
    "paired_difference",
    "plan_lines",
    "read_results",
    "settings_of",
    "write_results",
]
