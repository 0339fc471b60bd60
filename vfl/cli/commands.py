"""The table of all commands, and the entry point `main`.

Functions and options of the commands are in the other modules of this package, or in a product's
`command.py`; `vfl.cli.output` defines options that several commands have.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import click
import typer
from typer.core import TyperArgument, TyperGroup
from typer.utils import get_params_from_function

from vfl.cli import (
    advise,
    align,
    federation,
    model,
    new,
    party,
    privacy,
    project,
    records,
    reference,
    serving,
    status,
    study,
    training,
)
from vfl.cli.output import argument, option, progress_line
from vfl.core.errors import ConfigError, VFLError, file_mistake, redacted_output, redacted_traceback
from vfl.core.products import products
from vfl.core.registry import PLUGINS, load_plugin, named
from vfl.core.text import logged
from vfl.core.version import VERSION


class _Group(TyperGroup):
    """A group of commands that prints the help of arguments with every version of click.

    Below version 0.21, which Flower does not allow, typer loses this help if click is 8.5 or later.
    """

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        described = getattr(command and command.callback, "__wrapped__", None)
        if command is None or described is None or isinstance(command, click.Group):
            return command
        known = get_params_from_function(described)
        for one in command.params:
            if isinstance(one, TyperArgument) and one.help is None:
                one.help = getattr(known[str(one.name)].default, "help", None)
        return command


app = typer.Typer(
    cls=_Group,
    rich_markup_mode="markdown",
    name="vfl",
    help="Train one network on columns that belong to different organisations.",
    no_args_is_help=True,
    # typer's tracebacks show local variables, which may contain rows of data
    pretty_exceptions_enable=False,
)

#: Commands of vfl's kernel, by panel of `vfl --help`; products add more commands.
_PANELS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Start": {
        "demo": project.demo,
        "init": project.init,
        "join": project.join,
        "check": project.check,
        "advise": advise.advise,
        "doctor": project.doctor,
    },
    "Train and predict": {
        "align": align.align,
        "train": training.train,
        "evaluate": training.evaluate,
        "predict": training.predict,
        "serve": serving.serve,
        "clients": serving.clients,
        "promote": serving.promote,
        "rollback": serving.rollback,
        "export": training.export,
        "model": model.app,
        "status": status.status,
        "report": training.report,
        "runs": status.runs,
    },
    "Compare and attack": {
        "compare": study.compare,
        "value": study.value,
        "grid": study.grid,
        "attack": study.attack,
        "submit": study.submit,
        "verify": study.verify,
        "compress": study.compress,
        "privacy": privacy.privacy,
        "new": new.new,
    },
    "Run a party": {
        "up": federation.up,
        "party": party.app,
        "sessions": federation.sessions,
        "log": records.log,
        "forget": records.forget,
        "renew": federation.renew,
    },
    "Look up": {"list": reference.listing, "explain": reference.explain},
}
for _product in products().values():
    for _panel, _paths in _product.commands.items():
        _PANELS.setdefault(_panel, {}).update({one: named(path) for one, path in _paths.items()})
for _panel, _commands in _PANELS.items():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name, cls=_Group, rich_help_panel=_panel)
        else:
            app.command(_name, rich_help_panel=_panel)(_command)
app.command("grid-worker", hidden=True)(study.worker)
app.command("party-rank", hidden=True)(federation.rank)
for _former in (federation.superlink, federation.supernode):
    app.command(_former.__name__, hidden=True)(_former)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"vfl {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        option("Print the version of vfl.", "--version", is_eager=True, callback=_print_version),
    ] = False,
    plugin: Annotated[
        list[Path] | None,
        option(
            "Load your own codecs, defenses, attacks or models; allowed anywhere in a command.",
            "FILE.py",
        ),
    ] = None,
) -> None:
    """Options of vfl itself; `main` removes --plugin from the arguments before parsing."""


def _load_plugins() -> None:
    """Load the plug-in files that the command line or the parent process gives."""
    rest: list[str] = []
    files = [one for one in os.environ.get(PLUGINS, "").split(os.pathsep) if one]
    words = iter(sys.argv[1:])
    for word in words:
        option, equals, file = word.partition("=")
        if option != "--plugin":
            rest.append(word)
        elif path := file if equals else next(words, ""):
            files.append(path)
        else:
            raise ConfigError("--plugin needs a file", want="--plugin FILE.py")
    sys.argv[1:] = rest
    for path in files:
        load_plugin(Path(path))


def main() -> None:
    """Run a command.

    Exit codes: 0 means success, 1 a bug in vfl, 2 a mistake in the
    user's files or arguments, 3 a failure of another party or the network. 130 means an interrupt,
    143 a termination signal. Code 1 of `advise`, `log`, `verify` and `privacy audit` also means
    that the check failed; `status` also has the codes 4 and 5.
    """
    signal.signal(signal.SIGTERM, _end)
    try:
        with redacted_output():
            try:
                _load_plugins()
                app(prog_name="vfl")
            finally:
                progress_line.end()
    except VFLError as error:
        print(logged(str(error)), file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception as bug:
        if mistake := file_mistake(bug):
            print(logged(str(mistake)), file=sys.stderr)
            sys.exit(mistake.exit_code)
        print(logged(redacted_traceback(bug), "error"), file=sys.stderr)
        sys.exit(1)


@app.command("party-worker", hidden=True)
def _worker(
    life: Annotated[int, argument("A pipe that closes with the service.", "FD")],
) -> None:
    """Run as a long-lived worker of a party; `vfl up`, a service or `vfl demo` starts it."""
    federation.worker(life, main)


def _end(number: int, frame: object) -> None:
    """End this process like Ctrl-C, so that the command also ends its child processes."""
    sys.exit(128 + number)
