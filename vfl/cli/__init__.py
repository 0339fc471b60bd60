"""The command line: a file for each thing a user does, heavy imports inside the commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfl.core import lazy_names

if TYPE_CHECKING:
    from vfl.cli.commands import app, main

__all__ = ["app", "main"]

#: Commands of a product import `vfl.cli.output`, and `vfl.cli.commands` imports them.
__getattr__ = lazy_names(__name__)
