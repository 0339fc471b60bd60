"""``vfl party``: parties that enter, leave or rename themselves while a project runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vfl.cli.output import Json, emit

if TYPE_CHECKING:
    from vfl.federation.members import Change

app = typer.Typer(
    no_args_is_help=True,
    help="Let a party enter, leave or be renamed while a project runs.",
    pretty_exceptions_enable=False,
)
Where = Annotated[
    Path,
    typer.Argument(
        metavar="[PROJECT|PARTY]",
        help="At the label party its project; at another party its own folder.",
    ),
]
Name = Annotated[str, typer.Argument(metavar="NAME")]


@app.command()
def add(
    name: Name,
    path: Where = Path(),
    table: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Its table, in a project of one machine."),
    ] = None,
    ids: Annotated[
        str | None, typer.Option("--id", metavar="COLUMN", help="Its ids, where not found.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="It answers requests, as with vfl init --serve.")
    ] = False,
    json: Json = False,
) -> None:
    """Add a feature party to a project, at the label party.

    The party is written into the experiment, and PROJECT/NAME is its folder, to be sent to it. In
    a project of one machine it has keys, and --table names its table; else the party makes its
    own with `vfl join`. Nobody meets it before `vfl party accept` there.
    """
    from vfl.cli.project import described
    from vfl.federation import members
    from vfl.federation.project import LabelFolder

    label = LabelFolder.find(path)
    found = None
    if table is not None:
        given = [] if ids is None else [f"{name}={ids}"]
        found = described([f"{name}={table}"], given, [], {"": ""}, "", project=True)[name]
    _say(members.add(label, name, found, serves=serve), json)


@app.command()
def accept(
    key: Annotated[
        Path, typer.Argument(metavar="NAME.pub", help="What vfl join wrote at the other party.")
    ],
    path: Where = Path(),
    fingerprint: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="As that party reads it out; asked for without it."),
    ] = None,
    json: Json = False,
) -> None:
    """Take another party's public keys, once it has read out their fingerprint.

    At the label party, `vfl up` lets it connect then. At another party its identity is pinned, and
    this party consents to sessions that it is in: `members` in the [consent] of its own file.
    """
    from vfl.core.errors import ConfigError
    from vfl.federation import joining, members

    if fingerprint is None:
        if not sys.stdin.isatty():
            raise ConfigError(
                "a key is taken once its fingerprint was compared",
                got=str(key),
                fix=f'let {key.stem} read it out, by telephone: --fingerprint "TEXT"',
            )
        fingerprint = str(typer.prompt(f"The fingerprint that {key.stem} reads out"))
    _say(members.accept(joining.folder_of(path), key, fingerprint), json)


@app.command()
def remove(name: Name, path: Where = Path(), json: Json = False) -> None:
    """Take a feature party out of a project; at another party, refuse sessions with it.

    Its settings and key go at the label party, and what is known there of its rows. Runs that it
    had part in can be looked at; they predict without it where they were trained with
    `data.missing_rows = "token"`.
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
    """Give a feature party another name: at the label party, then at every other party.

    Keys, ledgers and logs go on under the new name. Runs that the party had part in under the old
    name can be looked at, and predict no more.
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
        print(f"{'done':<12} {sentence}")
    for sentence in change.stays:
        print(f"{'stays':<12} {sentence}")
    for party, command in change.then:
        print(f"{'then':<12} {party}: {command}")
