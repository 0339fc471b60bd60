"""``vfl demo``: see it work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vfl.cli.output import Json, Set, emit, machine, say, say_epoch, show


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
    from vfl import demo as trial
    from vfl.report import build_report
    from vfl.run_folder import new_run_name
    from vfl.storage import read_json
    from vfl.threads import use_one_thread

    use_one_thread()
    folder = folder or Path("runs") / new_run_name("demo")
    label = trial.write_demo(folder, settings or [])
    say(f"the project of the demo is {folder}")
    if in_process:
        run = trial.run_in_process(folder, label, say_epoch)
    else:
        run = trial.run_federated(folder, label, say, say_epoch)
    page = build_report(run)
    summary = read_json(run / "summary.json")
    if json:
        emit(machine(summary) | {"report": str(page)})
    else:
        show(summary)
        print(f"{'report':<16} {page}")
