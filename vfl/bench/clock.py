"""The clock of a measurement: it looks at the time between two steps, on every path alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, pairwise
from statistics import median

from vfl.bench.messages import Measurement
from vfl.session import Exchange


class Clock:
    """Hands out the exchanges of a session and measures what happens in between.

    Args:
        warmup_steps: steps that are not measured.
        steps: steps that are.
        now: what time it is, in seconds.
    """

    def __init__(
        self, warmup_steps: int, steps: int, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._now = now
        self._warmup_steps = warmup_steps
        self._steps = steps
        self._ticks: list[float] = []
        self._cpu_s = 0.0

    def over(self, schedule: Iterable[Exchange]) -> Iterator[Exchange]:
        """The first exchanges of a schedule, as many as are wanted; asking for one ends a step."""
        started = 0.0
        total = self._warmup_steps + self._steps
        for index, exchange in enumerate(islice(schedule, total)):
            if index == self._warmup_steps:
                started = time.process_time()
            self._ticks.append(self._now())
            yield exchange
        self._ticks.append(self._now())
        self._cpu_s = time.process_time() - started

    def measurement(self, final_loss: float | None = None) -> Measurement:
        """What was measured, once the exchanges have run out."""
        timed = self._ticks[self._warmup_steps :]
        return Measurement(
            cpu_ms=1000 * self._cpu_s / self._steps,
            wall_ms=1000 * median(after - before for before, after in pairwise(timed)),
            final_loss=final_loss,
        )
