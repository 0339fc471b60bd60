"""Status of a grid."""

from __future__ import annotations

import fcntl
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vfl.experiments.cells import LOCK, GridFolder, failure_of, is_done
from vfl.experiments.scores import OF_CELL

#: Name of each kind of grid.
KINDS = {"attacks": "grid", "codecs": "comparison", "value": "value"}


@dataclass(frozen=True)
class GridStatus:
    """Status of a grid.

    Attributes:
        grid: its folder.
        kind: grid, comparison or value.
        state: at work, ended, failed or interrupted.
        created: time of the start.
        cells, done: number of all trainings, and of complete ones.
        failed: titles of cells that ended badly, with the reason.
        then: commands that go on from here.
        exit_code: exit code of `vfl status`.
    """

    grid: str
    kind: str
    state: str
    created: str
    cells: int
    done: int
    failed: dict[str, str]
    then: tuple[str, ...]
    exit_code: int

    def record(self) -> dict[str, Any]:
        """Return a record for `--json`."""
        return asdict(self) | {"then": list(self.then)}


def grid_status(path: Path) -> GridStatus:
    """Return the status of a grid, whether its cells are done or not.

    Raises:
        RunFolderError: there is no grid, or its record is damaged.
    """
    from vfl.training.status import AT_WORK, INTERRUPTED  # it needs torch, and pages do not

    folder = GridFolder(path)
    cells, failed, done, exit_code = folder.cells(), dict[str, str](), 0, 0
    for cell in cells:
        own = folder.cells_path / cell.name
        if (failure := failure_of(own)) is not None:
            failed[cell.title] = str(failure["what"])
            exit_code = max(exit_code, int(failure["exit"]))
        else:
            done += (own / OF_CELL).exists() if folder.kind == "attacks" else is_done(own)
    again: tuple[str, ...] = (str(folder.head("command")),)
    state = "ended"
    if _at_work(path):
        state, exit_code, again = "at work", AT_WORK, ()
    elif done + len(failed) < len(cells):
        state, exit_code = "interrupted", INTERRUPTED
    elif failed:
        state = "failed"
    else:
        again = (f"vfl report {path}",)
    return GridStatus(
        str(path), KINDS[folder.kind], state, str(folder.head("created")), len(cells), done, failed,
        again, exit_code,
    )  # fmt: skip


def _at_work(path: Path) -> bool:
    """Return whether a running process holds the folder's lock."""
    if not (path / LOCK).exists():
        return False
    with (path / LOCK).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
