"""Products: packages of vfl that a user can delete from an installation.

The kernel (the rest of vfl) imports no product. A product is a folder of `vfl` with a file
`product.py` that defines one `PRODUCT`: a list of the product's additions to the kernel, as import
paths that are resolved on first use. If the folder is deleted, the kernel lacks only these
additions.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mode:
    """A kind of session (a protocol between the parties) that a product adds.

    Attributes:
        plays: path of the function that the label party's Flower app calls to run the session; the
            function's arguments are Flower's grid, the experiment, the party's own file, the
            changed settings and the run's name.
        outcome: name of a file in the run's folder, which the session writes when it ends
            successfully.
    """

    plays: str
    outcome: str


@dataclass(frozen=True)
class Product:
    """List of what a product adds to the kernel; a path is "module:name".

    Attributes:
        commands: maps a panel of `vfl --help` to its commands, and each command to the path of its
            function or Typer app.
        members: maps the entry-point group of a plug-in family ("vfl.attacks") to member names, and
            each name to the path of its class.
        modes: maps the name of a kind of session to its `Mode`; a party consents to such a name in
            `modes`.
        client_apps: paths of functions that add message handlers to a party's ClientApp; each
            function receives the app, and a second function that returns the path of the party's
            own file from a Flower context.
        terms: maps a prefix of the names in `[consent.ranges]` to the path of the schema class that
            defines the numeric settings with this prefix.
        ledgers: paths of functions that read, for a party's own file, the privacy budget that the
            product has spent; see `vfl.session.store.spending`. One limit of the party applies to
            the spending of all products together. `vfl sessions --restored` ends the ledger entries
            of all trainings that were running.
        cases: maps the name of a secure mode to the path of the `vfl.experiments.scenarios.Cases`
            subclass that builds the cases of attacks on runs of this mode.
        takes_missing_rows: names of secure modes whose sessions accept rows that some party does
            not have.
        sections: maps a key of a run's summary, or of the run's last evaluation, to the path of a
            function. The function receives the value of that key and the run's folder, and renders
            a section of the run's page.
        files: maps the name of a settings file to the path of the pydantic model that checks it.
        listeners: maps the name of a marker file, which only the folder of a listening party
            contains, to the commands that listen there. `vfl renew` renews the certificate in a
            folder with such a marker file.
    """

    commands: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    members: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    modes: Mapping[str, Mode] = field(default_factory=dict)
    client_apps: Sequence[str] = ()
    terms: Mapping[str, str] = field(default_factory=dict)
    ledgers: Sequence[str] = ()
    cases: Mapping[str, str] = field(default_factory=dict)
    takes_missing_rows: Sequence[str] = ()
    sections: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    listeners: Mapping[str, str] = field(default_factory=dict)


@cache
def products() -> Mapping[str, Product]:
    """Return the products in this installation; the keys are the names of their folders."""
    rooms = sorted(path.parent.name for path in _PACKAGE.glob("*/product.py"))
    return {room: importlib.import_module(f"vfl.{room}.product").PRODUCT for room in rooms}


def members_of(group: str) -> dict[str, str]:
    """Return the members that products add to the family of an entry-point group, by name."""
    found = [product.members.get(group, {}) for product in products().values()]
    return {name: path for members in found for name, path in members.items()}


def cases() -> dict[str, str]:
    """Return the paths of the `Cases` classes that products add, by the name of the secure mode."""
    return {name: path for one in products().values() for name, path in one.cases.items()}


def takes_missing_rows(mode: str) -> bool:
    """Return whether sessions of a secure mode of a product accept rows that some party lacks."""
    return any(mode in one.takes_missing_rows for one in products().values())


def sections() -> dict[str, str]:
    """Return the paths of functions that add sections to a run's page, by key; see `Product`."""
    return {name: path for one in products().values() for name, path in one.sections.items()}


def modes() -> dict[str, Mode]:
    """Return the kinds of sessions that products add, by name."""
    return {name: mode for one in products().values() for name, mode in one.modes.items()}


def listening_in(folder: Path) -> str:
    """Return a product's commands that listen with this party folder; "" if it has none."""
    found = [product.listeners.items() for product in products().values()]
    return next((say for files in found for file, say in files if (folder / file).exists()), "")
