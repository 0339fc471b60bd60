"""One party's process: a job on its standard input, what happened on its standard output.

Started as ``python -m vfl.triple.worker``.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from vfl.config.toml import Settings
from vfl.errors import VFLError
from vfl.mpc import make_party
from vfl.run import load_data
from vfl.storage import load_weights, pack_weights, write_bytes
from vfl.threads import use_one_thread
from vfl.triple.links import Links
from vfl.triple.messages import Doors, Job, Told
from vfl.triple.plan import Part
from vfl.triple.program import Outcome, follow


def work(job: Job) -> Outcome:
    """Do one job; every other party is told if it fails.

    Raises:
        VFLError: what went wrong, here or at another party.
    """
    data = load_data(job.experiment)
    empty = Part(None, None, None, None)
    part = Part.of(data[job.party], job.plan, job.role) if job.party in data else empty
    shares = load_weights(Path(job.shares)) if job.shares else {}
    links = Links(job)
    try:
        door = links.listen()
        if door is not None:
            tell(Told(doors=door))
        doors = Doors.model_validate_json(sys.stdin.readline()).doors
        party = make_party(job.role, links.connect(doors), job.plan.rules)
        party.agree(job.plan.model_dump(mode="json"), job.session)
        outcome = follow(party, job.plan, part, shares, lambda found: tell(Told(figures=found)))
        if job.keep:
            write_bytes(Path(job.keep), pack_weights(outcome.shares), mode=0o600)
        return outcome
    except VFLError as error:
        told = error
        links.each(lambda link: link.fail(told))
        raise
    finally:
        links.close()


def tell(message: Settings) -> None:
    """One line to whoever started this process."""
    print(message.model_dump_json(exclude_none=True), flush=True)


def main() -> int:
    """Do one job; the exit code is that of its error."""
    use_one_thread()
    try:
        outcome = work(Job.model_validate_json(sys.stdin.readline()))
    except VFLError as error:
        tell(Told(error=error.record()))
        return error.exit_code
    outcome.shares = {}
    tell(Told(outcome=asdict(outcome)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
