"""One port for several hubs: each connection reaches the session that it names, or nobody."""

import contextlib
import os
import random
import socket
import ssl
import sys
import time

import httpx
import pytest
import uvicorn

from vfl.core.errors import AuthenticationError, LostPeerError
from vfl.core.frame import Frame, Kind
from vfl.transport import (
    Admission,
    Credential,
    Front,
    FrontLimits,
    Hello,
    StreamRouter,
    TcpHub,
    TcpLink,
    Timeouts,
    route_of,
    routed_listener,
)
from vfl.transport.http import HttpServer
from vfl.transport.router import ROUTER_VARIABLE, OtherConnections, alpn_of, router_port

FAST = Timeouts(30, 30, step_s=30, idle_s=30, rejoin_window_s=0.5, retry_s=0.02)
NAMES = ("a" * 32, "b" * 32)


@pytest.fixture
def router(tmp_path, monkeypatch):
    made = StreamRouter("127.0.0.1", 0, tmp_path / "streams")
    monkeypatch.setenv(ROUTER_VARIABLE, str(tmp_path / "streams"))
    yield made
    made.close()


@pytest.fixture
def open_hub(router, open_hub_at):
    return open_hub_at


@pytest.fixture
def open_hub_at(certificate):
    """Hubs behind the router of this test's environment."""
    hubs = []

    def make(session):
        admission = Admission(session, {"bank": Credential("node", f"token of {session}")})
        listener = routed_listener(session, "127.0.0.1", 0)
        hub = TcpHub("127.0.0.1", 0, admission, certificate, timeouts=FAST, listener=listener)
        hubs.append(hub)
        return hub

    yield make
    for hub in hubs:
        hub.close()


@pytest.fixture
def connect(router, certificate):
    links = []

    def make(session, route=None):
        hello = Hello(session, "node", f"token of {session}")
        route = route_of(session) if route is None else route
        ca = certificate.ca_pem
        links.append(TcpLink.connect("127.0.0.1", router.port, hello, ca, FAST, route=route))
        return links[-1]

    yield make
    for link in links:
        link.close()


def client_hello(*protocols, host="127.0.0.1"):
    """The first message of a TLS client, as OpenSSL writes it."""
    context, sent = ssl.create_default_context(), ssl.MemoryBIO()
    if protocols:
        context.set_alpn_protocols(list(protocols))
    client = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=host)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


def test_two_sessions_at_one_port_get_their_own_frames(router, open_hub, connect):
    hubs = [open_hub(name) for name in NAMES]
    assert {hub.port for hub in hubs} == {router.port}
    links = [connect(name) for name in reversed(NAMES)][::-1]
    for number, (hub, link) in enumerate(zip(hubs, links, strict=True)):
        hub.wait_all(["bank"], 30)
        link.send(Frame(Kind.CUT, number, bytes([number]) * 100_000))
    for number, hub in enumerate(hubs):
        frame = hub.link("bank").receive()
        assert (frame.step, bytes(frame.payload)) == (number, bytes([number]) * 100_000)
    hubs[0].close()  # the other session, and a later one, go on
    hubs[1].link("bank").send(Frame(Kind.DONE))
    assert links[1].receive().kind is Kind.DONE
    later = open_hub("c" * 32)
    connect("c" * 32)
    later.wait_all(["bank"], 30)


def test_the_credential_of_one_session_opens_no_other(open_hub, connect):
    for name in NAMES:
        open_hub(name)
    with pytest.raises(AuthenticationError, match="no such session"):
        connect(NAMES[0], route=route_of(NAMES[1]))


@pytest.mark.parametrize("route", ["", "h2", "vfl/", f"vfl/{'0' * 32}", f"vfl/../{'0' * 29}"])
def test_a_route_that_no_session_has_leads_nowhere(open_hub, connect, route):
    open_hub(NAMES[0])
    with pytest.raises(LostPeerError, match="cannot be reached"):
        connect(NAMES[0], route=route)


def test_a_session_whose_process_died_is_refused_at_once(tmp_path, router, open_hub, connect):
    hub = open_hub(NAMES[0])
    hub._listener._listening.close()  # as the kernel does; its file stays
    with pytest.raises(LostPeerError):
        connect(NAMES[0])
    again = open_hub(NAMES[0])  # takes the place of the file
    connect(NAMES[0])
    again.wait_all(["bank"], 30)


def test_a_hello_in_pieces_is_waited_for_and_reaches_the_session_whole(router, open_hub):
    taken = routed_listener(NAMES[0], "127.0.0.1", 0)
    hello = client_hello("other", route_of(NAMES[0]))
    with socket.create_connection(("127.0.0.1", router.port)) as client:
        for at in range(0, len(hello), 97):
            client.sendall(hello[at : at + 97])
            time.sleep(0.002)
        connection, address = accepted(taken)
        with connection:
            connection.setblocking(True)
            assert (connection.recv(len(hello), socket.MSG_WAITALL), address) == (
                hello,
                "127.0.0.1",
            )
    taken.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, the listener looks every 50 ms")
