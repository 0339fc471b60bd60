"""The processes of a benchmark: one for the label party, one for each feature party.

They are started once, with one thread each, and measure every path in turn.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from types import TracebackType
from typing import TypeVar

from vfl.bench.messages import Door, Job, Measurement, Role
from vfl.bench.workloads import FEATURE_PARTIES, Path
from vfl.config.toml import Settings
from vfl.errors import PeerFailedError

_END_S = 5.0
#: One thread each. The C library (glibc) keeps freed memory: whether it hands large tensors back
#: to the system and faults them in again hangs on chance, and costs up to a tenth of a step.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
}
_Message = TypeVar("_Message", bound=Settings)


class Crew:
    """A context manager; the processes end with it, whatever they are doing."""

    def __init__(self) -> None:
        self._label = Process()
        self._features = {party: Process() for party in FEATURE_PARTIES}

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in [self._label, *self._features.values()]:
            process.end(at_once=error is not None)

    def measure(
        self,
        path: Path,
        workload: str,
        seed: int,
        warmup_steps: int,
        steps: int,
        secure: str = "none",
    ) -> Measurement:
        """Train once along a path; CPU time of all processes, wall time of the label party.

        Raises:
            PeerFailedError: a process ended early; its standard error says why.
        """
        role: Role = path if path in ("monolith", "inprocess") else "host"
        job = Job(
            role=role,
            workload=workload,
            seed=seed,
            warmup_steps=warmup_steps,
            steps=steps,
            secure=secure,
        )
        if role == "host":
            return self._over_stream(job, tls=path == "tls")
        self._label.tell(job)
        return self._label.hear(Measurement)

    def _over_stream(self, job: Job, *, tls: bool) -> Measurement:
        tokens = {party: secrets.token_urlsafe(32) for party in self._features}
        job = job.model_copy(
            update={"session": secrets.token_hex(16), "tokens": tokens, "tls": tls}
        )
        self._label.tell(job)
        door = self._label.hear(Door)
        for party, process in self._features.items():
            own = {"role": "join", "tokens": {party: tokens[party]}, "door": door}
            process.tell(job.model_copy(update=own))
        label = self._label.hear(Measurement)
        others = [process.hear(Measurement).cpu_ms for process in self._features.values()]
        return label.model_copy(update={"cpu_ms": label.cpu_ms + sum(others)})


class Process:
    """One process and the two pipes to it.

    Args:
        module: what it runs.
    """

    def __init__(self, module: str = "vfl.bench.worker") -> None:
        # -P: a benchmark must not import what happens to lie in the working folder.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | _ENVIRONMENT,
        )

    def tell(self, message: Settings) -> None:
        """Hand it one message."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `hear` finds out that it is gone
            self._process.stdin.write(message.model_dump_json() + "\n")
            self._process.stdin.flush()

    def hear(self, kind: type[_Message]) -> _Message:
        """Wait for its next message.

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
        return kind.model_validate_json(line)

    def end(self, *, at_once: bool) -> None:
        """Let it end by itself, or at once."""
        if at_once:
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=_END_S)
        self._process.kill()
        self._process.communicate()  # closes the pipes too, when the first did not get that far
