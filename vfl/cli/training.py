"""``vfl train``, ``evaluate``, ``predict``, ``export``, ``report``: train a run, and use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vfl.cli.align import align_on_the_federation
from vfl.cli.federation import hand_over, project_of
from vfl.cli.output import (
    Device,
    Download,
    Json,
    Run,
    Set,
    Write,
    argument,
    emit,
    figure,
    machine,
    newest_run,
    option,
    print_line,
    progress_line,
    quick_imports,
    say,
    say_epoch,
    served_run,
    show,
    show_training,
    write_elsewhere,
)
from vfl.core.errors import ConfigError, DisagreementError, UserError, VFLError
from vfl.core.registry import command_of
from vfl.core.storage import write_text
from vfl.core.text import csv_text, printable

if TYPE_CHECKING:
    from vfl.config.run_folder import RunFolder
    from vfl.training.promotion import RunningService


#: Options that are only for an experiment file, each with the reason; and options that are only for
#: a project.
_OF_A_FILE = {
    "runs": "each party's own file names its store, which contains the runs",
    "download": "a party's own table is not downloaded",
    "device": "each party's own file has this setting",
    "threads": "each party's own file has this setting",
}
_OF_A_PROJECT = ("engine",)
Explain = Annotated[
    list[str] | None,
    option(
        "Let this party learn the Shapley value of each of its own columns for predictions of "
        "boosted trees. Repeat.",
        "PARTY",
    ),
]


def train(
    context: typer.Context,
    path: Annotated[
        Path,
        argument(
            "An experiment file, or a project for a training on Flower.",
            "EXPERIMENT.toml|PROJECT",
        ),
    ],
    settings: Set = None,
    runs: Annotated[Path, option("Parent folder of run folders (in one process).")] = Path("runs"),
    resume: Annotated[
        Path | None,
        option("The folder of an interrupted or failed run, which the training continues."),
    ] = None,
    start: Annotated[
        Path | None,
        option(
            "Start from every party's weights in this run, whose folder must be next to the new "
            "one.",
            "RUN",
            "--from",
        ),
    ] = None,
    download: Download = False,
    device: Device = "cpu",
    threads: Annotated[
        int,
        option(
            "Threads of torch in this process; with 1, weights are the same bit for bit on every "
            "machine. A party's own file sets its own number.",
            min=1,
            max=1024,
        ),
    ] = 1,
    engine: Annotated[
        Literal["deployment", "simulation"],
        option("For a project: its SuperNodes, or Flower's simulation of all parties."),
    ] = "deployment",
    write: Write = None,
    json: Json = False,
) -> None:
    """Train an experiment.

    An experiment file trains with every party in this process. A project, which is a folder that
    `vfl init` wrote, trains on the project's SuperLink with the connected SuperNodes. With
    `--engine simulation` no service has to run: Flower simulates the parties of a project whose
    folders are all on this machine. `--resume RUN` continues an interrupted or failed run from its
    last checkpoint, with the run's own settings. With `--from RUN` every party starts from its
    weights in a run that ended well, and encodes its table as in that run.
    """
    if resume and (settings or start):
        raise typer.BadParameter("a resumed run keeps its settings", param_hint="--set, --from")
    if start is not None:
        settings = [*(settings or []), _beginning(path, start, runs)]
    project = path.is_dir()
    for name in _OF_A_FILE if project else _OF_A_PROJECT:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                _OF_A_FILE[name] if project else "only a project has an engine",
                param_hint=f"--{name}",
            )
    if write:
        from vfl.training.writers import WRITERS

        for spec in write:
            WRITERS.make(spec).check()  # checked before the training, not after hours of training
    if project:
        folder = on_the_federation(path, settings or [], resume, simulated=engine == "simulation")
        _compare_with_label_party(folder)
        write_elsewhere(folder, write)
        show_training(folder, json)
        return
    with quick_imports():
        from vfl.config import Experiment, Locations
        from vfl.config.run_folder import RunFolder, new_run_name
        from vfl.experiments.value import label_alone
        from vfl.session.threads import use_threads
        from vfl.training import run
        from vfl.training.specs import check_specs, read_checked

    use_threads(threads)
    if resume:
        experiment, locations = RunFolder.open(resume).experiment(), Locations()
        check_specs(experiment)
    else:
        experiment, locations = read_checked(path, settings or [])
    folder = resume or runs / new_run_name(experiment.name)
    with locations.located(Experiment):
        data = run.load_data(experiment, download=download)
        try:
            run.train(
                experiment,
                folder.parent,
                folder.name,
                data=data,
                command=command_of(
                    "train", str(path), settings=settings or [], device=device, threads=threads
                ),
                resume=resume is not None,
                on_epoch=say_epoch,
                on_progress=progress_line.show,
                device=device,
                say=say,
            )
        except KeyboardInterrupt:
            say(f"interrupted; to continue: vfl train {path} --resume {folder}")
            raise
    label_alone(RunFolder(folder), data[experiment.label.party])
    write_elsewhere(folder, write)
    show_training(folder, json)


def _compare_with_label_party(run: Path) -> None:
    """Measure the metrics of a model of only the label party's own columns, for a project."""
    from vfl.config.run_folder import RunFolder
    from vfl.experiments.value import label_alone
    from vfl.session import Terms
    from vfl.session.store.party_folder import own_data
    from vfl.training.federated import label_folder_of

    folder = RunFolder(run)
    experiment = folder.experiment()
    try:
        party = label_folder_of(run).party()
        terms = Terms.of(experiment, "train", run.name)
        label_alone(folder, own_data(party, terms, experiment.label.task))
    except VFLError as problem:  # only reported, as the training itself has ended well
        say(f"the metrics of {experiment.label.party} alone were not measured: {problem.what}")


