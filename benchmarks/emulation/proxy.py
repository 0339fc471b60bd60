"""A network of TCP proxies on the loopback interface; it needs no root and only delays bytes."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Literal

from benchmarks.emulation.base import LOOPBACK, Address, Egress, Network, Wan

Way = Literal["up", "down"]
_PIECE_BYTES = 16 * 1024
#: Socket option with which a close resets the connection, so that a sender that waits for buffer
#: space stops.
_RESET = struct.pack("ii", 1, 0)
_BUFFER_BYTES = 64 * 1024
_UNLIMITED_BYTES = 16 * 1024 * 1024


class ProxyNetwork(Network):
    """A proxy for each pair of parties and each port, so that bytes are counted by sender.

    A new connection opens without delay, and TCP's slow start is that of the loopback interface.
    The counted bytes are those of the connections, without packet headers.
    """

    kind = "proxy"

    def __init__(self, parties: Sequence[str], wan: Wan) -> None:
        super().__init__(parties, wan)
        self._egress = {party: Egress(wan) for party in parties}
        self._proxies: dict[tuple[str, str, int], TcpProxy] = {}

    def reach(self, source: str, target: str, port: int) -> Address:
        key = (source, target, port)
        if key not in self._proxies:
            there, back = self._egress[source], self._egress[target]
            self._proxies[key] = TcpProxy(Address(LOOPBACK, port), self.wan, there, back)
        return Address(LOOPBACK, self._proxies[key].port)

    def bytes_sent(self) -> dict[str, int]:
        return {party: egress.sent_bytes for party, egress in self._egress.items()}

    def close(self) -> None:
        while self._proxies:
            self._proxies.popitem()[1].close()


class TcpProxy:
    """Proxy that delays data, limits bandwidth and breaks connections; a context manager.

    In each direction, the data of all connections pass one after the other at the bandwidth, and
    arrive after the delay. The two directions are independent. A connection opens without delay,
    because the operating system opens it. There is no jitter, and TCP's slow start is that of the
    loopback interface.

    Args:
        target: address to which connections are forwarded.
        wan: bandwidth in each direction, and round-trip time.
        up: outgoing network link of the connecting party; by default, a link that only this proxy
            uses.
        down: outgoing network link of the target; by default, a link that only this proxy uses.
        listen: address to listen on; by default, a free port of this machine.

    Attributes:
        port: port on which the proxy listens.
        connections: number of connections that were forwarded so far.
        swallowed: direction in which data are dropped, until the next `cut`.
    """

    def __init__(
        self,
        target: Address | tuple[str, int],
        wan: Wan | None = None,
        up: Egress | None = None,
        down: Egress | None = None,
        *,
        listen: tuple[str, int] = (LOOPBACK, 0),
    ) -> None:
        wan = wan or Wan()
        self._target, self._most_bytes = target, _most_bytes(wan)
        self._egress: dict[Way, Egress] = {"up": up or Egress(wan), "down": down or Egress(wan)}
        self._ends: list[socket.socket] = []
        self._open = True
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(listen)
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self.swallowed: Way | None = None
        self._door = threading.Thread(target=self._accept, name="tcp-proxy", daemon=True)
        self._door.start()

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def sent_bytes(self) -> int:
        """Number of bytes carried in both directions."""
        return sum(egress.sent_bytes for egress in self._egress.values())

    def cut(self) -> None:
        """Break every open connection; data in transit are lost."""
        with self._lock:
            broken, self._ends = self._ends, []
            self.swallowed = None
        for end in broken:
            _break(end)

    def shut(self) -> None:
        """Break every connection; break each new connection at once, until `restore` is called."""
        with self._lock:
            self._open = False
        self.cut()

    def restore(self) -> None:
        """Accept connections again after `shut`."""
        with self._lock:
            self._open = True

    def close(self) -> None:
        """Break all connections and stop listening."""
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
                if self._open:
                    self._ends += [near, far]
                    self.connections += 1
                    thread = threading.Thread(target=self._carry, args=(near, far), daemon=True)
                    self._threads = [each for each in self._threads if each.is_alive()] + [thread]
                    thread.start()
                    continue
            near.close()
            far.close()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        """Serve one connection until both its directions have ended."""
        ways: tuple[tuple[Way, socket.socket, socket.socket], ...]
        ways = (("up", near, far), ("down", far, near))
        pumps = [threading.Thread(target=self._pump, args=way, daemon=True) for way in ways]
        for pump in pumps:
            pump.start()
        for pump in pumps:
            pump.join()
        with self._lock:
            self._ends = [end for end in self._ends if end not in (near, far)]
        near.close()
        far.close()

    def _pump(self, way: Way, source: socket.socket, sink: socket.socket) -> None:
        """Read from one socket; a second thread writes to the other one at computed times."""
        travelling = _Travelling(self._most_bytes)
        writer = threading.Thread(target=_deliver, args=(travelling, source, sink), daemon=True)
        writer.start()
        data = b"-"
        while data:
            try:
                data = source.recv(_PIECE_BYTES)
            except OSError:
                data = b""
            if not data or self.swallowed != way:
                travelling.add(self._egress[way].arrival(time.monotonic(), len(data)), data)
        writer.join()


def _deliver(travelling: _Travelling, source: socket.socket, sink: socket.socket) -> None:
    """Write bytes when they arrive; if the receiving socket closes, close the other one."""
    taken = True
    while data := travelling.take():
        if taken:
            try:
                sink.sendall(data)
            except OSError:
                taken = False
                source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                _break(source)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def _break(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


class _Travelling:
    """Bytes in transit in one direction of a connection, at most as many as the link can hold.

    Further data stay with the sender, so that the sender's `send` blocks, as it does on a real
    network.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()

    def add(self, arrival: float, data: bytes) -> None:
        """Add bytes to the bytes in transit; wait while the link holds its maximum."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes < self._most_bytes)
            self._pieces.append((arrival, data))
            self._bytes += len(data)
            self._changed.notify_all()

    def take(self) -> bytes:
        """Return the next bytes at the time when they arrive."""
        with self._changed:
            self._changed.wait_for(lambda: self._pieces)
            arrival, data = self._pieces.popleft()
        time.sleep(max(0.0, arrival - time.monotonic()))
        with self._changed:
            self._bytes -= len(data)
            self._changed.notify_all()
        return data


def _most_bytes(wan: Wan) -> int:
    """Return how many bytes may be in transit: on a link of this delay and in its buffer."""
    if wan.mbps is None:
        return _UNLIMITED_BYTES
    return _BUFFER_BYTES + int(2 * wan.one_way_s / wan.seconds_a_byte)
