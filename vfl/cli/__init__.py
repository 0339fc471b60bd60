"""The command line: one file a command, heavy imports inside the commands."""

from __future__ import annotations

import signal
import sys

import typer

from vfl.cli import (
    attack,
    bench,
    cells,
    check,
    compare,
    compress,
    demo,
    doctor,
    evaluate,
    explain,
    grid,
    init,
    listing,
    mpc,
    nodes,
    predict,
    renew,
    report,
    sessions,
    train,
)
from vfl.errors import VFLError
from vfl.unexpected import of_a_file, place_of, told_by_place

app = typer.Typer(
    name="vfl",
    help="Train one network on columns that belong to different organisations.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # its tracebacks show local variables, so rows of data
    add_completion=False,
)
app.command("demo")(demo.demo)
app.command("init")(init.init)
app.command("check")(check.check)
app.command("train")(train.train)
app.command("compare")(compare.compare)
app.command("grid")(grid.grid)
app.command("grid-worker", hidden=True)(cells.worker)
app.command("attack")(attack.attack)
app.command("evaluate")(evaluate.evaluate)
app.command("predict")(predict.predict)
app.command("report")(report.report)
app.command("compress")(compress.compress)
app.command("list")(listing.listing)
app.command("explain")(explain.explain)
app.command("doctor")(doctor.doctor)
app.command("superlink")(nodes.superlink)
app.command("supernode")(nodes.supernode)
app.command("sessions")(sessions.sessions)
app.command("renew")(renew.renew)
app.add_typer(bench.app, name="bench")
app.add_typer(mpc.app, name="mpc")


def main() -> None:
    """Run a command.

    Exit codes: 0 done, 1 a bug of ours, 2 the user's files or arguments, 3 another party or the
    network, 130 interrupted, 143 told to end.
    """
    signal.signal(signal.SIGTERM, _end)
    try:
        with told_by_place():
            app(prog_name="vfl")
    except VFLError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception as bug:
        if mistake := of_a_file(bug):
            print(mistake, file=sys.stderr)
            sys.exit(mistake.exit_code)
        print(place_of(bug), file=sys.stderr)
        sys.exit(1)


def _end(number: int, frame: object) -> None:
    """End as after Ctrl-C, so that a command takes along the processes it started."""
    sys.exit(128 + number)
