"""What the processes of ``vfl bench mpc`` are told and tell: one line of JSON each.

Our parties and the adapters of other systems speak it alike; an adapter knows it from
`vfl/bench/peers/talk.py`, for it imports nothing of vfl.
"""

from __future__ import annotations

from pydantic import Field

from vfl.config.toml import Settings


class Place(Settings):
    """Who a process is.

    Attributes:
        rank: 0, 1 or 2.
        parties: how many there are.
        system: such as "spu-semi2k".
        host: address it listens at.
        device: name of the network device that has this address.
        session: name of the session.
        token: what our parties show at the door.
    """

    rank: int
    parties: int
    system: str
    host: str
    device: str
    session: str = ""
    token: str = Field(default="", repr=False)


class Port(Settings):
    """Where a process listens, or will; 0 if nobody calls it."""

    port: int


class Doors(Settings):
    """Host and port of every party, by rank, as this one finds them."""

    doors: tuple[tuple[str, int], ...]


class Task(Settings):
    """One run.

    Attributes:
        system: such as "fast"; our parties play either mode.
        workload: its name.
        session: of this run, for fresh keys.
        rows, widths, training, function: see `vfl.mpc.workloads.Workload`.
        rate: what the gradient, summed over the rows, is multiplied with in a training step.
        fresh: inputs were not opened before.
        arrays: npz file with inputs, weights, targets and what is wanted; "" for our own parties,
            who draw them from the same seed.
    """

    system: str
    workload: str
    session: str
    rows: int
    widths: tuple[int, ...]
    training: bool
    function: str
    rate: float
    fresh: bool = False
    arrays: str = ""


class Ready(Settings):
    """All is prepared: keys, shares, compiled code."""


class Go(Settings):
    """Begin, all at one moment.

    Attributes:
        at: on the machine's clock, in seconds.
    """

    at: float


class Turn(Settings):
    """What one process did between "go" and its end.

    Attributes:
        began, ended: on the machine's clock, in seconds.
        cpu_ms: user and system time of all its threads between the two.
        offline_ms: work ahead of the clock that each turn needs anew; 0 if there is none.
        bytes_setup, bytes_offline, bytes_online: sent by this party; None if it cannot tell.
        max_error: against float64 in clear, at the party that has the result.
    """

    began: float
    ended: float
    cpu_ms: float
    offline_ms: float = 0.0
    bytes_setup: int | None = None
    bytes_offline: int | None = None
    bytes_online: int | None = None
    max_error: float | None = None
