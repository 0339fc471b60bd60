"""Foundations of all other packages: error classes, plug-in registry, randomness, frames, files."""

from __future__ import annotations

import ast
import getpass
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any


def lazy_names(package: str) -> Callable[[str], Any]:
    """Make a package's ``__getattr__``, which imports on first use the modules that need torch.

    The import statements below ``if TYPE_CHECKING`` in the package's source state which module
    defines each name. The package's ``__dir__`` returns its public names, so that completion in a
    shell or editor shows them.

    Args:
        package: name of the package.
    """
    module = sys.modules[package]

    @cache
    def homes() -> dict[str, str]:
        nodes = ast.walk(ast.parse(inspect.getsource(module)))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        return {each.name: str(one.module) for one in imports for each in one.names}

    def find(name: str) -> Any:
        if name not in module.__all__ or name not in homes():
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        home = importlib.import_module(homes()[name])
        if not hasattr(home, name):  # the name is a module's name
            return importlib.import_module(f"{homes()[name]}.{name}")
        return getattr(home, name)

    module.__dir__ = lambda: sorted(module.__all__)  # type: ignore[method-assign]
    return find


def _name_the_user() -> None:
    """Set a user name where the system has none, as in many containers; torch needs one."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["LOGNAME"] = f"user-{os.getuid()}"


_name_the_user()
