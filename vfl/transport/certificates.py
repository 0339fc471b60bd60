"""Certificates of one session's stream, and a set of files for a trial federation.

A session's certificate lives as long as its hub: its CA signs once and is forgotten, its private
key stays in memory. The trial files let a federation be tried before an organisation issues its
own: a CA, a server certificate for the SuperLink, and one key pair for each SuperNode.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import ssl
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from vfl.errors import UserError

_SESSION_DAYS = 30
_TRIAL_DAYS = 90
_CLOCK_SKEW = datetime.timedelta(hours=1)
_PARTY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    """A server's certificate and key, and the CA that vouches for it; all PEM."""

    ca_pem: bytes
    cert_pem: bytes
    key_pem: bytes = field(repr=False)

    def context(self) -> ssl.SSLContext:
        """TLS 1.3 for the server's side."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # a party that comes back greets anew
        # ssl reads keys from files only; this one has mode 0600 and is gone at once.
        with tempfile.NamedTemporaryFile(prefix="vfl-") as file:
            file.write(self.key_pem + self.cert_pem)
            file.flush()
            context.load_cert_chain(file.name)
        return context


@dataclass(frozen=True, slots=True)
class TrialFiles:
    """Where the trial files are: PEM for TLS, OpenSSH key pairs by party."""

    ca: Path
    server_certificate: Path
    server_key: Path
    private_keys: dict[str, Path]
    public_keys: dict[str, Path]


def session_certificate(hosts: Sequence[str], days: float = _SESSION_DAYS) -> ServerCertificate:
    """A new server certificate under a CA of its own.

    Args:
        hosts: names and addresses the server is reached by.
        days: how long it is valid.
    """
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name = _name("vfl session CA")
    ca = _builder(ca_name, ca_name, ca_key.public_key(), ca_key.public_key(), days)
    ca = ca.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    ca = ca.add_extension(_usage(signs_certificates=True), critical=True)
    server = _builder(_name("vfl server"), ca_name, key.public_key(), ca_key.public_key(), days)
    server = server.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    server = server.add_extension(_usage(signs_certificates=False), critical=True)
    server = server.add_extension(
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
    )
    names = x509.SubjectAlternativeName([_host(host) for host in hosts])
    server = server.add_extension(names, critical=False)
    pem = serialization.Encoding.PEM
    return ServerCertificate(
        ca_pem=ca.sign(ca_key, hashes.SHA256()).public_bytes(pem),
        cert_pem=server.sign(ca_key, hashes.SHA256()).public_bytes(pem),
        key_pem=key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )


def check_not_expired(path: Path) -> None:
    """Look at a certificate of our own before somebody else refuses it.

    Raises:
        UserError: it has expired, or is no certificate.
    """
    try:
        ends = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    except ValueError:
        raise UserError("this is no PEM certificate", where=str(path)) from None
    if ends < datetime.datetime.now(datetime.UTC):
        raise UserError(
            "a certificate has expired",
            where=str(path),
            got=f"valid until {ends:%Y-%m-%d %H:%M} UTC",
            fix="put a new one and its key there; every party needs the ca.pem that signed it",
        )


def write_trial_certificates(
    folder: Path, hosts: Sequence[str], parties: Sequence[str]
) -> TrialFiles:
    """Write ca.pem, server.pem, server.key and a P-384 key pair for each party.

    The public keys are for ``flwr supernode register``, the private ones for
    ``flower-supernode --auth-supernode-private-key``. Private keys get mode 0600; the CA's own
    is kept nowhere, so nobody can sign a second server with it.

    Raises:
        UserError: a party's name cannot name a file, or one of the files is there already.
    """
    for party in parties:
        if not _PARTY.fullmatch(party) or party in ("ca", "server"):
            raise UserError(
                "a party's name cannot name its key files",
                got=repr(party),
                want="letters, digits, '_', '-' or '.', not 'ca' or 'server'",
            )
    files = TrialFiles(
        folder / "ca.pem",
        folder / "server.pem",
        folder / "server.key",
        {party: folder / f"{party}.key" for party in parties},
        {party: folder / f"{party}.pub" for party in parties},
    )
    folder.mkdir(parents=True, exist_ok=True)
    certificate = session_certificate(hosts, _TRIAL_DAYS)
    _write(files.ca, certificate.ca_pem)
    _write(files.server_certificate, certificate.cert_pem)
    _write(files.server_key, certificate.key_pem, private=True)
    for party in parties:
        private, public = _key_pair()
        _write(files.private_keys[party], private, private=True)
        _write(files.public_keys[party], public)
    return files


def _key_pair() -> tuple[bytes, bytes]:
    """A private and a public P-384 key in OpenSSH's formats, which Flower reads."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return private, public


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
    days: float,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False
        )
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(path: Path, data: bytes, *, private: bool = False) -> None:
    mode = 0o600 if private else 0o644
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise UserError(
            "a certificate or key is there already and is never overwritten",
            where=str(path),
            fix="name another folder, or remove the old files first",
        ) from None
    with os.fdopen(handle, "wb") as file:
        file.write(data)
