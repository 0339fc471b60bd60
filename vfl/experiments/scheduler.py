"""Runs the cells (trainings) of a grid: skips finished cells, and resumes interrupted cells.

Workers run the cells, in this process or in other processes; each worker runs one cell at a time.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.config.validate import of_complete_rows, refuse
from vfl.core import processes
from vfl.core.errors import LostPeerError, RunFolderError, VFLError
from vfl.core.storage import locked, worker_of, write_json
from vfl.datasets import PartyData
from vfl.experiments.attack_grid import attack_cell
from vfl.experiments.cells import (
    CODEC,
    FAILURE,
    Cell,
    GridFolder,
    data_digest,
    failure_of,
    is_done,
)
from vfl.experiments.checks import require_test_rows
from vfl.experiments.module_grid import Recipe, is_of_vfl, last_line, run_module_cell
from vfl.experiments.outside import OUTSIDE_FAILURE, attack_from_outside
from vfl.experiments.staleness import put_aside_if_stale
from vfl.experiments.training import DataCache, measure_cell, train_cell
from vfl.experiments.value import run_value_cell

if TYPE_CHECKING:
    from vfl.experiments.on_ray import RayCluster

#: Number of times that a cell is run if its process dies.
TRIES = 3

#: Kind of a cell, for mean durations: whether an earlier call began the cell, and the cell's
#: description without the seed or fold.
_Kind = tuple[bool, frozenset[tuple[str, str]]]


class RemainingTime:
    """Estimates the remaining time from a mean duration for each kind of cell, such as baselines.

    Args:
        cells: cells that have not finished yet.
        jobs: number of cells that run at the same time.
        begun: names of cells that an earlier call began; the remaining parts of these cells say
            nothing about the durations of other cells.

    >>> RemainingTime([], jobs=1).left_s()
    0.0
    """

    def __init__(self, cells: Iterable[Cell], jobs: int, begun: Collection[str] = ()) -> None:
        self._jobs = jobs
        self._begun = begun
        self._ahead = Counter(map(self._kind, cells))
        self._seconds: defaultdict[_Kind, list[float]] = defaultdict(list)

    def add(self, cell: Cell, seconds: float | None = None) -> None:
        """Record a finished cell and its duration; None if an earlier call finished the cell."""
        kind = self._kind(cell)
        self._ahead[kind] -= 1
        if seconds is not None:
            self._seconds[kind].append(seconds)

    def left_s(self) -> float:
        """Return the remaining seconds; kinds of cells without durations get other kinds' mean."""
        means = {kind: fmean(seconds) for kind, seconds in self._seconds.items()}

        def expected(kind: _Kind) -> float:
            if kind in means or not means:
                return means.get(kind, 0.0)
            alike = [seconds for (begun, _), seconds in means.items() if begun == kind[0]]
            return fmean(alike or means.values())

        return sum(count * expected(kind) for kind, count in self._ahead.items()) / self._jobs

    def _kind(self, cell: Cell) -> _Kind:
        repeats = ("seed", "repeat")
        about = frozenset((key, value) for key, value in cell.about.items() if key not in repeats)
        return cell.name in self._begun, about


@dataclass(frozen=True, slots=True)
class FinishedCell:
    """A cell that has just finished or failed.

    Attributes:
        cell: the cell.
        failure: error record with the reason of the failure; None if the cell succeeded.
        seconds: duration of the cell in seconds.
        done, total: number of finished cells and of all cells, including cells that earlier calls
            finished.
        left_s: estimated remaining seconds of this call.
        per_second: number of cells that this call finished, per second.
    """

    cell: Cell
    failure: dict[str, Any] | None
    seconds: float
    done: int
    total: int
    left_s: float
    per_second: float


