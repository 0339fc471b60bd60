"""``vfl bins`` and ``vfl scorecard``: bins of the columns of several parties, and their points."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vfl.cli.output import (
    Download,
    Json,
    Set,
    argument,
    emit,
    option,
    print_line,
    progress_line,
    say,
    say_epoch,
)

if TYPE_CHECKING:
    from vfl.config import Experiment
    from vfl.experiments.tables import Table

_Where = Annotated[
    Path,
    argument(
        "An experiment or a project that describes the training; or a run with a scorecard.",
        "EXPERIMENT.toml|PROJECT|RUN",
    ),
]
_Runs = Annotated[Path, option("Folder that contains run folders (of runs in one process).")]
#: Settings with which an experiment with another model becomes an experiment with a scorecard.
_OF_CARDS = ("model=scorecard", "train.epochs=1", "train.patience=0", "train.keep=last")


def bins(
    path: _Where,
    settings: Set = None,
    runs: _Runs = Path("runs"),
    download: Download = False,
    json: Json = False,
) -> None:
    """Find bins that separate good from bad rows, and the information value of each column.

    The command prints the information value of each column, and writes scorecard.html and
    scorecard.txt into the run's folder. Settings are options of the model, as in -s
    model=scorecard:monotone=auto. If PATH is a party's own part of a run (the folder parties/NAME),
    the command prints the bins of that party's columns.
    """
    if is_part(path):
        _show_part(path, json)
        return
    run = _run_of(path, settings or [], runs, download)
    _show(run, json, points=False)


def scorecard(
    path: _Where,
    settings: Set = None,
    runs: _Runs = Path("runs"),
    reasons: Annotated[
        int | None,
        option(
            "Also write the scores of predicted rows, with up to this many reasons per row.",
            min=0,
            max=4,
        ),
    ] = None,
    download: Download = False,
    json: Json = False,
) -> None:
    """Make a scorecard over columns of several parties.

    The command prints the points of all bins, and writes scorecard.html and scorecard.txt into the
    run's folder; with --reasons also scores.csv. If PATH is a party's own part of a run (the folder
    parties/NAME), the command prints the points of that party's columns.
    """
    if is_part(path):
        _show_part(path, json)
        return
    run = _run_of(path, settings or [], runs, download)
    if reasons is not None:
        from vfl.cli.training import ask

        ask(run, "predict", "cpu")
    _show(run, json, points=True, reasons=reasons)


def _run_of(path: Path, settings: list[str], runs: Path, download: bool) -> Path:
    """Return the run with the scorecard; if the path is an experiment, train the run first."""
    if (path / "run.json").exists():
        if settings:
            raise typer.BadParameter("an existing run keeps its settings", param_hint="--set")
        return path
    if path.is_dir():
        from vfl.cli.training import on_the_federation
        from vfl.federation.project import LabelFolder

        return on_the_federation(path, _of_card(LabelFolder.find(path).experiment(), settings))
    from vfl.config import Experiment, read_experiment
    from vfl.config.run_folder import new_run_name
    from vfl.core.registry import command_of
    from vfl.core.seeds import use_one_thread
    from vfl.training import run
    from vfl.training.specs import read_checked

    use_one_thread()
    asked = _of_card(read_experiment(path), settings)
    experiment, locations = read_checked(path, asked)
    folder = runs / new_run_name(experiment.name)
    with locations.located(Experiment):
        run.train(
            experiment,
            folder.parent,
            folder.name,
            command=command_of("scorecard", str(path), settings=settings),
            download=download,
            on_epoch=say_epoch,
            on_progress=progress_line.show,
            say=say,
        )
    return folder


def _of_card(experiment: Experiment, settings: list[str]) -> list[str]:
    """Return the settings; for an experiment with another model, scorecard defaults come first."""
    is_card = experiment.secure.partition(":")[0] == "scorecard"
    return settings if is_card else [*_OF_CARDS, *settings]


def is_part(path: Path) -> bool:
    """Return whether a folder is a party's own part of a run (parties/NAME)."""
    return (path / "party.json").exists()


def _show_part(path: Path, json: bool) -> None:
    """Print the bins of a party's own columns; only this party has their names."""
    from vfl.experiments.tables import Table
    from vfl.trees.scorecard.loaded import part_of

    lines = [
        {"column": name, "bin": text, "weight_of_evidence": float(weight), "points": int(points)}
        for name, texts, column in part_of(path)
        for text, weight, points in zip(texts, column.weights, column.points, strict=True)
    ]
    if json:
        emit(lines)
        return
    rows = [
        [
            str(one["column"]),
            str(one["bin"]),
            f"{one['weight_of_evidence']:+.3f}",
            f"{one['points']}",
        ]
        for one in lines
    ]
    print(
        Table(["column", "bin", "weight of evidence", "points"], rows, words=2).markdown(), end=""
    )


def _show(run: Path, json: bool, *, points: bool, reasons: int | None = None) -> None:
    from vfl.trees.scorecard.loaded import LoadedCard
    from vfl.trees.scorecard.page import card_page, write_card

    page, text = write_card(run)
    loaded = LoadedCard(run)
    content = card_page(loaded)
    where: dict[str, Any] = {"run": str(run), "page": str(page), "text": str(text)}
    if reasons is not None:
        where["scores"] = str(loaded.write_scores(reasons))
    if json:
        emit({**content.json, **where})
        return
    table: Table = content.tables[1 if points else 0]
    print(table.markdown(), end="")
    print(content.glance.sentence)
    for note in content.notes:
        print(note)
    for name, value in where.items():
        print_line(name, value)
