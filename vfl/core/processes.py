"""Child processes: their start, output, end and restart.

A `Process` is ended only by its process id. A `Service` writes a log, a `Worker` answers lines with
lines. A secret is passed by standard input or by a file of its owner, never by arguments, which
every user of the machine can read.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Any, Self

from vfl.core.errors import LostPeerError
from vfl.core.storage import PRIVATE_FILE, private_folder
from vfl.core.text import printable, printable_lines

#: Standard streams for `Process`: none, or a pipe to this process.
DEVNULL, PIPE = subprocess.DEVNULL, subprocess.PIPE
#: Only the owner may read a service's log, database and other files.
_UMASK = 0o077
#: Flower treats a killed SuperNode as online for a minute and refuses its key meanwhile.
PATIENCE_S = 300.0
_END_S = 10.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 15.0


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def looks(patience_s: float, every_s: float = 0.1) -> Iterator[None]:
    """Yield at once, and then at intervals until the time is up; the caller checks each time.

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
    """A child process; as a context manager it ends with the block, immediately after an error.

    Args:
        name: its name in messages.
        command: program and arguments.
        environment: all its environment variables.
        options: further options of its start; see `subprocess.Popen`.
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
        """Exit code; a negative one is the signal that killed it; None while it runs."""
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
        """Write a line to the process's input, a pipe; only `receive` reports that it has ended."""
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
        """Wait for the process's next line, without the line break; its output is a pipe.

        Raises:
            LostPeerError: the process has ended, or has closed its output.
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
            fix="its standard error has its own messages",
        )

    def ask_to_end(self) -> None:
        """Send SIGTERM, which ends a program without a handler; return immediately."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the process immediately."""
        self._process.kill()
        self._process.wait()

    def stop(self, patience_s: float = _END_S) -> None:
        """Close the process's input, send SIGTERM, and after a while kill the process.

        Its children notice this and end too.
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
    """A process that reads lines and answers with lines; it ends when its input is closed.

    Its input closes however the starting process ends.

    Args:
        name: its name in messages.
        command: program and arguments.
        environment: all its environment variables.
        options: further options of its start; see `subprocess.Popen`.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], **options: Any
    ) -> None:
        pipes = {"stdin": PIPE, "stdout": PIPE}
        super().__init__(name, command, environment, **{**pipes, **options})


class Service(Process):
    """A long-running process with a log.

    Args:
        name: its name in messages.
        command: program and arguments.
        environment: all its environment variables.
        log: file for its output.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self.log = log
        private_folder(log.parent)
        log.touch()
        log.chmod(PRIVATE_FILE)
        with log.open("ab") as output:
            self._log_start = output.tell()  # skips the log of earlier starts
            super().__init__(
                name, command, environment, stdout=output, stderr=subprocess.STDOUT, umask=_UMASK
            )

    def wait_for(
        self, marker: str, timeout_s: float = 120.0, *, refusals: Sequence[str] = ()
    ) -> None:
        """Block until the log contains a text.

        Args:
            marker: the text.
            timeout_s: limit of the waiting time.
            refusals: texts after which the marker cannot come, even if the program tries again.

        Raises:
            LostPeerError: the process ended, or the text did not come in time.
        """
        deadline = monotonic() + timeout_s
        while marker not in (said := self.said()):
            hopeless = any(one in said for one in refusals)
            if hopeless or not self.alive or monotonic() > deadline:
                state = "still starting" if self.alive else f"exit {self.exit_code}"
                where, got, fix = _reason(said)
                raise LostPeerError(
                    f"{self.name} did not start",
                    where=where,
                    got=f"{state}{got}",
                    fix=fix or f"look at {self.log}",
                )
            sleep(0.1)

    def said(self) -> str:
        """Output since this start."""
        return self.log.read_bytes()[self._log_start :].decode(errors="replace")


def _reason(said: str) -> tuple[str | None, str, str]:
    r"""Return place, text and cure of the last vfl error in a log, or else the last line.

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


def return_memory() -> None:
    """Return freed memory to the operating system, if the C library can."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def last_words(text: str) -> str:
    """Return the last line of a program's output, without the frame around it."""
    lines = (line.strip(" │╭╮╰╯─") for line in text.splitlines())
    return printable(next((line for line in reversed(list(lines)) if line), ""))


def supervise(
    start: Callable[[], Service],
    follow: Callable[[Service], None],
    say: Callable[[str], None],
    patience_s: float = PATIENCE_S,
) -> None:
    """Start a service and wait for its end; when it ends, start it again. It never returns.

    Args:
        start: starts the service and returns it.
        follow: returns after the service has ended by itself; Ctrl-C passes through.
        say: receives one line with the reason and the time of each restart. Each pause is twice as
            long as the one before, from 1 s up to 15 s.
        patience_s: limit of the time of repeated failures.

    Raises:
        LostPeerError: the service has failed to start for this long.
        VFLError: waiting cannot cure the error, for example an untrusted certificate.
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
