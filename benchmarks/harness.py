"""The command line of every benchmark: its options, rows as a table or as JSON, and times.

A benchmark is a function that measures. The arguments of the function are the options of its
command: their types and defaults come from the signature, and the help texts from the docstring's
``Args``.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import time
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, BooleanOptionalAction
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from benchmarks.emulation import Wan
from vfl.config.toml import Settings
from vfl.core.errors import VFLError
from vfl.core.text import printable_lines

Row = TypeVar("Row")
#: Type of a text option that may contain commas; lists of other texts are split at commas.
Whole = Annotated[str, "whole"]
#: Type of an integer option that may be 0 although its default is not 0.
OrZero = Annotated[int, "0"]
#: A column: heading, format such as ">10.2f", and an attribute of the row or a function of the row.
Column = tuple[str, str, str | Callable[[Any], Any]]
#: Type of a function that formats rows for people.
Shown = Callable[[Sequence[Any]], str]


def run(bench: Callable[..., Sequence[Row]], shown: Shown) -> Sequence[Row]:
    """Run the measurement that the command line requests, and print the rows.

    Errors end the program with the exit codes of `vfl`.

    Args:
        bench: function that measures; its arguments without a default become positional arguments.
        shown: function that formats rows for people.
    """
    about, helps = _documented(bench)
    name = Path(inspect.getfile(bench)).stem
    options = ArgumentParser(prog=f"python -m benchmarks.{name}", description=about)
    options.add_argument("--json", action="store_true", help="print JSON on standard output")
    arguments = inspect.signature(bench, eval_str=True).parameters
    for each in arguments.values():
        _add(options, each, helps.get(each.name, "").replace("%", "%%"))
    try:
        asked = vars(options.parse_args())
        as_json = asked.pop("json")
        for name in asked:
            if get_origin(_kind(arguments[name])) is Sequence:
                asked[name] = [each for part in asked[name] for each in part]
        if "network" in asked and not asked.get("wan", arguments["wan"].default):
            options.error("--network needs a network link: --wan 80mbps,40ms")
        rows = bench(**asked)
    except VFLError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    print(json.dumps([_record(row) for row in rows], indent=2) if as_json else shown(rows))
    return rows


def command(
    bench: Callable[..., Sequence[Row]],
    shown: Shown,
    holds: Callable[[Row], bool] = lambda row: True,
) -> Callable[[], None]:
    """Return the `main` function of a benchmark's program; see `run`.

    Args:
        bench: function that measures.
        shown: function that formats rows for people.
        holds: function that returns whether a row meets its target; the exit code is 1 if some row
            does not.
    """

    def main() -> None:
        if not all(map(holds, run(bench, shown))):
            sys.exit(1)

    return main


def table(*columns: Column, markdown: bool = False) -> Shown:
    """Return a function that formats rows with these columns.

    A value of None becomes a dash, or an empty cell in Markdown.

    >>> print(table(("rows", ">5", lambda row: row), ("half", ">6.1f", lambda row: row / 2))([3]))
     rows  half
        3   1.5
    """

    def cells(row: Any) -> list[str]:
        found = []
        for _, form, value in columns:
            cell = getattr(row, value) if isinstance(value, str) else value(row)
            if markdown:
                found.append("" if cell is None else format(cell, re.sub(r"^[<>]\d+", "", form)))
            else:
                found.append(f"{'-':{_width(form)}}" if cell is None else format(cell, form))
        return found

    def shown(rows: Sequence[Any]) -> str:
        if markdown:
            return markdown_table([head for head, *_ in columns], map(cells, rows))
        head = "".join(f"{text:{_width(form)}}" for text, form, _ in columns)
        return "\n".join(line.rstrip() for line in [head, *("".join(cells(row)) for row in rows)])

    return shown


def markdown_table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown.

    >>> print(markdown_table(["task", "AUC"], [["bank", "0.7"]]))
    | task | AUC |
    | --- | --- |
    | bank | 0.7 |
    """
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *lines))


def say(text: str) -> None:
    """Print progress on standard error."""
    print(printable_lines(text), file=sys.stderr, flush=True)


def times(ratio: float) -> str:
    """Format a ratio, followed by "x"."""
    return f"{ratio:.2f}x"


def beside(figure: float, ratio: float, digits: int = 2) -> str:
    """Format a number, followed by a ratio in brackets.

    >>> beside(12.3456, 1.5)
    '12.35 (1.500x)'
    """
    return f"{figure:.{digits}f} ({ratio:.3f}x)"


def middle(rows: Sequence[Any], *names: str) -> dict[str, float]:
    """Return the median, over all turns, of some metrics of the rows, by name."""
    return {name: median(getattr(row, name) for row in rows) for name in names}


