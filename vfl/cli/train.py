"""``vfl train``: one training, in process or over the federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vfl.cli.output import Json, Set, emit, machine, say, say_epoch, show


def train(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="EXPERIMENT.toml|PROJECT",
            help="An experiment file, or a project for a training on Flower.",
        ),
    ],
    settings: Set = None,
    runs: Annotated[Path, typer.Option(help="Where run folders go (in process).")] = Path("runs"),
    download: Annotated[
        bool, typer.Option("--download", help="Fetch a data set that is not here.")
    ] = False,
    json: Json = False,
) -> None:
    """Train an experiment.

    An experiment file trains with every party in this process. A project, the folder that
    `vfl init` writes, trains on its SuperLink with the SuperNodes that are connected.
    """
    from vfl.report import build_report
    from vfl.run_folder import new_run_name
    from vfl.storage import read_json

    if path.is_dir():
        from vfl import federated
        from vfl.project import LabelFolder

        label = LabelFolder.find(path)
        name = new_run_name(label.experiment().name)
        say(f"submitting run {name}")
        folder = federated.run_session(
            label, "train", name, overrides=settings or [], on_epoch=say_epoch
        )
    else:
        from vfl.config import read_experiment
        from vfl.plan import check_specs
        from vfl.run import train as train_in_process
        from vfl.threads import use_one_thread

        use_one_thread()
        experiment = read_experiment(path, settings or [])
        check_specs(experiment)
        name = new_run_name(experiment.name)
        command = f"vfl train {path}" + "".join(f" -s {text}" for text in settings or [])
        train_in_process(
            experiment, runs, name, command=command, download=download, on_epoch=say_epoch
        )
        folder = runs / name
    page = build_report(folder)
    summary = read_json(folder / "summary.json")
    if json:
        emit(machine(summary) | {"report": str(page)})
    else:
        show(summary)
        print(f"{'report':<16} {page}")
