"""``vfl grid``: victims trained under each defense, and every attack on each of them."""

from __future__ import annotations

import json as jsons
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vfl.cli.cells import ATTACKS_HELP, numbers, said_failures, train_cells
from vfl.cli.output import Device, Json, Set, emit

if TYPE_CHECKING:
    from vfl.config import Experiment
    from vfl.grid import Cell, GridFolder

#: Experiments that come with vfl, by name.
_PROFILES = Path(__file__).parents[1] / "grid"


def grid(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="EXPERIMENT.toml|quick",
            help="An experiment file, with [grid] or not; quick is a small one on digits.",
        ),
    ],
    defense: Annotated[
        list[str] | None, typer.Option(metavar="SPEC", help="A defense, beside none. Repeat.")
    ] = None,
    codec: Annotated[
        list[str] | None, typer.Option(metavar="SPEC", help="A codec as a defense. Repeat.")
    ] = None,
    attack: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help=ATTACKS_HELP),
    ] = None,
    adversary: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help="A party that tampers while a victim trains. Repeat."),
    ] = None,
    leaks: Annotated[
        str | None, typer.Option(metavar="1,5,10", help="Leaked labels of each class.")
    ] = None,
    draws: Annotated[int | None, typer.Option(help="Draws of leaked rows, a victim.")] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="0,1,2", help="One victim of each defense a seed.")
    ] = None,
    settings: Set = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where; otherwise runs/NAME.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Cells at a time, a process each.")] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cells; train and attack nothing.")
    ] = False,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch a data set that is not here.")
    ] = False,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Attack every defense with everything, and write table and page.

    Victims are trained once a defense, adversary and seed; leaked rows are the same for all. The
    same command goes on where an earlier one stopped, and does only what is new.
    """
    listed: dict[str, object] = {"defenses": defense, "attacks": attack, "draws": draws}
    listed |= {"codecs": codec, "adversaries": adversary}
    listed |= {"leaks": numbers(leaks), "seeds": numbers(seeds)}
    given = {key: value for key, value in listed.items() if value is not None and value != []}
    table = [f"grid.{key}={jsons.dumps(value)}" for key, value in given.items()]
    experiment, cells = _read(path, [*(settings or []), *table])
    if dry_run:
        print("\n".join(cell.title for cell in cells))
        return
    words = ["vfl", "grid", str(path)]
    words += [word for one in [*(settings or []), *table] for word in ("-s", one)]
    folder = _written(out or Path("runs") / experiment.name, experiment, cells, words)
    failed = train_cells(folder, cells, jobs, device, download)
    _tell(folder, json)
    said_failures(failed)


def _written(path: Path, experiment: Experiment, cells: list[Cell], words: list[str]) -> GridFolder:
    from vfl.grid import GridFolder

    folder = GridFolder(path)
    folder.write(experiment.model_copy(update={"compare": None}), cells, shlex.join(words))
    return folder


def _tell(folder: GridFolder, json: bool) -> None:
    from vfl.grid.attack_table import write_attack_results
    from vfl.report import build_report

    text, rows = write_attack_results(folder)
    page = build_report(folder.path)
    if json:
        emit(rows)
    else:
        print(text)
        print(f"{'report':<16} {page}")


def _read(path: Path, overrides: list[str]) -> tuple[Experiment, list[Cell]]:
    from vfl.config import Places, read_experiment
    from vfl.grid.attack import grid_cells
    from vfl.specs import check_specs, spec_mistakes

    profile = _PROFILES / f"{path}.toml"
    if not path.exists() and path.parts == (path.name,) and profile.exists():
        path = profile
    experiment = read_experiment(path, overrides, spec_mistakes)
    places = Places.of(path, overrides)
    check_specs(experiment, places)
    with places.told(type(experiment)):
        return experiment, grid_cells(experiment)
