"""Cost of the engine of `vfl compare` for many short trainings (cells), and of a simple loop.

    python -m benchmarks.grid --cells 1000 --epochs 1 --jobs 2

The simple loop trains some of the cells one after another in this process, on rows that are already
loaded. The other result rows train all cells: in this process, in several processes, or on Ray.
`used` is the fraction of the `jobs` cores that were training: the time that the loop would need for
all cells, divided by wall time and by cores. Times include the start of processes, but not the
writing of tables and of the page. CPU time includes this process and all processes that it started,
also those of Ray.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks import harness
from vfl.config import Experiment
from vfl.core.seeds import use_one_thread
from vfl.experiments import GridFolder
from vfl.experiments.cells import Cell
from vfl.experiments.comparison import comparison_of
from vfl.experiments.on_ray import RayCluster
from vfl.experiments.scheduler import run_cells
from vfl.training.run import load_data, train

#: Number of cells from which the loop's mean time is computed.
_ALONE = 10

Engine = Literal["process", "pool", "ray"]


@dataclass(frozen=True, slots=True)
class GridRow:
    """Cost of all cells with one engine.

    Attributes:
        engine: name of the engine that runs the cells.
        jobs: number of cells that run at the same time.
        cells: number of cells.
        wall_s: wall time of all cells in seconds, including start and end of the engine.
        cell_cpu_ms: CPU time of a cell, in milliseconds.
        over_ms: CPU time of a cell minus the CPU time of a cell in the simple loop, in
            milliseconds.
        used: fraction of the `jobs` cores that were training.
    """

    engine: str
    jobs: int
    cells: int
    wall_s: float
    cell_cpu_ms: float
    over_ms: float
    used: float


def bench_grid(
    cells: int = 100,
    epochs: int = 1,
    jobs: int = 2,
    engine: Sequence[Engine] = ("process", "pool", "ray"),
    ray: str = "local",
    quick: bool = False,
) -> list[GridRow]:
    """Compare the engine of `vfl compare` with a loop over the same trainings.

    Args:
        cells: number of cells; each has its own seed, and thus its own split.
        epochs: epochs of each training, which determine the time of a cell.
        jobs: number of cells that run at the same time, in processes and on Ray.
        engine: process for this process, pool for `--jobs`, ray for `--ray`.
        ray: value of the option `--ray`.
        quick: whether to only check that the benchmark runs.
    """
    if quick:
        cells, engine = 2, ("process",)
    use_one_thread()
    rows = [_alone(_planned(min(cells, _ALONE), epochs))]
    planned = _planned(cells, epochs)
    for one in engine:
        harness.say(f"{cells} cells, engine {one}")
        rows.append(_of_engine(one, planned, 1 if one == "process" else jobs, ray, rows[0]))
    return rows


def _planned(cells: int, epochs: int) -> tuple[Experiment, Sequence[Cell]]:
    experiment = Experiment.model_validate(
        {
            "name": "cost",
            "parties": {"client": {"width": 16, "bottom": "mlp:hidden=16,last=relu"}},
            "label": {"top": "linear"},
            "train": {"epochs": epochs},
            "compare": {"codecs": ["none"], "seeds": list(range(cells))},
        }
    )
    return experiment, comparison_of(experiment).cells


def _cpu_s() -> float:
    """Return the CPU time of this process and all its descendants, including those that ended."""
    total = 0
    for pid in harness.family(os.getpid()):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


def _alone(planned: tuple[Experiment, Sequence[Cell]]) -> GridRow:
    _, cells = planned
    with tempfile.TemporaryDirectory() as place:
        data = [load_data(cell.experiment) for cell in cells]
        with harness.measured(_cpu_s) as cost:
            for cell, rows in zip(cells, data, strict=True):
                train(cell.experiment, Path(place), cell.name, data=rows)
    cell_cpu_ms = 1e3 * cost.cpu_s / len(cells)
    return GridRow("loop", 1, len(cells), cost.wall_s, cell_cpu_ms, 0.0, 1.0)


def _of_engine(
    engine: Engine,
    planned: tuple[Experiment, Sequence[Cell]],
    jobs: int,
    ray: str,
    alone: GridRow,
) -> GridRow:
    experiment, cells = planned
    with tempfile.TemporaryDirectory() as place, harness.measured(_cpu_s) as cost:
        folder = GridFolder(Path(place))
        with RayCluster.of(ray) if engine == "ray" else nullcontext() as cluster:
            folder.write(experiment, cells, "benchmarks.grid")
            failed = run_cells(folder, cells, jobs, cluster=cluster)
        assert not failed, failed[0].failure
    cpu_ms = 1e3 * cost.cpu_s / len(cells)
    used = alone.wall_s / alone.cells * len(cells) / (jobs * cost.wall_s)
    return GridRow(engine, jobs, len(cells), cost.wall_s, cpu_ms, cpu_ms - alone.cell_cpu_ms, used)


TABLE = harness.table(
    ("engine", "<10", "engine"),
    ("jobs", ">6", "jobs"),
    ("cells", ">7", "cells"),
    ("wall s", ">9.1f", "wall_s"),
    ("CPU ms a cell", ">15.1f", "cell_cpu_ms"),
    ("over the loop", ">15.1f", "over_ms"),
    ("used", ">7.0%", "used"),
)


main = harness.command(bench_grid, TABLE)


if __name__ == "__main__":
    main()
