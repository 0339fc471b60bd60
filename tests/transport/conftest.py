import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from vfl.transport import Credential, Hello, TcpHub, TcpLink, Timeouts, session_certificate

SESSION = "session-1"
FAST = Timeouts(connect_s=2, handshake_s=1, step_s=10, idle_s=10, rejoin_window_s=1.5, retry_s=0.02)


class Proxy:
    """Carries bytes between feature parties and a hub, and cuts them when told to.

    Set `swallowed` to "up" or "down" to lose what travels that way until the next cut.
    """

    def __init__(self, target_port):
        self._target = ("127.0.0.1", target_port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections = 0
        self.swallowed = ""
        self._open = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self):
        """Break every connection there is now, both ways at once."""
        with self._lock:
            doomed, self._open = self._open, []
            for end in doomed:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self.swallowed = ""

    def close(self):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(5)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(5)

    def _accept(self):
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
                self._open += [near, far]
                self.connections += 1
            pumps = [
                threading.Thread(target=self._pump, args=ends, daemon=True)
                for ends in ((near, far, "up"), (far, near, "down"))
            ]
            closer = threading.Thread(target=self._finish, args=(pumps, near, far), daemon=True)
            self._threads += [*pumps, closer]
            for thread in (*pumps, closer):
                thread.start()

    def _pump(self, source, sink, direction):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.swallowed != direction:
                    sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _finish(pumps, *ends):
        for pump in pumps:
            pump.join()
        for end in ends:
            end.close()


@pytest.fixture(scope="session")
def certificate():
    return session_certificate(["localhost", "127.0.0.1"])


@pytest.fixture(params=["tcp", "tls"])
def secured(request, certificate):
    """The hub's certificate, or None without TLS."""
    return certificate if request.param == "tls" else None


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as threads:
        yield threads


@pytest.fixture
def credential():
    return lambda party: Credential(f"node-of-{party}", f"token-of-{party}")


@pytest.fixture
def hello(credential):
    def make(party="bank", **changes):
        known = credential(party)
        fields = {"session": SESSION, "node": known.node, "token": known.token}
        return Hello(**(fields | changes))

    return make


@pytest.fixture
def open_hub(credential):
    """Hubs that are closed afterwards, with a look for threads left behind."""
    hubs = []

    def make(*parties, timeouts=FAST, **options):
        credentials = {party: credential(party) for party in parties or ("bank",)}
        hubs.append(TcpHub("127.0.0.1", 0, SESSION, credentials, timeouts=timeouts, **options))
        return hubs[-1]

    yield make
    for hub in hubs:
        hub.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("vfl-")]


@pytest.fixture
def open_proxy():
    proxies = []

    def make(port):
        proxies.append(Proxy(port))
        return proxies[-1]

    yield make
    for proxy in proxies:
        proxy.close()


@pytest.fixture
def attach(hello):
    """Feature parties' links that are closed afterwards."""
    links = []

    def make(port, party="bank", ca=None, timeouts=FAST, greeting=None, **options):
        pem = ca.ca_pem if ca else None
        greeting = greeting or hello(party)
        links.append(TcpLink.connect("127.0.0.1", port, greeting, pem, timeouts, **options))
        return links[-1]

    yield make
    for link in links:
        link.close()


@pytest.fixture
def fast():
    return FAST
