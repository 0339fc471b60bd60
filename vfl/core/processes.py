"""Child processes: how this process starts them, reads their output, restarts and ends them.

A `Process` object ends only its own process, by its process id. A `Service` writes a log; a
`Worker` answers each input line with an output line. A child process receives secrets by standard
input or in a file that only its owner can read. Command-line arguments never contain secrets,
because every user of the machine can read them.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Any, Self

from vfl.core.errors import LostPeerError
from vfl.core.storage import PRIVATE_FILE, private_folder
from vfl.core.text import printable, printable_lines

#: Values for the standard streams of a `Process`: no stream, or a pipe between the child process
#: and this process.
DEVNULL, PIPE = subprocess.DEVNULL, subprocess.PIPE
#: File mode mask with which only the owner may read a service's log, database and other files.
_UMASK = 0o077
#: Seconds during which vfl repeats a failed start of a SuperNode: Flower treats a killed SuperNode
#: as online for a minute, and refuses the node's key during this minute.
PATIENCE_S = 300.0
_END_S = 10.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 15.0


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def looks(patience_s: float, every_s: float = 0.1) -> Iterator[None]:
    """Yield at once, and then at intervals until the time is up.

    The caller checks its condition at each yield.

    >>> len(list(looks(0.0)))
    1
    """
    deadline = monotonic() + patience_s
    while True:
        yield
        if monotonic() >= deadline:
            return
        sleep(every_s)


class Process:
    """A child process; a `with` block stops it at the block's end, or kills it after an error.

    Args:
        name: name of the process in messages.
        command: program and its arguments.
        environment: all environment variables of the process.
        options: further options of `subprocess.Popen` for the start of the process.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], **options: Any
    ) -> None:
        self.name = name
        self._process: subprocess.Popen[str] = subprocess.Popen(
            command, env=dict(environment), encoding="utf-8", errors="replace", **options
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code; a negative code is the signal that killed the process; None while it runs."""
        return self._process.poll()

    @property
    def alive(self) -> bool:
        """Return whether the process still runs."""
        return self.exit_code is None

    def wait(self) -> int:
        """Block until the process ends; returns its exit code."""
        return self._process.wait()

    def ends_within(self, patience_s: float) -> bool:
        """Wait for the end of the process; returns whether it ended in time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        return not self.alive

    def send(self, line: str) -> None:
        """Write a line to the process's input pipe.

        If the process has ended, only the next `receive` reports this.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def close_input(self) -> None:
        """Close the process's input, if it is a pipe."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def receive(self) -> str:
        """Wait for the process's next output line and return it without its line break.

        Raises:
            LostPeerError: the process has ended, or has closed its output pipe.
        """
        assert self._process.stdout is not None
        line: str = self._process.stdout.readline()
        if line:
            return line.removesuffix("\n")
        ended = self.ends_within(_END_S)
        raise LostPeerError(
            f"the process of {self.name} ended early",
            got=f"exit status {self.exit_code}"
            if ended
            else "no further line appeared, although the process is still running",
            fix="read the messages that this process wrote to its standard error",
        )

    def ask_to_end(self) -> None:
        """Send SIGTERM, which ends a program that has no handler for it; return immediately."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the process immediately."""
        self._process.kill()
        self._process.wait()

    def stop(self, patience_s: float = _END_S) -> None:
        """Close the process's input, send SIGTERM, and kill the process if it does not end.

        The child processes of the stopped process notice that their input is closed, and end too.
        """
        self.close_input()
        if self._process.stdin is not None:
            self.ends_within(patience_s)
        if self.alive:
            self.ask_to_end()
            if not self.ends_within(patience_s):
                self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.kill()
        self.stop()


class Worker(Process):
    """A process that answers each input line with an output line; it ends when its input is closed.

    However the starting process ends, the operating system then closes the worker's input, so the
    worker ends too.

    Args:
        name: name of the process in messages.
        command: program and its arguments.
        environment: all environment variables of the process.
        options: further options of `subprocess.Popen` for the start of the process.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], **options: Any
    ) -> None:
        pipes = {"stdin": PIPE, "stdout": PIPE}
        super().__init__(name, command, environment, **{**pipes, **options})


class Service(Process):
    """A long-running process that writes a log.

    Args:
        name: name of the process in messages.
        command: program and its arguments.
        environment: all environment variables of the process.
        log: file that receives the output of the process.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self.log = log
        private_folder(log.parent)
        log.touch()
        log.chmod(PRIVATE_FILE)
        with log.open("ab") as output:
            # Position in the log file where the output of this start begins
            self._log_start = output.tell()
            super().__init__(
                name, command, environment, stdout=output, stderr=subprocess.STDOUT, umask=_UMASK
            )

    def wait_for(
        self, marker: str, timeout_s: float = 120.0, *, refusals: Sequence[str] = ()
    ) -> None:
        """Wait until the log contains a marker text, which shows that the service is ready.

        If the wait ends with an error, also by Ctrl+C, the method stops the service.

        Args:
            marker: the text.
            timeout_s: longest time to wait, in seconds.
            refusals: error texts after which waiting is useless, even if the program keeps trying.

        Raises:
            LostPeerError: the process ended, or the marker text did not appear in time.
        """
        try:
            for _ in looks(timeout_s):
                said = self.said()
                if marker in said:
                    return
                if not self.alive or any(one in said for one in refusals):
                    break
            state = "still starting" if self.alive else f"exit {self.exit_code}"
            where, got, fix = _reason(said)
            raise LostPeerError(
                f"{self.name} did not start",
                where=where,
                got=f"{state}{got}",
                fix=fix or f"look at {self.log}",
            )
        except BaseException:
            self.stop()
            raise

    def said(self) -> str:
        """Return the output of the process since its last start."""
        return self.log.read_bytes()[self._log_start :].decode(errors="replace")


def _reason(said: str) -> tuple[str | None, str, str]:
    r"""Return the place, the cause and the fix that the last vfl error in a log states.

    If the log has no such error, return the last line of the log as the place.

    >>> _reason("error[V001]: no port\n  where h:1\n  got   busy\n  try   0\n  more  vfl explain")
    ('h:1', ': no port: busy', '0')
    """
    _, found, told = printable_lines(said).rpartition("error[V")
    if not found:
        return last_words(said) or None, "", ""
    first, *lines = told.splitlines()
    facts = {line[2:7].strip(): line[8:] for line in lines if line.startswith("  ")}
    what = first.partition("]: ")[2]
    why = f": {what}" + (f": {facts['got']}" if "got" in facts else "")
    return facts.get("where"), why, facts.get("try", "")


def end_with(process: int) -> None:
    """End this process, as SIGTERM would, when another process has ended.

    Args:
        process: id of the other process, which need not be the parent.
    """
    threading.Thread(target=partial(_follow, process), name="vfl-starter", daemon=True).start()


def _follow(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        if sys.platform == "linux":  # os.kill finds an ended process until its parent waits for it
            ended = select.poll()
            ended.register(os.pidfd_open(process), select.POLLIN)
            ended.poll()
        else:
            for _ in looks(math.inf):
                os.kill(process, 0)
    os.kill(os.getpid(), signal.SIGTERM)


def return_memory() -> None:
    """Return freed memory to the operating system, if the C library has a function for this."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def last_words(text: str) -> str:
    """Return the last line of a program's output, without box-drawing characters around it."""
    lines = (line.strip(" │╭╮╰╯─") for line in text.splitlines())
    return printable(next((line for line in reversed(list(lines)) if line), ""))


def supervise(
    start: Callable[[], Service],
    follow: Callable[[Service], None],
    say: Callable[[str], None],
    patience_s: float = PATIENCE_S,
) -> None:
    """Run a service until it ends, then start it again; only an error ends this function.

    Args:
        start: starts the service and returns it.
        follow: function that returns after the service has ended by itself; KeyboardInterrupt
            passes through.
        say: function that receives one text line with the reason of each restart and the pause
            before it. Each pause is twice as long as the pause before, from 1 s up to 15 s.
        patience_s: longest time in seconds during which the service may repeatedly fail to start.

    Raises:
        LostPeerError: the service has failed to start for longer than `patience_s`.
        VFLError: another attempt cannot succeed, for example because a certificate is not trusted.
    """
    deadline, pause_s = monotonic() + patience_s, _FIRST_PAUSE_S
    while True:
        try:
            service = start()
        except LostPeerError as problem:
            if monotonic() + pause_s > deadline:
                raise
            why = f"{problem.what} ({problem.got})"
        else:
            try:
                follow(service)
            finally:
                service.stop()
            why = f"{service.name} ended (exit {service.wait()})"
            deadline, pause_s = monotonic() + patience_s, _FIRST_PAUSE_S
        say(f"{why}; starting it again in {pause_s:g} s")
        sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
