"""What `vfl compare` and `vfl grid` have in common: cells that are done, and what went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vfl.cli.output import Device, say

if TYPE_CHECKING:
    from vfl.grid import Cell, GridFolder
    from vfl.grid.run import Ended

#: Of both commands that attack; what it tells of is in `vfl.config.packs`.
ATTACKS_HELP = (
    "An attack, or a pack of them: thesis, quick, light, heavy, columns (on a party's inputs) or"
    " members (on who was trained on); vfl list packs says what is in each. Repeat."
)


def worker(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a grid.")],
    device: Device = "cpu",
) -> None:
    """Do the cells whose names come on standard input; `--jobs` starts it."""
    from vfl.grid.workers import serve
    from vfl.threads import use_one_thread

    use_one_thread()
    serve(folder, device)


def train_cells(
    folder: GridFolder, cells: Sequence[Cell], jobs: int, device: str, download: bool
) -> list[Ended]:
    """Go through cells and say each; the failed ones.

    Args:
        folder: where they lie.
        cells: what is wanted.
        jobs: how many at a time.
        device: where models run.
        download: fetch a data set that is not here first.
    """
    from vfl.grid.run import go_through
    from vfl.run import load_data
    from vfl.threads import use_one_thread

    use_one_thread()
    if download:
        load_data(cells[0].experiment, download=True)
    say(f"{len(cells)} cells in {folder.path}")
    return go_through(folder, cells, jobs, device, on_end=_say_cell)


def said_failures(failed: Sequence[Ended]) -> None:
    """Tell what went wrong in cells, and end with the exit code of the worst."""
    for ended in failed:
        say(_failure(ended))
    if failed:
        raise typer.Exit(max(int((ended.failure or {})["exit"]) for ended in failed))


def numbers(text: str | None) -> list[int] | None:
    """Whole numbers between commas.

    Raises:
        ConfigError: something else.
    """
    from vfl.errors import ConfigError

    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError("a list of whole numbers", got=text, want="1,5,10") from None


def _say_cell(ended: Ended) -> None:
    from vfl.report.units import seconds_text

    left = "" if ended.done == ended.total else f"  about {seconds_text(ended.left_s)} left"
    state = f"failed: {ended.failure['what']}" if ended.failure else seconds_text(ended.seconds)
    say(f"{ended.done} of {ended.total}  {ended.cell.title}  {state}{left}")


def _failure(ended: Ended) -> str:
    """What went wrong in a cell, in the form of every error."""
    record = ended.failure or {}
    parts = {"where": "where", "got": "got", "want": "want", "fix": "try", "code": "more"}
    more = [
        f"  {word:<5} {'vfl explain ' if key == 'code' else ''}{record[key]}"
        for key, word in parts.items()
        if record.get(key)
    ]
    return "\n".join([f"failed: {ended.cell.title}: {record['what']}", *more])
