"""Who trains cells: this process, or one of its own for each at a time."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from vfl.grid.cells import Cell, GridFolder
from vfl.grid.do import do_cell
from vfl.grid.train import Rows
from vfl.storage import write_json

_PATIENCE_S = 10.0


class Worker(Protocol):
    """Trains one cell at a time."""

    def do(self, cell: Cell) -> None:
        """Train a cell; what went wrong is in its folder afterwards."""

    def end(self) -> None:
        """Stop, whatever is being trained."""


class Here:
    """Trains in this process.

    Args:
        folder: of the grid.
        device: where models run.
    """

    def __init__(self, folder: GridFolder, device: str) -> None:
        self._folder = folder
        self._device = device
        self._rows = Rows()

    def do(self, cell: Cell) -> None:
        do_cell(cell, self._folder, self._rows, self._device)

    def end(self) -> None:
        self._rows = Rows()


class Process:
    """Trains in a process that is started when there is something to do, and again if it dies.

    It reads names of cells from its standard input, writes each back when the cell has ended, and
    ends when this process does, because that closes its input.

    Args:
        folder: of the grid.
        device: where models run.
    """

    def __init__(self, folder: GridFolder, device: str) -> None:
        self._folder = folder
        words = [sys.executable, "-m", "vfl", "grid-worker", str(folder.path.resolve())]
        self._words = [*words, "--device", device]
        self._process: subprocess.Popen[str] | None = None
        self._ended = False

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    def do(self, cell: Cell) -> None:
        if self._ended:
            return
        process = self._process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{cell.name}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer and not self._ended:
            self._lost(cell, process)

    def end(self) -> None:
        self._ended = True
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            _gone(process)

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the process that leads
        )

    def _lost(self, cell: Cell, process: subprocess.Popen[str]) -> None:
        self._process = None
        status = _gone(process)
        record = {
            "what": "the process that trained this ended before it",
            "got": f"exit status {status}",
            "fix": "give the same command again: it goes on from the last checkpoint",
            "exit": 1,
        }
        write_json(self._folder.cells_path / cell.name / "failure.json", record)


def serve(folder: Path, device: str) -> None:
    """Train the cells whose names come on standard input; end at once when it is closed."""
    grid = GridFolder(folder)
    cells = {cell.name: cell for cell in grid.cells()}
    here = Here(grid, device)
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin, asked), daemon=True).start()
    while name := asked.get():
        here.do(cells[name])
        print(name, flush=True)


def _read(lines: Iterable[str], asked: queue.SimpleQueue[str]) -> None:
    for line in lines:
        asked.put(line.strip())
    os._exit(0)  # whoever asked is gone; a checkpoint is whole or not there


def _gone(process: subprocess.Popen[str]) -> int:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        return process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
