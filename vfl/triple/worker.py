"""One party's process: a job on its standard input, what happened on its standard output.

Started as ``python -m vfl.triple.worker``; ``vfl mpc party`` does the same work.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from vfl.core.errors import VFLError, file_mistake, redacted_output, redacted_traceback
from vfl.core.seeds import use_one_thread
from vfl.mpc import make_party
from vfl.mpc.trio import broke_off
from vfl.triple.door import LISTENS, Door, Invitation
from vfl.triple.kept import Kept, keep, keep_answers, kept_at
from vfl.triple.links import Links
from vfl.triple.messages import Invitations, Job, Told
from vfl.triple.own_rows import own_rows
from vfl.triple.program import Outcome, play

_HOST = "127.0.0.1"


def work(
    job: Job,
    links: Links,
    reach: Callable[[], Mapping[int, Invitation]],
    tell: Callable[[dict[str, float]], None],
) -> Outcome:
    """Do one job; every other party is told if it fails.

    Args:
        job: what to do.
        links: not connected yet; closed afterwards.
        reach: opens this party's door, if it has one, and tells how to get in at others.
        tell: told every epoch and the figures there are, at the owner of the labels.

    Raises:
        VFLError: what went wrong, here or at another party.
    """
    if job.terms is not None:
        kept = Kept(job.terms, {})
    else:
        kept = kept_at(Path(job.kept), job.role, "predict" if job.rows else "infer")
    data = own_rows(job.experiment, kept, job.role, job.rows)
    try:
        party = make_party(job.role, links.connect(reach()), kept.terms.rules)
        plan, outcome = play(party, kept.terms, data, kept.shares, tell)
        if job.keep:
            keep(Path(job.keep), job.role, plan, outcome.shares, data)
        keep_answers(Path(job.kept), data, outcome)
        return outcome
    except Exception as error:
        links.fail(error if isinstance(error, VFLError) else broke_off(error, job.role))
        raise
    finally:
        links.close()


def _reach(job: Job, links: Links, tell: Callable[[Told], None]) -> Mapping[int, Invitation]:
    """Over the loopback, with secrets made now; whoever started this process passes them on."""
    if LISTENS[job.role]:
        door = Door.fresh(job.role, _HOST)
        port = links.listen(door, _HOST, door.port)
        tell(Told(invitations=door.invitations(port)))
    return Invitations.model_validate_json(sys.stdin.readline()).by


def main() -> int:
    """Do one job; the exit code is that of its error."""
    # What a library prints must not get between the lines.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(told: Told) -> None:
        """One line to whoever started this process."""
        print(told.model_dump_json(exclude_none=True), file=answers, flush=True)

    def failed(error: VFLError) -> int:
        """The last line, and the exit code."""
        tell(Told(error=error.record()))
        return error.exit_code

    use_one_thread()
    try:
        job = Job.model_validate_json(sys.stdin.readline())
        links = Links(job.role, job.timeout_s, job.join_s)
        outcome = work(
            job, links, lambda: _reach(job, links, tell), lambda found: tell(Told(figures=found))
        )
    except VFLError as error:
        return failed(error)
    except Exception as bug:
        if mistake := file_mistake(bug):
            return failed(mistake)
        print(redacted_traceback(bug), file=sys.stderr)
        return failed(VFLError(f"this is a bug of vfl: {type(bug).__name__}"))
    outcome.shares, outcome.outputs = {}, None
    tell(Told(outcome=asdict(outcome)))
    return 0


if __name__ == "__main__":
    with redacted_output():
        sys.exit(main())
