"""A slow link on this machine: a TCP proxy that adds delay and has a bandwidth.

What a direction carries goes one after the other at its bandwidth, all connections together, and
arrives the delay later; the two directions do not disturb each other. A connection is opened
without delay, for that is between the kernels. There is no loss and no jitter, and the ramp-up of
TCP is that of the loopback. Nothing here needs root rights, unlike the kernel's own emulation.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from types import TracebackType

_PIECE_BYTES = 16 * 1024
#: How much of a direction's time may be waiting at its entrance; more stays with the sender.
_ENTRANCE_S = 0.05
_HOST = "127.0.0.1"


class _Direction:
    """One way of the link, shared by all connections; says when bytes arrive.

    Args:
        delay_s: between the last bit's departure and its arrival.
        bytes_per_second: None is no limit.
    """

    def __init__(self, delay_s: float, bytes_per_second: float | None) -> None:
        self._delay_s = delay_s
        self._seconds_a_byte = 1 / bytes_per_second if bytes_per_second else 0.0
        self._free_at = 0.0
        self._lock = threading.Lock()

    def arrival(self, size: int) -> float:
        """When bytes that are handed over now arrive, on the clock of `time.monotonic`."""
        with self._lock:
            started = max(time.monotonic(), self._free_at)
            self._free_at = started + size * self._seconds_a_byte
            return self._free_at + self._delay_s

    def wait_for_room(self) -> None:
        """Block while too much waits at the entrance."""
        _sleep_until(self._free_at - _ENTRANCE_S)


class SlowLink:
    """A proxy in front of a port of this machine; a context manager.

    Args:
        target_port: where connections are passed on to.
        delay_ms: one way; a round trip takes twice as long.
        mbps: millions of bits a second in each direction; None is no limit.

    Attributes:
        port: where it listens.
        connections: how many were passed on so far.
    """

    def __init__(self, target_port: int, delay_ms: float, mbps: float | None = None) -> None:
        bytes_per_second = mbps * 1e6 / 8 if mbps else None
        self._up, self._down = (_Direction(delay_ms / 1000, bytes_per_second) for _ in range(2))
        self._target = (_HOST, target_port)
        self._ends: list[socket.socket] = []
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server((_HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self._door = threading.Thread(target=self._accept, name="slow-link", daemon=True)
        self._door.start()

    def __enter__(self) -> SlowLink:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def cut(self) -> None:
        """Break every connection there is; what was on its way is lost."""
        with self._lock:
            broken, self._ends = self._ends, []
        for end in broken:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Break everything and stop listening."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._door.join()
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._ends += [near, far]
                self.connections += 1
            thread = threading.Thread(target=self._carry, args=(near, far), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        """One connection, until both its directions have ended."""
        ways = ((near, far, self._up), (far, near, self._down))
        pumps = [threading.Thread(target=_pump, args=way, daemon=True) for way in ways]
        for pump in pumps:
            pump.start()
        for pump in pumps:
            pump.join()
        with self._lock:
            self._ends = [end for end in self._ends if end not in (near, far)]
        near.close()
        far.close()


def _pump(source: socket.socket, sink: socket.socket, direction: _Direction) -> None:
    """Read one end; a second thread writes to the other when the time has come."""
    waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
    writer = threading.Thread(target=_deliver, args=(waiting, sink), daemon=True)
    writer.start()
    data = b"-"
    while data:
        direction.wait_for_room()
        try:
            data = source.recv(_PIECE_BYTES)
        except OSError:
            data = b""
        waiting.put((direction.arrival(len(data)), data))
    writer.join()


def _deliver(waiting: queue.SimpleQueue[tuple[float, bytes]], sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            arrival, data = waiting.get()
            _sleep_until(arrival)
            if not data:
                break
            sink.sendall(data)
    # The end has been read, or nobody takes anything any more.
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def _sleep_until(moment: float) -> None:
    left_s = moment - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)
