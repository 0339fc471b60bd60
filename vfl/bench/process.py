"""A process of a benchmark and the two pipes to it: lines there, lines back."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

from vfl.config.toml import Settings
from vfl.core.errors import PeerFailedError

_END_S = 5.0
#: One thread each. The C library (glibc) keeps freed memory: whether it hands large tensors back
#: to the system and faults them in again hangs on chance, and costs up to a tenth of a step.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
}
_Message = TypeVar("_Message", bound=Settings)


class Process:
    """Python in a process of its own; a context manager, which lets it end by itself.

    Args:
        module: what it runs.
        at: what its command line begins with, where it runs in a network of its own.
        script: its text, to run instead of a module.
        command: another program and its arguments, to run instead.

    Attributes:
        pid: of the process.
    """

    def __init__(
        self,
        module: str = "",
        at: Sequence[str] = (),
        script: str = "",
        command: Sequence[str] = (),
    ) -> None:
        what = ["-m", module] if module else ["-c", script]
        # -P: a benchmark must not import what happens to lie in the working folder.
        self._process = subprocess.Popen(
            [*at, *(command or [sys.executable, "-P", *what])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | _ENVIRONMENT,
        )
        self.pid = self._process.pid

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(at_once=error is not None)

    def write(self, raw: bytes) -> None:
        """Hand it some bytes."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `read_line` finds out that it is gone
            self._process.stdin.write(raw)
            self._process.stdin.flush()

    def read_line(self) -> bytes:
        """Wait for its next line.

        Raises:
            PeerFailedError: it ended instead; its standard error says why.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailedError(
                "a process of the benchmark ended early",
                got=f"exit status {self._process.wait()}",
                fix="its own words are on standard error",
            )
        return line

    def tell(self, message: Settings) -> None:
        """Hand it one message."""
        self.write(message.model_dump_json().encode() + b"\n")

    def hear(self, kind: type[_Message]) -> _Message:
        """Wait for its next message.

        Raises:
            PeerFailedError: see `read_line`.
        """
        return kind.model_validate_json(self.read_line())

    def end(self, *, at_once: bool) -> None:
        """Let it end by itself, or at once."""
        if at_once:
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=_END_S)
        self._process.kill()
        self._process.communicate()  # closes the pipes too, when the first did not get that far


def tell(message: Settings) -> None:
    """One line from this process to whoever started it."""
    print(message.model_dump_json(), flush=True)
