"""The proxy keeps its promises: delay, bandwidth, order, losses and cuts."""

import contextlib
import socket
import threading
import time

import pytest

from benchmarks.emulation import TcpProxy, Wan

MBIT = 1e6 / 8


class Peer:
    """A server that answers each byte with itself, or swallows and times what it gets."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.accepted = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.accepted.append(connection)

    def take(self):
        """The end of the next connection."""
        deadline = time.monotonic() + 60
        while not self.accepted and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.accepted.pop(0)

    def close(self):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self.accepted:
            connection.close()


@pytest.fixture
def connect():
    """Pairs of ends with a proxy between them."""
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(contextlib.closing(Peer()))
        links = {}

        def make(delay_ms=0.0, mbps=None):
            key = (delay_ms, mbps)
            if key not in links:
                links[key] = stack.enter_context(
                    TcpProxy(("127.0.0.1", peer.port), Wan(mbps, 2 * delay_ms))
                )
            near = stack.enter_context(socket.create_connection(("127.0.0.1", links[key].port)))
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            far = stack.enter_context(peer.take())
            near.settimeout(60)
            far.settimeout(60)
            return near, far, links[key]

        yield make


def least(transfer):
    """Seconds of a transfer: no machine may make them fewer, and a busy one makes them more."""
    begun = time.perf_counter()
    transfer()
    return time.perf_counter() - begun


def send_all(end, size):
    thread = threading.Thread(target=end.sendall, args=(bytes(size),), daemon=True)
    thread.start()
    return thread


def receive(end, size):
    left = size
    while left:
        left -= len(end.recv(min(left, 65536)))


def is_over(end):
    """Whether the other side ended or broke the connection, and said nothing before."""
    with contextlib.suppress(ConnectionError):
        return end.recv(1) == b""
    return True


@pytest.mark.parametrize("delay_ms", [0, 20])
def test_a_round_trip_takes_twice_the_delay(connect, delay_ms):
    near, far, _ = connect(delay_ms)
    trips = []
    for _ in range(3):
        begun = time.perf_counter()
        near.sendall(b"x")
        far.sendall(far.recv(1))
        near.recv(1)
        trips.append(1000 * (time.perf_counter() - begun))
    assert 2 * delay_ms <= min(trips)


@pytest.mark.parametrize("way", ["up", "down"])
def test_bytes_take_their_time(connect, way):
    near, far, _ = connect(delay_ms=10, mbps=40)
    source, sink = (near, far) if way == "up" else (far, near)
    size = int(0.3 * 40 * MBIT)

    def transfer():
        sending = send_all(source, size)
        receive(sink, size)
        sending.join()

    assert least(transfer) >= 0.99 * 0.31


def test_connections_share_a_direction_and_the_other_is_free(connect):
    first, second = connect(mbps=40), connect(mbps=40)
    size = int(0.2 * 40 * MBIT)
    begun = time.perf_counter()
    sending = [
        send_all(first[0], size),
        send_all(second[0], size),
        send_all(first[1], size),
        send_all(second[1], size),
    ]
    sinks = [
        threading.Thread(target=receive, args=(end, size)) for end in (*first[:2], *second[:2])
    ]
    for each in sinks:
        each.start()
    for each in (*sinks, *sending):
        each.join(60)
    assert time.perf_counter() - begun >= 0.99 * 0.4


def test_a_sender_is_held_back(connect):
    """Nothing is stored without bound: the rest stays in the sender's own hands."""
    near, _, _ = connect(delay_ms=0, mbps=8)
    near.settimeout(0.3)
    with pytest.raises(TimeoutError):
        near.sendall(bytes(2**26))


def test_what_is_sent_arrives_in_order_and_ends(connect):
    near, far, _ = connect(delay_ms=3, mbps=100)
    message = bytes(range(256)) * 1000
    sending = threading.Thread(target=near.sendall, args=(message,), daemon=True)
    sending.start()
    got = bytearray()
    while len(got) < len(message):
        got += far.recv(65536)
    sending.join()
    near.shutdown(socket.SHUT_WR)
    assert bytes(got) == message
    assert far.recv(1) == b""
    far.sendall(b"last words")
    assert near.recv(100) == b"last words"


def test_a_cut_breaks_both_ends_and_the_next_connection_works(connect):
    near, far, link = connect(delay_ms=1)
    near.sendall(b"x")
    assert far.recv(1) == b"x"
    link.cut()
    assert is_over(near)
    assert is_over(far)
    again, other, _ = connect(delay_ms=1)
    again.sendall(b"y")
    assert other.recv(1) == b"y"
    assert link.connections == 2


@pytest.mark.parametrize("way", ["up", "down"])
def test_what_is_swallowed_is_lost_until_the_next_cut(connect, way):
    near, far, link = connect()
    link.swallowed = way
    lost, heard = (near, far) if way == "up" else (far, near)
    lost.sendall(b"lost")
    heard.sendall(b"heard")
    assert lost.recv(10) == b"heard"
    heard.settimeout(0.05)
    with pytest.raises(TimeoutError):
        heard.recv(10)
    link.cut()
    again, other, _ = connect()
    again.sendall(b"x")
    assert other.recv(1) == b"x"


def test_a_shut_proxy_breaks_connections_until_it_is_restored(connect):
    near, far, link = connect()
    near.sendall(b"x")
    assert far.recv(1) == b"x"  # now the proxy has counted it; its target may know it before
    link.shut()
    assert is_over(near)
    with socket.create_connection(("127.0.0.1", link.port)) as refused:
        refused.settimeout(60)
        assert is_over(refused)
    assert link.connections == 1
    link.restore()
    with socket.create_connection(("127.0.0.1", link.port)) as again:
        deadline = time.monotonic() + 60
        while link.connections == 1 and time.monotonic() < deadline:
            time.sleep(0.001)
        again.settimeout(0.05)
        with pytest.raises(TimeoutError):  # it stands, and nobody says anything
            again.recv(1)
    assert link.connections == 2