def run_cells(
    folder: GridFolder,
    cells: Sequence[Cell],
    jobs: int = 1,
    device: str = "cpu",
    on_end: Callable[[FinishedCell], None] = lambda ended: None,
    cluster: RayCluster | None = None,
    outside: bool = False,
    recipe: Recipe | None = None,
) -> list[FinishedCell]:
    """Run every cell that is not finished yet.

    The function visits every cell, because a cell's data and its plug-ins' code determine whether
    it is finished.

    Args:
        folder: folder of the grid.
        cells: cells to complete; two cells with equal settings are trained only once.
        jobs: number of cells that run at the same time, each in a separate process; 1 uses this
            process.
        device: device on which the models are trained.
        on_end: callback that receives each cell that this call finishes, or that fails.
        cluster: Ray cluster whose machines run the cells: as many cells at the same time as the
            machines can run, and at most `jobs` unless `jobs` is 1; None uses this machine.
        outside: whether to run only attacks from a user's file ("from outside"), on victims that
            exist.
        recipe: functions for a grid of modules; None imports the functions by the import names in
            the folder.

    Returns:
        The cells that failed; all other cells are complete.

    Raises:
        RunFolderError: another process is running cells of this folder.
        ConfigError: some parties may lack rows, but the grid's measurements need complete rows; or
            other processes cannot import the functions of a grid of modules.
    """
    for cell in cells:
        refuse(of_complete_rows(cell.experiment, "a comparison, a value or a grid"))
    named = {cell.name: cell for cell in cells}
    repeats = list(dict.fromkeys(cell.repeat for cell in cells))
    # In this order cells with the same data are neighbours, so that the data are loaded only once.
    waiting = sorted(named.values(), key=lambda cell: repeats.index(cell.repeat))
    if cluster is not None:
        jobs = cluster.places if jobs == 1 else min(jobs, cluster.places)
    jobs = max(1, min(jobs, len(waiting)))
    if recipe is not None and (jobs > 1 or cluster is not None):
        recipe.require_names()

    def worker() -> Worker:
        if cluster is not None:
            from vfl.experiments.on_ray import RayWorker

            return RayWorker(folder, device, cluster)
        if jobs == 1:
            return InProcessWorker(folder, device, outside, recipe)
        return ProcessWorker(folder, device, outside)

    if (process := worker_of(folder.path)) is not None:
        raise RunFolderError(
            "another process trains the cells of this folder",
            where=str(folder.path),
            got=f"process {process}",
            fix="wait until it has ended, or give another folder with --out",
        )
    failed, ran, began = list[FinishedCell](), 0, time.monotonic()
    with locked(folder.path):
        workers = [worker() for _ in range(jobs)]
        before = {cell.name: _measured(folder.cells_path / cell.name) for cell in waiting}
        begun = {name for name in named if (folder.cells_path / name).exists()}
        remaining = RemainingTime(waiting, jobs, begun)
        for number, (cell, seconds) in enumerate(_each(waiting, workers), start=1):
            path = folder.cells_path / cell.name
            if before[cell.name] is not None and _measured(path) == before[cell.name]:
                remaining.add(cell)
                continue
            failure = failure_of(path, OUTSIDE_FAILURE if outside else FAILURE)
            remaining.add(cell, seconds)
            left = remaining.left_s()
            ran += 1
            rate = ran / max(time.monotonic() - began, 1e-9)
            ended = FinishedCell(cell, failure, seconds, number, len(named), left, rate)
            failed += [ended] if failure else []
            on_end(ended)
    return failed


def _measured(path: Path) -> int | None:
    """Return the modification time of a finished cell's file `CODEC`; None without this file."""
    return (path / CODEC).stat().st_mtime_ns if is_done(path) else None


def _each(cells: Sequence[Cell], workers: Sequence[Worker]) -> Iterator[tuple[Cell, float]]:
    """Yield each cell with its duration in seconds when the cell ends; finally stop all workers."""
    try:
        if len(workers) == 1:
            yield from (_timed(workers[0], cell) for cell in cells)
        else:
            yield from _side_by_side(cells, workers)
    finally:
        for worker in workers:
            worker.stop()


