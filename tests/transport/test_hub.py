"""Who is let in, and what a stranger can do at a hub: nothing, and not for long."""

import json
import socket
import ssl
import threading
import time
import tracemalloc
from dataclasses import replace

import pytest

from vfl.core.errors import (
    AuthenticationError,
    ConsentError,
    CorruptFrameError,
    DisagreementError,
    FrameVersionError,
    LostPeerError,
    MissingPartyError,
    OversizedFrameError,
    PeerFailedError,
)
from vfl.core.frame import HEADER_BYTES, Frame, Kind, from_bytes, pack_header, to_bytes
from vfl.transport import Front, FrontLimits, session_certificate
from vfl.transport.stream import Stream

OVERSIZED = bytearray(pack_header(Frame(Kind.CUT)))
OVERSIZED[:4] = (2**32 - 1).to_bytes(4, "little")


@pytest.fixture
def knock():
    """Plain sockets to a hub, closed afterwards."""
    sockets = []

    def make(port, data=b""):
        sockets.append(socket.create_connection(("127.0.0.1", port), timeout=60))
        sockets[-1].sendall(data)
        return sockets[-1]

    yield make
    for connection in sockets:
        connection.close()


@pytest.fixture
def attached(open_hub, knock, hello, fast):
    """A hub's link and the plain socket of a party that greeted properly."""
    hub = open_hub(timeouts=replace(fast, rejoin_window_s=0.3))
    connection = knock(hub.port, to_bytes(hello().frame()))
    hub.wait_all(["bank"], 60)
    assert answer(connection).kind is Kind.WELCOME
    return hub.link("bank"), connection


def answer(connection):
    """The one frame the hub answered with."""
    raw = bytearray()
    while len(raw) < HEADER_BYTES or len(raw) < HEADER_BYTES + int.from_bytes(raw[:4], "little"):
        data = connection.recv(65536)
        assert data, "closed without an answer"
        raw += data
    return from_bytes(raw)


@pytest.mark.parametrize(
    "change",
    [
        {"token": "wrong"},
        {"token": "token-of-shop"},
        {"node": "node-of-nobody"},
        {"node": "node-of-shop"},
        {"session": "session-2"},
    ],
)
def test_wrong_credentials_are_refused_at_once_and_for_good(open_hub, attach, hello, change):
    asked = []
    hub = open_hub("bank", "shop", on_attach=lambda party, about: asked.append(party) or {})
    with pytest.raises(AuthenticationError) as caught:
        attach(hub.port, greeting=hello(**change))
    assert "token-of" not in str(caught.value)
    assert asked == []
    with pytest.raises(MissingPartyError):
        hub.wait_all(["bank"], 0)


def test_a_foreign_ca_is_refused_and_the_certificate_named(open_hub, attach, certificate):
    hub = open_hub(certificate=certificate)
    with pytest.raises(AuthenticationError, match="certificate is not trusted"):
        attach(hub.port, ca=session_certificate(["127.0.0.1"]))


def test_a_certificate_of_another_host_is_refused(open_hub, attach):
    other = session_certificate(["elsewhere.example"])
    hub = open_hub(certificate=other)
    with pytest.raises(AuthenticationError, match="certificate is not trusted") as caught:
        attach(hub.port, ca=other)
    assert "127.0.0.1" in caught.value.got


def test_older_tls_is_refused(open_hub, certificate):
    hub = open_hub(certificate=certificate)
    context = ssl.create_default_context(cadata=certificate.ca_pem.decode())
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection(("127.0.0.1", hub.port), timeout=60) as plain,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(plain, server_hostname="127.0.0.1")


def test_a_party_refuses_a_hub_with_older_tls(attach, certificate, fast, pool):
    context = certificate.context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_server(("127.0.0.1", 0)) as listener:
        old = pool.submit(lambda: context.wrap_socket(listener.accept()[0], server_side=True))
        with pytest.raises(LostPeerError, match="cannot be reached"):
            attach(
                listener.getsockname()[1], ca=certificate, timeouts=replace(fast, rejoin_window_s=0)
            )
        with pytest.raises(ssl.SSLError, match=r"(?i)protocol version|unsupported"):
            old.result(60)


@pytest.mark.parametrize("hub_has_tls", [True, False])
def test_one_side_without_tls_ends_in_a_typed_error(
    open_hub, attach, certificate, fast, hub_has_tls
):
    hub = open_hub(certificate=certificate if hub_has_tls else None)
    waits = replace(fast, rejoin_window_s=0.3)
    with pytest.raises((LostPeerError, CorruptFrameError)):
        attach(hub.port, ca=None if hub_has_tls else certificate, timeouts=waits)


@pytest.mark.parametrize("kind", [ConsentError, DisagreementError])
def test_a_refusal_reaches_the_party_and_the_label_party(open_hub, attach, kind):
    def refuse(party, about):
        raise kind(f"{party} may not", fix="ask first")

    hub = open_hub(on_attach=refuse)
    with pytest.raises(kind, match="bank may not") as caught:
        attach(hub.port)
    assert caught.value.fix == "ask first"
    with pytest.raises(kind, match="bank may not"):
        hub.wait_all(["bank"], 60)


