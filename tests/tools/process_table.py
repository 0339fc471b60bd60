"""The processes of one deployment, found by a mark in their environment."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

#: Set for the commands a test starts; everything that those start inherits it.
MARK = "VFL_TEST_DEPLOYMENT"
#: What Flower keeps its files in; it tells whose process it is.
HOME = "FLWR_HOME"


@dataclass(frozen=True)
class Process:
    """One running process: its id, name and command line, and the folder Flower keeps files in."""

    pid: int
    command: str
    home: Path


def running(mark):
    """Every process with this mark that has not ended."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            status = entry.joinpath("stat").read_text().rpartition(")")[2].split()[0]
            command = entry.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            name = entry.joinpath("comm").read_text().strip()  # a fork of a worker has its own
            pairs = entry.joinpath("environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has just ended, or is not ours
        variables = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        if status != "Z" and variables.get(MARK) == str(mark):
            found.append(
                Process(int(entry.name), f"{name} {command}", Path(variables.get(HOME, "")))
            )
    return found


def find(mark, program, owner):
    """Process id of a program that runs in the folder of one owner; None without any."""
    below = Path(mark) / owner
    pids = [
        process.pid
        for process in running(mark)
        if program in process.command and process.home.is_relative_to(below)
    ]
    return max(pids, default=None)


def kill(mark, program, owner, number=signal.SIGKILL):
    """Send a signal to such a process, which must be there; its id."""
    pid = find(mark, program, owner)
    assert pid is not None, f"no {program} of {owner} is running"
    os.kill(pid, number)
    return pid


def wait_until_gone(mark, timeout_s=60.0):
    """Processes that are still there after a while; none is what a test wants."""
    deadline = time.monotonic() + timeout_s
    while (left := running(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left
