"""``vfl party``: adds, accepts, removes or renames parties of a running project."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vfl.cli.output import Json, argument, emit, option, print_line

if TYPE_CHECKING:
    from vfl.federation.members import Change

app = typer.Typer(
    no_args_is_help=True,
    help="Add, accept, remove or rename parties while a project runs.",
    pretty_exceptions_enable=False,
)
Where = Annotated[
    Path,
    argument(
        "At the label party: its project. At another party: its own folder.", "[PROJECT|PARTY]"
    ),
]
Name = Annotated[str, typer.Argument(metavar="NAME")]


@app.command()
def add(
    name: Name,
    path: Where = Path(),
    table: Annotated[
        str | None, option("The party's table, in a project on one machine.", "FILE")
    ] = None,
    ids: Annotated[
        str | None, option("The table's id column, if vfl does not find it.", "COLUMN", "--id")
    ] = None,
    encoding: Annotated[
        str | None, option("Encoding of a CSV if vfl does not find it, such as cp1251.", "NAME")
    ] = None,
    serve: Annotated[
        bool, option("Let the party answer requests, as with vfl init --serve.", "--serve")
    ] = False,
    json: Json = False,
) -> None:
    """Add a feature party to the experiment of a project, at the label party.

    PROJECT/NAME becomes the feature party's folder. In a project on one machine, the command makes
    the party's keys, and --table sets the path of its table; otherwise you send the folder to the
    party, which makes its keys with `vfl join`. Other parties need `vfl party accept` before they
    have sessions with the new party.
    """
    from vfl.cli.project import GivenTables, described
    from vfl.federation import members
    from vfl.federation.project import LabelFolder

    label = LabelFolder.find(path)
    found = None
    if table is not None:
        own_ids, written = (
            [] if given is None else [f"{name}={given}"] for given in (ids, encoding)
        )
        given = GivenTables([f"{name}={table}"], ids=own_ids, encodings=written)
        found = described(given, {"": ""}, "", project=True)[name]
    _say(members.add(label, name, found, serves=serve), json)


@app.command()
def accept(
    key: Annotated[Path, argument("File that vfl join wrote at the other party.", "NAME.pub")],
    path: Where = Path(),
    fingerprint: Annotated[
        str | None,
        option("Fingerprint that the party read aloud; by default vfl asks for it.", "TEXT"),
    ] = None,
    json: Json = False,
) -> None:
    """Accept another party's public keys, after its owner has read their fingerprint aloud.

    At the label party, `vfl up` then lets the other party connect. At any other party, the command
    pins the other party's identity key, and consents to sessions with that party: `members` in the
    [consent] of the own file.
    """
    from vfl.core.errors import ConfigError
    from vfl.federation import joining, members

    if fingerprint is None:
        if not sys.stdin.isatty():
            raise ConfigError(
                "a key is accepted only after a comparison of its fingerprint",
                got=str(key),
                fix=f'ask {key.stem} to read it out, by telephone: --fingerprint "TEXT"',
            )
        fingerprint = str(typer.prompt(f"The fingerprint that {key.stem} reads aloud"))
    _say(members.accept(joining.folder_of(path), key, fingerprint), json)


@app.command()
def remove(name: Name, path: Where = Path(), json: Json = False) -> None:
    """Remove a feature party from a project; run by another party, refuse sessions with that party.

    The label party removes the party's settings and its key, and the alignments that need its rows.
    Runs with the removed party remain readable; they can predict without it only if they were
    trained with `data.missing_rows = "token"`.
    """
    from vfl.federation import joining, members
    from vfl.federation.project import LabelFolder

    folder = joining.folder_of(path)
    leads = (folder / "app").is_dir()
    done = members.remove(LabelFolder(folder), name) if leads else members.withdraw(folder, name)
    _say(done, json)


@app.command()
def rename(
    old: Annotated[str, typer.Argument(metavar="OLD")],
    new: Annotated[str, typer.Argument(metavar="NEW")],
    path: Where = Path(),
    json: Json = False,
) -> None:
    """Rename a feature party, first at the label party and then at every other party.

    The party's identity key, ledgers and log continue under the new name. Its SuperNode gets a new
    key, which the label party must accept, and rows must be aligned again. Runs with the party
    under its old name remain readable, but cannot predict any more.
    """
    from vfl.federation import joining, members
    from vfl.federation.project import LabelFolder

    folder = joining.folder_of(path)
    if (folder / "app").is_dir():
        _say(members.rename(LabelFolder(folder), old, new), json)
    else:
        _say(members.follow(folder, old, new), json)


def _say(change: Change, json: bool) -> None:
    from dataclasses import asdict

    if json:
        emit(asdict(change))
        return
    for sentence in change.done:
        print_line("done", sentence, 12)
    for sentence in change.stays:
        print_line("stays", sentence, 12)
    for party, command in change.then:
        print_line("then", f"{party}: {command}", 12)