def _beginning(path: Path, start: Path, runs: Path) -> str:
    """Return the setting for the earlier run, whose folder must be next to the new run's folder.

    Raises:
        RunFolderError: the earlier run has not ended well, or its folder is damaged.
        ConfigError: its folder is elsewhere.
    """
    from vfl.config.run_folder import RunFolder
    from vfl.training.promotion import runs_of

    folder = RunFolder.open(start.resolve())
    folder.summary()  # `RunFolder.summary` raises an error unless the run has ended well
    beside = (runs_of(path) if path.is_dir() else runs).resolve()
    if folder.path.parent != beside:
        raise ConfigError(
            "a training starts from a run whose folder is next to the new one",
            where="--from",
            got=str(folder.path.parent),
            want=str(beside),
        )
    return f"train.warm_start={folder.path.name}"


def evaluate(
    run: Run,
    beside: Annotated[
        list[Path] | None,
        option(
            "Another run; all runs are scored on common rows that none was trained or validated on."
        ),
    ] = None,
    explain: Explain = None,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Evaluate a run's weights on its test rows, each party with its own part of the model.

    RUN is the folder that `vfl train` printed. With `--explain PARTY` this party learns the mean
    absolute Shapley value of each of its own columns; `vfl importance`, run by that party, prints
    these values.
    """
    from vfl.config.run_folder import RunFolder

    if beside:
        if explain:
            raise typer.BadParameter("--explain is for one run at a time", param_hint="--explain")
        _evaluate_together([run, *beside], device, json)
        return
    summary = RunFolder(ask(run, "evaluate", device, explain or ())).evaluation()
    emit(machine(summary)) if json else show(summary)


def predict(
    run: Annotated[
        str,
        argument(
            "The folder that vfl train printed; a project for its last run, or with --ids for its "
            "promoted or last run; or with --ids the address of a service, https://HOST:PORT.",
            "RUN|PROJECT|ADDRESS",
        ),
    ],
    ids: Annotated[
        Path | None,
        option("Query the service of RUN, or at ADDRESS, only for the rows of this table.", "FILE"),
    ] = None,
    out: Annotated[Path | None, option("With --ids: the CSV file for the answers.", "FILE")] = None,
    id_column: Annotated[
        str, option("With --ids: the id column of that table.", "COLUMN", "--id")
    ] = "id",
    token: Annotated[
        Path | None, option("With --ids: the token; by default the service's own.", "FILE")
    ] = None,
    ca: Annotated[
        Path | None,
        option(
            "With --ids: PEM file of the authority that signed the service's certificate.", "FILE"
        ),
    ] = None,
    explain: Explain = None,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Predict with a run's weights; write predictions.csv to the label party's run folder.

    In one process: the command predicts the rows on which `vfl evaluate` tests the run. In a
    federation, it predicts the rows that every party's own file names: `data.predict`, or else
    `data.source`. With `--explain PARTY`, the party's part of the run folder gets explanations.csv
    with the Shapley value of each of the party's columns for each row. With `--ids FILE --out
    FILE`, the command queries a running `vfl serve` only for the rows of FILE, and writes the
    answers as a table.
    """
    if ids is not None:
        if explain:
            raise typer.BadParameter(
                "a service explains parties only: vfl serve --explain", param_hint="--explain"
            )
        _predict_by_service(run, ids, out, id_column, token, ca, json)
        return
    _predict_all(newest_run(Path(run)), device, json, explain or ())


def _predict_by_service(
    where: str,
    ids: Path,
    out: Path | None,
    id_column: str,
    token: Path | None,
    ca: Path | None,
    json: bool,
) -> None:
    """Query a prediction service for the rows of a file, and write the service's answers."""
    from vfl.datasets.alignment.ids import read_own_ids
    from vfl.datasets.table import TableFormat
    from vfl.serving.client import Client

    if out is None:
        raise typer.BadParameter("the answers need a file", param_hint="--out")
    address = where
    if "://" not in where:
        service = _service_of(served_run(Path(where)))
        address, token = service.address, token or service.began / "serve.token"
    if token is None:
        raise typer.BadParameter("an address needs a token", param_hint="--token")
    asked = read_own_ids(ids, id_column, TableFormat(), str(ids)).tolist()
    rows: list[dict[str, Any]] = []
    with Client(address, token, ca=ca) as client:
        model = client.model()
        classes, version = model.get("classes") or [], model.get("version")
        try:
            for part in client.parts(asked):
                if version != (version := part[0].get("version")):
                    _require_same_classes(client.model(), version, classes, address)
                rows += part
                progress_line.tell(partial("{} of {} rows".format, len(rows), len(asked)))
        except VFLError as problem:
            if rows:
                _write_answers(out, asked, rows, classes)
                problem.fix = f"{len(rows)} of {len(asked)} rows are in {out}; query the others"
            raise
    progress_line.end()
    _write_answers(out, asked, rows, classes)
    runs = sorted({str(row["version"]) for row in rows})
    if json:
        emit({"predictions": str(out), "rows": len(rows), "runs": runs})
    else:
        print(f"{len(rows)} rows in {out}, answered by {', '.join(runs)}")


def _require_same_classes(
    model: Mapping[str, Any], version: object, classes: Sequence[object], address: str
) -> None:
    """Refuse answers of a run to which a service has switched, if its classes differ.

    Args:
        model: description of the service's present model.
        version: the run that answered.
        classes: classes of the runs that answered before.
        address: address of the service.

    Raises:
        DisagreementError: the run has other classes, or the service has switched once more.
    """
    if model.get("version") != version or (model.get("classes") or []) != classes:
        raise DisagreementError(
            "the service has switched to a run with other classes",
            where=address,
            got=f"run {printable(str(model.get('version')))}",
            want="answers of runs with the same classes",
            fix="query the service again",
        )


def _write_answers(
    out: Path, asked: Sequence[str], rows: Sequence[Mapping[str, Any]], classes: Sequence[object]
) -> None:
    """Write a service's answers for the first queried rows, in the format of `predictions.csv`."""
    heads = [f"probability_{one}" for one in classes]
    table = [
        {"id": name, "prediction": row["prediction"], "run": row["version"]}
        | {"missing": " ".join(row.get("missing", ()))}
        | dict(zip(heads, row.get("probabilities", ()), strict=True))
        for name, row in zip(asked, rows, strict=False)
    ]
    write_text(out, csv_text(["id", "prediction", *heads, "missing", "run"], table))


def _service_of(run: Path) -> RunningService:
    """Return the service that answers with a run on this machine.

    Raises:
        RunFolderError: there is no run in this folder.
        UserError: no such service is running.
    """
    from vfl.config.run_folder import RunFolder
    from vfl.training.promotion import service_of

    service = service_of(RunFolder.open(run).path)
    if service is None:
        raise UserError(
            "no service of this run is running here",
            where=str(run),
            fix=f"vfl serve {run}, and try again",
        )
    return service


def _predict_all(run: Path, device: str, json: bool, explain: Sequence[str]) -> None:
    from vfl.config.run_folder import RunFolder

    folder = RunFolder(ask(run, "predict", device, explain))
    table, predicted = folder.path / "predictions.csv", _predicted(folder.path)
    own = predicted[folder.experiment().label.party]
    rows, trained = own["rows"], own["trained"]
    unfamiliar = {name: one["unfamiliar"] for name, one in predicted.items() if one["unfamiliar"]}
    if json:
        emit(
            {
                "predictions": str(table),
                "rows": rows,
                **({"trained": trained} if trained else {}),
                "run": str(run),
                "unfamiliar": unfamiliar,
            }
        )
        return
    print(f"{rows} rows in {table}")
    for party in explain:
        own = run / "parties" / party / "explanations.csv"
        print(f"contributions of {party}'s columns: {own if own.exists() else 'in its own folder'}")
    if trained:
        print(
            f"{trained} of them were training rows, marked in the column 'trained': the "
            "model fits them too well; name a table of new rows as data.predict in each "
            "party.toml"
        )
    for party, columns in unfamiliar.items():
        for column, counts in columns.items():
            told = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in counts.items())
            print(f"{party}: column '{printable(column)}': {told}")


