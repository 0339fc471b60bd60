"""Certificates and keys for the streams of sessions and for trial federations, and their renewal.

The certificate of a session is valid for 30 days, and only the session's hub (the label party's
server) uses it. A new certificate authority (CA) signs it, and the CA's key is then deleted; the
hub's private key stays in memory, except for a moment in a temporary file that only its owner can
read. The trial files allow a federation before an organisation issues its own
certificates: a CA, a server certificate for the SuperLink, and one key pair for each SuperNode. If
a new server certificate is signed by the same CA, the other parties need not do anything. A change
of the CA takes two steps, so that no party loses its connection. First the label party adds the new
CA to ca.pem beside the old CA, and sends the file to all parties; then the server gets a
certificate that the new CA has signed.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import os
import re
import ssl
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from vfl.core.errors import MissingDataError, UserError
from vfl.core.storage import PRIVATE_FILE, private_folder, write_bytes

_SESSION_DAYS = 30
#: Lifetimes in days: of the SuperLink's certificate, and of the CA that signs this certificate.
SERVER_DAYS = 90
AUTHORITY_DAYS = 1825
#: Warnings begin at most this many days before a certificate expires; see `ends_soon`.
WARN_DAYS = 30
_NEW_CA = "make a new one with: vfl renew PROJECT --authority"
#: Cures for missing files, by file name.
_SOURCES = {
    "ca.pem": "copy ca.pem from the label party, or from the folder of another party",
    "ca.key": "restore ca.key, the private key of the authority, or make a new authority with "
    "--authority",
    "server.pem": "restore server.pem from a backup, or from the host of the SuperLink",
}
_CLOCK_SKEW = datetime.timedelta(hours=1)
_PEM = serialization.Encoding.PEM
#: Order of the elliptic curve group P-256 (SEC 2, section 2.4.2), and the number of secret bytes
#: from which a CA's key is derived.
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_SECRET_BYTES = 48
#: Number of bytes of a key's fingerprint; with 128 bits, it is infeasible to make another key with
#: the same fingerprint.
_FINGERPRINT_BYTES = 16
_KEY_TYPE = re.compile(rb"(ssh|ecdsa)-[a-z0-9-]+")
_PARTY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    """A server's certificate, its key, and the certificate of the CA that signed it, all as PEM."""

    ca_pem: bytes
    cert_pem: bytes
    key_pem: bytes = field(repr=False)

    def context(self) -> ssl.SSLContext:
        """Return the TLS 1.3 context with which the server accepts connections."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # reconnecting parties send a new greeting
        # ssl reads keys from files only; this one has mode 0600 and is deleted immediately.
        with tempfile.NamedTemporaryFile(prefix="vfl-") as file:
            file.write(self.key_pem + self.cert_pem)
            file.flush()
            context.load_cert_chain(file.name)
        return context


@dataclass(frozen=True, slots=True)
class Authority:
    """A CA that can sign certificates: the CA's own certificate and private key, both as PEM."""

    ca_pem: bytes
    key_pem: bytes = field(repr=False)

    @classmethod
    def new(cls, name: str, days: float) -> Authority:
        """Make a CA with this name and a random key, valid for this many days."""
        return cls._of(ec.generate_private_key(ec.SECP256R1()), name, days)

    @classmethod
    def of_secret(cls, secret: bytes, name: str, days: float) -> Authority:
        """Make a CA with this name, whose private key is derived from 48 secret bytes.

        Each call makes a new certificate for the same key, and each of these certificates verifies
        every signature of the key; the extra random bits follow FIPS 186-5, A.2.1.
        """
        assert len(secret) == _SECRET_BYTES, (
            "16 more bytes than the key has, so that the key is almost uniform"
        )
        number = 1 + int.from_bytes(secret, "big") % (_P256_ORDER - 1)
        return cls._of(ec.derive_private_key(number, ec.SECP256R1()), name, days)

    @classmethod
    def _of(cls, key: ec.EllipticCurvePrivateKey, name: str, days: float) -> Authority:
        subject = _name(name)
        ca = _builder(subject, subject, key.public_key(), key.public_key(), _after(days))
        ca = ca.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        ca = ca.add_extension(_usage(signs_certificates=True), critical=True)
        return cls(ca.sign(key, hashes.SHA256()).public_bytes(_PEM), _private_pem(key))

    def issue_for(self, hosts: Sequence[str], days: float) -> ServerCertificate:
        """Issue a certificate for names and IP addresses in text form; see `issue`."""
        return self.issue([_host(host) for host in hosts], days)

    def issue(self, names: Sequence[x509.GeneralName], days: float) -> ServerCertificate:
        """Make a server key and its certificate, which ends no later than the CA's certificate."""
        ca = x509.load_pem_x509_certificate(self.ca_pem)
        ca_key = serialization.load_pem_private_key(self.key_pem, None)
        assert isinstance(ca_key, ec.EllipticCurvePrivateKey), (
            "the CAs of vfl have elliptic-curve keys"
        )
        key = ec.generate_private_key(ec.SECP256R1())
        end = min(_after(days), ca.not_valid_after_utc)
        server = _builder(
            _name("vfl server"), ca.subject, key.public_key(), ca_key.public_key(), end
        )
        server = server.add_extension(
            x509.BasicConstraints(ca=False, path_length=None), critical=True
        )
        server = server.add_extension(_usage(signs_certificates=False), critical=True)
        server = server.add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
        server = server.add_extension(x509.SubjectAlternativeName(names), critical=False)
        pem = server.sign(ca_key, hashes.SHA256()).public_bytes(_PEM)
        return ServerCertificate(self.ca_pem, pem, _private_pem(key))


