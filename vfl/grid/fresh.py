"""What was trained of other rows, or by other code of its plug-ins, is trained anew."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vfl.grid.cells import HONEST, Cell, GridFolder
from vfl.grid.identity import data_digest, plug_ins_of
from vfl.storage import read_json, write_json

if TYPE_CHECKING:
    from vfl.datasets import PartyData

_MADE_OF = "made_of"


def forget_if_stale(cell: Cell, folder: GridFolder, data: Mapping[str, PartyData]) -> None:
    """Throw a cell's run folder away unless rows and plug-ins are those it came from.

    What they are now is written beside the cells, for the next call to compare with. Where nothing
    was written, as by older versions, nobody knows what it came from.

    Args:
        cell: what is going to be trained, or was.
        folder: of its grid.
        data: every party's rows.
    """
    path = folder.path / _MADE_OF / f"{cell.name}.json"
    against = [] if cell.adversary == HONEST else [cell.adversary]
    now = {"data": data_digest(data), "code": plug_ins_of(cell.experiment, against)}
    before = read_json(path) if path.exists() else {}
    if {key: before.get(key) for key in now} != now:
        for run in (folder.cells_path / cell.name, folder.aside(cell)):
            shutil.rmtree(run, ignore_errors=True)
    write_json(path, now)
