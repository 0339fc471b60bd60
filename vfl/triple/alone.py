"""One of the three parties alone, as an organisation starts it on a machine of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vfl.config import Experiment
from vfl.core.errors import BadOptionError, UserError, nearest
from vfl.mpc.rules import NAMES
from vfl.triple.card import add_card, card_of, write_card
from vfl.triple.door import CALLS, LISTENS, Door, Invitation, read_door, read_invitation
from vfl.triple.links import Links
from vfl.triple.messages import Job
from vfl.triple.plan import Terms, seats
from vfl.triple.run import Tell, new_folder, require_waits
from vfl.triple.worker import work


@dataclass(frozen=True, slots=True)
class Ways:
    """How one party and the others come together.

    Attributes:
        role: of the party.
        door: where it listens; None if nobody calls it.
        at: address it listens on; None for the door's own.
        invitations: how it gets in at others, by their role.
        timeout_s: how long it waits for another.
        join_s: how long it waits for the others to come.
    """

    role: int
    door: Door | None
    at: tuple[str, int] | None
    invitations: Mapping[int, Invitation]
    timeout_s: float
    join_s: float

    @classmethod
    def read(
        cls,
        role: int,
        door: Path | None,
        at: tuple[str, int] | None,
        invitations: Sequence[Path],
        timeout_s: float,
        join_s: float,
    ) -> Ways:
        """From the files of `vfl mpc invite`.

        Raises:
            UserError: a file that is missing, or another party's.
            BadOptionError: a wait that is none, or longer than a week.
        """
        require_waits(timeout_s, join_s)
        found = [read_invitation(path) for path in invitations]
        for path, each in zip(invitations, found, strict=True):
            if each.caller != role:
                raise _not_ours(role, path, f"an invitation for {NAMES[each.caller]}")
        by = {each.listener: each for each in found}
        missing = [NAMES[listener] for listener in CALLS[role] if listener not in by]
        if missing:
            raise UserError(
                f"{NAMES[role]} has no way to {' and '.join(missing)}",
                where="--invitation",
                want=", ".join(f"{name}-for-{NAMES[role]}.json" for name in missing),
                fix=f"{missing[0]} makes one by vfl mpc invite, and gives it to you",
            )
        opened = None
        if LISTENS[role]:
            if door is None:
                raise UserError(
                    f"{NAMES[role]} is called by others and has no door",
                    where="--door",
                    fix=f"vfl mpc invite FOLDER --as {NAMES[role]} --address HOST:PORT",
                )
            opened = read_door(door)
            if opened.role != role:
                raise _not_ours(role, door, f"a door of {NAMES[opened.role]}")
        return cls(role, opened, at, by, timeout_s, join_s)

    def reach(self, links: Links) -> Mapping[int, Invitation]:
        """Open the door, if there is one; how to get in at others."""
        if self.door is not None:
            host, port = self.at or (self.door.host, self.door.port)
            links.listen(self.door, host, port)
        return self.invitations


def role_of(experiment: Experiment, name: str) -> int:
    """Which of the three a party is, by role or by its name in the experiment.

    Raises:
        ConfigError: not exactly two parties have columns.
        BadOptionError: nobody is called so.
    """
    known = seats(experiment)
    for names in (NAMES, known):
        if name in names:
            return names.index(name)
    raise BadOptionError(
        "no party of this network is called so",
        where="--as",
        got=name,
        want=", ".join((*NAMES, *known)),
        fix=nearest(name, (*NAMES, *known)),
    )


def train_alone(
    experiment: Experiment, terms: Terms, folder: Path, ways: Ways, tell: Tell
) -> dict[str, Any]:
    """Play one party in a new training; its part goes to a new folder. Its card.

    Raises:
        RunFolderError: the folder is there already.
        VFLError: what went wrong, here or at another party.
    """
    with new_folder(folder):
        card = _play(experiment, terms, ways, tell, keep=str(folder))
        write_card(folder, experiment, card)
    return card


def ask_alone(
    experiment: Experiment, folder: Path, ways: Ways, rows: Path | None = None
) -> dict[str, Any]:
    """Play one party in an inference with what `train_alone` kept. Its card.

    Args:
        experiment: that was trained.
        folder: this party's part.
        ways: to the others.
        rows: this party's table of new rows, to predict instead of the test rows.

    Raises:
        RunFolderError: there is nothing of this party's.
        VFLError: what went wrong, here or at another party.
    """
    card = _play(
        experiment, None, ways, lambda figures: None, kept=str(folder), rows=str(rows or "")
    )
    add_card(folder, card)
    return card


def _play(
    experiment: Experiment,
    terms: Terms | None,
    ways: Ways,
    tell: Callable[[dict[str, float]], None],
    **paths: str,
) -> dict[str, Any]:
    job = Job(
        role=ways.role,
        experiment=experiment,
        terms=terms,
        timeout_s=ways.timeout_s,
        join_s=ways.join_s,
        **paths,
    )
    links = Links(ways.role, ways.timeout_s, ways.join_s)
    return card_of([work(job, links, lambda: ways.reach(links), tell)], processes=True)


def _not_ours(role: int, path: Path, got: str) -> UserError:
    return UserError(
        "this file is for another party",
        where=str(path),
        got=got,
        want=f"a file of vfl mpc invite for {NAMES[role]}",
    )
