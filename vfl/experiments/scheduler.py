"""Runs the cells of a grid: finished cells stay, and started cells continue.

Workers complete the rest of a cell, in this process or in one separate process at a time.
"""

from __future__ import annotations

import fcntl
import os
import queue
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.config.validate import of_complete_rows, refuse
from vfl.core import processes
from vfl.core.errors import LostPeerError, RunFolderError, VFLError
from vfl.core.storage import write_json
from vfl.datasets import PartyData
from vfl.experiments.attack_grid import attack_cell
from vfl.experiments.cells import (
    CODEC,
    FAILURE,
    LOCK,
    Cell,
    GridFolder,
    data_digest,
    failure_of,
    is_done,
)
from vfl.experiments.checks import require_test_rows
from vfl.experiments.module_grid import Recipe, run_module_cell
from vfl.experiments.outside import OUTSIDE_FAILURE, attack_from_outside
from vfl.experiments.staleness import put_aside_if_stale
from vfl.experiments.training import DataCache, measure_cell, train_cell
from vfl.experiments.value import run_value_cell

if TYPE_CHECKING:
    from vfl.experiments.on_ray import RayCluster

_PACKAGE = Path(__file__).parents[1]
#: Number of attempts at a cell whose process dies.
TRIES = 3

#: Kind of a cell, without its seed: whether an earlier call began it, and its settings.
_Kind = tuple[bool, frozenset[tuple[str, str]]]


class RemainingTime:
    """Estimate of the remaining time by kind of cell; baselines can take longer than victims.

    Args:
        cells: cells that have not ended.
        jobs: number of cells that run at a time.
        begun: names of cells that an earlier call began; their times do not predict other cells.

    >>> RemainingTime([], jobs=1).left_s()
    0.0
    """

    def __init__(self, cells: Iterable[Cell], jobs: int, begun: Collection[str] = ()) -> None:
        self._jobs = jobs
        self._begun = begun
        self._ahead = Counter(map(self._kind, cells))
        self._seconds: defaultdict[_Kind, list[float]] = defaultdict(list)

    def add(self, cell: Cell, seconds: float | None = None) -> None:
        """Record a finished cell with its duration; None if an earlier call had finished it."""
        kind = self._kind(cell)
        self._ahead[kind] -= 1
        if seconds is not None:
            self._seconds[kind].append(seconds)

    def left_s(self) -> float:
        """Seconds until all have ended; of a new kind each counts as the mean of the others."""
        means = {kind: fmean(seconds) for kind, seconds in self._seconds.items()}

        def expected(kind: _Kind) -> float:
            if kind in means or not means:
                return means.get(kind, 0.0)
            alike = [seconds for (begun, _), seconds in means.items() if begun == kind[0]]
            return fmean(alike or means.values())

        return sum(count * expected(kind) for kind, count in self._ahead.items()) / self._jobs

    def _kind(self, cell: Cell) -> _Kind:
        about = frozenset((key, value) for key, value in cell.about.items() if key != "seed")
        return cell.name in self._begun, about


@dataclass(frozen=True, slots=True)
class FinishedCell:
    """A cell that has just ended.

    Attributes:
        cell: the cell.
        failure: error record of a failed cell, with the reason.
        seconds: it took.
        done, total: cells that have ended, and all, those of earlier calls included.
        left_s: estimated remaining seconds.
        per_second: cells that ended in this call, over its time.
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
    """Run every cell that is not done yet.

    Whether a cell is done follows from its rows and its plug-ins' code, so each is looked at.

    Args:
        folder: folder of the cells.
        cells: cells to complete; cells of one experiment are trained once.
        jobs: number of simultaneous cells, each in a separate process; 1 trains in this process.
        device: device of the models.
        on_end: gets every cell that was not done before.
        cluster: cluster whose machines run the cells, as many at a time as fit, and at most `jobs`
            unless that is 1; None uses this machine.
        outside: whether only attacks from outside run, on the existing victims.
        recipe: functions of a grid of modules; None imports them by the names in the folder.

    Returns:
        The result is the failed cells; all others are complete.

    Raises:
        RunFolderError: another process is running cells of this folder.
        ConfigError: some parties lack rows, which what is measured of a cell cannot do without; or
            other processes cannot import a module's functions.
    """
    for cell in cells:
        refuse(of_complete_rows(cell.experiment, "a comparison, a value or a grid"))
    named = {cell.name: cell for cell in cells}
    repeats = list(dict.fromkeys(cell.repeat for cell in cells))
    # Cells of the same rows follow each other, so that these are loaded once.
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

    failed, ran, began = list[FinishedCell](), 0, time.monotonic()
    with _alone(folder.path):
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
    """Return the time of a cell's measurement; None for attacks, or if it was not measured."""
    return (path / CODEC).stat().st_mtime_ns if is_done(path) else None


def _each(cells: Sequence[Cell], workers: Sequence[Worker]) -> Iterator[tuple[Cell, float]]:
    """Yield cells and their seconds as they end; workers end with the last or on interruption."""
    try:
        if len(workers) == 1:
            yield from (_timed(workers[0], cell) for cell in cells)
        else:
            yield from _side_by_side(cells, workers)
    finally:
        for worker in workers:
            worker.stop()


