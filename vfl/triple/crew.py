"""Three processes on this machine, one a party, started and ended together."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType

from pydantic import ValidationError

from vfl.core import errors
from vfl.core.errors import DisagreementError, LostPeerError, PeerFailedError, UserError, VFLError
from vfl.mpc.rules import NAMES
from vfl.triple.door import LISTENS, Invitation
from vfl.triple.messages import Invitations, Job, Told

_END_S = 10.0
#: Parties that others connect to.
_DOORS = sum(bool(callers) for callers in LISTENS.values())
#: Errors about the files and arguments of whoever runs all three, by code; what the three disagree
#: about is among these.
_OWN = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, UserError | DisagreementError)
}
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


class Crew:
    """A context manager; the processes end with it, whatever they are doing.

    Args:
        jobs: of P0, P1 and P2, each to begin within its `join_s`.

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
                encoding="utf-8",
                errors="replace",
                env=os.environ | _ENVIRONMENT,
            )
            for _ in jobs
        ]
        for role in range(len(jobs)):
            threading.Thread(target=self._read, args=(role,), daemon=True).start()

    def run(self, tell: Callable[[dict[str, float]], None]) -> list[Told]:
        """Let them do their jobs; the last word of each.

        Args:
            tell: told every epoch and the figures there are.

        Raises:
            UserError: one of them stopped for a reason that lies in files or arguments.
            DisagreementError: their parts are of two trainings.
            PeerFailedError: one of them stopped for another reason of its own.
            LostPeerError: one was killed, or does not go on.
        """
        for role, job in enumerate(self._jobs):
            self._say(role, job.model_dump_json())
        doors: dict[int, dict[int, Invitation]] = {}
        last: dict[int, Told | None] = {}
        while len(last) < len(self._jobs) and not _cause(last):
            role, told = self._next(last, started=len(doors) == _DOORS)
            if told is not None and told.invitations is not None:
                doors[role] = told.invitations
                if len(doors) == _DOORS:
                    self._pass_on(doors)
            elif told is not None and told.figures is not None:
                tell(told.figures)
            else:
                last[role] = told
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
        patience = None if started else max(job.join_s for job in self._jobs)
        if last:
            patience = max(job.timeout_s for job in self._jobs) + _END_S
        try:
            return self._lines.get(timeout=patience)
        except queue.Empty:
            silent = " and ".join(
                NAMES[role] for role in range(len(self._jobs)) if role not in last
            )
            raise LostPeerError(f"the process of {silent} neither goes on nor ends") from None

    def _check(self, last: dict[int, Told | None]) -> list[Told]:
        """The last words, if all are good ones; else the cause of what went wrong."""
        for role, told in sorted(last.items(), key=lambda each: _rank(each[1])):
            if told is None:
                raise LostPeerError(
                    f"the process of {NAMES[role]} ended early",
                    got=self._end_of(role),
                    fix="its own words are on standard error",
                )
            if told.error is not None:
                raise _failure(role, told.error)
        return [told for _, told in sorted(last.items()) if told is not None]

    def _end_of(self, role: int) -> str:
        try:
            return f"exit status {self.processes[role].wait(_END_S)}"
        except subprocess.TimeoutExpired:  # it closed its output, and goes on
            return "no word more, while it still runs"

    def _pass_on(self, doors: Mapping[int, Mapping[int, Invitation]]) -> None:
        for role in range(len(self._jobs)):
            by = {at: callers[role] for at, callers in doors.items() if role in callers}
            self._say(role, Invitations(by=by).model_dump_json())

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
                try:
                    told = Told.model_validate_json(line)
                except ValidationError:  # printed by something else, which got past `main`
                    continue
                final = told.outcome is not None or told.error is not None
                self._lines.put((role, told))
        if not final:
            self._lines.put((role, None))


def _rank(told: Told | None) -> int:
    """Causes before what they led to at the other parties: the last is a party that is done."""
    if told is None:
        return 1
    if told.error is None:
        return 4
    return {PeerFailedError.code: 2, LostPeerError.code: 3}.get(str(told.error["code"]), 0)


def _cause(last: Mapping[int, Told | None]) -> bool:
    """Whether one party's last word explains whatever the others will say."""
    return any(_rank(told) < 2 for told in last.values())


def _failure(role: int, error: Mapping[str, str | None]) -> VFLError:
    texts = {key: error.get(key) for key in ("where", "got", "want", "fix")}
    what, kind = str(error.get("what")), _OWN.get(str(error.get("code")))
    if kind is not None:
        return kind(what, **texts)
    return PeerFailedError(f"{NAMES[role]} stopped with {error.get('code')}: {what}", **texts)
