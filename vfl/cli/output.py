"""Output of commands (results on stdout, progress on stderr), and common options."""

from __future__ import annotations

import gc
import json as jsons
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vfl.core.text import logged, logs_json, printable
from vfl.core.traffic import size

if TYPE_CHECKING:
    from vfl.session.progress import ProgressReport


def option(text: str, *words: str, **more: Any) -> Any:
    """Declare an option of a command; `words` are the option's metavar and names such as --set."""
    names = [word for word in words if word.startswith("-")]
    metavar = next((word for word in words if not word.startswith("-")), None)
    return typer.Option(*names, metavar=metavar, help=text, **more)


def argument(text: str, metavar: str | None = None, **more: Any) -> Any:
    """Declare an argument of a command with its help text."""
    return typer.Argument(metavar=metavar, help=text, **more)


Json = Annotated[bool, option("Print JSON on standard output.", "--json")]
Set = Annotated[
    list[str] | None,
    option("Change a setting, such as train.epochs=5 or codec=topk:k=4.", "--set", "-s"),
]
Device = Annotated[
    str, option("Device of all models in this process; a party's own file names its device.")
]


@contextmanager
def quick_imports() -> Iterator[None]:
    """Turn garbage collection off while a command imports modules, which Python never frees.

    Otherwise, repeated scans of a million objects would take a fifth of a short command's CPU time.
    """
    gc.disable()
    try:
        yield
    finally:
        # collection is turned on again, because later garbage would never be freed
        if not gc.get_freeze_count():
            gc.freeze()
        gc.enable()


def newest_run(path: Path) -> Path:
    """Return the run folder at a path, or the last successful run of the project at the path."""
    if (path / "run.json").exists():
        return path
    from vfl.core.errors import RunFolderError
    from vfl.federation.project import LabelFolder

    try:
        runs = LabelFolder.find(path).runs_path
    except RunFolderError:
        return path  # the command itself reports that the run is missing
    ended = list(runs.glob("*/summary.json"))
    if not ended:
        raise RunFolderError(
            "no run of this project has ended well", where=str(runs), fix=f"vfl train {path}"
        )
    return max(ended, key=lambda summary: summary.stat().st_mtime_ns).parent


def served_run(path: Path) -> Path:
    """Return the run at a path; of a project or folder, the promoted run or else the last run."""
    if (path / "run.json").exists():
        return path
    from vfl.core.errors import RunFolderError
    from vfl.training.promotion import promoted_runs, runs_of

    try:
        runs = runs_of(path)
    except RunFolderError:
        return path  # the command itself reports that the run is missing
    promoted = promoted_runs(runs)
    return runs / promoted[-1] if promoted else newest_run(path)


OwnFile = Annotated[Path, argument("The party's own file.", "party.toml")]
Run = Annotated[
    Path,
    argument(
        "The folder that vfl train printed, or a project for its last run that ended well.",
        "RUN|PROJECT",
        callback=newest_run,
    ),
]
Write = Annotated[
    list[str] | None,
    option(
        "Write the run for another tool: tensorboard, or mlflow:store=FILE.db. Repeat.",
        "SPEC",
        "--write",
    ),
]
Download = Annotated[bool, option("Fetch missing data sets.", "--download")]

_PLAIN_FIRST_S, _PLAIN_EVERY_S = 10.0, 60.0
#: Largest number of characters that a printed message has.
_SAID = 20_000
#: Groups of test rows with separate metrics: rows that all parties have, and rows that some party
#: lacks.
_APART = ("complete", "missing")
_PER_PARTY = ("bytes_up", "bytes_down")
#: Metrics that an epoch's progress line shows; the run folder has all metrics.
_PER_EPOCH = ("loss", "accuracy", "hit_rate", "rmse")


def say(text: str) -> None:
    """Print a progress message: one line, or a few lines if vfl quotes another program's text."""
    progress_line.end()
    shown = "\n".join(printable(line) for line in text[:_SAID].split("\n"))
    print(logged(shown), file=sys.stderr, flush=True)