@pytest.mark.parametrize("routed", [False, True], ids=["port", "routed"])
def test_hub_and_router_close_while_they_wait_for_a_connection(
    tmp_path, monkeypatch, certificate, routed
):
    monkeypatch.setattr("vfl.transport.router._TICK_S", 30.0)
    router = StreamRouter("127.0.0.1", 0, tmp_path / "streams")
    monkeypatch.setenv(ROUTER_VARIABLE, str(tmp_path / "streams"))
    listener = routed_listener(NAMES[0], "127.0.0.1", 0) if routed else None
    hub = TcpHub("127.0.0.1", 0, Admission(NAMES[0], {}), certificate, listener=listener)
    time.sleep(0.2)  # both threads wait now
    for each in (hub, router):
        begun = time.monotonic()
        each.close()
        assert time.monotonic() - begun < 15


def accepted(listener):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            return listener.accept()
        except TimeoutError:
            continue
    raise AssertionError("no connection was passed on")


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\x16",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\xff\xff" + bytes(100),
        b"\x16\x03\x01\x00\x04\x01\xff\xff\xff",
        os.urandom(4096),
    ],
    ids=["nothing", "a byte", "http", "too long a record", "too long a body", "noise"],
)
def test_a_stranger_is_ended_and_keeps_nobody_out(tmp_path, certificate, sent):
    front = Front(FrontLimits(head_s=0.3))
    router = StreamRouter("127.0.0.1", 0, tmp_path / "streams", front)
    try:
        with socket.create_connection(("127.0.0.1", router.port), timeout=30) as stranger:
            stranger.sendall(sent)
            began = time.monotonic()
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
            assert time.monotonic() - began < 20
        assert router._thread.is_alive()
    finally:
        router.close()


def test_a_crowd_of_strangers_makes_room_at_its_own_cost(tmp_path):
    front = Front(FrontLimits(strangers=4, head_s=30, connections_per_second=1e6))
    router = StreamRouter("127.0.0.1", 0, tmp_path / "streams", front)
    crowd = []
    try:
        for _ in range(6):
            crowd.append(socket.create_connection(("127.0.0.1", router.port), timeout=30))
            time.sleep(0.05)
        assert crowd[0].recv(1) == crowd[1].recv(1) == b""
        crowd[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            crowd[-1].recv(1)
    finally:
        router.close()
        for one in crowd:
            one.close()


def test_alpn_is_read_as_openssl_writes_it():
    assert alpn_of(client_hello("h2", "http/1.1")) == ["h2", "http/1.1"]
    assert alpn_of(client_hello("vfl/x", host="a.example")) == ["vfl/x"]
    assert alpn_of(client_hello()) == []


def test_a_damaged_hello_is_refused_or_read_and_never_more():
    hello, draw = client_hello("vfl/abc", host="lender.example"), random.Random(0)
    for _ in range(4000):
        damaged = bytearray(hello)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        cut = bytes(damaged[: draw.choice([len(damaged), draw.randrange(len(damaged))])])
        try:
            found = alpn_of(cut)
        except ValueError:
            continue
        assert all(isinstance(name, str) and len(name) < 256 for name in found)


def test_a_router_is_found_at_its_own_address_alone(tmp_path, router):
    folder = tmp_path / "streams"
    assert router_port(folder, "127.0.0.1", 0) == router.port
    assert router_port(folder, "127.0.0.2", 0) is None
    assert router_port(folder, "127.0.0.1", 8001) is None
    router.close()
    assert router_port(folder, "127.0.0.1", 0) is None
    assert routed_listener(NAMES[0], "127.0.0.1", 0) is None


@pytest.fixture
def shared_port(tmp_path, monkeypatch, certificate):
    """An HTTPS server and a router at one port; the port."""

    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["client"][0].encode()})

    for name, content in (("cert", certificate.cert_pem), ("key", certificate.key_pem)):
        (tmp_path / name).write_bytes(content)
    files = {"ssl_certfile": tmp_path / "cert", "ssl_keyfile": tmp_path / "key"}
    config = uvicorn.Config(answer, log_config=None, ws="none", lifespan="off", **files)
    server = HttpServer(config, signals=False)
    others = OtherConnections()
    router = StreamRouter("127.0.0.1", 0, tmp_path / "streams", others=others)
    monkeypatch.setenv(ROUTER_VARIABLE, str(tmp_path / "streams"))
    server.start(others, "https")
    yield router.port
    server.stop()
    router.close()


def test_one_port_has_streams_and_https(shared_port, open_hub_at, certificate):
    hub = open_hub_at(NAMES[0])
    secure = ssl.create_default_context(cadata=certificate.ca_pem.decode())
    with httpx.Client(verify=secure, trust_env=False) as client:
        for _ in range(3):
            assert client.get(f"https://127.0.0.1:{shared_port}/").text == "127.0.0.1"
            hello = Hello(NAMES[0], "node", f"token of {NAMES[0]}")
            ca, route = certificate.ca_pem, route_of(NAMES[0])
            link = TcpLink.connect("127.0.0.1", shared_port, hello, ca, FAST, route=route)
            link.send(Frame(Kind.CUT, 1, b"cut"))
            hub.wait_all(["bank"], 30)
            assert hub.link("bank").receive().step == 1
            link.close()
            hub.replace("bank", Credential("node", f"token of {NAMES[0]}"))
    for junk in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x00\x01\x01",
        client_hello("vfl/nobody"),
    ):
        with socket.create_connection(("127.0.0.1", shared_port), 30) as stranger:
            stranger.sendall(junk)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
