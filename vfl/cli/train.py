"""``vfl train``: one training, in process or over the federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vfl.cli.output import Device, Json, Set, emit, machine, say, say_epoch, show


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
    resume: Annotated[
        Path | None, typer.Option(help="The folder of an interrupted run, to go on with it.")
    ] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch a data set that is not here.")
    ] = False,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Train an experiment.

    An experiment file trains with every party in this process. A project, the folder that
    `vfl init` writes, trains on its SuperLink with the SuperNodes that are connected. A run that
    was interrupted goes on from its last checkpoint with `--resume RUN`, as it was started.
    """
    if resume and settings:
        raise typer.BadParameter("a resumed run keeps its settings", param_hint="--set")
    from vfl.report import build_report
    from vfl.storage import read_json

    if path.is_dir():
        folder = _on_the_federation(path, settings or [], resume)
    else:
        folder = _in_process(path, settings or [], runs, resume, download, device)
    page = build_report(folder)
    summary = read_json(folder / "summary.json")
    if json:
        emit(machine(summary) | {"report": str(page)})
    else:
        show(summary)
        print(f"{'report':<16} {page}")


def _on_the_federation(project: Path, settings: list[str], resume: Path | None) -> Path:
    from vfl import federated
    from vfl.config import read_party_file
    from vfl.plan import check_public
    from vfl.project import LabelFolder
    from vfl.run_folder import new_run_name
    from vfl.specs import spec_mistakes

    label = LabelFolder.find(project)
    for warning in label.certificate_warnings():
        say(warning)
    experiment = label.experiment(settings, spec_mistakes)
    if not resume:
        check_public(experiment, label.places(settings))
    name = resume.resolve().name if resume else new_run_name(experiment.name)
    say(f"{'resuming' if resume else 'submitting'} run {name}")
    extra = {"resume": resume is not None}
    try:
        return federated.run_session(
            label,
            "train",
            name,
            overrides=settings,
            on_epoch=say_epoch,
            on_note=say,
            extra=extra,
        )
    except KeyboardInterrupt:
        folder = read_party_file(label.party_file).run_path(name)
        say(f"only this command ended: the SuperLink goes on with the run, in {folder}")
        raise


def _in_process(
    path: Path,
    settings: list[str],
    runs: Path,
    resume: Path | None,
    download: bool,
    device: str,
) -> Path:
    from vfl.config import Experiment, Places, read_experiment
    from vfl.run import train as train_in_process
    from vfl.run_folder import RunFolder, new_run_name
    from vfl.specs import check_specs, spec_mistakes
    from vfl.threads import use_one_thread

    use_one_thread()
    if resume:
        experiment, places = RunFolder.open(resume).experiment(), Places()
    else:
        experiment = read_experiment(path, settings, spec_mistakes)
        places = Places.of(path, settings)
    check_specs(experiment, places)
    folder = resume or runs / new_run_name(experiment.name)
    command = f"vfl train {path}" + "".join(f" -s {text}" for text in settings)
    with places.told(Experiment):
        train_in_process(
            experiment,
            folder.parent,
            folder.name,
            command=command,
            resume=resume is not None,
            download=download,
            on_epoch=say_epoch,
            device=device,
            say=say,
        )
    return folder