def test_a_refusal_reaches_the_party_though_the_hub_closes_at_once(open_hub, attach, monkeypatch):
    """The label party may know of it before the party's own handshake has written it."""
    written = []

    def write_late(stream, frame, deadline):
        if frame.kind is Kind.ERROR:
            time.sleep(0.2)
            written.append(frame)
        write(stream, frame, deadline)

    def refuse(party, about):
        raise DisagreementError("other rows")

    write = Stream.write
    monkeypatch.setattr(Stream, "write", write_late)
    hub = open_hub(on_attach=refuse)

    def close_at_once():
        with pytest.raises(DisagreementError):
            hub.wait_all(["bank"], 60)
        hub.fail(DisagreementError("other rows"))

    closing = threading.Thread(target=close_at_once)
    closing.start()
    with pytest.raises(DisagreementError, match="other rows"):
        attach(hub.port)
    closing.join()
    assert len(written) == 1


@pytest.mark.parametrize("broken", [lambda *_: 1 // 0, lambda *_: {"bad": object()}])
def test_a_mistake_in_on_attach_is_not_lost(open_hub, attach, broken):
    hub = open_hub(on_attach=broken)
    with pytest.raises(PeerFailedError, match="failed while it admitted"):
        attach(hub.port)
    with pytest.raises(PeerFailedError, match="failed while it admitted"):
        hub.wait_all(["bank"], 60)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (to_bytes(Frame(Kind.HELLO, payload=b"x" * 8193)), "V452"),
        (to_bytes(Frame(Kind.HELLO, payload=b"[" * 8192)), "V407"),
        (to_bytes(Frame(Kind.HELLO, payload=b"{}")), "V407"),
        (to_bytes(Frame(Kind.CUT, payload=b"{}")), "V407"),
        (bytes(OVERSIZED), "V452"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "V453"),
    ],
)
def test_bad_greetings_are_answered_and_closed(open_hub, knock, data, code):
    hub = open_hub()
    tracemalloc.start()
    try:
        connection = knock(hub.port, data)
        refusal = answer(connection)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert refusal.kind is Kind.ERROR
    assert json.loads(bytes(refusal.payload))["code"] == code
    assert connection.recv(1) == b""


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (lambda raw: raw[:-1] + bytes([raw[-1] ^ 4]), CorruptFrameError),
        (lambda raw: raw[:6] + bytes([raw[6] ^ 1]) + raw[7:], CorruptFrameError),
        (lambda raw: raw[:4] + b"\x52" + raw[5:], FrameVersionError),
        (lambda raw: b"\x00" * len(raw), CorruptFrameError),
        (lambda raw: raw[:5] + b"\x63" + raw[6:], CorruptFrameError),
        (lambda raw: bytes(OVERSIZED), OversizedFrameError),
    ],
    ids=["payload bit", "header bit", "version", "magic", "kind", "oversized"],
)
def test_bad_frames_of_an_attached_party(attached, spoil, kind):
    link, connection = attached
    connection.sendall(to_bytes(Frame(Kind.CUT, 1, b"fine")))
    connection.sendall(spoil(to_bytes(Frame(Kind.CUT, 2, b"payload"))))
    assert link.receive().step == 1
    tracemalloc.start()
    try:
        for _ in range(2):
            with pytest.raises(kind):
                link.receive()
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_bytes_that_trickle_do_not_stretch_the_step_timeout(attached, pool):
    link, connection = attached
    link.patience_s = 0.6

    def trickle():
        for byte in to_bytes(Frame(Kind.CUT, 1, bytes(100))):
            time.sleep(0.02)
            try:
                connection.sendall(bytes([byte]))
            except OSError:
                return

    drip = pool.submit(trickle)
    with pytest.raises(LostPeerError, match="'bank' sent nothing"):
        link.receive()
    drip.result(60)


def test_a_stalled_handshake_is_dropped_and_blocks_nobody(open_hub, attach, knock, secured, fast):
    hub = open_hub(certificate=secured, timeouts=replace(fast, handshake_s=0.4))
    stalled = knock(hub.port, b"\x16\x03\x01" if secured else b"\x00\x00")
    attach(hub.port, ca=secured)
    assert stalled.recv(100) == b""


def test_with_one_place_a_stalled_handshake_makes_room(open_hub, attach, knock, secured):
    hub = open_hub(certificate=secured, front=Front(FrontLimits(strangers=1)))
    stalled = knock(hub.port, b"\x16\x03\x01" if secured else b"\x00\x00")
    attach(hub.port, ca=secured)
    assert stalled.recv(100) == b""


def test_closing_does_not_wait_for_a_stalled_handshake(open_hub, knock, fast):
    hub = open_hub()
    knock(hub.port, b"\x00")
    while not hub._greeting:
        time.sleep(0.01)
    begun = time.monotonic()
    hub.close()
    assert time.monotonic() - begun < fast.handshake_s
