"""What the processes of a private network are told and tell: one line of JSON each."""

from __future__ import annotations

from typing import Any

from vfl.config import Experiment
from vfl.config.toml import Settings
from vfl.triple.door import Invitation
from vfl.triple.plan import Terms


class Job(Settings):
    """One party's part.

    Attributes:
        role: 0, 1 or 2.
        experiment: where its own rows come from.
        terms: of a new training; None to ask the network in `kept`.
        timeout_s: how long it waits for another party.
        join_s: how long it waits for the others to come, and whoever starts all three for each to
            load its table and open its door.
        kept: folder of its part of a trained network; "" for none.
        keep: folder that its part is written to; "" for none.
        rows: its table of new rows, which the network in `kept` is asked to predict; "" for none.
    """

    role: int
    experiment: Experiment
    terms: Terms | None
    timeout_s: float
    join_s: float
    kept: str = ""
    keep: str = ""
    rows: str = ""


class Invitations(Settings):
    """How a party gets in at others, by the role that listens."""

    by: dict[int, Invitation]


class Told(Settings):
    """A line a party's process writes.

    Attributes:
        invitations: it listens; how each caller gets in, by role.
        figures: of one epoch, its number among them.
        outcome: it is done.
        error: it stopped; the record of a `VFLError`.
    """

    invitations: dict[int, Invitation] | None = None
    figures: dict[str, float] | None = None
    outcome: dict[str, Any] | None = None
    error: dict[str, str | None] | None = None
