"""What may be said of an error nobody raised on purpose: never its text, which may hold data."""

from __future__ import annotations

import os
import traceback

from vfl.errors import UserError


def of_a_file(problem: Exception) -> UserError | None:
    """The same as a user's mistake, if the operating system names the file it is about.

    >>> of_a_file(FileNotFoundError(2, "No such file or directory", "rows.csv")).where
    'rows.csv'
    """
    if isinstance(problem, OSError) and problem.filename is not None:
        return UserError(str(problem.strerror), where=str(problem.filename))
    return None


def place_of(bug: Exception) -> str:
    """Where it came from, line by line, and its type; its text where VFL_DEBUG asks for it."""
    if os.environ.get("VFL_DEBUG"):
        return "".join(traceback.format_exception(bug)).rstrip()
    lines = "".join(traceback.format_tb(bug.__traceback__))
    about = f"this is a bug of vfl: {type(bug).__name__}; VFL_DEBUG=1 shows its text"
    return f"{lines}{about}, which may hold data"