def _predicted(run: Path) -> dict[str, Any]:
    """Return the counts of a run's last prediction, by party.

    The counts are those of `PartyFolder.save_predicted`. In a federation the label party knows only
    the counts of its own table.
    """
    from vfl.session import PartyFolder

    folders = sorted((run / "parties").glob("*"))
    found = {folder.name: PartyFolder(folder).predicted() for folder in folders}
    return {name: own for name, own in found.items() if own}


def export(
    run: Run,
    party: Annotated[
        str, option("Party whose part of the model to export; its files must be on this host.")
    ],
    to: Annotated[
        str, option("onnx, torch (a torch.export program), or another format of the model.", "FORM")
    ] = "onnx",
    out: Annotated[
        Path | None, option("Output folder; by default next to the weights.", "FOLDER")
    ] = None,
    bottom: Annotated[
        str | None, option("Spec of the bottom model, if the party's own file named it.")
    ] = None,
    json: Json = False,
) -> None:
    """Export one party's part of a model, with model card and encoder, to run without vfl.

    The file of a feature party maps rows of inputs to a cut; the file of the label party maps cuts
    to predictions. The exported encoder maps a table to these inputs. The encoder contains
    categories and means of the party's table, so all exported files must stay with the party. A
    model that is not a neural network has its own formats; an unknown --to raises an error that
    lists them. In a forest exported for XGBoost, a date is a number of days since 1970, and a
    category that no training row had must be a missing cell.
    """
    from vfl.training.export import export_half

    made = export_half(run, party, to, out, bottom)
    if json:
        emit(made)
    else:
        for name, value in made.items():
            print_line(name, "not compared" if value is None else value)


