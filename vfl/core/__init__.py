"""Foundations of all other packages: errors, plug-ins by name, randomness, frames, files."""

from __future__ import annotations

import getpass
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Make a package's ``__getattr__``, which imports modules that need torch on first use.

    The package's ``__dir__`` is its public list, so that completion finds these names.

    Args:
        package: name of the package, for the message.
        homes: maps each public name to the module that contains it or is it.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        home = importlib.import_module(homes[name])
        return home if homes[name].endswith(f".{name}") else getattr(home, name)

    module = sys.modules[package]
    module.__dir__ = lambda: sorted(module.__all__)  # type: ignore[method-assign]
    return find


def _name_the_user() -> None:
    """Give a user without a name one, because torch asks for it; containers often have none."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["LOGNAME"] = f"user-{os.getuid()}"


_name_the_user()