class ProgressLine:
    """One line on standard error: overwritten on a terminal, else printed again at intervals."""

    def __init__(self) -> None:
        self._shown, self._due = False, -math.inf

    def show(self, report: ProgressReport) -> None:
        """Show the progress of an operation; when it has ended, remove the line."""
        if report.is_over:
            self.end()
            self._due = -math.inf
        else:
            self.tell(partial(progress_text, report))

    def tell(self, words: Callable[[], str]) -> None:
        """Show a text: on a terminal at once, elsewhere if the last text was shown long ago."""
        if sys.stderr.isatty() and not logs_json():
            text = words()[: shutil.get_terminal_size().columns - 1]
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            self._shown = True
        elif (now := time.monotonic()) >= self._due:
            # In a training of a few seconds, the lines of epochs are enough; so the first call
            # prints nothing.
            if self._due > -math.inf:
                say(words())
            self._due = now + (_PLAIN_EVERY_S if self._due > -math.inf else _PLAIN_FIRST_S)

    def end(self) -> None:
        """Remove the progress line before other output is printed."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = False


#: The progress line of this command; other output on a terminal removes it first.
progress_line = ProgressLine()


def progress_text(report: ProgressReport) -> str:
    """Return the progress of an operation as text.

    >>> from vfl.session.progress import ProgressReport
    >>> progress_text(ProgressReport("train", (), 2, 20, 300, 2000, 250.0, 16e3, 6.8))
    'train, epoch 2 of 20: 15 %, 250 steps/s, 16 000 rows/s, about 7 s left'
    >>> progress_text(ProgressReport("align", done=12_300_000, per_second=1.2e6))
    'align: 12.30 MB, 1.20 MB/s'
    >>> progress_text(ProgressReport("train", ("bank", "shop")))
    'train: waiting for bank, shop'
    """
    if report.waits_for:
        return f"{report.mode}: waiting for {', '.join(report.waits_for)}"
    of_epoch = f", epoch {report.epoch} of {report.epochs}" if report.epoch else ""
    if report.share is None:
        facts = [size(report.done), f"{size(round(report.per_second))}/s"] if report.done else []
    else:
        facts = [f"{report.share:.0%}".replace("%", " %")]
        if report.per_second:
            facts += [
                f"{_rate(report.per_second)} steps/s",
                f"{_rate(report.rows_per_second)} rows/s",
            ]
        if report.left_s is not None:
            facts.append(f"about {duration(report.left_s)} left")
    return f"{report.mode}{of_epoch}: {', '.join(facts) or 'at work'}"


def duration(seconds: float) -> str:
    """Format a duration roughly; a similar function for pages prints more digits.

    >>> duration(7.4), duration(130), duration(7500)
    ('7 s', '2 min 10 s', '2 h 5 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _rate(value: float) -> str:
    return f"{round(value):,}".replace(",", " ") if value >= 10 else f"{value:.2g}"


def say_epoch(record: Mapping[str, Any]) -> None:
    """Print one line about an epoch."""
    figures = [
        f"{name.replace('_', ' ')} {figure(value)}"
        for name, value in record.items()
        if name.partition("_")[2] in _PER_EPOCH
    ]
    sent = size(record["bytes_up"] + record["bytes_down"])
    say(f"epoch {record['epoch']:>3}  {'  '.join(figures)}  {sent}  {record['seconds']:.1f} s")


def print_line(name: str, text: object, width: int = 16) -> None:
    """Print a name and its text.

    >>> print_line("rows", 569)
    rows             569

    Args:
        name: the name.
        text: value that is printed after the name.
        width: smallest number of characters before the text, without the blank that precedes it.
    """
    print(f"{name:<{width}} {text}")


def emit(content: Any) -> None:
    """Print one JSON value on standard output."""
    print(jsons.dumps(content, indent=2))


def machine(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Prepare a run's summary for programs: add totals to the bytes of each party."""
    totals = {key: sum(summary[key].values()) for key in _PER_PARTY}
    parties = {
        name: {"up": summary["bytes_up"][name], "down": summary["bytes_down"][name]}
        for name in summary["bytes_up"]
    }
    return {**summary, **totals, "bytes_by_party": parties}


def show(summary: Mapping[str, Any]) -> None:
    """Print a run's summary for people."""
    _show_quality(summary)
    if "best_epoch" in summary:
        print_line("epochs", f"{summary['epochs']}, the best was epoch {summary['best_epoch']}")
    _show_bytes(summary)
    if summary.get("secure", "none") != "none":
        print_line("secure", f"{summary['secure']}: {summary['trust']}")
    for stated in summary.get("privacy", ()):
        print_line("privacy", stated["text"])
    if summary.get("steps_per_second"):
        print_line("steps a second", summary["steps_per_second"])
    print_line("run", summary["run"])
    for warning in summary.get("warnings", ()):
        print_line("look at", warning)


def _show_quality(summary: Mapping[str, Any]) -> None:
    complete, missing = (summary.get(f"test_{rows}_rows") for rows in _APART)
    for name, value in summary.items():
        if not name.startswith(("test_", "new_")) or name.split("_")[1] in _APART:
            continue
        text = figure(value)
        if complete is not None:
            of = [summary.get(name.replace("test_", f"test_{rows}_")) for rows in _APART]
            told = ["-" if one is None else figure(one) for one in of]
            missed = f"{missing} with a missing cut {told[1]}"
            text += f"   {complete} rows with every cut {told[0]}, {missed}"
        print_line(name.replace("_", " "), text)
    if rows := summary.get("rows"):
        print_line(
            "rows",
            f"{rows['test']} test rows of the training, {rows['new']} new ones; "
            f"{rows['left_out']} rows of this training or validation are left out",
        )
    for party, own in summary.get("tasks", {}).items():
        for name, value in own.items():
            if name.startswith("test_"):
                print_line(f"{party} {name}".replace("_", " "), figure(value))


def _show_bytes(summary: Mapping[str, Any]) -> None:
    for party, sent in summary["bytes_up"].items():
        print_line(party, f"{size(sent)} up, {size(summary['bytes_down'][party])} down")
    for name, own in summary.get("tasks", {}).items():
        for party, sent in own["bytes_up"].items():
            whose = f"{party} to {name}"
            print_line(whose, f"{size(sent)} up, {size(own['bytes_down'][party])} down")
    if summary.get("wire_ratio"):
        codec = summary["codec"]
        print_line("bytes", f"{summary['wire_ratio']:.2%} of dense float32 (codec {codec})")


def show_training(folder: Path, json: bool) -> None:
    """Build the page of a training, and print its summary with the path of the page."""
    from vfl.config.run_folder import RunFolder
    from vfl.experiments.loaded_run import LoadedRun
    from vfl.experiments.pages import build_report
    from vfl.experiments.pages.run_page import gain_of
    from vfl.experiments.pages.thresholds import threshold_lines

    page = build_report(folder)
    summary = RunFolder(folder).summary()
    if json:
        alone = RunFolder(folder).label_alone()
        emit(machine(summary) | {"report": str(page)} | ({"label_alone": alone} if alone else {}))
    else:
        show(summary)
        if gain := gain_of(LoadedRun(folder)):
            print_line("gain of joining", gain)
        for name, told in threshold_lines(LoadedRun(folder)):
            print_line(name, told)
        print_line("report", page)


def write_elsewhere(folder: Path, specs: list[str] | None) -> None:
    """Export a run to the formats of other tools, and print the written paths."""
    from vfl.config.run_folder import RunFolder
    from vfl.training.writers import write_run

    for spec in specs or ():
        say(f"{spec.partition(':')[0]}: wrote {write_run(RunFolder.open(folder), spec)}")


def figure(value: float) -> str:
    """Format a loss or metric; a regression's values have units, and thus any order of magnitude.

    >>> figure(0.97210), figure(2.5e-7), figure(4_623_665.9)
    ('0.9721', '2.5e-07', '4.624e+06')
    """
    plain = value == 0 or 1e-3 <= abs(value) < 1e5
    return f"{value:.4f}" if plain else f"{value:.4g}"
