"""A user's own model, imported from ``package.module:ClassOrFunction``.

The import runs the code at this path. So vfl accepts a path only from the user's local files or
command line, and never from a message, a session, or another party's experiment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from vfl.core.errors import SpecError
from vfl.core.registry import imported
from vfl.models.base import Bottom, Top


class _Brought:
    """A model that calls a user's function to build its module."""

    def __init__(self, maker: Callable[..., object], path: str) -> None:
        self.maker = maker
        self.path = path

    def build(self, *sizes: Any, **named: Any) -> nn.Module:
        made = self.maker(*sizes, **named)
        if not isinstance(made, nn.Module):
            raise SpecError(
                "the object at this path does not build a torch module",
                where=self.path,
                got=f"an object of type {type(made).__name__}",
                want="torch.nn.Module",
            )
        return made


class BroughtBottom(_Brought, Bottom):
    """A bottom whose modules are built by a user's callable of (shape, width)."""


class BroughtTop(_Brought, Top):
    """A top whose modules are built by a user's callable of (width, outputs)."""


def bring(path: str) -> Bottom:
    """Return a user's own bottom. Use only paths from local files, because the import runs code.

    Args:
        path: ``package.module:name`` of a class or function of (shape, width) that returns a torch
            module, like `Bottom.build`.

    Raises:
        SpecError: the path is malformed, its module does not exist, or its name is not callable.
        UnknownNameError: the module has no object with this name.
    """
    return BroughtBottom(_imported(path), path)


def bring_top(path: str) -> Top:
    """Return a user's own top, like `bring`; the callable has arguments (width, outputs)."""
    return BroughtTop(_imported(path), path)


def _imported(path: str) -> Callable[..., Any]:
    found = imported(path, "a class or a function that builds a module")
    if isinstance(found, nn.Module):
        raise SpecError(
            "a path must name a class or a function that builds a module",
            where=path,
            got=f"an object of type {type(found).__name__}",
        )
    return found  # type: ignore[no-any-return]
