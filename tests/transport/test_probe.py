"""A look at a TLS server: what is wrong with it is told in words, by the certificate's own test."""

import socket
import ssl
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vfl.core.errors import (
    AuthenticationError,
    ClockError,
    LostPeerError,
    ProtocolError,
    UserError,
)
from vfl.transport import check_not_expired, check_server, session_certificate
from vfl.transport.certificates import ServerCertificate

EXPIRED_DAYS = -1 / 48  # certificates are valid from an hour before they are made


@contextmanager
def serving(certificate):
    """A TLS server for one connection; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection:
                try:
                    with certificate.context().wrap_socket(connection, server_side=True) as secured:
                        secured.recv(1)
                except OSError:
                    return  # the other end did not like what it saw

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(60)
        assert not thread.is_alive()


def test_a_server_that_is_right():
    certificate = session_certificate(["127.0.0.1"])
    with serving(certificate) as address:
        check_server("the SuperLink", address, certificate.ca_pem.decode())


@pytest.mark.parametrize(
    ("certificate", "why"),
    [
        (session_certificate(["127.0.0.1"], days=EXPIRED_DAYS), "certificate has expired"),
        (session_certificate(["lender.example"]), "IP address mismatch"),
    ],
    ids=["expired", "another host"],
)
def test_a_server_with_a_bad_certificate(certificate, why):
    with serving(certificate) as address:
        with pytest.raises(AuthenticationError, match="of the SuperLink is not accepted") as caught:
            check_server("the SuperLink", address, certificate.ca_pem.decode())
        assert caught.value.where == address
    assert why in caught.value.got


def test_a_ca_file_without_a_certificate():
    with pytest.raises(AuthenticationError, match="certificate of the CA cannot be read"):
        check_server("the SuperLink", "127.0.0.1:1", "no certificate")


def test_a_server_with_an_old_tls_is_refused(monkeypatch):
    """Every server of vfl has TLS 1.3; a server that has not may be an attacker's."""
    certificate, own = session_certificate(["127.0.0.1"]), ServerCertificate.context

    def old(self):
        context = own(self)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        return context

    monkeypatch.setattr(ServerCertificate, "context", old)
    with serving(certificate) as address, pytest.raises(ProtocolError):
        check_server("the SuperLink", address, certificate.ca_pem.decode())


def test_nobody_there():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(LostPeerError, match="the SuperLink cannot be reached") as caught:
            check_server("the SuperLink", address, session_certificate(["x"]).ca_pem.decode())
    assert caught.value.got == "Connection refused"


def test_our_own_certificate(tmp_path):
    path = tmp_path / "server.pem"
    path.write_bytes(session_certificate(["127.0.0.1"]).cert_pem)
    check_not_expired(path)
    path.write_bytes(session_certificate(["127.0.0.1"], days=EXPIRED_DAYS).cert_pem)
    with pytest.raises(UserError, match="has expired") as caught:
        check_not_expired(path)
    assert caught.value.where == str(path)
    path.write_text("no certificate")
    with pytest.raises(UserError, match="not a PEM certificate"):
        check_not_expired(path)


@pytest.fixture
def dated():
    """An HTTPS server whose answers have a date; its address."""
    servers = []

    def make(certificate, date):
        class Answer(BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.send_response_only(403)
                self.send_header("Date", date)
                self.end_headers()

        server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        server.handle_error = lambda *_: None  # the other end did not like what it saw
        server.socket = certificate.context().wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"127.0.0.1:{server.server_port}"

    yield make
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def date_in(seconds):
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)


@pytest.mark.parametrize("ahead_s", [-3000, -400, -15, 400, 86_400])
def test_clocks_that_differ_are_both_told(dated, ahead_s):
    certificate, date = session_certificate(["127.0.0.1"]), date_in(ahead_s)
    address = dated(certificate, date)
    with pytest.raises(ClockError) as caught:
        check_server("the SuperLink", address, certificate.ca_pem.decode(), clock=True)
    here, there = (
        datetime.strptime(text.rsplit(" ", 1)[0], "%Y-%m-%d %H:%M:%S UTC").replace(tzinfo=UTC)
        for text in caught.value.got.split(", ")
    )
    assert there == parsedate_to_datetime(date)
    assert abs((there - here).total_seconds() - ahead_s) < 60


@pytest.mark.parametrize("date", [-2, 100, "yesterday", "", "0" * 5000])
def test_clocks_that_agree_or_are_not_told(dated, date):
    date = date_in(date) if isinstance(date, int) else date
    certificate = session_certificate(["127.0.0.1"])
    check_server("it", dated(certificate, date), certificate.ca_pem.decode(), clock=True)


def test_an_expired_certificate_by_a_wrong_clock_and_by_a_right_one(dated):
    """A clock that is a day ahead finds a good certificate expired: the other clock shows why."""
    certificate = session_certificate(["127.0.0.1"], days=EXPIRED_DAYS)
    with pytest.raises(ClockError):
        check_server("it", dated(certificate, date_in(-86_400)), certificate.ca_pem.decode())
    with pytest.raises(AuthenticationError, match="is not accepted"):
        check_server("it", dated(certificate, date_in(0)), certificate.ca_pem.decode())