def session_certificate(hosts: Sequence[str], days: float = _SESSION_DAYS) -> ServerCertificate:
    """Make a server certificate, signed by a new CA whose private key is then deleted.

    Args:
        hosts: names and addresses of the server that the certificate contains.
        days: validity of the certificate in days.
    """
    return Authority.new("vfl session CA", days).issue_for(hosts, days)


def check_not_expired(path: Path) -> None:
    """Check that a certificate made by vfl has not expired; peers refuse an expired certificate.

    Raises:
        MissingDataError: the file does not exist.
        UserError: the certificate has expired, or the file is not a certificate.
    """
    ends, now = _certificates(path)[0].not_valid_after_utc, datetime.datetime.now(datetime.UTC)
    if ends < now:
        raise UserError(
            "a certificate has expired",
            where=str(path),
            got=f"valid until {ends:%Y-%m-%d %H:%M} UTC, and it is {now:%Y-%m-%d %H:%M} UTC",
            fix="vfl renew PROJECT; if ca.key exists, vfl up renews it automatically",
        )


def write_trial_certificates(
    folder: Path,
    hosts: Sequence[str],
    parties: Sequence[str],
    *,
    with_keys: bool = True,
    days: float = SERVER_DAYS,
) -> None:
    """Write ca.pem, ca.key, server.pem, server.key, and PARTY.key and PARTY.pub for each party.

    With `with_keys=False` the function makes no keys for parties, but still checks the parties'
    names. The server's certificate is valid for `days` days from now. The files of the CA and of
    the server are in PEM format. Each party gets a P-384 key pair in OpenSSH's file formats: the
    public key is for the command ``flwr supernode register``, the private key for
    ``flower-supernode --auth-supernode-private-key``. Only the owner can read the files (mode
    0600).

    Raises:
        UserError: a party's name cannot be part of a file name, or one of the files exists already.
    """
    for party in parties:
        if not _PARTY.fullmatch(party) or party in ("ca", "server"):
            raise UserError(
                "this party's name cannot be the name of its key files",
                got=repr(party),
                want="letters, digits, '_', '-' or '.', not 'ca' or 'server'",
            )
    authority = Authority.new("vfl CA", AUTHORITY_DAYS)
    server = authority.issue_for(hosts, days)
    contents = {
        "ca.pem": authority.ca_pem,
        "ca.key": authority.key_pem,
        "server.pem": server.cert_pem,
        "server.key": server.key_pem,
    }
    for party in parties if with_keys else ():
        contents[f"{party}.key"], contents[f"{party}.pub"] = node_key_pair()
    private_folder(folder)
    for name, content in contents.items():
        _write_new(folder / name, content)


