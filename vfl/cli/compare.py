"""``vfl compare``: each codec trained on the same data, side by side, as often as it takes."""

from __future__ import annotations

import json as jsons
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vfl.cli.cells import said_failures, train_cells
from vfl.cli.output import Device, Json, Set, emit

if TYPE_CHECKING:
    from vfl.config import Experiment
    from vfl.grid import GridFolder
    from vfl.grid.compare import Comparison
    from vfl.grid.run import Ended


def compare(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="EXPERIMENT.toml", help="An experiment file, with [compare] or not."
        ),
    ],
    codec: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help="A codec; a ? is a number that --level finds. Repeat."),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="0,1,2", help="One training of each codec a seed.")
    ] = None,
    level: Annotated[
        list[float] | None,
        typer.Option(metavar="PERCENT", help="Of dense float32 that a frame may take. Repeat."),
    ] = None,
    settings: Set = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where; otherwise runs/NAME.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Trainings at a time, a process each.")] = 1,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="WORDS", help="Train only cells whose line in --dry-run holds these words."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cells and their bytes; train nothing.")
    ] = False,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch a data set that is not here.")
    ] = False,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Compare codecs: train each with several seeds and write table and page.

    The same command goes on where an earlier one stopped, in the middle of a training as well, and
    trains only what is new.
    """
    overrides = [*(settings or []), *_table(codec, seeds, level)]
    experiment, comparison = _read(path, overrides)
    from vfl.grid import GridFolder, chosen
    from vfl.grid.compare import plan_lines

    cells = chosen(comparison.cells, only) if only else list(comparison.cells)
    if dry_run:
        print("\n".join(plan_lines(cells)))
        print("".join(f"{note}\n" for note in comparison.notes), end="")
        return
    folder = GridFolder(out or Path("runs") / experiment.name)
    words = ["vfl", "compare", str(path), *(word for one in overrides for word in ("-s", one))]
    folder.write(experiment, comparison.cells, shlex.join(words), comparison.notes)
    failed = train_cells(folder, cells, jobs, device, download)
    _tell(folder, failed, json)


def _table(codecs: list[str] | None, seeds: str | None, levels: list[float] | None) -> list[str]:
    """Options as overrides of the table, so that they are checked as if they stood there."""
    found = [f"compare.codecs={jsons.dumps(codecs)}"] if codecs else []
    if seeds:
        found.append(f"compare.seeds=[{seeds}]")
    if levels:
        found.append(f"compare.levels={jsons.dumps(levels)}")
    return found


def _read(path: Path, overrides: Sequence[str]) -> tuple[Experiment, Comparison]:
    from vfl.config import Places, read_experiment
    from vfl.grid.compare import comparison_of
    from vfl.specs import check_specs, spec_mistakes

    experiment = read_experiment(path, overrides, spec_mistakes)
    experiment = experiment.model_copy(update={"grid": None})
    places = Places.of(path, overrides)
    check_specs(experiment, places)
    return experiment, comparison_of(experiment, places)


def _tell(folder: GridFolder, failed: Sequence[Ended], json: bool) -> None:
    from vfl.grid import write_results
    from vfl.report import build_report

    table, content = write_results(folder)
    page = build_report(folder.path)
    if json:
        emit(content | {"report": str(page)})
    else:
        print(table)
        print(f"{'report':<16} {page}")
    said_failures(failed)
