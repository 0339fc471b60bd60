import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.emulation import TcpProxy
from vfl.transport import (
    Admission,
    Credential,
    Hello,
    TcpHub,
    TcpLink,
    Timeouts,
    session_certificate,
)

SESSION = "session-1"
#: Nothing that goes well comes near these bounds, on however busy a machine.
FAST = Timeouts(60, 60, step_s=60, idle_s=60, rejoin_window_s=60, retry_s=0.02)


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
    hubs, before = [], set(threading.enumerate())  # other tests' threads may end when they like

    def make(*parties, timeouts=FAST, on_attach=None, **options):
        credentials = {party: credential(party) for party in parties or ("bank",)}
        admission = Admission(SESSION, credentials, on_attach)
        hubs.append(TcpHub("127.0.0.1", 0, admission, timeouts=timeouts, **options))
        return hubs[-1]

    yield make
    for hub in hubs:
        hub.close()
    left = [thread for thread in threading.enumerate() if thread not in before]
    assert not [thread.name for thread in left if thread.name.startswith("vfl-")]


@pytest.fixture
def open_proxy():
    """Proxies that can be cut, between feature parties and a hub."""
    proxies = []

    def make(port):
        proxies.append(TcpProxy(("127.0.0.1", port)))
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
