"""The command line: one file per task of a user; heavy imports are inside the commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfl.core import lazy_names

if TYPE_CHECKING:
    from vfl.cli.commands import app, main

__all__ = ["app", "main"]

#: Modules with commands of a product (trees, llm and others) import `vfl.cli.output`;
#: `vfl.cli.commands` imports these modules.
__getattr__ = lazy_names(__name__)
