"""A user's own model, imported from ``package.module:ClassOrFunction``.

Importing runs code. A path therefore comes only from the user's own local files or command line,
never from a message, a session or another party's experiment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from vfl.core.errors import SpecError
from vfl.core.registry import imported
from vfl.models.base import Bottom, Top


class _Brought:
    """A recipe that calls a user's function with the given sizes."""

    def __init__(self, maker: Callable[..., object], path: str) -> None:
        self.maker = maker
        self.path = path

    def build(self, *sizes: Any, **named: Any) -> nn.Module:
        made = self.maker(*sizes, **named)
        if not isinstance(made, nn.Module):
            raise SpecError(
                "this path does not build a torch module",
                where=self.path,
                got=f"an object of type {type(made).__name__}",
                want="torch.nn.Module",
            )
        return made


class BroughtBottom(_Brought, Bottom):
    """A bottom made by a user's callable of (shape, width)."""


class BroughtTop(_Brought, Top):
    """A top made by a user's callable of (width, outputs)."""


def bring(path: str) -> Bottom:
    """Return the user's own bottom; only paths from local files are allowed, since it runs code.

    Args:
        path: ``package.module:name`` of a class or function of (shape, width) that returns a torch
            module, as `Bottom.build` does.

    Raises:
        SpecError: the path is malformed, its module is not found, or it names nothing callable.
        UnknownNameError: the module has no such name.
    """
    return BroughtBottom(_imported(path), path)


def bring_top(path: str) -> Top:
    """The user's own top; as `bring`, with a callable of (width, outputs)."""
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
