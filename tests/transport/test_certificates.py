import datetime
import ipaddress
import stat
import tempfile

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from vfl.errors import UserError
from vfl.transport import session_certificate, write_trial_certificates


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


def test_two_sessions_share_no_key():
    first, second = session_certificate(["a"]), session_certificate(["a"])
    assert first.key_pem != second.key_pem
    assert first.ca_pem != second.ca_pem


def test_the_private_key_is_not_printed_and_leaves_no_file(tmp_path, monkeypatch):
    made = session_certificate(["localhost"])
    assert "PRIVATE" not in repr(made)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made.context()
    assert list(tmp_path.iterdir()) == []


def test_trial_files(tmp_path):
    files = write_trial_certificates(tmp_path / "keys", ["localhost"], ["bank", "shop"])
    ca, server = (
        x509.load_pem_x509_certificate(path.read_bytes())
        for path in (files.ca, files.server_certificate)
    )
    server.verify_directly_issued_by(ca)
    key = serialization.load_pem_private_key(files.server_key.read_bytes(), None)
    assert key.public_key() == server.public_key()
    private = [files.ca_key, files.server_key, *files.private_keys.values()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    assert len(list((tmp_path / "keys").iterdir())) == 8


def test_party_keys_are_what_flower_registers(tmp_path):
    files = write_trial_certificates(tmp_path, ["localhost"], ["bank", "shop"])
    points = set()
    for party in ("bank", "shop"):
        private = serialization.load_ssh_private_key(files.private_keys[party].read_bytes(), None)
        public = serialization.load_ssh_public_key(files.public_keys[party].read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert private.public_key() == public
        assert private.curve.name == "secp384r1"
        points.add(public.public_numbers())
    assert len(points) == 2


def test_files_are_never_overwritten(tmp_path):
    files = write_trial_certificates(tmp_path, ["localhost"], ["bank"])
    before = files.private_keys["bank"].read_bytes()
    with pytest.raises(UserError, match="never overwritten"):
        write_trial_certificates(tmp_path, ["localhost"], ["bank"])
    assert files.private_keys["bank"].read_bytes() == before


@pytest.mark.parametrize("party", ["", "../bank", "a/b", ".hidden", "ca", "server", "x" * 65])
def test_a_party_whose_name_is_no_file_name(tmp_path, party):
    with pytest.raises(UserError, match="cannot name its key files"):
        write_trial_certificates(tmp_path / "new", ["localhost"], [party])
    assert not (tmp_path / "new").exists()
