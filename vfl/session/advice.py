"""How to train over a slow link: a larger batch first, or several cuts in flight.

A lock-step exchange takes one round trip, the compute of both sides and the bytes both ways. With m
cuts in flight it takes an m-th of that, until compute or bytes are busy all the time. Measured on
MNIST halves at 40 ms: batches of 256 to 1024 with Adam's rate scaled by the square root are as good
as five in flight and free of staleness, the two do not multiply, and beyond five in flight Adam
and momentum pay in accuracy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

#: From this round trip on the delay is worth a change.
SLOW_ROUND_TRIP_S = 0.010
MOST_IN_FLIGHT = 5
#: With batches of this size or more, no more than this in flight.
LARGE_BATCH_SIZE = 256
MOST_WITH_LARGE_BATCH = 2
_BATCHES = (1024, 512, 256)
#: So many exchanges an epoch at least; a small table does not gain from a large batch.
_LEAST_STEPS = 50


@dataclass(frozen=True, slots=True)
class LinkCost:
    """What one exchange costs on a link.

    Attributes:
        round_trip_s: there and back.
        step_s: compute of an exchange, both sides one after the other.
        row_bytes: of one row in one direction, all feature parties together.
        bytes_per_second: of the label party's link in one direction; None is no limit.
    """

    round_trip_s: float
    step_s: float
    row_bytes: float
    bytes_per_second: float | None = None

    def bytes_s(self, batch_size: int) -> float:
        """How long the cuts of a batch take on the wire, one way."""
        return batch_size * self.row_bytes / (self.bytes_per_second or math.inf)

    def period_s(self, batch_size: int, in_flight: int) -> float:
        """How long an exchange takes on average.

        >>> cost = LinkCost(0.040, 0.00099, row_bytes=256, bytes_per_second=10e6)
        >>> [round(1 / cost.period_s(64, m)) for m in (1, 5, 9, 17)]
        [23, 113, 203, 384]
        """
        cycle_s = self.round_trip_s + self.step_s + 2 * self.bytes_s(batch_size)
        return max(cycle_s / in_flight, self.step_s, self.bytes_s(batch_size))

    def useful_in_flight(self, batch_size: int) -> int:
        """The least depth that keeps compute or wire busy; the accuracy allows 5, or 2."""
        busy_s = max(self.step_s, self.bytes_s(batch_size))
        large = batch_size >= LARGE_BATCH_SIZE
        most = MOST_WITH_LARGE_BATCH if large else MOST_IN_FLIGHT
        return min(most, math.ceil(self.period_s(batch_size, 1) / busy_s))


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to train.

    Attributes:
        batch_size, in_flight: settings of `train`.
        rate_factor: what Adam's learning rate is multiplied with.
        speedup: how much faster rows are trained on than now.
    """

    batch_size: int
    in_flight: int
    rate_factor: float
    speedup: float


def advise(cost: LinkCost, batch_size: int, in_flight: int, train_rows: int) -> list[Choice]:
    """Ways to train over a link that are faster than now, the one to try first in front.

    Args:
        cost: of the link.
        batch_size: rows of one exchange now.
        in_flight: cuts in flight now.
        train_rows: of the table; small ones get no larger batch.
    """
    if cost.round_trip_s <= SLOW_ROUND_TRIP_S:
        return []
    batches = [rows for rows in _BATCHES if batch_size < rows <= train_rows // _LEAST_STEPS]
    fitting = [rows for rows in batches if cost.bytes_s(rows) <= cost.round_trip_s]
    settings = [(rows, cost.useful_in_flight(rows)) for rows in fitting[:1]]
    settings.append((batch_size, cost.useful_in_flight(batch_size)))
    now = batch_size / cost.period_s(batch_size, in_flight)
    choices = [
        Choice(rows, depth, math.sqrt(rows / batch_size), rows / cost.period_s(rows, depth) / now)
        for rows, depth in settings
    ]
    return [choice for choice in choices if choice.speedup > 1]


def warnings(batch_size: int, in_flight: int) -> list[str]:
    """What to be careful about in settings as they are."""
    if in_flight > MOST_IN_FLIGHT:
        return [f"train.in_flight above {MOST_IN_FLIGHT} costs accuracy; check the learning rate"]
    if batch_size >= LARGE_BATCH_SIZE and in_flight > MOST_WITH_LARGE_BATCH:
        return [
            f"batches of {LARGE_BATCH_SIZE} rows and more with train.in_flight above "
            f"{MOST_WITH_LARGE_BATCH} cost accuracy; use one or the other"
        ]
    return []


def of_shared_layers(round_trip_s: float, step_s: float, waits: int = 2) -> dict[str, Any]:
    """Facts about an exchange of shared first layers, which cannot overlap.

    Args:
        round_trip_s: there and back.
        step_s: compute of an exchange.
        waits: round trips of an exchange; 1 where a third party deals.

    >>> of_shared_layers(0.040, 0.001)["exchanges_per_second"]
    12.3
    """
    trips = "one round trip" if waits == 1 else "two round trips"
    return {
        "round_trip_ms": round(1000 * round_trip_s, 1),
        "exchanges_per_second": round(1 / (waits * round_trip_s + step_s), 1),
        "advice": [f"a larger batch; an exchange of shared first layers waits for {trips}"],
    }
