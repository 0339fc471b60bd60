"""Workers: what is done with a cell, in this process or in one of its own for each at a time."""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.core import processes
from vfl.core.errors import LostPeerError, VFLError
from vfl.core.storage import write_json
from vfl.datasets import PartyData
from vfl.experiments.attack_grid import attack_cell
from vfl.experiments.cells import CODEC, FAILURE, Cell, GridFolder
from vfl.experiments.checks import require_test_rows
from vfl.experiments.outside import OUTSIDE_FAILURE, attack_from_outside
from vfl.experiments.staleness import put_aside_if_stale
from vfl.experiments.training import DataCache, measure_cell, train_cell
from vfl.experiments.value import run_value_cell

_PACKAGE = Path(__file__).parents[1]


def rows_of(folder: GridFolder, cell: Cell) -> Experiment:
    """The experiment that says which rows a cell is about.

    That of the file where a cell's own parties stand in for those of the file.
    """
    if folder.kind != "value":
        return cell.experiment
    own = {"seed": cell.experiment.seed, "data": cell.experiment.data}
    return folder.experiment().model_copy(update=own)


def run_cell(
    cell: Cell,
    folder: GridFolder,
    rows: DataCache | Mapping[str, PartyData],
    device: str = "cpu",
    outside: bool = False,
) -> None:
    """Bring a cell to its end, from wherever an earlier call left it.

    Whatever goes wrong is written to a file of the cell, and nothing is raised: one cell does not
    stop the others.

    Args:
        cell: what is trained.
        folder: of its grid, which says what is measured of it.
        rows: every party's, or where they come from.
        device: where the models run.
        outside: only attacks from outside are run, on what is there.
    """
    failed = folder.cells_path / cell.name / (OUTSIDE_FAILURE if outside else FAILURE)
    path = failed.parent
    try:
        failed.unlink(missing_ok=True)
        data = rows.of(rows_of(folder, cell)) if isinstance(rows, DataCache) else rows
        require_test_rows(cell.experiment, data)
        if outside:
            attack_from_outside(cell, folder, data, device)
            return
        if folder.kind == "value":
            run_value_cell(cell, folder, data, device)
            return
        put_aside_if_stale(cell, folder, data)
        if folder.kind == "attacks":
            attack_cell(cell, folder, data, device)
        else:
            train_cell(cell, folder, data, device)
            if not (path / CODEC).exists():
                write_json(path / CODEC, measure_cell(RunFolder(path), data, device))
    except VFLError as error:
        write_json(failed, error.record() | {"exit": error.exit_code})
    except Exception as bug:  # its text may quote a cell of a table
        write_json(failed, _bug(bug))


def _bug(bug: Exception) -> dict[str, Any]:
    """Who is to look where: the last line of vfl's or a plug-in's that was being run."""

    def is_ours(file: str) -> bool:
        return Path(file).is_relative_to(_PACKAGE)

    frames = traceback.extract_tb(bug.__traceback__)
    own = [one for one in frames if is_ours(one.filename) or "-packages" not in one.filename]
    last = (own or frames)[-1]
    whose = "this is a bug of vfl" if is_ours(last.filename) else "a plug-in stopped"
    where = f"{last.filename}:{last.lineno} in {last.name}"
    return {"what": f"{whose}: {type(bug).__name__}", "where": where, "exit": 1}


class InProcessWorker:
    """Runs cells in this process.

    Args:
        folder: of the grid.
        device: where models run.
        outside: see `run_cell`.
    """

    def __init__(self, folder: GridFolder, device: str, outside: bool = False) -> None:
        self._folder, self._device, self._outside = folder, device, outside
        self._cache = DataCache()

    def run(self, cell: Cell) -> None:
        """Run a cell; what went wrong is in its folder afterwards."""
        run_cell(cell, self._folder, self._cache, self._device, self._outside)
        processes.return_memory()  # the C library keeps what a victim freed, some 40 MB each

    def stop(self) -> None:
        """Stop, whatever is being run."""
        self._cache = DataCache()


class ProcessWorker:
    """Runs cells in a process that is started when there is something to do, and again if it dies.

    Args:
        folder: of the grid.
        device: where models run.
        outside: see `run_cell`.
    """

    def __init__(self, folder: GridFolder, device: str, outside: bool = False) -> None:
        self._folder, self._device, self._outside = folder, device, outside
        self._process: processes.Worker | None = None
        self._stopped = threading.Event()

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    def run(self, cell: Cell) -> None:
        """Run a cell; what went wrong is in its folder afterwards."""
        if self._stopped.is_set():
            return
        if self._process is None:
            self._process = self._start()
        process = self._process
        process.send(cell.name)
        try:
            process.receive()
        except LostPeerError as lost:
            if self._stopped.is_set():  # whoever stopped it knows that it ended
                return
            self._process = None
            process.stop()
            record = {
                "what": "the process that trained this ended before it",
                "got": lost.got,
                "fix": "give the same command again: it goes on from the last checkpoint",
                "exit": 1,
            }
            name = OUTSIDE_FAILURE if self._outside else FAILURE
            write_json(self._folder.cells_path / cell.name / name, record)

    def stop(self) -> None:
        """Stop, whatever is being run."""
        self._stopped.set()
        process, self._process = self._process, None
        if process is not None:
            process.stop()

    def _start(self) -> processes.Worker:
        folder = str(self._folder.path.resolve())
        return processes.Worker(
            "the grid",
            [
                *(sys.executable, "-m", "vfl", "grid-worker", folder, "--device", self._device),
                *(["--outside"] if self._outside else []),
            ],
            os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the process that leads
        )


class Worker(Protocol):
    """Runs cells, one after another."""

    def run(self, cell: Cell) -> None:
        """Run a cell; what went wrong is in its folder afterwards."""

    def stop(self) -> None:
        """Stop, whatever is being run."""


def serve(folder: Path, device: str, outside: bool = False) -> None:
    """Run the cells whose names come on standard input; end at once when it is closed."""
    grid = GridFolder(folder)
    cells = {cell.name: cell for cell in grid.cells()}
    worker = InProcessWorker(grid, device, outside)
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            asked.put(line.strip())
        os._exit(0)  # whoever asked is gone; a checkpoint is whole or not there

    threading.Thread(target=read, daemon=True).start()
    while name := asked.get():
        worker.run(cells[name])
        print(name, flush=True)