def report(
    run: Annotated[Path, argument("The folder of a run, a comparison or a grid.", "RUN")],
    show: Annotated[bool, option("Open the page in the browser.", "--open")] = False,
    alone: Annotated[
        bool,
        option("First train each party alone, to show the gain over each party.", "--alone"),
    ] = False,
    cost: Annotated[
        float | None,
        option(
            "Cost of one missed positive, as a number of false alarms; it determines a threshold."
        ),
    ] = None,
    write: Write = None,
) -> None:
    """Build report.html for a run: one static file.

    RUN is the folder that `vfl train`, `vfl compare`, `vfl grid` or `vfl value` printed. With
    --write, the command instead writes a training run in another tool's format; during the
    training, up to its current state.
    """
    if write:
        write_elsewhere(run, write)
        return
    from vfl.experiments.pages import build_report

    if alone:
        from vfl.cli.study import exit_with_failures, say_cell
        from vfl.core.seeds import use_one_thread
        from vfl.experiments.study import train_alone

        use_one_thread()
        exit_with_failures(train_alone(run, on_end=say_cell))
    page = build_report(run, cost)
    if cost is not None:
        from vfl.experiments.loaded_run import LoadedRun
        from vfl.experiments.pages.thresholds import threshold_lines

        for name, told in threshold_lines(LoadedRun(run), cost):
            print_line(name, told)
    print(page)
    if show:
        typer.launch(str(page))


