"""``vfl demo``, ``init``, ``check`` and ``doctor``: from a first look to a project that works."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vfl.cli.output import Json, Set, emit, say, say_epoch, show_training
from vfl.core.ledger import size

if TYPE_CHECKING:
    from vfl.config import Experiment


def demo(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER", help="Where to put it; a new folder under runs/ by default."
        ),
    ] = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="All parties in this process, without Flower.")
    ] = False,
    settings: Set = None,
    json: Json = False,
) -> None:
    """Train on handwritten digits: left half here, right half there, labels at a third party.

    Starts a SuperLink and two SuperNodes on this machine (TLS, registered keys), trains over them,
    and ends all of them. Everything is kept in FOLDER, a new one under runs/ unless it is given.
    """
    from vfl.config.run_folder import new_run_name
    from vfl.core.seeds import use_one_thread
    from vfl.training import demo as trial

    use_one_thread()
    folder = folder or Path("runs") / new_run_name("demo")
    label = trial.write_demo(folder, settings or [])
    say(f"the project of the demo is {folder}")
    if in_process:
        run = trial.run_in_process(folder, label, say_epoch)
    else:
        run = trial.run_federated(folder, label, say, say_epoch)
    show_training(run, json)


def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder.")],
    party: Annotated[list[str], typer.Option(help="A feature party; give it once for each.")],
    label_party: Annotated[str, typer.Option(help="The party with the labels.")] = "label",
    dealer: Annotated[
        str, typer.Option(help="A party without data that deals, for shared first layers.")
    ] = "",
    host: Annotated[
        str, typer.Option(help="Name or address the label party is reached by.")
    ] = "127.0.0.1",
) -> None:
    """Write a project: experiment, Flower app, trial certificates and keys, a file a party.

    FOLDER is a new one. Its README.md tells each party's command.
    """
    from vfl.config import Experiment, PartyFile
    from vfl.config.toml import check
    from vfl.federation.project import write_project

    superlink, stream_port, api_port = f"{host}:8000", 8001, 9094
    experiment = check(
        {
            "name": folder.resolve().name,
            **(_shared(party, dealer) if dealer else {"parties": {name: {} for name in party}}),
            "label": {"party": label_party},
            "federation": {
                "superlink": superlink,
                "stream_host": host,
                "stream_port": stream_port,
            },
        },
        Experiment,
        where="the arguments",
    )
    table = {"source": "data.csv", "id": "id"}
    own: dict[str, dict[str, Any]] = {name: {"data": table} for name in party}
    own |= {dealer: {"role": "dealer"}} if dealer else {}
    for position, settings in enumerate(own.values()):
        settings["node"] = {"superlink": superlink, "api_port": api_port + position}
    own[label_party] = {"data": table | {"label": "label"}}
    files = {
        name: check({"party": name, **settings}, PartyFile, where="the arguments")
        for name, settings in own.items()
    }
    write_project(folder, experiment, files, host)
    say(f"wrote {folder}; {folder / 'README.md'} has each party's command")


def check(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="EXPERIMENT.toml|party.toml|PROJECT",
            help="An experiment file, a party's own file, or a project.",
        ),
    ],
    settings: Set = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the round trip to the SuperLink.")
    ] = False,
    round_trip_ms: Annotated[
        float | None, typer.Option(help="What a feature party measured, for advice on speed.")
    ] = None,
    mbps: Annotated[
        float | None, typer.Option(help="Bandwidth of the label party, for that advice.")
    ] = None,
    json: Json = False,
) -> None:
    """Check files and data without training, and show the plan.

    An experiment file is checked with its data and models, a party's own file with that party's
    table, a project with the label party's table. A party far away measures the round trip with
    --measure; the label party gets advice for it with --round-trip-ms.
    """
    from vfl.core.errors import ConfigError
    from vfl.experiments import plan
    from vfl.transport import round_trip_s

    facts, experiment, address = _plan_of(path, settings or [])
    if measure:
        if not address:
            raise ConfigError("an experiment in one process has no link", got=f"--measure {path}")
        round_trip_ms = 1000 * round_trip_s(address)
    if round_trip_ms is not None:
        facts |= (
            plan.link_advice(experiment, facts["train_rows"], round_trip_ms / 1000, mbps)
            if experiment
            else _measured(round_trip_ms)
        )
    if json:
        emit(facts)
        return
    advice = facts.pop("advice", [])
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):<24} {_shown(name, value)}")
    for line in advice:
        print(f"{'advice':<24} {line}")
    print("no mistake found")


def doctor(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PROJECT|party.toml",
            help="A project, or a party's own file; without one, the machine alone.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Look for what could go wrong: one line a check, OK, WARN or FAIL, and what to do.

    Versions, cores and disk; with PROJECT or party.toml also files, keys, certificates, ports, the
    way to the SuperLink, and the clock. It changes nothing and contacts only the addresses in the
    given files. Exit code 2 if anything is FAIL.
    """
    from dataclasses import asdict

    from vfl.federation.doctor import examine

    checks = []
    for check in examine(path):
        checks.append(check)
        if not json:
            print(f"{check.state:<4}  {check.name:<15} {check.found}")
            if check.fix and check.state != "OK":
                print(f"{'':<22}try {check.fix}")
    failed = sum(check.state == "FAIL" for check in checks)
    if json:
        emit({"ok": not failed, "checks": [asdict(check) for check in checks]})
    else:
        print(f"{failed} of {len(checks)} checks failed" if failed else "nothing is wrong")
    if failed:
        raise typer.Exit(2)


def _shared(parties: list[str], dealer: str) -> dict[str, Any]:
    """Settings of an experiment in which a third party deals; see docs/secure_layer.md."""
    return {
        "merge": "sum",
        "secure": f"beaver:dealer={dealer}",
        "parties": {name: {"bottom": "mlp:hidden=none"} for name in parties},
        "train": {"optimizer": "sgd", "momentum": 0, "learning_rate": 0.1},
    }


def _plan_of(path: Path, settings: list[str]) -> tuple[dict[str, Any], Experiment | None, str]:
    """The facts of a path; its experiment, and the address of its SuperLink, where it has them."""
    from vfl.config import is_party_file, read_experiment, read_party_file
    from vfl.core.errors import ConfigError
    from vfl.experiments import plan
    from vfl.federation.project import LabelFolder

    if path.is_dir():
        label = LabelFolder.find(path)
        facts = plan.of_project(label, settings)
        experiment = label.experiment(settings)
        return facts, experiment, experiment.federation.superlink
    if is_party_file(path):
        if settings:
            raise ConfigError("--set changes an experiment, not a party's own file", got=str(path))
        return plan.of_party_file(path), None, read_party_file(path).node.superlink
    return plan.of_experiment(path, settings), read_experiment(path, settings), ""


def _measured(round_trip_ms: float) -> dict[str, Any]:
    """What a feature party can say: the settings are the label party's."""
    command = f"vfl check PROJECT --round-trip-ms {round_trip_ms:.0f}"
    return {
        "round_trip_ms": round(round_trip_ms, 1),
        "advice": [f"the label party gets advice with: {command}"],
    }


def _shown(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(key, each)}" for key, each in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return size(value) if name.endswith("bytes") else str(value)
