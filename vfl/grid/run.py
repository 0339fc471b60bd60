"""Go through the cells of a grid: what is done stays, what was begun goes on."""

from __future__ import annotations

import fcntl
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vfl.errors import RunFolderError
from vfl.grid.cells import CODEC, Cell, GridFolder, failure_of, is_done
from vfl.grid.pace import Pace
from vfl.grid.workers import Here, Process, Worker

_LOCK = "lock"


@dataclass(frozen=True, slots=True)
class Ended:
    """A cell that has just ended.

    Attributes:
        cell: which.
        failure: why it ended badly, as an error's record.
        seconds: it took.
        done, total: cells that have ended, and all, those of earlier calls included.
        left_s: about how long the rest takes.
    """

    cell: Cell
    failure: dict[str, Any] | None
    seconds: float
    done: int
    total: int
    left_s: float


def go_through(
    folder: GridFolder,
    cells: Sequence[Cell],
    jobs: int = 1,
    device: str = "cpu",
    on_end: Callable[[Ended], None] = lambda ended: None,
) -> list[Ended]:
    """Do every cell that is not done yet.

    Whether a cell is done follows from its rows and its plug-ins' code, so each is looked at.

    Args:
        folder: where they lie.
        cells: what is wanted; cells of one experiment are trained once.
        jobs: how many at a time, each in a process of its own; 1 trains in this process.
        device: where models run.
        on_end: told of every cell that was not done before.

    Returns:
        The cells that failed; the others are whole.

    Raises:
        RunFolderError: another process is at it.
    """
    named = {cell.name: cell for cell in cells}
    waiting = list(named.values())
    jobs = max(1, min(jobs, len(waiting)))
    kind: type[Here] | type[Process] = Here if jobs == 1 else Process
    failed: list[Ended] = []
    with _alone(folder.path):
        workers: list[Worker] = [kind(folder, device) for _ in range(jobs)]
        before = {cell.name: _measured(folder.cells_path / cell.name) for cell in waiting}
        begun = {name for name in named if (folder.cells_path / name).exists()}
        pace, ahead = Pace(jobs, begun), dict(named)
        for number, (cell, seconds) in enumerate(_each(waiting, workers), start=1):
            del ahead[cell.name]
            path = folder.cells_path / cell.name
            if before[cell.name] is not None and _measured(path) == before[cell.name]:
                continue
            failure = failure_of(path)
            pace.took(cell, seconds)
            left = pace.left_s(ahead.values())
            ended = Ended(cell, failure, seconds, number, len(named), left)
            failed += [ended] if failure else []
            on_end(ended)
    return failed


def _measured(path: Path) -> int | None:
    """When a cell was measured; None if it was not, or if its rows say so, as of attacks."""
    return (path / CODEC).stat().st_mtime_ns if is_done(path) else None


def _each(cells: Sequence[Cell], workers: Sequence[Worker]) -> Iterator[tuple[Cell, float]]:
    """Cells and their seconds as they end; workers end with the last, or with an interruption."""
    try:
        if len(workers) == 1:
            yield from (_timed(workers[0], cell) for cell in cells)
        else:
            yield from _side_by_side(cells, workers)
    finally:
        for worker in workers:
            worker.end()


def _side_by_side(cells: Sequence[Cell], workers: Sequence[Worker]) -> Iterator[tuple[Cell, float]]:
    free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    for worker in workers:
        free.put(worker)

    def one(cell: Cell) -> tuple[Cell, float]:
        worker = free.get()
        try:
            return _timed(worker, cell)
        finally:
            free.put(worker)

    with ThreadPoolExecutor(len(workers)) as pool:
        try:
            for future in as_completed([pool.submit(one, cell) for cell in cells]):
                yield future.result()
        finally:
            for worker in workers:
                worker.end()
            pool.shutdown(cancel_futures=True)


def _timed(worker: Worker, cell: Cell) -> tuple[Cell, float]:
    started = time.monotonic()
    worker.do(cell)
    return cell, time.monotonic() - started


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep a second call out of the folder; the system lets go when this process ends."""
    with (path / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderError(
                "another process trains the cells of this folder",
                where=str(path),
                fix="wait until it has ended, or give another folder with --out",
            ) from None
        yield
