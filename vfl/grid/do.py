"""One cell: trained or gone on with, then measured or attacked; what goes wrong is written down."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vfl.errors import VFLError
from vfl.grid.attack import attack_cell
from vfl.grid.cells import CODEC, FAILURE, Cell, GridFolder
from vfl.grid.fresh import forget_if_stale
from vfl.grid.measure import measure_cell
from vfl.grid.misfits import require_test_rows
from vfl.grid.train import Rows, train_cell
from vfl.run_folder import RunFolder
from vfl.storage import write_json

_HOME = Path(__file__).parents[1]


def do_cell(cell: Cell, folder: GridFolder, rows: Rows, device: str = "cpu") -> None:
    """Bring a cell to its end, from wherever an earlier call left it.

    Whatever goes wrong is written to the cell's failure.json, and nothing is raised: one cell does
    not stop the others.

    Args:
        cell: what is trained.
        folder: of its grid, which says what is measured of it.
        rows: where data come from.
        device: where the models run.
    """
    path = folder.cells_path / cell.name
    try:
        (path / FAILURE).unlink(missing_ok=True)
        data = rows.of(cell.experiment)
        require_test_rows(cell.experiment, data)
        forget_if_stale(cell, folder, data)
        if folder.kind == "attacks":
            attack_cell(cell, folder, data, device)
        else:
            train_cell(cell, folder, data, device)
            if not (path / CODEC).exists():
                write_json(path / CODEC, measure_cell(RunFolder(path), data, device))
    except VFLError as error:
        _fail(path, error.record() | {"exit": error.exit_code})
    except Exception as bug:  # its text may quote a cell of a table
        _fail(path, _bug(bug))


def _bug(bug: Exception) -> dict[str, Any]:
    """Who is to look where: the last line of vfl's or a plug-in's that was being run."""
    frames = traceback.extract_tb(bug.__traceback__)
    own = [one for one in frames if _is_ours(one.filename) or "-packages" not in one.filename]
    last = (own or frames)[-1]
    ours = _is_ours(last.filename)
    whose = "this is a bug of vfl" if ours else "a plug-in stopped"
    where = f"{last.filename}:{last.lineno} in {last.name}"
    return {"what": f"{whose}: {type(bug).__name__}", "where": where, "exit": 1}


def _is_ours(file: str) -> bool:
    return Path(file).is_relative_to(_HOME)


def _fail(path: Path, record: Mapping[str, Any]) -> None:
    write_json(path / FAILURE, record)
