"""An HTTP server behind a front: deadlines, places, and that answers are those of uvicorn."""

import asyncio
import contextlib
import http.client
import socket
import ssl
import threading
import time

import pytest
import uvicorn

from vfl.federation.programs import _server
from vfl.transport import Front, FrontLimits
from vfl.transport.certificates import Authority
from vfl.transport.front import _Held, welcome
from vfl.transport.http import HttpServer
from vfl.transport.stream import listen

LIMITS = FrontLimits(strangers=8, head_s=0.4, head_bytes=2000)


async def echo(scope, receive, send):
    """Answers with the body; a request that shows a credential is welcome."""
    body, more = b"", True
    if dict(scope["headers"]).get(b"token") == b"good":
        welcome(scope)
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message.get("body", b""), message.get("more_body", False)
    if scope["path"] == "/slow":
        await asyncio.sleep(1)
    length = str(len(body)).encode()
    headers = [(b"content-length", length)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(autouse=True)
def held(monkeypatch):
    fresh = _Held()
    monkeypatch.setattr("vfl.transport.front._HELD", fresh)
    return fresh


@pytest.fixture(params=[("uvloop", False), ("asyncio", True)], ids=["uvloop", "asyncio, TLS"])
def server(request, certificate, tmp_path):
    """Port, and a client's TLS; the server has no thread and no descriptor left afterwards."""
    loop, secured = request.param
    pytest.importorskip(loop)
    options, context = {}, None
    if secured:
        files = {"cert": certificate.cert_pem, "key": certificate.key_pem, "ca": certificate.ca_pem}
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        options = {"ssl_certfile": tmp_path / "cert", "ssl_keyfile": tmp_path / "key"}
        context = ssl.create_default_context(cafile=tmp_path / "ca")
    config = uvicorn.Config(
        echo, lifespan="off", log_level="critical", ws="none", loop=loop, **options
    )
    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    made = HttpServer(config, Front(LIMITS))
    thread = threading.Thread(target=made.run, args=([listening],))
    thread.start()
    yield port, context
    made.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def dial(server):
    """Connections to the server, closed afterwards; with TLS done where `whole`."""
    port, context = server
    with contextlib.ExitStack() as stack:

        def make(data=b"", whole=True):
            made = socket.create_connection(("127.0.0.1", port), 60)
            if whole and context:
                made = context.wrap_socket(made, server_hostname="127.0.0.1")
            stack.enter_context(made)
            made.sendall(data)
            return made

        yield make


def client(server, timeout=60):
    port, context = server
    if context:
        return http.client.HTTPSConnection("127.0.0.1", port, timeout=timeout, context=context)
    return http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)


def ask(server, body=b"", path="/", **headers):
    with contextlib.closing(client(server)) as connection:
        connection.request("POST", path, body, headers)
        return connection.getresponse().read()


def wait_for_the_end(connection):
    """Until the server ends a connection; a minute without that is a `TimeoutError`."""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while connection.recv(1000):
            pass


def test_a_body_comes_back_whole_on_one_connection(server):
    with contextlib.closing(client(server)) as connection:
        for size in (0, 1, 3000, 300_000):
            connection.request("POST", "/", bytes(size))
            assert connection.getresponse().read() == bytes(size)


def test_an_answer_that_takes_longer_than_a_head_may_is_given(server):
    assert ask(server, b"x", "/slow") == b"x"


@pytest.mark.parametrize(("begun", "whole"), [(b"", True), (b"POST", True), (b"\x16", False)])
def test_what_is_no_whole_head_or_handshake_is_ended(server, dial, begun, whole):
    wait_for_the_end(dial(begun, whole))


def test_bytes_that_drip_do_not_move_the_deadline(server, dial):
    connection, begun = dial(b"POST / HTTP/1.1\r\n"), time.monotonic()
    with contextlib.suppress(OSError):
        while time.monotonic() - begun < 60:
            connection.sendall(b"a: b\r\n")
            time.sleep(0.05)
    assert time.monotonic() - begun < 60


