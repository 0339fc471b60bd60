"""Products: rooms of vfl that one can take away.

The kernel imports no product. A product is a folder of `vfl` with a file `product.py`, which holds
one `PRODUCT`: what it adds to the kernel, as paths that are imported when they are used. Without
the folder the kernel lacks what these tables name, and nothing else.
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
    """A kind of session that a product adds.

    Attributes:
        plays: path of what the label party's app calls with Flower's grid, the experiment, the
            party's own file, the changed settings and the run's name.
        outcome: the file of the run's folder that says that a session has ended well.
    """

    plays: str
    outcome: str


@dataclass(frozen=True)
class Product:
    """What a product adds; a path is "module:name".

    Attributes:
        commands: panel of `vfl --help` -> command -> path of its function or its Typer.
        members: entry-point group of a family ("vfl.attacks") -> name -> path of its class.
        modes: name of a kind of session, which a party consents to by `modes` -> what it is.
        client_apps: paths of functions that let a party's ClientApp answer more messages; each
            takes the app, and what gives the party's own file in a context.
        terms: first part of the names in `[consent.ranges]` -> path of the schema of settings whose
            numbers these are.
        ledgers: paths of functions that take a party's own file and give what it has spent, as
            `vfl.session.store.spending` keeps it; one limit bounds all of it, and `vfl sessions
            --restored` ends what was under way.
        cases: name of a secure mode -> path of the `vfl.experiments.scenarios.Cases` that says what
            attackers of its runs hold.
        takes_missing_rows: names of secure modes whose sessions take rows that some party lacks.
        sections: entry of a run's summary, or of its last evaluation -> path of what shows it as a
            section of the run's page, from the entry and the run's folder.
        listeners: file in the folder of a party that listens -> the commands that do. `vfl renew`
            renews the certificate of such a folder.
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
    listeners: Mapping[str, str] = field(default_factory=dict)


@cache
def products() -> Mapping[str, Product]:
    """The products of this installation, by the names of their rooms."""
    rooms = sorted(path.parent.name for path in _PACKAGE.glob("*/product.py"))
    return {room: importlib.import_module(f"vfl.{room}.product").PRODUCT for room in rooms}


def members_of(group: str) -> dict[str, str]:
    """The members that products add to the family of an entry-point group."""
    found = [product.members.get(group, {}) for product in products().values()]
    return {name: path for members in found for name, path in members.items()}


def cases() -> dict[str, str]:
    """What products say of attackers of their runs, by the name of the secure mode."""
    return {name: path for one in products().values() for name, path in one.cases.items()}


def takes_missing_rows(mode: str) -> bool:
    """Whether sessions of a product's secure mode take rows that some party lacks."""
    return any(mode in one.takes_missing_rows for one in products().values())


def sections() -> dict[str, str]:
    """What products show of a run, by the entry of its summary."""
    return {name: path for one in products().values() for name, path in one.sections.items()}


def modes() -> dict[str, Mode]:
    """The kinds of sessions that products add."""
    return {name: mode for one in products().values() for name, mode in one.modes.items()}


def listening_in(folder: Path) -> str:
    """The commands of a product that listen with this folder of a party; "" for none."""
    found = [product.listeners.items() for product in products().values()]
    return next((say for files in found for file, say in files if (folder / file).exists()), "")
