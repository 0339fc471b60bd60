"""Certificates and keys, made and renewed; judged by real TLS handshakes."""

import datetime
import ipaddress
import socket
import ssl
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from aged import made_ago
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from vfl.core.errors import MissingDataError, UserError
from vfl.transport import (
    expiry_warning,
    public_half,
    renew_node_key,
    renew_server,
    replace_authority,
    session_certificate,
    write_trial_certificates,
)
from vfl.transport.certificates import days_left


def test_the_server_certificate_names_its_hosts_and_is_signed_by_the_ca():
    made = session_certificate(["label.example", "10.0.0.7", "::1"], days=2)
    ca, server = map(x509.load_pem_x509_certificate, (made.ca_pem, made.cert_pem))
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["label.example"]
    assert names.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address("10.0.0.7"),
        ipaddress.ip_address("::1"),
    ]
    limits = server.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert not limits.ca
    left = server.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=1, hours=23) < left <= datetime.timedelta(days=2)


def test_the_private_key_is_not_printed_and_leaves_no_file(tmp_path, monkeypatch):
    made = session_certificate(["localhost"])
    assert "PRIVATE" not in repr(made)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made.context()
    assert list(tmp_path.iterdir()) == []


def test_trial_files(tmp_path):
    folder = tmp_path / "keys"
    write_trial_certificates(folder, ["localhost"], ["bank", "shop"])
    ca, server = (
        x509.load_pem_x509_certificate((folder / name).read_bytes())
        for name in ("ca.pem", "server.pem")
    )
    server.verify_directly_issued_by(ca)
    key = serialization.load_pem_private_key((folder / "server.key").read_bytes(), None)
    assert key.public_key() == server.public_key()
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert len(list(folder.iterdir())) == 8


def test_party_keys_are_what_flower_registers(tmp_path):
    write_trial_certificates(tmp_path, ["localhost"], ["bank", "shop"])
    points = set()
    for party in ("bank", "shop"):
        private = serialization.load_ssh_private_key((tmp_path / f"{party}.key").read_bytes(), None)
        public = serialization.load_ssh_public_key((tmp_path / f"{party}.pub").read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert private.public_key() == public
        assert private.curve.name == "secp384r1"
        points.add(public.public_numbers())
    assert len(points) == 2


def test_files_are_never_overwritten(tmp_path):
    write_trial_certificates(tmp_path, ["localhost"], ["bank"])
    before = (tmp_path / "bank.key").read_bytes()
    with pytest.raises(UserError, match="never overwritten"):
        write_trial_certificates(tmp_path, ["localhost"], ["bank"])
    assert (tmp_path / "bank.key").read_bytes() == before


@pytest.mark.parametrize("party", ["", "../bank", "a/b", ".hidden", "ca", "server", "x" * 65])
def test_a_party_whose_name_is_no_file_name(tmp_path, party):
    with pytest.raises(UserError, match="cannot be the name of its key files"):
        write_trial_certificates(tmp_path / "new", ["localhost"], [party])
    assert not (tmp_path / "new").exists()


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
            serving.result(60)
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


def test_a_missing_private_key_is_not_called_a_wrong_one(folder):
    with pytest.raises(MissingDataError, match="missing"):
        public_half(folder / "none.key")


@pytest.mark.parametrize("wrong", ["server.key", "ca.pem"])
def test_a_key_of_something_else_signs_nothing(folder, wrong):
    (folder / "ca.key").write_bytes((folder / wrong).read_bytes())
    before = (folder / "server.pem").read_bytes()
    with pytest.raises(UserError, match=r"belongs to no certificate|not a private key"):
        renew_server(folder)
    assert (folder / "server.pem").read_bytes() == before


def test_an_expired_authority_signs_nothing(folder):
    replace_authority(folder, days=0)
    with pytest.raises(UserError, match="has expired") as caught:
        renew_server(folder)
    assert "vfl renew PROJECT --authority" in caught.value.fix


def test_what_is_said_before_a_certificate_ends(folder):
    path = folder / "server.pem"
    made_ago(59, lambda: renew_server(folder, days=90))
    assert expiry_warning(path, "renew it") is None
    renew_server(folder, days=1)  # which will be renewed in time
    assert expiry_warning(path, "renew it") is None
    made_ago(0.7, lambda: renew_server(folder, days=1))
    assert "expires today" in expiry_warning(path, "renew it")
    made_ago(60, lambda: renew_server(folder, days=90))
    assert days_left(path) == 29
    assert expiry_warning(path, "renew it") == (
        f"warning: the certificate {path} expires in 29 days; renew it"
    )
    renew_server(folder, days=0)
    assert "has expired; renew it" in expiry_warning(path, "renew it")
    assert certificate(path).not_valid_after_utc < datetime.datetime.now(datetime.UTC)


def test_a_new_node_key(folder):
    private, public = folder / "bank.key", folder / "bank.pub"
    before = public.read_bytes()
    renew_node_key(private, public)
    assert public.read_bytes() != before
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    own = serialization.load_ssh_private_key(private.read_bytes(), None)
    assert own.public_key() == serialization.load_ssh_public_key(public.read_bytes())
