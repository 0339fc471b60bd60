"""What may be said of an error nobody raised on purpose: never its text, which may hold data."""

from __future__ import annotations

import os
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from vfl.errors import UserError


def of_a_file(problem: Exception) -> UserError | None:
    """The same as a user's mistake, if the operating system names the file it is about.

    >>> of_a_file(FileNotFoundError(2, "No such file or directory", "rows.csv")).where
    'rows.csv'
    """
    if isinstance(problem, OSError) and problem.filename is not None:
        return UserError(str(problem.strerror), where=str(problem.filename))
    return None


def place_of(bug: BaseException) -> str:
    """Where it came from, line by line, and its type; its text where VFL_DEBUG asks for it."""
    if os.environ.get("VFL_DEBUG"):
        return "".join(traceback.format_exception(bug)).rstrip()
    lines = "".join(traceback.format_tb(bug.__traceback__))
    about = f"this is a bug of vfl: {type(bug).__name__}; VFL_DEBUG=1 shows its text"
    return f"{lines}{about}, which may hold data"


@contextmanager
def told_by_place() -> Iterator[None]:
    """Inside, warnings and errors that end a thread are told by type and place, as a bug is.

    Libraries quote values in both. VFL_DEBUG brings the texts back.
    """
    if os.environ.get("VFL_DEBUG"):
        yield
        return
    hook = threading.excepthook
    with warnings.catch_warnings():
        warnings.showwarning = _tell_warning
        threading.excepthook = _tell_thread
        try:
            yield
        finally:
            threading.excepthook = hook


def _tell_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"{filename}:{lineno}: {category.__name__}", file=file or sys.stderr, flush=True)


def _tell_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is not None and not isinstance(ended.exc_value, SystemExit):
        print(place_of(ended.exc_value), file=sys.stderr, flush=True)
