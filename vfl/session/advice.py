"""Advice for training over a slow network link: larger batches, or more cuts in flight.

The duration of an exchange that waits for the previous one is a round trip, plus both parties'
compute time, plus the transfer times. With m cuts in flight (sent before the earlier gradients
arrive), an exchange takes 1/m of that time on average. The average cannot be shorter than the
compute time or the transfer time in one direction.

Measured on MNIST, divided into halves of each image, with a delay of 40 ms: batches of 256 to 1024
rows train as fast as five cuts in flight, and their gradients are not stale. Adam's learning rate
was multiplied by the square root of the growth of the batch. If a larger batch is combined with
several cuts in flight, the speedup is smaller than the product of both speedups. With more than
five cuts in flight, training with Adam or momentum loses accuracy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

#: vfl gives advice if the link's round-trip time is at least this long, in seconds.
SLOW_ROUND_TRIP_S = 0.010
MOST_IN_FLIGHT = 5
#: For batches of at least this many rows, at most `MOST_WITH_LARGE_BATCH` cuts in flight are
#: advised.
LARGE_BATCH_SIZE = 256
MOST_WITH_LARGE_BATCH = 2
_BATCHES = (1024, 512, 256)
#: A larger batch is advised only if an epoch then still has at least this many steps.
_LEAST_STEPS = 50


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Cost of one exchange on a network link, as times and bytes.

    Attributes:
        round_trip_s: round-trip time of the link in seconds.
        step_s: compute time of one exchange in seconds, summed over the two parties.
        row_bytes: bytes of one row's cuts in one direction, summed over the feature parties.
        bytes_per_second: bandwidth of the label party's link in one direction; None without a
            limit.
    """

    round_trip_s: float
    step_s: float
    row_bytes: float
    bytes_per_second: float | None = None

    def bytes_s(self, batch_size: int) -> float:
        """Return the seconds for the transfer of a batch's cuts in one direction."""
        return batch_size * self.row_bytes / (self.bytes_per_second or math.inf)

    def period_s(self, batch_size: int, in_flight: int) -> float:
        """Return the average time between two exchanges, in seconds.

        >>> cost = LinkCost(0.040, 0.00099, row_bytes=256, bytes_per_second=10e6)
        >>> [round(1 / cost.period_s(64, m)) for m in (1, 5, 9, 17)]
        [23, 113, 203, 384]
        """
        cycle_s = self.round_trip_s + self.step_s + 2 * self.bytes_s(batch_size)
        return max(cycle_s / in_flight, self.step_s, self.bytes_s(batch_size))

    def useful_in_flight(self, batch_size: int) -> int:
        """Return the fewest cuts in flight that keep the processors or the link busy.

        Because more cuts in flight would cost accuracy, the result is at most 5, and at most 2 with
        a large batch.
        """
        busy_s = max(self.step_s, self.bytes_s(batch_size))
        large = batch_size >= LARGE_BATCH_SIZE
        most = MOST_WITH_LARGE_BATCH if large else MOST_IN_FLIGHT
        return min(most, math.ceil(self.period_s(batch_size, 1) / busy_s))


@dataclass(frozen=True, slots=True)
class Choice:
    """Advised values of batch size, cuts in flight and learning rate.

    Attributes:
        batch_size, in_flight: advised values of the settings `train.batch_size` and
            `train.in_flight`.
        rate_factor: factor by which to multiply Adam's learning rate.
        speedup: training rows per second with the advised settings, divided by those with the
            present settings.
    """

    batch_size: int
    in_flight: int
    rate_factor: float
    speedup: float


def advise(cost: LinkCost, batch_size: int, in_flight: int, train_rows: int) -> list[Choice]:
    """Return settings that train faster over a link; the first ones should be tried first.

    Args:
        cost: cost of an exchange on the link.
        batch_size: present batch size.
        in_flight: present number of cuts in flight.
        train_rows: number of training rows of the table; for a small table, no larger batch is
            advised.
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
    """Return warnings about those present settings that reduce accuracy."""
    if in_flight > MOST_IN_FLIGHT:
        return [f"train.in_flight above {MOST_IN_FLIGHT} reduces accuracy; check the learning rate"]
    if batch_size >= LARGE_BATCH_SIZE and in_flight > MOST_WITH_LARGE_BATCH:
        return [
            f"batches of {LARGE_BATCH_SIZE} rows or more together with train.in_flight above "
            f"{MOST_WITH_LARGE_BATCH} reduce accuracy; use only one of the two"
        ]
    return []


def of_shared_layers(round_trip_s: float, step_s: float, waits: int = 2) -> dict[str, Any]:
    """Describe an exchange with secret-shared first layers, which cannot overlap with the next one.

    Args:
        round_trip_s: round-trip time of the link.
        step_s: compute time of an exchange in seconds.
        waits: number of round trips in an exchange; 1 if a third party deals the shares.

    >>> of_shared_layers(0.040, 0.001)["exchanges_per_second"]
    12.3
    """
    trips = "one round trip" if waits == 1 else "two round trips"
    return {
        "round_trip_ms": round(1000 * round_trip_s, 1),
        "exchanges_per_second": round(1 / (waits * round_trip_s + step_s), 1),
        "advice": [
            f"use a larger batch; an exchange with secret-shared first layers waits for {trips}"
        ],
    }
