"""Products: rooms of vfl that one can take away.

The kernel imports no product. A product is a folder of `vfl` with a file `product.py`, which holds
one `PRODUCT`: what it adds to the kernel, as paths that are imported when they are used. Without
the folder the kernel lacks these commands, modes and members, and nothing else.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Product:
    """What a product adds; a path is "module:name".

    Attributes:
        commands: panel of `vfl --help` -> command -> path of its function or its Typer.
        members: entry-point group of a family ("vfl.attacks") -> name -> path of its class.
    """

    commands: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    members: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@cache
def products() -> Mapping[str, Product]:
    """The products of this installation, by the names of their rooms."""
    rooms = sorted(path.parent.name for path in _PACKAGE.glob("*/product.py"))
    return {room: importlib.import_module(f"vfl.{room}.product").PRODUCT for room in rooms}


def members_of(group: str) -> dict[str, str]:
    """The members that products add to the family of an entry-point group."""
    found = [product.members.get(group, {}) for product in products().values()]
    return {name: path for members in found for name, path in members.items()}