def test_a_head_has_so_many_bytes(server, dial):
    connection, sent = dial(b"POST / HTTP/1.1\r\n"), 0
    with contextlib.suppress(OSError):
        while sent < 100_000:
            connection.sendall(b"a: " + b"b" * 500 + b"\r\n")
            sent += 505
            time.sleep(0.005)
    assert sent < 40_000


def test_the_next_head_has_a_deadline_too(server, dial):
    connection = dial(b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\nok")
    answer = b""
    while not answer.endswith(b"ok"):
        answer += connection.recv(1000)
    connection.sendall(b"POST / HT")
    wait_for_the_end(connection)


def test_strangers_make_room_and_who_is_known_stays(server, dial, held):
    with contextlib.closing(client(server)) as connection:
        connection.request("POST", "/", b"1", {"token": "good"})
        assert connection.getresponse().read() == b"1"
        silent = [dial(whole=False) for _ in range(3 * LIMITS.strangers)]
        assert ask(server, b"2", token="good") == b"2"
        assert len(held._strangers) <= LIMITS.strangers
        connection.request("POST", "/", b"3", {"token": "good"})
        assert connection.getresponse().read() == b"3"
    assert silent[0].recv(1) == b""


def test_nothing_is_held_of_connections_that_have_ended(server, dial, held):
    for _ in range(5):
        ask(server, b"x", token="good")
        dial(b"nonsense\r\n\r\n", whole=False).close()
    deadline = time.monotonic() + 60
    while held._strangers or held._known:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_every_server_of_the_federation_refuses_tls_1_2(tmp_path, certificate):
    for name, content in (("cert", certificate.cert_pem), ("key", certificate.key_pem)):
        (tmp_path / name).write_bytes(content)
    files = tmp_path / "cert", tmp_path / "key"
    server = _server(echo, {"log_config": None}, *files, lifespan="off")
    listening = listen("127.0.0.1", 0)
    server.start(listening, "vfl-superlink")
    try:
        for version, accepted in ((ssl.TLSVersion.TLSv1_2, False), (ssl.TLSVersion.TLSv1_3, True)):
            context = ssl.create_default_context(cadata=certificate.ca_pem.decode())
            context.minimum_version = context.maximum_version = version
            with socket.create_connection(("127.0.0.1", listening.getsockname()[1]), 60) as plain:
                refused = contextlib.nullcontext() if accepted else pytest.raises(ssl.SSLError)
                with refused:
                    context.wrap_socket(plain, server_hostname="127.0.0.1").close()
    finally:
        server.stop()


def test_no_request_is_lost_while_certificates_of_seconds_are_renewed(tmp_path):
    authority, seconds = Authority.new("ca", 1), 3.0
    (tmp_path / "ca").write_bytes(authority.ca_pem)

    def renew():
        made = authority.issue_for(["127.0.0.1"], seconds / 86400)
        (tmp_path / "key").write_bytes(made.key_pem)  # a moment without its certificate
        time.sleep(0.05)
        (tmp_path / "cert").write_bytes(made.cert_pem)

    renew()
    files = {"ssl_certfile": tmp_path / "cert", "ssl_keyfile": tmp_path / "key"}
    config = uvicorn.Config(echo, lifespan="off", log_level="critical", ws="none", **files)
    server, listening = HttpServer(config, signals=False), listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    server.start(listening, "renewed")
    context = ssl.create_default_context(cafile=tmp_path / "ca")

    def ask():
        client = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=5)
        try:
            client.request("POST", "/", b"x")
        except BaseException:
            client.close()
            raise
        serial = ssl.DER_cert_to_PEM_cert(client.sock.getpeercert(binary_form=True))
        assert client.getresponse().read() == b"x"
        return client, serial

    try:
        first, _ = ask()
        ends, shown, at = time.monotonic() + 1.4 * seconds, set(), 0.0
        while time.monotonic() < ends:
            if time.monotonic() > at:
                renew()
                at = time.monotonic() + seconds / 6
            time.sleep(0.01)  # a source may make 200 connections a second
            client, serial = ask()
            shown.add(serial)
            client.close()
            first.request("POST", "/", b"still")  # what is open stays
            assert first.getresponse().read() == b"still"
        assert len(shown) > 3
        first.close()
        time.sleep(seconds)
        with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
            ask()
    finally:
        server.stop()