def node_key_pair() -> tuple[bytes, bytes]:
    """Generate a P-384 key pair in OpenSSH's formats, which Flower reads.

    The result is the pair (private key, public key).
    """
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        _PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return private, public


def public_key_bytes(content: bytes) -> bytes | None:
    """Return the bytes of a SuperNode's key file that identify the key.

    The result is None if the file has no key. Comments at the end of a line, PEM encoding instead
    of OpenSSH's, and keys of other types on further lines do not change the result.
    """
    lines: list[bytes] = public_key_lines(content)
    for load, text in (
        *((serialization.load_ssh_public_key, line) for line in lines),
        (serialization.load_pem_public_key, content),
    ):
        try:
            key = load(text)
        except (ValueError, UnsupportedAlgorithm):
            continue
        if isinstance(key, ec.EllipticCurvePublicKey):
            return key.public_bytes(_PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return None


def public_key_lines(content: bytes) -> list[bytes]:
    r"""Return key type and key from each line of a file of OpenSSH public keys, without comments.

    >>> public_key_lines(b"ssh-ed25519 AAAA bank\n\n# nothing\n")
    [b'ssh-ed25519 AAAA']
    """
    words = [line.split() for line in content.splitlines()]
    return [b" ".join(line[:2]) for line in words if len(line) > 1 and _KEY_TYPE.fullmatch(line[0])]


def fingerprint(content: bytes) -> str:
    """Return the fingerprint of a file of public keys: 128 bits of their SHA-256, as hex.

    Comments and the order of lines do not change the fingerprint.

    Raises:
        UserError: the file contains no public key.

    >>> fingerprint(b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA bank")
    'b5dd a09c 26d3 11d1 9b73 d698 89ba 9a0d'
    """
    lines = public_key_lines(content)
    if not lines:
        raise UserError("this file contains no public key")
    digest = hashlib.sha256(b"\n".join(sorted(lines))).hexdigest()[: 2 * _FINGERPRINT_BYTES]
    return " ".join(digest[start : start + 4] for start in range(0, len(digest), 4))


def public_half(private: Path) -> bytes:
    """Return the public key of a private key file, as one line in OpenSSH's format.

    Raises:
        MissingDataError: the file does not exist.
        UserError: the file contains no private key, or its key has a passphrase.
    """
    content = _read(private)
    try:
        key = serialization.load_ssh_private_key(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise UserError("this is not a private key", where=str(private)) from None
    openssh = serialization.PublicFormat.OpenSSH
    return key.public_key().public_bytes(serialization.Encoding.OpenSSH, openssh)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Encode a private key as PEM, without encryption."""
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _after(days: float) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_after(days=0) - _CLOCK_SKEW)
        .not_valid_after(end)
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


def _write_new(path: Path, content: bytes) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
    except FileExistsError:
        raise UserError(
            "a certificate or key exists already and is never overwritten",
            where=str(path),
            fix="name another folder, or remove the existing files first",
        ) from None
    with os.fdopen(handle, "wb") as file:
        os.fchmod(handle, PRIVATE_FILE)
        file.write(content)


def days_left(path: Path) -> int:
    """Return the number of full days until the first certificate of a PEM file expires.

    The number is negative after the expiry.

    Raises:
        MissingDataError: the file does not exist.
        UserError: the file contains no certificate.
    """
    return time_left(path) // datetime.timedelta(days=1)


def time_left(path: Path) -> datetime.timedelta:
    """Return the time until the first certificate of a PEM file expires.

    The time is negative after the expiry.

    Raises:
        MissingDataError, UserError: see `days_left`.
    """
    return _certificates(path)[0].not_valid_after_utc - datetime.datetime.now(datetime.UTC)


def ends_soon(path: Path) -> bool:
    """Return whether less than a third of a certificate's lifetime is left, but at most 30 days.

    Raises:
        MissingDataError, UserError: see `days_left`.
    """
    found = _certificates(path)[0]
    whole = found.not_valid_after_utc - found.not_valid_before_utc - _CLOCK_SKEW
    return time_left(path) < min(datetime.timedelta(days=WARN_DAYS), whole / 3)


def expiry_warning(path: Path, fix: str) -> str | None:
    """Return a warning line if a certificate has expired or expires soon; otherwise None."""
    if not ends_soon(path):
        return None
    left = days_left(path)
    when = "has expired" if left < 0 else f"expires in {left} days" if left else "expires today"
    return f"warning: the certificate {path} {when}; {fix}"


def renew_when_due(folder: Path, days: float) -> bool:
    """Renew the server's certificate if `ends_soon` is true for it; return whether it was renewed.

    The function does nothing without ca.key, and while ca.pem contains two authorities: until
    every party has the certificate of the new CA, the server's certificate must remain signed by
    the old CA.

    Raises:
        MissingDataError, UserError: see `renew_server`.
    """
    due = (folder / "ca.key").exists() and ends_soon(folder / "server.pem")
    if not due or len(_certificates(folder / "ca.pem")) > 1:
        return False
    renew_server(folder, days)
    return True


def renew_server(folder: Path, days: float = SERVER_DAYS) -> int:
    """Replace server.pem and server.key by a new certificate for the same host names.

    The CA key in ca.key signs the new certificate.

    Afterwards ca.pem contains only the certificate of the CA that signed the new certificate.

    Returns:
        validity of the new certificate in days; it ends no later than the CA's certificate.

    Raises:
        MissingDataError: a file is missing; ca.key is required for signing.
        UserError: ca.key does not belong to ca.pem, or the CA has expired.
    """
    old = _certificates(folder / "server.pem")[0]
    names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    authority = _authority(folder)
    new = authority.issue(list(names), days)
    # The key is replaced first: if the program stops between the two files, the server finds that
    # they do not match, and reports an error when it starts.
    write_bytes(folder / "server.key", new.key_pem)
    write_bytes(folder / "server.pem", new.cert_pem)
    write_bytes(folder / "ca.pem", authority.ca_pem)
    return days_left(folder / "server.pem")


def replace_authority(folder: Path, days: int = AUTHORITY_DAYS) -> None:
    """Make a new CA: put its certificate first in ca.pem, and its private key into ca.key.

    Raises:
        MissingDataError: ca.pem does not exist.
    """
    known = b"".join(each.public_bytes(_PEM) for each in _certificates(folder / "ca.pem"))
    authority = Authority.new("vfl CA", days)
    write_bytes(folder / "ca.key", authority.key_pem)
    write_bytes(folder / "ca.pem", authority.ca_pem + known)


def renew_node_key(private: Path, public: Path | None = None) -> None:
    """Replace a SuperNode's key pair; the label party must then register the new public key."""
    private_key, public_key = node_key_pair()
    if public is not None:
        write_bytes(public, public_key)
    write_bytes(private, private_key)


def _authority(folder: Path) -> Authority:
    """Return the CA whose certificate in ca.pem belongs to the key in ca.key."""
    path = folder / "ca.key"
    key_pem = _read(path)
    try:
        public = serialization.load_pem_private_key(key_pem, None).public_key()
    except (ValueError, TypeError):
        raise UserError("this is not a private key", where=str(path)) from None
    for each in _certificates(folder / "ca.pem"):
        if each.public_key() == public:
            if each.not_valid_after_utc <= datetime.datetime.now(datetime.UTC):
                raise UserError(
                    "the certificate authority has expired", where=str(folder), fix=_NEW_CA
                )
            return Authority(each.public_bytes(_PEM), key_pem)
    raise UserError("ca.key belongs to no certificate of ca.pem", where=str(folder), fix=_NEW_CA)


def _certificates(path: Path) -> list[x509.Certificate]:
    content = _read(path)  # not in the block below: its error is a ValueError too
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError:
        raise UserError("this is not a PEM certificate", where=str(path)) from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise MissingDataError(
            "a certificate or key is missing", where=str(path), fix=_SOURCES.get(path.name)
        ) from None
