"""What is on its way in one direction of a proxied connection."""

from __future__ import annotations

import threading
import time
from collections import deque

from vfl.bench.network.wan import Wan

_BUFFER_BYTES = 64 * 1024
_UNLIMITED_BYTES = 16 * 1024 * 1024


class Travelling:
    """What is on its way in one direction of a connection: no more than a line would hold.

    The rest stays in the sender's own hands, so that its `send` blocks as it does on a real line.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()

    def add(self, arrival: float, data: bytes) -> None:
        """Send a piece on its way, once there is room."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes < self._most_bytes)
            self._pieces.append((arrival, data))
            self._bytes += len(data)
            self._changed.notify_all()

    def take(self) -> bytes:
        """The next piece, when it arrives."""
        with self._changed:
            self._changed.wait_for(lambda: self._pieces)
            arrival, data = self._pieces.popleft()
        time.sleep(max(0.0, arrival - time.monotonic()))
        with self._changed:
            self._bytes -= len(data)
            self._changed.notify_all()
        return data


def most_bytes(wan: Wan) -> int:
    """What a line holds both ways, and a buffer at its entrance."""
    if wan.mbps is None:
        return _UNLIMITED_BYTES
    return _BUFFER_BYTES + int(2 * wan.one_way_s / wan.seconds_a_byte)
