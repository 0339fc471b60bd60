"""A flood at the door: garbage, connections that say nothing, wrong tokens, and an honest party."""

import contextlib
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from vfl.core.frame import Frame, Kind, to_bytes
from vfl.transport import Front, FrontLimits
from vfl.transport.stream import client_context, open_stream

HANDSHAKES = 16
OTHER_ADDRESS = "127.0.0.2"  # every address of 127.0.0.0/8 is this machine on Linux


class Flood:
    """Threads that knock without pause until told to stop; `knocks` counts connections."""

    def __init__(self, port, address, greeting, ca):
        self.knocks = 0
        self._port, self._address, self._greeting = port, address, greeting
        self._context = client_context(ca.ca_pem)
        self._over = threading.Event()
        self._silent = []
        kinds = (self._garbage, self._silence, self._wrong_token)
        self._threads = [threading.Thread(target=self._run, args=(kind,)) for kind in kinds]
        for thread in self._threads:
            thread.start()

    def stop(self):
        self._over.set()
        for thread in self._threads:
            thread.join(10)
        for connection in self._silent:
            connection.close()

    def _run(self, kind):
        while not self._over.is_set():
            with contextlib.suppress(OSError):
                kind(
                    socket.create_connection(
                        ("127.0.0.1", self._port), 2, source_address=(self._address, 0)
                    )
                )
            self.knocks += 1

    @staticmethod
    def _garbage(connection):
        with connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
            connection.settimeout(0.05)
            connection.recv(100)

    def _silence(self, connection):
        self._silent.append(connection)
        if len(self._silent) > 3 * HANDSHAKES:
            self._silent.pop(0).close()

    def _wrong_token(self, connection):
        stream = open_stream(connection, self._context, server_hostname="127.0.0.1")
        try:
            stream.handshake(time.monotonic() + 1)
            stream.write(self._greeting.frame(), time.monotonic() + 1)
            stream.read(time.monotonic() + 1)
        finally:
            stream.end()


@pytest.fixture
def flood(hello, certificate):
    floods = []

    def make(port, address):
        floods.append(Flood(port, address, hello(token="wrong"), certificate))
        return floods[-1]

    yield make
    for each in floods:
        each.stop()


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("address", [OTHER_ADDRESS, "127.0.0.1"], ids=["other", "same"])
def test_an_honest_party_gets_in_during_a_flood(open_hub, attach, certificate, flood, address):
    hub = open_hub(certificate=certificate, front=Front(FrontLimits(strangers=HANDSHAKES)))
    before = resident_bytes()
    stranger = flood(hub.port, address)
    threads = []
    time.sleep(0.7)  # the burst is spent, and silent connections hold every place
    link = attach(hub.port, ca=certificate)
    hub.wait_all(["bank"], 60)
    for step in range(20):
        link.send(Frame(Kind.CUT, step, b"cut"))
        assert hub.link("bank").receive().step == step
        threads.append(sum(each.name == "vfl-handshake" for each in threading.enumerate()))
    stranger.stop()
    assert stranger.knocks > 100
    assert max(threads) <= HANDSHAKES
    assert resident_bytes() - before < 64 * 2**20


def test_a_greeting_that_fails_costs_its_address_more_than_a_connection(open_hub, hello):
    """By a clock that stands still: no token comes back."""
    front = Front(FrontLimits(burst=9, failure_cost=8), clock=lambda: 0.0)
    hub, answers = open_hub(front=front), []
    for _ in range(2):
        with socket.create_connection(("127.0.0.1", hub.port), 60) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(to_bytes(hello(token="wrong").frame()))
            try:
                answers.append(connection.recv(10))
            except ConnectionError:
                answers.append(b"")
    assert answers[0]
    assert not answers[1]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts a connection's bytes")
def test_too_many_bytes_before_the_greeting(open_hub, certificate):
    """TLS would go on reading this greeting of 64 KiB, and wait for its end."""
    hub = open_hub(certificate=certificate)
    record = b"\x16\x03\x01\x40\x00" + b"\x01\x01\x00\x00" + bytes(16380)
    with socket.create_connection(("127.0.0.1", hub.port), 2) as connection:
        connection.settimeout(0.2)
        connection.sendall(record[:8000])
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.sendall(record[8000:])
        connection.settimeout(60)
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1) == b""
