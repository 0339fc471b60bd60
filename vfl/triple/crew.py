"""Three processes on this machine, one a party, started and ended together."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from types import TracebackType

from vfl.errors import LostPeerError, PeerFailedError, VFLError
from vfl.mpc.rules import NAMES
from vfl.triple.links import LISTENS
from vfl.triple.messages import Door, Doors, Job, Told

_START_S = 120.0
_END_S = 10.0
#: Parties that others connect to.
_DOORS = sum(bool(callers) for callers in LISTENS.values())
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


class Crew:
    """A context manager; the processes end with it, whatever they are doing.

    Args:
        jobs: of P0, P1 and P2.

    Attributes:
        processes: by role, for tests that kill one.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._lines: queue.SimpleQueue[tuple[int, Told | None]] = queue.SimpleQueue()
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", "vfl.triple.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | _ENVIRONMENT,
            )
            for _ in jobs
        ]
        for role in range(len(jobs)):
            threading.Thread(target=self._read, args=(role,), daemon=True).start()

    def run(self, tell: Callable[[dict[str, float]], None]) -> list[Told]:
        """Let them do their jobs; the last word of each.

        Args:
            tell: told the figures of every epoch.

        Raises:
            PeerFailedError: one of them stopped; the first that did so for a reason of its own.
            LostPeerError: one was killed.
        """
        for role, job in enumerate(self._jobs):
            self._say(role, job.model_dump_json())
        doors: dict[int, Door] = {}
        last: dict[int, Told | None] = {}
        while len(last) < len(self._jobs):
            role, told = self._next(last, started=len(doors) == _DOORS)
            if told is not None and told.doors is not None:
                doors[role] = told.doors
                if len(doors) == _DOORS:
                    self._send_doors(doors)
            elif told is not None and told.figures is not None:
                tell(told.figures)
            else:
                last[role] = told
                # Who has no doors yet would wait for them for ever.
                if (told is None or told.error is not None) and len(doors) < _DOORS:
                    break
        return self._check(last)

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.processes:
            if error is not None:
                process.kill()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def _next(self, last: Collection[int], started: bool) -> tuple[int, Told | None]:
        """The next line of anybody.

        While all work, each waits for the others only so long, so whoever hangs is told of. Before
        that and after it, when nobody may be waiting for the one that hangs, time is counted here.
        """
        patience = None if started else _START_S
        if last:
            patience = max(job.timeout_s for job in self._jobs) + _END_S
        try:
            return self._lines.get(timeout=patience)
        except queue.Empty:
            raise LostPeerError("a party's process neither goes on nor ends") from None

    def _check(self, last: dict[int, Told | None]) -> list[Told]:
        errors = [
            (role, told.error if told else None)
            for role, told in last.items()
            if told is None or told.error
        ]
        told_why = [each for each in errors if each[1] is not None]
        for role, error in sorted(told_why, key=lambda each: _rank(each[1])):
            raise _failure(role, error or {}) from None
        for role, _ in errors:
            raise LostPeerError(
                f"the process of {NAMES[role]} ended early",
                got=f"exit status {self.processes[role].wait()}",
                fix="its own words are on standard error",
            )
        return [told for _, told in sorted(last.items()) if told is not None]

    def _send_doors(self, doors: dict[int, Door]) -> None:
        for role in range(len(self._jobs)):
            own = {at: door for at, door in doors.items() if role in LISTENS[at]}
            self._say(role, Doors(doors=own).model_dump_json())

    def _say(self, role: int, line: str) -> None:
        stdin = self.processes[role].stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_read` finds out that it is gone
            stdin.write(line + "\n")
            stdin.flush()

    def _read(self, role: int) -> None:
        stdout = self.processes[role].stdout
        assert stdout is not None
        final = False
        with contextlib.suppress(ValueError):  # closed while it was read
            for line in stdout:
                told = Told.model_validate_json(line)
                final = told.outcome is not None or told.error is not None
                self._lines.put((role, told))
        if not final:
            self._lines.put((role, None))


def _rank(error: dict[str, str | None] | None) -> int:
    """Causes before what they led to at the other parties."""
    code = (error or {}).get("code")
    return {PeerFailedError.code: 1, LostPeerError.code: 2}.get(str(code), 0)


def _failure(role: int, error: dict[str, str | None]) -> VFLError:
    texts = {key: error.get(key) for key in ("where", "got", "want", "fix")}
    what = f"{NAMES[role]} stopped with {error.get('code')}: {error.get('what')}"
    return PeerFailedError(what, **texts)