@dataclass(slots=True)
class Cost:
    """Cost of a `with` block; all values are zero until the block ends.

    Attributes:
        wall_s, cpu_s: wall and processor time, in seconds.
        peak_bytes: peak memory of this process so far minus its memory when the block began.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0


@contextmanager
def measured(cpu: Callable[[], float] = time.process_time) -> Iterator[Cost]:
    """Measure a `with` block of this process.

    >>> with measured() as cost:
    ...     _ = sum(range(1000))
    >>> cost.wall_s > 0
    True

    Args:
        cpu: clock of the processor time.
    """
    cost, before = Cost(), resident_bytes("VmRSS")
    wall, busy = time.perf_counter(), cpu()
    yield cost
    cost.cpu_s, cost.wall_s = cpu() - busy, time.perf_counter() - wall
    cost.peak_bytes = resident_bytes("VmHWM") - before


def timed(call: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> float:
    """Return the seconds that one call takes, measured by a clock."""
    began = clock()
    call()
    return clock() - began


def cpu_s(pid: int) -> float:
    """Return a process's CPU seconds so far; 0 without /proc or after the process's end."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def family(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants, as far as /proc lists them."""
    yield pid
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the process has just ended
            for child in thread.read_text().split():
                yield from family(int(child))


def called(pid: int) -> str:
    """Return the name that `ps` shows for a process; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def resident_bytes(field: str, pid: int | Literal["self"] = "self", file: str = "status") -> int:
    """Return a memory value of a process from /proc: "VmRSS" is the present one, "VmHWM" the peak.

    The value is 0 if there is no /proc.

    `getrusage` is not used, because its peak includes the process that started the measured
    process.

    Raises:
        ProcessLookupError: the process has ended.
    """
    text = ""
    with suppress(FileNotFoundError, ProcessLookupError):
        text = Path(f"/proc/{pid}/{file}").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    if found is None and pid != "self" and Path("/proc/self").exists():
        raise ProcessLookupError("the process has ended")
    return 1024 * int(found[1]) if found else 0


def forget_peak(pid: int | Literal["self"] = "self") -> None:
    """Reset the peak "VmHWM" of a process to its present memory; without /proc, do nothing."""
    path = Path(f"/proc/{pid}/clear_refs")
    if path.exists():
        path.write_text("5")


def _documented(bench: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the first line of a docstring, and its text about each argument."""
    text = inspect.getdoc(bench) or ""
    _, _, args = text.partition("\nArgs:\n")
    lines = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", args.partition("\n\n")[0], re.MULTILINE)
    return text.partition("\n")[0], {name: " ".join(said.split()) for name, said in lines}


def _width(form: str) -> str:
    """Return the alignment and width of a format."""
    found = re.match(r"[<>]\d+", form)
    return found[0] if found else ""


def _kind(argument: inspect.Parameter) -> Any:
    """Return the type of an argument, without None."""
    kinds = get_args(argument.annotation)
    return kinds[0] if NoneType in kinds else argument.annotation


def _add(options: ArgumentParser, argument: inspect.Parameter, about: str) -> None:
    """Add an option, or a positional argument if it has no default."""
    kind = _kind(argument)
    needed = argument.default is inspect.Parameter.empty
    flag = argument.name if needed else f"--{argument.name.replace('_', '-')}"
    more: dict[str, Any] = {} if needed else {"default": SUPPRESS}
    if not needed and argument.default not in (None, "", ()):
        about += f" ({_spelled(argument.default)})"
    if kind is bool:
        action = BooleanOptionalAction if argument.default else "store_true"
        options.add_argument(flag, action=action, help=about, **more)
        return
    many = get_origin(kind) is Sequence
    kind = get_args(kind)[0] if many else kind
    read = _reader(kind, 0 if argument.default in (0, None) else 1)
    if many:
        parts = (lambda text: [text]) if kind == Whole else (lambda text: text.split(","))
        one, read = read, lambda text: [one(part) for part in parts(text)]
        more |= {"nargs": "+", "action": "extend"}
    options.add_argument(flag, type=read, metavar=_called(kind), help=about, **more)


def _called(kind: Any) -> str:
    """Return the placeholder that the help shows for a value."""
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    return {int: "N", OrZero: "N", float: "X", Path: "PATH", Wan: "LINE"}.get(kind, "NAME")


def _spelled(default: Any) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple | list) else str(default)


def _reader(kind: Any, least: int) -> Callable[[str], Any]:
    """Return the function that parses one value of an option."""
    if kind is Wan:
        return lambda text: Wan.parse(text) if text else None
    if kind is int:
        return partial(_at_least, least)
    if kind == OrZero:
        return partial(_at_least, 0)
    if get_origin(kind) is Literal:
        return partial(_one_of, get_args(kind))
    return str if kind == Whole else kind


def _at_least(least: int, text: str) -> int:
    if not text.strip().isdigit() or int(text) < least:
        raise ArgumentTypeError(f"'{text}' is no whole number of at least {least}")
    return int(text)


def _one_of(names: Sequence[str], text: str) -> str:
    if text not in names:
        raise ArgumentTypeError(f"'{text}' is none of {', '.join(names)}")
    return text


def _record(row: Any) -> dict[str, Any]:
    if isinstance(row, dict):
        return row
    return row.model_dump() if isinstance(row, Settings) else asdict(row)
