"""Status of a grid of trainings."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vfl.core.storage import worker_of
from vfl.experiments.cells import GridFolder, failure_of, is_done
from vfl.experiments.scores import OF_CELL

#: Display name of each kind of grid.
KINDS = {"attacks": "grid", "codecs": "comparison", "value": "value"}


@dataclass(frozen=True)
class GridStatus:
    """Status of a grid.

    Attributes:
        grid: its folder.
        kind: kind of the study: grid, comparison or value.
        state: one of: at work, ended, failed, interrupted.
        created: time at which the grid was created.
        cells, done: number of all trainings, and number of finished trainings.
        failed: titles of failed cells (trainings), each with the reason.
        then: commands with which the user can continue.
        exit_code: exit code that `vfl status` returns.
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
        """Return the status as a record for `--json`."""
        return asdict(self) | {"then": list(self.then)}


def grid_status(path: Path) -> GridStatus:
    """Return the status of a grid, whether it has ended or not.

    Raises:
        RunFolderError: the folder contains no grid, or the grid's record is damaged.
    """
    # imported late, because the imported module needs torch, and pages do not
    from vfl.training.status import AT_WORK, INTERRUPTED

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
    if worker_of(path) is not None:
        state, exit_code, again = "at work", AT_WORK, ()
    elif done + len(failed) < len(cells):
        state, exit_code = "interrupted", INTERRUPTED
    elif failed:
        state = "failed"
    else:
        # a command ends with its plug-ins; without them a report marks their results as stale
        _, option, plugins = again[0].partition(" --plugin ")
        again = (shlex.join(["vfl", "report", str(path)]) + option + plugins,)
    return GridStatus(
        str(path), KINDS[folder.kind], state, str(folder.head("created")), len(cells), done, failed,
        again, exit_code,
    )  # fmt: skip
