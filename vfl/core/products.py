"""Products: packages of vfl that can be removed.

The kernel imports no product. A product is a folder of `vfl` with a file `product.py` that contains
one `PRODUCT`: its additions to the kernel, as paths that are imported on first use. Without the
folder, the kernel lacks only these additions.
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
        plays: path of the function that the label party's app calls with Flower's grid, the
            experiment, the party's own file, the changed settings and the run's name.
        outcome: file of the run's folder that marks a successful end of the session.
    """

    plays: str
    outcome: str


@dataclass(frozen=True)
class Product:
    """Additions of a product to the kernel; a path is "module:name".

    Attributes:
        commands: maps a panel of `vfl --help` to commands, and each to the path of its function or
            Typer.
        members: maps the entry-point group of a family ("vfl.attacks") to names, and each to the
            path of its class.
        modes: maps the name of a kind of session, to which a party consents by `modes`, to its
            `Mode`.
        client_apps: paths of functions that add messages to a party's ClientApp; each receives the
            app, and a function that returns the party's own file in a context.
        terms: maps the first part of names in `[consent.ranges]` to the path of the schema with
            these numbers.
        ledgers: paths of functions that return the product's spending from a party's own file, as
            in `vfl.session.store.spending`; one limit applies to all spending, and `vfl sessions
            --restored` ends all running entries.
        cases: maps the name of a secure mode to the path of the `vfl.experiments.scenarios.Cases`
            that defines the attackers' knowledge in its runs.
        takes_missing_rows: names of secure modes whose sessions accept rows that some party lacks.
        sections: maps an entry of a run's summary, or of its last evaluation, to the path of a
            function. From the entry and the run's folder, the function renders a section of the
            run's page.
        files: maps a file of settings to the path of its model.
        listeners: maps a file in the folder of a party that listens to the commands that listen.
            `vfl renew` renews the certificate of such a folder.
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
    """The products of this installation, by the names of their folders."""
    rooms = sorted(path.parent.name for path in _PACKAGE.glob("*/product.py"))
    return {room: importlib.import_module(f"vfl.{room}.product").PRODUCT for room in rooms}


def members_of(group: str) -> dict[str, str]:
    """Members that products add to the family of an entry-point group."""
    found = [product.members.get(group, {}) for product in products().values()]
    return {name: path for members in found for name, path in members.items()}


def cases() -> dict[str, str]:
    """Attack cases of products, by the name of the secure mode."""
    return {name: path for one in products().values() for name, path in one.cases.items()}


def takes_missing_rows(mode: str) -> bool:
    """Return whether sessions of a product's secure mode accept rows that some party lacks."""
    return any(mode in one.takes_missing_rows for one in products().values())


def sections() -> dict[str, str]:
    """Sections of products on a run's page, by the entry of its summary."""
    return {name: path for one in products().values() for name, path in one.sections.items()}


def modes() -> dict[str, Mode]:
    """Kinds of sessions that products add."""
    return {name: mode for one in products().values() for name, mode in one.modes.items()}


def listening_in(folder: Path) -> str:
    """Commands of a product that listen with this folder of a party; "" if there are none."""
    found = [product.listeners.items() for product in products().values()]
    return next((say for files in found for file, say in files if (folder / file).exists()), "")
