"""One party's process: a job on its standard input, what happened on its standard output.

Started as ``python -m vfl.triple.worker``; ``vfl mpc party`` does the same work.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from vfl.config import Experiment
from vfl.datasets import PartyData
from vfl.errors import ConfigError, VFLError
from vfl.mpc import make_party
from vfl.run import load_party
from vfl.threads import use_one_thread
from vfl.triple.door import LISTENS, Door, Invitation
from vfl.triple.kept import Kept, keep, kept_at
from vfl.triple.links import Links
from vfl.triple.messages import Invitations, Job, Told
from vfl.triple.plan import Terms, seats
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
        tell: told the figures of every epoch, at the owner of the labels.

    Raises:
        VFLError: what went wrong, here or at another party.
    """
    if job.terms is not None:
        terms, shares = Kept(job.terms, {})
    else:
        terms, shares = kept_at(Path(job.kept), job.role)
    data = own_data(job.experiment, terms, job.role)
    try:
        party = make_party(job.role, links.connect(reach()), terms.rules)
        plan, outcome = play(party, terms, data, shares, tell)
        if job.keep:
            keep(Path(job.keep), job.role, plan, outcome.shares)
        return outcome
    except VFLError as error:
        links.fail(error)
        raise
    finally:
        links.close()


def own_data(experiment: Experiment, terms: Terms, role: int) -> PartyData | None:
    """A party's own rows and nobody else's; None for a helper.

    Raises:
        ConfigError: the experiment is not of these parties.
        DataError: see `vfl.datasets`.
    """
    parties = seats(experiment)
    if parties != terms.parties or parties[terms.label_role] != experiment.label.party:
        raise ConfigError(
            "the experiment is of other parties than the training was",
            where="parties",
            got=", ".join(parties),
            want=", ".join(terms.parties),
            fix="give the experiment that was trained",
        )
    helps = role == 2 and terms.label_role != role
    return None if helps else load_party(experiment, parties[role])


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

    use_one_thread()
    try:
        job = Job.model_validate_json(sys.stdin.readline())
        links = Links(job.role, job.timeout_s, job.join_s)
        outcome = work(
            job, links, lambda: _reach(job, links, tell), lambda found: tell(Told(figures=found))
        )
    except VFLError as error:
        tell(Told(error=error.record()))
        return error.exit_code
    outcome.shares = {}
    tell(Told(outcome=asdict(outcome)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
