"""The command line of every benchmark: shared options, rows as a table or as JSON."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from benchmarks.emulation import Wan
from vfl.config.toml import Settings
from vfl.core.errors import VFLError
from vfl.core.text import printable_lines

Row = TypeVar("Row")


def parser(name: str, about: str, *, wan: str | None = None, quick: bool = False) -> ArgumentParser:
    """A command line with the options that benchmarks share.

    Args:
        name: of the module that is run.
        about: what it measures.
        wan: every party's line unless told, "" for the loopback; None has no lines at all.
        quick: whether a quick run is offered.
    """
    made = ArgumentParser(prog=f"python -m benchmarks.{name}", description=about)
    made.add_argument("--json", action="store_true", help="print JSON on standard output")
    if quick:
        made.add_argument("--quick", action="store_true", help="does it run, not how fast")
    if wan is not None:
        made.add_argument(
            "--wan",
            default=wan,
            metavar="LINE",
            help="every party's line: bandwidth and round trip, such as 80mbps,40ms",
        )
        made.add_argument(
            "--network",
            help="how lines are made: tun (delays packets; root), proxy (delays bytes), model "
            "(computes), or auto: tun where that works, else proxy",
        )
    return made


def line(asked: Namespace, options: ArgumentParser) -> dict[str, Any]:
    """The line and the network that were asked for, as a benchmark takes them.

    Raises:
        BadOptionError: a line that cannot be.
    """
    if asked.network and not asked.wan:
        options.error("--network needs a line: --wan 80mbps,40ms")
    wan = Wan.parse(asked.wan) if asked.wan else None
    return {"wan": wan, "network": asked.network or "auto"}


def numbers(text: str) -> list[int]:
    """Whole numbers between commas, for an option.

    >>> numbers("1,5")
    [1, 5]
    """
    return [int(each) for each in text.split(",")]


def run(
    options: ArgumentParser,
    measure: Callable[[Namespace], Sequence[Row]],
    table: Callable[[Sequence[Row]], str],
) -> Sequence[Row]:
    """Parse the command line, measure, and print the rows.

    Exit codes of errors are those of `vfl`.
    """
    asked = options.parse_args()
    try:
        rows = measure(asked)
    except VFLError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    print(json.dumps([_record(row) for row in rows], indent=2) if asked.json else table(rows))
    return rows


def say(text: str) -> None:
    """Progress, on standard error."""
    print(printable_lines(text), file=sys.stderr, flush=True)


def silent(text: str) -> None:
    """No progress."""


def _record(row: Any) -> dict[str, Any]:
    return row.model_dump() if isinstance(row, Settings) else asdict(row)