def _side_by_side(cells: Sequence[Cell], workers: Sequence[Worker]) -> Iterator[tuple[Cell, float]]:
    """Run cells on all workers; a worker stops when no cell is left for this worker.

    A stopped worker of a cluster releases its resources; if another machine died, a cell may be
    waiting for these resources.
    """
    ahead = iter(cells)
    ended: queue.SimpleQueue[tuple[Cell, float] | BaseException] = queue.SimpleQueue()

    def work(worker: Worker) -> None:
        try:
            while (cell := next(ahead, None)) is not None:
                ended.put(_timed(worker, cell))
            worker.stop()
        except BaseException as error:  # the thread that yields results raises this error
            ended.put(error)

    threads = [threading.Thread(target=work, args=(one,), daemon=True) for one in workers]
    try:
        for thread in threads:
            thread.start()
        for _ in cells:
            if isinstance(found := ended.get(), BaseException):
                raise found
            yield found
    finally:
        deque(ahead, maxlen=0)  # this exhausts the iterator, so no cell starts
        for worker in workers:
            worker.stop()
        for thread in threads:
            thread.join()


def _timed(worker: Worker, cell: Cell) -> tuple[Cell, float]:
    started = time.monotonic()
    worker.run(cell)
    return cell, time.monotonic() - started


# --- workers --------------------------------------------------------------------------------------


class Worker(Protocol):
    """Runs cells (trainings) one after another."""

    def run(self, cell: Cell) -> None:
        """Run a cell; if the cell fails, its folder contains the error record afterwards."""

    def stop(self) -> None:
        """Stop the worker, even in the middle of a cell."""


def rows_of(folder: GridFolder, cell: Cell) -> Experiment:
    """Return the experiment whose data a cell loads.

    In a value study this is the study's experiment with the cell's seed, [data] and secure mode,
    because a stand-in party replaces the study's parties in some cells.
    """
    if folder.kind != "value":
        return cell.experiment
    own = {name: getattr(cell.experiment, name) for name in ("seed", "data", "secure")}
    return folder.experiment().model_copy(update=own)


def run_cell(
    cell: Cell,
    folder: GridFolder,
    rows: DataCache | Mapping[str, PartyData],
    device: str = "cpu",
    outside: bool = False,
    recipe: Recipe | None = None,
) -> None:
    """Complete a cell; continue where an earlier call stopped.

    The function writes an error to a file of the cell and does not raise it, so that a failed cell
    does not stop the other cells.

    Args:
        cell: the cell to complete.
        folder: folder of the grid, whose experiment defines the measurements.
        rows: data of every party, or a cache that loads the data.
        device: device on which the models are trained.
        outside: whether to run only attacks from a user's file ("from outside"), on the cell's
            stored victim.
        recipe: see `run_cells`.
    """
    failed = folder.cells_path / cell.name / (OUTSIDE_FAILURE if outside else FAILURE)
    path = failed.parent
    try:
        failed.unlink(missing_ok=True)
        if (modules := folder.modules) is not None:
            run_module_cell(cell, folder, recipe or Recipe.of_record(modules), device)
            return
        data = rows.of(rows_of(folder, cell)) if isinstance(rows, DataCache) else rows
        require_test_rows(cell.experiment, data)
        if outside:
            attack_from_outside(cell, folder, data, device)
            return
        if folder.kind == "value":
            run_value_cell(cell, folder, data, device)
            return
        put_aside_if_stale(cell, folder, data_digest(data))
        if folder.kind == "attacks":
            attack_cell(cell, folder, data, device)
        else:
            train_cell(cell, folder, data, device)
            if not (path / CODEC).exists():
                write_json(path / CODEC, measure_cell(RunFolder(path), data, device))
    except VFLError as error:
        write_json(failed, error.record() | {"exit": error.exit_code})
    except Exception as bug:  # the error's text may contain a value of a table
        write_json(failed, _bug(bug))


