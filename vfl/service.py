"""A process of Flower that runs beside ours: its environment, its log, and its end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from vfl.errors import LostPeerError
from vfl.storage import PRIVATE_FILE, private_folder
from vfl.text import printable

_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    # Ray, the engine of a Flower simulation: no usage reports, nothing beyond the loopback.
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # One thread a process: two parties and a label party share a small machine, and weights are
    # equal bit for bit only where sums are added in the same order.
    "OMP_NUM_THREADS": "1",
}
#: Each would open one more port of Flower's, without a guard before it.
_DOORS = {"FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API"}
#: A service's log, database and other files are for its owner alone.
_UMASK = 0o077


def flower_environment(home: Path, **extra: str) -> dict[str, str]:
    """The environment of every Flower process.

    Args:
        home: where Flower keeps its own files.
        extra: more variables.
    """
    # Flower starts its helpers by bare name, so our interpreter's scripts come first.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    inherited = {name: value for name, value in os.environ.items() if name not in _DOORS}
    return {**inherited, **_QUIET, "FLWR_HOME": str(home), "PATH": path, **extra}


class Service:
    """A long-running process with a log; ended by its own process id.

    Args:
        name: what messages call it.
        command: program and arguments.
        environment: all its variables.
        log: file for what it prints.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.log = log
        private_folder(log.parent)
        log.touch()
        log.chmod(PRIVATE_FILE)
        with log.open("ab") as output:
            self._log_start = output.tell()  # the log of an earlier start says nothing of this one
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdout=output,
                stderr=subprocess.STDOUT,
                umask=_UMASK,
            )

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def wait_for(self, marker: str, timeout_s: float = 60.0) -> None:
        """Block until the log shows a text.

        Raises:
            LostPeerError: the process ended, or the text did not come in time.
        """
        deadline = time.monotonic() + timeout_s
        while marker not in self.said():
            if not self.alive or time.monotonic() > deadline:
                state = "still starting" if self.alive else f"exit {self._process.returncode}"
                raise LostPeerError(
                    f"{self.name} did not start",
                    where=last_words(self.said()) or None,
                    got=state,
                    fix=f"look at {self.log}",
                )
            time.sleep(0.1)

    def said(self) -> str:
        """What it has printed since this start."""
        return self.log.read_bytes()[self._log_start :].decode(errors="replace")

    def wait(self) -> int:
        """Block until it ends; its exit code."""
        return self._process.wait()

    def stop(self, patience_s: float = 10.0) -> None:
        """Ask it to end; insist after a while. Its children watch it and follow."""
        if not self.alive:
            return
        self._process.terminate()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def last_words(text: str) -> str:
    """The last line of a program's output, without the frame around it."""
    lines = (line.strip(" │╭╮╰╯─") for line in text.splitlines())
    return printable(next((line for line in reversed(list(lines)) if line), ""))
