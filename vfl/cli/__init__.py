"""The command line: one file a command, heavy imports inside the commands."""

from __future__ import annotations

import sys

import typer

from vfl.cli import bench, check, demo, evaluate, init, listing, nodes, predict, report, train
from vfl.errors import VFLError

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
app.command("evaluate")(evaluate.evaluate)
app.command("predict")(predict.predict)
app.command("report")(report.report)
app.command("list")(listing.listing)
app.command("superlink")(nodes.superlink)
app.command("supernode")(nodes.supernode)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Run a command.

    Exit codes: 0 done, 1 a bug of ours, 2 the user's files or arguments, 3 another party or the
    network, 130 interrupted.
    """
    try:
        app()
    except VFLError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