def _bug(bug: Exception) -> dict[str, Any]:
    """Return a record that says whether vfl or a plug-in failed, with the last executed line."""
    file, where = last_line(bug, lambda file: "-packages" not in file or is_of_vfl(file))
    whose = "this is a bug of vfl" if is_of_vfl(file) else "a plug-in stopped"
    return {"what": f"{whose}: {type(bug).__name__}", "where": where, "exit": 1}


class InProcessWorker:
    """Runs cells in this process.

    Args:
        folder: folder of the grid.
        device: device on which the models are trained.
        outside, recipe: see `run_cell`.
    """

    def __init__(
        self,
        folder: GridFolder,
        device: str,
        outside: bool = False,
        recipe: Recipe | None = None,
    ) -> None:
        self._folder, self._device, self._outside = folder, device, outside
        self._cache, self._recipe = DataCache(), recipe

    def run(self, cell: Cell) -> None:
        """Run a cell; if the cell fails, its folder contains the error record afterwards."""
        run_cell(cell, self._folder, self._cache, self._device, self._outside, self._recipe)
        # otherwise the C library keeps memory that victims freed, some 40 MB per victim
        processes.return_memory()

    def stop(self) -> None:
        """Free the worker's cached data."""
        self._cache = DataCache()


class RetryingWorker(ABC):
    """Runs cells in another process; if this process dies, a new process runs the cell again.

    Args:
        folder: folder of the grid.
        device: device on which the models are trained.
        outside: see `run_cell`.
    """

    def __init__(self, folder: GridFolder, device: str, outside: bool = False) -> None:
        self._folder, self._device, self._outside = folder, device, outside
        self._stopped = threading.Event()

    @abstractmethod
    def _attempt(self, cell: Cell) -> str | None:
        """Run a cell once; return the reason if the process died, else None."""

    @abstractmethod
    def _end(self) -> None:
        """End the other process, even in the middle of a cell."""

    def run(self, cell: Cell) -> None:
        """Run a cell; if the cell fails, its folder contains the error record afterwards."""
        causes = list[str]()
        while len(causes) < TRIES:
            cause = None if self._stopped.is_set() else self._attempt(cell)
            # the scheduler stopped the worker on purpose, so this is not a failure
            if cause is None or self._stopped.is_set():
                return
            causes.append(cause)
        record = {
            "what": "the process that trained this cell died in every attempt",
            "got": f"{TRIES} tries: {', '.join(dict.fromkeys(causes))}",
            "fix": "run the same command again: it continues from the last checkpoint",
            "exit": 1,
        }
        name = OUTSIDE_FAILURE if self._outside else FAILURE
        write_json(self._folder.cells_path / cell.name / name, record)

    def stop(self) -> None:
        """Stop the worker, even in the middle of a cell."""
        self._stopped.set()
        self._end()


class ProcessWorker(RetryingWorker):
    """Runs cells in a separate process on this machine, which starts when needed."""

    _process: processes.Worker | None = None

    @property
    def pid(self) -> int | None:
        """Id of the worker's process; None if no process is running."""
        return None if self._process is None else self._process.pid

    def _attempt(self, cell: Cell) -> str | None:
        process = self._process = self._process or self._start()
        process.send(cell.name)
        try:
            process.receive()
        except LostPeerError as lost:
            self._end()
            return lost.got or ""
        return None

    def _end(self) -> None:
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
            start_new_session=True,  # only the main process reacts to Ctrl-C
        )


def serve(folder: Path, device: str, outside: bool = False) -> None:
    """Run cells whose names arrive on standard input, until standard input is closed."""
    grid = GridFolder(folder)
    cells = {cell.name: cell for cell in grid.cells()}
    worker = InProcessWorker(grid, device, outside)
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            asked.put(line.strip())
        # the scheduler has ended; stopping is safe, because checkpoints are always complete
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while name := asked.get():
        worker.run(cells[name])
        print(name, flush=True)