def on_the_federation(
    project: Path, settings: list[str], resume: Path | None = None, simulated: bool = False
) -> Path:
    """Train with the parties of a project, which first align their rows if necessary.

    Returns:
        The run's folder.
    """
    label, experiment = project_of(project, settings)
    from vfl.config.run_folder import new_run_name
    from vfl.experiments.plan import check_public
    from vfl.training import federated
    from vfl.training.status import needs_alignment

    with federated.simulation(label) if simulated else nullcontext():
        if not resume:
            party = label.party()
            check_public(experiment, label.locations(settings), party)
            if needs_alignment(experiment, party):
                say("there is no alignment yet: finding the rows that all parties have")
                align_on_the_federation(label, settings, simulated)
        name = resume.resolve().name if resume else new_run_name(experiment.name)
        say(f"{'resuming' if resume else 'submitting'} run {name}")
        try:
            return federated.run_session(
                label,
                "train",
                name,
                overrides=settings,
                on_epoch=say_epoch,
                on_note=say,
                on_progress=progress_line.show,
                resume=resume is not None,
                simulated=simulated,
            )
        except KeyboardInterrupt:
            folder = label.party().run_path(name)
            if not simulated:
                say(f"only this command has ended: the SuperLink continues the run in {folder}")
            raise


def _evaluate_together(runs: Sequence[Path], device: str, json: bool) -> None:
    """Evaluate several runs of the same kind on common rows, and print one line per run."""
    from vfl.config.run_folder import RunFolder
    from vfl.core.seeds import use_one_thread
    from vfl.training.run import evaluate_together

    folders = [RunFolder.open(run) for run in runs]
    modes = {folder.mode for folder in folders}
    if len(modes) > 1:
        raise ConfigError(
            "runs of a federation and of one process have no common rows",
            where=", ".join(folder.path.name for folder in folders),
        )
    if modes == {"federated"}:
        found = _evaluate_beside(folders)
    else:
        use_one_thread()
        found = evaluate_together(folders, device, progress_line.show)
    if json:
        emit({"runs": [machine(summary) for summary in found]})
        return
    rows = found[0]["common_rows"]
    print(f"{rows} rows that none of {len(found)} runs was trained or validated on")
    for folder, summary in zip(folders, found, strict=True):
        figures = {name: one for name, one in summary.items() if name.startswith("test_")}
        told = ", ".join(
            f"{name[5:].replace('_', ' ')} {figure(one)}" for name, one in figures.items()
        )
        print(f"{folder.path.name:<30} {told}")


def _evaluate_beside(folders: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Evaluate several federated runs on common rows, in one session per run."""
    from vfl.session.terms import BESIDE

    hand_over(folders[0].path)
    for folder in folders:
        others = [one.path.resolve().name for one in folders if one is not folder]
        _in_session(folder.path, "evaluate", [f"{BESIDE}{other}" for other in others])
    return [folder.evaluation() for folder in folders]


def _in_session(run: Path, mode: Literal["evaluate", "predict"], overrides: list[str]) -> Path:
    """Evaluate or predict with a run in a session of its federation; return the run's folder."""
    from vfl.training import federated

    return federated.run_session(
        federated.label_folder_of(run),
        mode,
        run.resolve().name,
        overrides=overrides,
        on_progress=progress_line.show,
    )


def ask(
    run: Path, mode: Literal["evaluate", "predict"], device: str, explained: Sequence[str] = ()
) -> Path:
    """Evaluate or predict in the way in which the run was trained; return the run's folder."""
    from vfl.config.run_folder import RunFolder

    folder = RunFolder.open(run)
    if folder.mode == "federated":
        hand_over(run)  # this check comes before the import of torch, which the next lines need
        from vfl.session.terms import EXPLAIN

        return _in_session(run, mode, [f"{EXPLAIN}{name}" for name in explained])
    from vfl.core.seeds import use_one_thread
    from vfl.training import evaluate, predict

    use_one_thread()
    {"evaluate": evaluate, "predict": predict}[mode](folder, device, progress_line.show, explained)
    return run
