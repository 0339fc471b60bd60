"""A look at a TLS server: what is wrong with it is told in words, by the certificate's own test."""

import socket
import threading
from contextlib import contextmanager

import pytest

from vfl.core.errors import AuthenticationError, LostPeerError, UserError
from vfl.transport import check_not_expired, check_server, session_certificate

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
    with pytest.raises(UserError, match="no PEM certificate"):
        check_not_expired(path)
