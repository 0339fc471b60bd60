"""What every room stands on: errors, plug-ins by name, randomness, frames, files."""

from __future__ import annotations

import getpass
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's ``__getattr__`` that imports what needs torch only when it is asked for.

    The package's ``__dir__`` is its public list, so that completion finds these names.

    Args:
        package: its name, for the message.
        homes: each public name, and the module that has it or is it.
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
    """Give a user without a name one, as a container's often has none: torch asks for it."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["LOGNAME"] = f"user-{os.getuid()}"


_name_the_user()
