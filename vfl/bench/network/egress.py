"""When bytes arrive: the one formula that proxy, router and model share."""

from __future__ import annotations

import threading

from vfl.bench.network.wan import Wan


class Egress:
    """One party's way out: what it sends goes one after the other, to whomever it is sent.

    Args:
        wan: bandwidth and delay.

    Attributes:
        sent_bytes: so far.
    """

    def __init__(self, wan: Wan) -> None:
        self._seconds_a_byte, self._delay_s = wan.seconds_a_byte, wan.one_way_s
        self._free_at = 0.0
        self._lock = threading.Lock()
        self.sent_bytes = 0

    def arrival(self, now: float, size: int) -> float:
        """When bytes that are handed over now arrive, on the clock of `now`, in seconds.

        >>> line = Egress(Wan(mbps=8, round_trip_ms=100))
        >>> line.arrival(now=10.0, size=1_000_000), line.arrival(now=10.5, size=1_000_000)
        (11.05, 12.05)
        """
        with self._lock:
            self.sent_bytes += size
            self._free_at = max(now, self._free_at) + size * self._seconds_a_byte
            return self._free_at + self._delay_s
