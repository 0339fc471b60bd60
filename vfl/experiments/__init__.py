"""Studies: sets of trainings that belong together, with their status and results.

A grid is a folder with a list of cells (one cell is one training). Each cell is an ordinary run
folder whose name depends on the cell's settings, so that a later call finds earlier trainings.
`comparison` and `attack_grid` make cells, `scheduler` trains and attacks them, and `pages` shows
the results. The names that this package exports are for reading cells; importing them does not
import torch. The following files of this package process one cell of a grid:

    vfl grid FILE, vfl compare FILE:    vfl/cli/study.py
      cells, by name and digest:        cells.py, comparison.py, scores.py
      run the cells that are left:      scheduler.py
      train a cell:                     training.py -> vfl/training/run.py -> vfl/training/local.py
      attack it:                        attack_grid.py -> attack_runner.py
           knowledge of an attack:      scenarios.py -> vfl/attacks/cases/ -> vfl/attacks/view.py
           score and guess:             vfl/attacks/scoring.py -> scores.py
      table, intervals, verdicts:       results.py, leaderboard.py, statistics.py
      later attacks from outside:       outside.py
      page:                             pages/
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
from vfl.experiments.loaded_run import LoadedRun
from vfl.experiments.pages import write_results
from vfl.experiments.results import Line, LoadedGrid, Record, records_of
from vfl.experiments.statistics import Estimate, estimate, paired_difference

__all__ = [
    "Cell",
    "Estimate",
    "GridFolder",
    "Line",
    "LoadedGrid",
    "LoadedRun",
    "Record",
    "chosen",
    "estimate",
    "failure_of",
    "is_done",
    "is_grid",
    "paired_difference",
    "records_of",
    "settings_of",
    "write_results",
]
