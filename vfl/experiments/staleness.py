"""Stale cells: if a cell's data or code has changed, tables mark the cell, and its old run is kept.

A file next to each cell (training) contains digests of the cell's data and of its plug-ins' code. A
training loads the data, so it can detect that a run is stale; it then moves the stale run aside. A
report compares only the code with the digests. A report detects changed data only if another cell
of the grid was trained later on the same data.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING, Any

from vfl.core.errors import UserError
from vfl.core.storage import read_json, stamp, write_json
from vfl.experiments.cells import HONEST, Cell, GridFolder, data_digest, plug_ins_of, text_digest

if TYPE_CHECKING:
    from pathlib import Path

    from vfl.datasets import PartyData

UNKNOWN = "its rows and its code were not recorded"
CODE, ROWS = "its code has changed since", "its rows have changed since"
#: Name of the file with the reason, in the folder of a run that was moved aside.
NOTE = "stale.json"


def put_aside_if_stale(
    cell: Cell, folder: GridFolder, rows: str, built: Mapping[str, str] | None = None
) -> None:
    """Move a cell's run aside, unless the cell's data and plug-ins are unchanged.

    The function then writes the current digests next to the cell, so that the next call can compare
    them.

    Args:
        cell: a cell that was trained, or that is trained next.
        folder: folder of the grid.
        rows: digest of every party's data, see `vfl.experiments.cells.data_digest`.
        built: for a module, an entry `built`: a digest of the code that builds and trains the
            module.
    """
    before, now = made_of(cell, folder), _made_of(cell, rows) | dict(built or {})
    moment = datetime.now(UTC).isoformat(timespec="microseconds")
    if why := _change(before, now):
        for run in (folder.cells_path / cell.name, folder.aside(cell)):
            if run.exists():
                _put_aside(run, folder.stale(cell), {"why": why, "was": before, "now": now})
    write_json(_record_path(cell, folder), now | {"checked": moment})


def is_stale(cell: Cell, folder: GridFolder, data: Mapping[str, PartyData]) -> bool:
    """Return whether a cell's data or plug-in code changed since its run, or is not recorded."""
    return bool(_change(made_of(cell, folder), _made_of(cell, data_digest(data))))


def stale_cells(folder: GridFolder) -> dict[str, str]:
    """Return the reasons why finished or started cells are stale, by name, without loading data."""
    held = [cell for cell in folder.cells() if (folder.cells_path / cell.name).exists()]
    records = {cell.name: made_of(cell, folder) for cell in held}
    now, found = dict[str, dict[str, str]](), dict[str, str]()
    latest: dict[str, Mapping[str, str]] = {}
    rows = dict[str, str]()
    for cell in held:
        try:
            now[cell.name], rows[cell.name] = {"code": _code_of(cell)}, _rows_of(cell)
        except UserError as error:
            found[cell.name] = f"code of the cell cannot be loaded: {error.what}"
            continue
        own, newest = records[cell.name], latest.get(rows[cell.name], {})
        if own.get("checked", "") >= newest.get("checked", ""):
            latest[rows[cell.name]] = own
    for name, today in now.items():
        today["data"] = latest[rows[name]].get("data", "")
        # only a call that has the functions of the module grid can compare their code
        if "built" in records[name]:
            today["built"] = records[name]["built"]
        if why := _change(records[name], today):
            found[name] = why
    return found


def put_aside(folder: GridFolder) -> list[Path]:
    """Return the runs that were moved aside, each with a note of the reason."""
    found = (folder.stale(cell).glob(f"*/{NOTE}") for cell in folder.cells())
    return [note.parent for own in found for note in sorted(own)]


def _change(before: Mapping[str, Any], now: Mapping[str, str]) -> str:
    """Return the difference between two records of digests as text; empty if they are equal."""
    if not before:
        return UNKNOWN
    if before.get("code") != now["code"] or before.get("built") != now.get("built"):
        return CODE
    return "" if before.get("data") == now["data"] else ROWS


def _put_aside(run: Path, into: Path, note: Mapping[str, Any]) -> None:
    place = next(one for number in count(1) if not (one := into / str(number)).exists())
    into.mkdir(parents=True, exist_ok=True)
    run.rename(place)
    write_json(place / NOTE, stamp() | dict(note))


def _record_path(cell: Cell, folder: GridFolder) -> Path:
    return folder.path / "made_of" / f"{cell.name}.json"


def made_of(cell: Cell, folder: GridFolder) -> dict[str, str]:
    """Return the digests of data and code from a cell's training; empty if it stored none."""
    path = _record_path(cell, folder)
    return read_json(path) if path.exists() else {}


def _made_of(cell: Cell, rows: str) -> dict[str, str]:
    return {"data": rows, "code": _code_of(cell)}


def _code_of(cell: Cell) -> str:
    return plug_ins_of(cell.experiment, [] if cell.adversary == HONEST else [cell.adversary])


def _rows_of(cell: Cell) -> str:
    """Return a digest that is the same for all cells whose trainings use the same data."""
    from vfl.experiments.training import about_rows  # imported late, because the module needs torch

    own = [cell.about.get(key, "") for key in ("what", "party")] if "what" in cell.about else []
    return text_digest("|".join([about_rows(cell.experiment), *own]))
