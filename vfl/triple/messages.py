"""What the processes of a private network are told and tell: one line of JSON each."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from vfl.config import Experiment
from vfl.config.toml import Settings
from vfl.triple.plan import Plan


class Door(Settings):
    """Where a party listens for another; its certificate's CA."""

    host: str = "127.0.0.1"
    port: int
    ca_pem: str


class Job(Settings):
    """One party's part.

    Attributes:
        role: 0, 1 or 2.
        party: its name in the experiment.
        plan: public.
        experiment: where its own rows come from; on one machine every process could read all.
        session: name of the session, fresh for every start.
        tokens: of each pair, "01", "02" or "12", that this party is in.
        timeout_s: how long it waits for another party.
        shares: file with its share of a trained network; "" for none.
        keep: file its share of the network is written to; "" for none.
    """

    role: int
    party: str
    plan: Plan
    experiment: Experiment
    session: str
    tokens: dict[str, str] = Field(repr=False)
    timeout_s: float
    shares: str = ""
    keep: str = ""


class Doors(Settings):
    """Where a party's links lead, by the role that listens."""

    doors: dict[int, Door]


class Told(Settings):
    """A line a party's process writes.

    Attributes:
        doors: it listens.
        figures: of one epoch.
        outcome: it is done.
        error: it stopped; the record of a `VFLError`.
    """

    doors: Door | None = None
    figures: dict[str, float] | None = None
    outcome: dict[str, Any] | None = None
    error: dict[str, str | None] | None = None
