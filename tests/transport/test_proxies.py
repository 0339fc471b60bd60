"""Streams and looks at servers through a proxy that makes tunnels, as the environment names it."""

import socket
import time
from dataclasses import replace
from urllib.parse import quote

import httpx
import pytest
from connect_proxy import ConnectProxy

from vfl.core.errors import AuthenticationError, ConfigError, LostPeerError, VFLError
from vfl.core.frame import Frame, Kind
from vfl.transport import TcpLink, check_server, round_trip_s, session_certificate
from vfl.transport.proxies import connect, local_is_direct, proxy_for

#: A name that this machine cannot resolve: the proxy alone knows where it lies.
HOST = "label_party.lender.invalid"
PASSWORD = "s3cret/p@ss"


@pytest.fixture(autouse=True)
def no_proxy_of_this_machine(monkeypatch):
    for name in ("HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture(scope="module")
def named():
    return session_certificate([HOST])


@pytest.fixture
def far(open_hub, named):
    """A hub behind a name, and the route to it."""
    hub = open_hub(certificate=named)
    return hub, {f"{HOST}:{hub.port}": ("127.0.0.1", hub.port)}


@pytest.fixture
def attach_far(hello, named, fast):
    links = []

    def make(port, **waits):
        timeouts = replace(fast, **waits)
        links.append(TcpLink.connect(HOST, port, hello(), named.ca_pem, timeouts))
        return links[-1]

    yield make
    for link in links:
        link.close()


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "https_proxy", "ALL_PROXY"])
def test_frames_go_through_a_tunnel(far, attach_far, monkeypatch, variable):
    hub, routes = far
    with ConnectProxy(routes) as proxy:
        monkeypatch.setenv(variable, proxy.url)
        feature = attach_far(hub.port)
        hub.wait_all(["bank"], 60)
        feature.send(Frame(Kind.CUT, 1, b"x" * 100_000))
        assert len(hub.link("bank").receive().payload) == 100_000
        hub.link("bank").send(Frame(Kind.GRAD, 1, b"y"))
        assert bytes(feature.receive().payload) == b"y"
        assert proxy.asked == [f"{HOST}:{hub.port}"]


def test_a_proxy_that_cuts_quiet_tunnels_loses_no_frame(far, attach_far, monkeypatch):
    hub, routes = far
    with ConnectProxy(routes, idle_s=0.2) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        feature = attach_far(hub.port)
        hub.wait_all(["bank"], 60)
        for step in range(3):
            before = proxy.cuts
            feature.send(Frame(Kind.CUT, step, b"cut"))
            assert hub.link("bank").receive().step == step
            while proxy.cuts == before:
                time.sleep(0.01)
            hub.link("bank").send(Frame(Kind.GRAD, step, b"gradient"))
            assert feature.receive().step == step
        assert len(proxy.asked) > 3


@pytest.mark.parametrize("login", [("bank", PASSWORD), ("bank", "qwerty"), None])
def test_a_proxy_with_a_password(far, attach_far, monkeypatch, login):
    hub, routes = far
    with ConnectProxy(routes, login=("bank", PASSWORD)) as proxy:
        said = "" if login is None else ":".join(quote(word, safe="") for word in login) + "@"
        monkeypatch.setenv("HTTPS_PROXY", proxy.url.replace("//", f"//{said}"))
        if login == ("bank", PASSWORD):
            attach_far(hub.port)
            return
        with pytest.raises(
            AuthenticationError, match="a different user name or password"
        ) as caught:
            attach_far(hub.port)
    assert "407" in caught.value.got
    assert "qwerty" not in str(caught.value)


def test_a_proxy_that_refuses_is_named(far, attach_far, monkeypatch, named):
    hub, _ = far
    with ConnectProxy({}) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        for try_it in (
            lambda: attach_far(hub.port),
            lambda: check_server("the SuperLink", f"{HOST}:{hub.port}", named.ca_pem.decode()),
        ):
            with pytest.raises(LostPeerError, match="the proxy refuses a tunnel") as caught:
                try_it()
            assert caught.value.got == "403 Forbidden"
            assert caught.value.want == f"CONNECT {HOST}:{hub.port}"


def test_a_target_that_is_not_there_yet_is_tried_again(attach_far, monkeypatch):
    with ConnectProxy({}, answer="502 Bad Gateway") as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        with pytest.raises(LostPeerError, match="cannot be reached") as caught:
            attach_far(8001, rejoin_window_s=0.3)
        assert len(proxy.asked) > 2
    assert "502 Bad Gateway" in caught.value.got


def test_no_proxy_there(attach_far, monkeypatch):
    with ConnectProxy({}) as proxy:
        url = proxy.url
    monkeypatch.setenv("HTTPS_PROXY", url)
    with pytest.raises(LostPeerError) as caught:
        attach_far(8001, rejoin_window_s=0.1)
    assert caught.value.got == f"the proxy {url.removeprefix('http://')}: Connection refused"


@pytest.mark.parametrize("answer", ["nonsense", "HTTP/1.1", "\0\xff", "200 OK extra", ""])
def test_what_is_no_answer_of_a_proxy(attach_far, monkeypatch, answer):
    class Odd(ConnectProxy):
        def _answer_to(self, near):
            near.recv(4096)
            near.sendall(answer.encode("latin-1") + b"\r\n\r\n")
            near.shutdown(socket.SHUT_RDWR)

    with Odd({}) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        with pytest.raises(LostPeerError):
            attach_far(8001, rejoin_window_s=0.1)


def test_the_loopback_and_named_hosts_have_no_proxy(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "bank.example, .shop.example")
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost", "bank.example", "a.shop.example"):
        assert proxy_for(host) is None
    for host in ("lender.example", "10.0.0.7", "2001:db8::7", "notbank.example"):
        assert str(proxy_for(host).address) == "proxy.example:3128"
    monkeypatch.setenv("NO_PROXY", "*")
    assert proxy_for("lender.example") is None


@pytest.mark.parametrize(
    "url",
    [
        "https://proxy.example", "socks5://proxy.example:1080", "http://", "http://a b:3128",
        f"http://bank:{PASSWORD}@:3128", f"http://bank:{PASSWORD}@proxy.example:x",
        "http://proxy.example:99999", "http://[::1",
    ],
)  # fmt: skip
def test_a_proxy_that_cannot_be_used_is_told_without_its_password(monkeypatch, url):
    monkeypatch.setenv("HTTPS_PROXY", url)
    with pytest.raises(ConfigError) as caught:
        connect("lender.example", 8000, 1)
    assert "s3cret" not in str(caught.value)
    assert isinstance(caught.value, VFLError)


def test_a_look_at_a_server_goes_the_same_way(far, monkeypatch, named):
    hub, routes = far
    address = f"{HOST}:{hub.port}"
    with ConnectProxy(routes) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        check_server("the hub", address, named.ca_pem.decode())
        assert 0 < round_trip_s(address, 60) < 60
        assert set(proxy.asked) == {address}


def test_flowers_client_reaches_this_machine_without_the_proxy(monkeypatch):
    """httpx has no exception for the loopback; the variables that we set make one."""
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "bank.example")
    for name, value in local_is_direct().items():
        monkeypatch.setenv(name, value)
    with httpx.Client() as client:
        direct = client._transport
        for host in ("127.0.0.1", "localhost", "[::1]", "bank.example"):
            assert client._transport_for_url(httpx.URL(f"https://{host}:8000")) is direct
        assert client._transport_for_url(httpx.URL("https://lender.example")) is not direct
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("no_proxy", "*")
    assert local_is_direct()["NO_PROXY"] == "*"