def _side_by_side(cells: Sequence[Cell], workers: Sequence[Worker]) -> Iterator[tuple[Cell, float]]:
    """Run cells on all workers; a worker stops when no cell is left for it.

    Workers of a cluster then release their resources, for which a cell may wait whose machine died.
    """
    ahead = iter(cells)
    ended: queue.SimpleQueue[tuple[Cell, float] | BaseException] = queue.SimpleQueue()

    def work(worker: Worker) -> None:
        try:
            while (cell := next(ahead, None)) is not None:
                ended.put(_timed(worker, cell))
            worker.stop()
        except BaseException as error:  # the thread that yields raises it
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
        deque(ahead, maxlen=0)  # starts no further cell
        for worker in workers:
            worker.stop()
        for thread in threads:
            thread.join()


def _timed(worker: Worker, cell: Cell) -> tuple[Cell, float]:
    started = time.monotonic()
    worker.run(cell)
    return cell, time.monotonic() - started


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep a second call out of the folder; the system releases the lock when this process ends."""
    with (path / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderError(
                "another process trains the cells of this folder",
                where=str(path),
                fix="wait until it has ended, or give another folder with --out",
            ) from None
        yield


# --- workers --------------------------------------------------------------------------------------


class Worker(Protocol):
    """Runs cells, one after another."""

    def run(self, cell: Cell) -> None:
        """Run a cell; its folder contains a failure afterwards."""

    def stop(self) -> None:
        """Stop, whatever is being run."""


def rows_of(folder: GridFolder, cell: Cell) -> Experiment:
    """Return the experiment that determines the rows of a cell.

    It belongs to the experiment file if stand-ins replace the file's parties in a cell.
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
    recipe: Recipe | None = None,
) -> None:
    """Complete a cell, from wherever an earlier call stopped.

    Whatever goes wrong is written to a file of the cell, and nothing is raised: a failed cell does
    not stop the others.

    Args:
        cell: cell to run.
        folder: folder of the cell's grid, which states the measurements.
        rows: rows of every party, or their source.
        device: device of the models.
        outside: only attacks from outside are run, on what is there.
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
    except Exception as bug:  # its text may quote a cell of a table
        write_json(failed, _bug(bug))


def _bug(bug: Exception) -> dict[str, Any]:
    """Return whether vfl or a plug-in failed, and its last line that ran."""

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
        folder: folder of the grid.
        device: device of the models.
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
        """Run a cell; its folder holds any failure afterwards."""
        run_cell(cell, self._folder, self._cache, self._device, self._outside, self._recipe)
        processes.return_memory()  # the C library keeps memory that a victim freed, some 40 MB each

    def stop(self) -> None:
        """Stop, whatever is being run."""
        self._cache = DataCache()


class RetryingWorker(ABC):
    """Runs cells in another process; a process that dies is replaced, and its cell tried again.

    Args:
        folder: folder of the grid.
        device: device of the models.
        outside: see `run_cell`.
    """

    def __init__(self, folder: GridFolder, device: str, outside: bool = False) -> None:
        self._folder, self._device, self._outside = folder, device, outside
        self._stopped = threading.Event()

    @abstractmethod
    def _attempt(self, cell: Cell) -> str | None:
        """Run a cell once; return why its process died, or None if it ended by itself."""

    @abstractmethod
    def _end(self) -> None:
        """End the process, even if it is running a cell."""

    def run(self, cell: Cell) -> None:
        """Run a cell; its folder holds any failure afterwards."""
        causes = list[str]()
        while len(causes) < TRIES:
            cause = None if self._stopped.is_set() else self._attempt(cell)
            if cause is None or self._stopped.is_set():  # stopped on purpose, so this is no failure
                return
            causes.append(cause)
        record = {
            "what": "the process that trained this cell ended early, every time",
            "got": f"{TRIES} tries: {', '.join(dict.fromkeys(causes))}",
            "fix": "run the same command again: it continues from the last checkpoint",
            "exit": 1,
        }
        name = OUTSIDE_FAILURE if self._outside else FAILURE
        write_json(self._folder.cells_path / cell.name / name, record)

    def stop(self) -> None:
        """Stop, whatever is being run."""
        self._stopped.set()
        self._end()


class ProcessWorker(RetryingWorker):
    """Runs cells in a process on this machine, which starts on demand."""

    _process: processes.Worker | None = None

    @property
    def pid(self) -> int | None:
        """Id of the process; None without a process."""
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
            start_new_session=True,  # Ctrl-C is for the process that leads
        )


def serve(folder: Path, device: str, outside: bool = False) -> None:
    """Run the cells whose names arrive on standard input; end when it is closed."""
    grid = GridFolder(folder)
    cells = {cell.name: cell for cell in grid.cells()}
    worker = InProcessWorker(grid, device, outside)
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            asked.put(line.strip())
        os._exit(0)  # the scheduler has ended; checkpoints are always complete

    threading.Thread(target=read, daemon=True).start()
    while name := asked.get():
        worker.run(cells[name])
        print(name, flush=True)
