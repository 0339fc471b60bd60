"""Renewed certificates, judged by real TLS handshakes of parties that know older or newer CAs."""

import datetime
import socket
import ssl
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from vfl.errors import MissingDataError, UserError
from vfl.transport import (
    expiry_warning,
    renew_node_key,
    renew_server,
    replace_authority,
    write_trial_certificates,
)
from vfl.transport.renewal import days_left


@pytest.fixture
def folder(tmp_path):
    write_trial_certificates(tmp_path / "certificates", ["label.example", "127.0.0.1"], ["bank"])
    return tmp_path / "certificates"


def trusted(folder, ca_pem, host="label.example"):
    """Whether a party with these CAs completes a handshake with a server of these files."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.pem", folder / "server.key")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(cadata=ca_pem.decode())
    ends = socket.socketpair()

    def serve():
        with suppress(ssl.SSLError), server.wrap_socket(ends[0], server_side=True):
            pass

    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve)
        try:
            client.wrap_socket(ends[1], server_hostname=host).close()
        except ssl.SSLCertVerificationError:
            return False
        finally:
            ends[1].close()
            serving.result(5)
    return True


def certificate(path):
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_a_renewed_certificate_is_trusted_by_who_trusted_the_old_one(folder):
    old_ca = (folder / "ca.pem").read_bytes()
    old, old_key = certificate(folder / "server.pem"), (folder / "server.key").read_bytes()
    assert renew_server(folder, days=400) == 399
    new = certificate(folder / "server.pem")
    assert (folder / "ca.pem").read_bytes() == old_ca
    assert new.serial_number != old.serial_number
    assert (folder / "server.key").read_bytes() != old_key
    assert stat.S_IMODE((folder / "server.key").stat().st_mode) == 0o600
    assert trusted(folder, old_ca)
    assert trusted(folder, old_ca, "127.0.0.1")
    assert not trusted(folder, old_ca, "elsewhere.example")


def test_a_certificate_never_outlives_its_authority(folder):
    renew_server(folder, days=100_000)
    assert (
        certificate(folder / "server.pem").not_valid_after_utc
        == certificate(folder / "ca.pem").not_valid_after_utc
    )


def test_a_new_authority_cuts_nobody_off(folder):
    """The old CA, then both, then the new one: whoever follows is always connected."""
    old_ca = (folder / "ca.pem").read_bytes()
    replace_authority(folder)
    both = (folder / "ca.pem").read_bytes()
    assert trusted(folder, old_ca)
    assert trusted(folder, both)
    renew_server(folder)
    new_ca = (folder / "ca.pem").read_bytes()
    assert not trusted(folder, old_ca)
    assert trusted(folder, both)
    assert trusted(folder, new_ca)
    assert old_ca not in new_ca
    assert old_ca in both


def test_an_authority_whose_key_is_kept_elsewhere(folder):
    key = (folder / "ca.key").read_bytes()
    (folder / "ca.key").unlink()
    before = (folder / "server.pem").read_bytes()
    with pytest.raises(MissingDataError, match="missing") as caught:
        renew_server(folder)
    assert "--authority" in caught.value.fix
    assert (folder / "server.pem").read_bytes() == before
    (folder / "ca.key").write_bytes(key)
    renew_server(folder)


@pytest.mark.parametrize("wrong", ["server.key", "ca.pem"])
def test_a_key_of_something_else_signs_nothing(folder, wrong):
    (folder / "ca.key").write_bytes((folder / wrong).read_bytes())
    before = (folder / "server.pem").read_bytes()
    with pytest.raises(UserError, match=r"belongs to no certificate|no private key"):
        renew_server(folder)
    assert (folder / "server.pem").read_bytes() == before


def test_an_expired_authority_signs_nothing(folder):
    replace_authority(folder, days=0)
    with pytest.raises(UserError, match="has expired") as caught:
        renew_server(folder)
    assert "vfl renew PROJECT --authority" in caught.value.fix


def test_what_is_said_before_a_certificate_ends(folder):
    path = folder / "server.pem"
    renew_server(folder, days=31)
    assert expiry_warning(path, "renew it") is None
    renew_server(folder, days=30)
    assert days_left(path) == 29
    assert expiry_warning(path, "renew it") == (
        f"warning: the certificate {path} expires in 29 days; renew it"
    )
    renew_server(folder, days=0)
    assert "has expired; renew it" in expiry_warning(path, "renew it")
    assert certificate(path).not_valid_after_utc < datetime.datetime.now(datetime.UTC)


def test_a_file_that_is_no_certificate(folder):
    (folder / "server.pem").write_text("nonsense")
    with pytest.raises(UserError, match="no PEM certificate"):
        days_left(folder / "server.pem")


def test_a_new_node_key(folder):
    private, public = folder / "bank.key", folder / "bank.pub"
    before = public.read_bytes()
    renew_node_key(private, public)
    assert public.read_bytes() != before
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    own = serialization.load_ssh_private_key(private.read_bytes(), None)
    assert own.public_key() == serialization.load_ssh_public_key(public.read_bytes())
