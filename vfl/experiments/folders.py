"""Where a grid stands, and which runs and grids a folder holds."""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vfl.config.run_folder import RunFolder
from vfl.core.errors import RunFolderError, VFLError
from vfl.experiments.cells import GRID, LOCK, GridFolder, failure_of, is_done, is_grid
from vfl.experiments.scores import OF_CELL

#: What a grid of each kind is called.
KINDS = {"attacks": "grid", "codecs": "comparison", "value": "value"}


@dataclass(frozen=True)
class GridStatus:
    """Where a grid stands.

    Attributes:
        grid: its folder.
        kind: grid, comparison or value.
        state: at work, ended, failed or interrupted.
        created: when it began.
        cells, done: how many trainings it has, and how many are whole.
        failed: titles of cells that ended badly, with the reason.
        then: commands that go on from here.
        exit_code: what `vfl status` ends with.
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
        """For machines."""
        return asdict(self) | {"then": list(self.then)}


def grid_status(path: Path) -> GridStatus:
    """Where a grid stands, whether its cells are done or not.

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
    """Whether a process holds the folder."""
    if not (path / LOCK).exists():
        return False
    with (path / LOCK).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@dataclass(frozen=True)
class Listed:
    """A run or a grid of a folder.

    Attributes:
        name: of its own folder.
        kind: training, grid, comparison or value.
        created: when it began.
        state: see `GridStatus` and `vfl.training.status.RunStatus`.
        sentence: what it says first; empty while it says nothing.
        cards: the same as numbers, title and value.
        page: whether it has one.
    """

    name: str
    kind: str
    created: str
    state: str
    sentence: str
    cards: Sequence[tuple[str, str]]
    page: bool


def list_runs(folder: Path) -> list[Listed]:
    """The runs and grids right below a folder, the newest first; a damaged one says so.

    Raises:
        RunFolderError: there is no such folder.
    """
    if not folder.is_dir():
        raise RunFolderError(
            "there is no such folder", where=str(folder), fix="vfl train makes runs/ where it runs"
        )
    found = [path.parent for name in ("run.json", GRID) for path in folder.glob(f"*/{name}")]
    return sorted(map(_listed, found), key=lambda one: one.created, reverse=True)


def _listed(path: Path) -> Listed:
    from vfl.experiments.pages import PAGE, glance  # they import this
    from vfl.training.status import run_status

    kind = "grid" if is_grid(path) else "training"
    created, state, sentence, cards = "", "damaged", "", list[tuple[str, str]]()
    try:
        if is_grid(path):
            grid = grid_status(path)
            kind, created = grid.kind, grid.created
            state = f"{grid.state}, {grid.done} of {grid.cells}"
        else:
            created = str(RunFolder(path).about()["created"])
            state = run_status(path).state
        top = glance(path)
        sentence, cards = top.sentence, [(card.title, card.value) for card in top.cards]
    except VFLError as error:
        sentence = error.what
    return Listed(path.name, kind, created, state, sentence, cards, (path / PAGE).exists())
