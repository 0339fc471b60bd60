"""``vfl horizontal``: average networks of clients, which hold rows, with differential privacy."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vfl.cli.federation import hand_over
from vfl.cli.output import Json, Set, argument, emit, option, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfl.horizontal.study import Trained


def horizontal(
    path: Annotated[
        Path, argument("File with a [horizontal] table, with or without sweeps.", "FILE.toml")
    ],
    settings: Set = None,
    project: Annotated[
        Path | None,
        option(
            "Train once with the parties of a project, on their own tables, by Flower; variants"
            " and sweeps have no effect."
        ),
    ] = None,
    engine: Annotated[
        Literal["process", "ray"],
        option("Runtime of the clients: this process, or Flower's simulation on Ray."),
    ] = "process",
    out: Annotated[Path | None, option("Output folder; by default runs/NAME.", "FOLDER")] = None,
    dry_run: Annotated[
        bool, option("List the trainings and their privacy guarantees.", "--dry-run")
    ] = False,
    json: Json = False,
) -> None:
    """Train one network over clients that have different rows of the same columns.

    If an earlier command was interrupted, this command runs only the trainings that have no result
    yet. Change settings by options such as -s horizontal.epsilon=2 or -s 'sweep.seed=[0, 1, 2]'.
    """
    from vfl.core.seeds import use_one_thread
    from vfl.horizontal.settings import read_horizontal

    use_one_thread()
    study = read_horizontal(path, settings or [])
    trainings = study.trainings()
    if dry_run:
        _list(trainings)
        return
    if project is not None:
        _require_own_place(engine, out)
        if len(trainings) > 1:
            say("the project trains [horizontal] alone, without variants and sweeps")
        hand_over(project)
        _on_the_federation(study.horizontal, project, json)
        return
    from vfl.horizontal.study import train_study

    folder = out or Path("runs") / study.horizontal.name
    say(f"{len(trainings)} trainings in {folder}")
    done = train_study(study, folder, engine, say)
    if json:
        emit([{"title": one.title, **one.record} for one in done])
        return
    print("\n".join(_table(done)))
    for statement in done[0].record["privacy"] if len(done) == 1 else ():
        print(f"privacy  {statement['text']}")


def _require_own_place(engine: str, out: Path | None) -> None:
    """Refuse options that have no effect in a project, whose clients and folder are its own."""
    for name, given in (("--engine", engine != "process"), ("--out", out is not None)):
        if given:
            raise typer.BadParameter(
                "a project trains at its parties, and writes its own folder", param_hint=name
            )


def _list(trainings: Sequence[tuple[str, Any]]) -> None:
    """Print every training with its guarantees, as if the clients had equally many rows."""
    from vfl.horizontal import plan_noise
    from vfl.horizontal.simulation import shared_rows

    for title, settings in trainings:
        print(title or settings.name)
        for statement in plan_noise(settings, shared_rows(settings).fewest).statements:
            print(f"  {statement}")


def _on_the_federation(settings: Any, project: Path, json: bool) -> None:
    from vfl.core.storage import read_json
    from vfl.federation.project import LabelFolder
    from vfl.horizontal.study import train_project

    folder = train_project(settings, LabelFolder.find(project), say)
    record = read_json(folder / "horizontal.json")
    if json:
        emit(record | {"run": str(folder)})
        return
    print(f"accuracy  {record['accuracy']:.4f}\nloss      {record['loss']:.4f}\nrun       {folder}")
    for statement in record["privacy"]:
        print(f"privacy   {statement['text']}")


def _table(done: Sequence[Trained]) -> list[str]:
    """Return a table with one line for each setting.

    A line shows the mean accuracy over the seeds, and its confidence interval.
    """
    from vfl.experiments.statistics import estimate

    groups: dict[str, list[float]] = {}
    for one in done:
        words = [word for word in one.title.split() if not word.startswith("seed=")]
        groups.setdefault(" ".join(words) or one.settings.name, []).append(one.record["accuracy"])
    width = max(map(len, groups))
    lines = [f"{'training':<{width}}  accuracy  95 %    seeds"]
    for title, values in groups.items():
        found = estimate(values)
        half = None if found is None else found.half_width
        shown = "-     " if half is None else f"{half:.4f}"
        mean = statistics.fmean(values)
        lines.append(f"{title:<{width}}  {mean:.4f}    {shown}  {len(values)}")
    return lines
