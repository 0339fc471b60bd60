"""Time to start a session in a running federation, and the cost of idle parties.

The SuperLink, the SuperNodes and their workers run on this machine, as `vfl up` starts them.
Training, evaluation and prediction are separate commands, timed from their start. The first time
ends when every party has connected to the stream, just before the first exchange; the second time
ends when the command ends. The result also has the memory and CPU time of each idle process of a
party.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks import harness
from vfl.config import read_party_file
from vfl.core.errors import LostPeerError, UserError
from vfl.core.processes import Process, Service, last_words
from vfl.federation import deployment, workers
from vfl.federation.project import LabelFolder
from vfl.training import demo

TURNS, IDLE_S = 5, 20.0
_SIDES = ("left", "right")
_LOOK_S = 0.01
_PATIENCE_S = 120.0
#: Seconds after which the processes of the last session have ended.
_REST_S = 3.0
_STAND_BY = "vfl: a worker is ready"


@dataclass(frozen=True, slots=True)
class StartRow:
    """Result of one measurement; values that were not measured are None.

    Attributes:
        what: name of a command, or of a process of a party.
        joined_s, end_s: median seconds until every party had connected, and until the command
            ended.
        resident_mb, own_mb: memory of an idle process in units of 10^6 bytes, and the part that it
            does not share.
        cpu_percent: CPU time that the idle services use, in percent of one core.
    """

    what: str
    joined_s: float | None = None
    end_s: float | None = None
    resident_mb: float | None = None
    own_mb: float | None = None
    cpu_percent: float | None = None


def bench_start(turns: int = TURNS, idle_s: float = IDLE_S, quick: bool = False) -> list[StartRow]:
    """Measure how long sessions take to start in a running federation, and what idle parties cost.

    Args:
        turns: number of turns of each command.
        idle_s: duration of the idle phase in seconds.
        quick: whether to only check that the benchmark runs.

    Raises:
        UserError: the operating system does not list its processes.
        LostPeerError: a process did not start, or a command failed.
    """
    if quick:
        turns, idle_s = 1, 1.0
    if not sys.platform.startswith("linux"):
        raise UserError("processes can be measured only under Linux", got=sys.platform)
    with tempfile.TemporaryDirectory() as name, ExitStack() as services:
        folder = Path(name) / "project"
        label = demo.write_demo(folder, ["train.epochs=1"])
        harness.say("starting the parties")
        standing = list(_start(folder, label, services))
        rows = []
        times: dict[str, list[tuple[float, float]]] = {}
        for turn in range(turns):
            harness.say(f"turn {turn + 1} of {turns}")
            run = folder
            for mode in ("train", "evaluate", "predict"):
                times.setdefault(mode, []).append(_command(label, mode, run))
                run = max((label.path / "store" / "runs").iterdir(), key=_changed)
        for mode, each in times.items():
            joined, ends = zip(*each, strict=True)
            rows.append(StartRow(f"vfl {mode}", median(joined), median(ends)))
        harness.say(f"waiting for {idle_s:g} s")
        return rows + _idle({service.name: service.pid for service in standing}, idle_s)


def _start(folder: Path, label: LabelFolder, services: ExitStack) -> Iterator[Service]:
    superlink = deployment.start_superlink(label)
    services.callback(superlink.stop)
    deployment.register_nodes(label)
    started = [superlink]
    for side in _SIDES:
        file = folder / side / "party.toml"
        started.append(deployment.start_supernode(read_party_file(file), file))
        services.callback(started[-1].stop)
    for service in started:
        service.wait_for(_STAND_BY, _PATIENCE_S)
        yield service


def _changed(path: Path) -> float:
    return path.stat().st_mtime


def _command(label: LabelFolder, mode: str, path: Path) -> tuple[float, float]:
    """Return the seconds until all parties had connected, and until the command ended."""
    notes = {file: file.read_text() for file in label.path.rglob("notes.txt")}
    command = [sys.executable, "-m", "vfl", mode, str(path)]
    began, joined = time.monotonic(), 0.0
    with tempfile.TemporaryFile("w+") as output:
        process = Process(f"vfl {mode}", command, os.environ, stdout=output, stderr=output)
        while process.alive:
            if not joined:
                new = (
                    file.read_text().removeprefix(notes.get(file, ""))
                    for file in label.path.rglob("notes.txt")
                )
                here = max((text.count(" is here:") for text in new), default=0)
                joined = time.monotonic() - began if here == len(_SIDES) else 0.0
            time.sleep(_LOOK_S)
        ended = time.monotonic() - began
        output.seek(0)
        if process.wait() or not joined:
            raise LostPeerError(f"vfl {mode} failed", got=last_words(output.read()))
    return joined, ended


def _idle(services: dict[str, int], seconds: float) -> list[StartRow]:
    """Return memory and CPU use of idle services, and of the processes that they started.

    A process that has ended gets no row.
    """
    time.sleep(_REST_S)
    processes = {pid: name for name, top in services.items() for pid in harness.family(top)}
    before = {pid: harness.cpu_s(pid) for pid in processes}
    time.sleep(seconds)
    rows = []
    for pid, name in processes.items():
        with suppress(ProcessLookupError):
            row = StartRow(
                f"{name}{'' if pid == services[name] else ': ' + _called(pid)}",
                cpu_percent=100 * (harness.cpu_s(pid) - before[pid]) / seconds,
                resident_mb=_memory_mb(pid, "Rss"),
                own_mb=_memory_mb(pid, "Private_Clean") + _memory_mb(pid, "Private_Dirty"),
            )
            rows.append(row)
    return rows


def _called(pid: int) -> str:
    return "its worker" if harness.called(pid) == workers.NAME else "its SuperExec"


def _memory_mb(pid: int, field: str) -> float:
    return harness.resident_bytes(field, pid, "smaps_rollup") / 1e6


TABLE = harness.table(
    ("", "<36", "what"),
    ("joined s", ">8.2f", "joined_s"),
    ("end s", ">8.2f", "end_s"),
    ("MB", ">8.0f", "resident_mb"),
    ("own MB", ">8.0f", "own_mb"),
    ("CPU %", ">8.1f", "cpu_percent"),
)


main = harness.command(bench_start, TABLE)


if __name__ == "__main__":
    main()
