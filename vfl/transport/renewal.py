"""Certificates and keys that end: how long they last, and new ones in their place.

The folder is the one `write_trial_certificates` wrote. A new server certificate under the same CA
needs nothing from anybody. A new CA goes in two steps, so that no party is cut off: first ca.pem
holds the new CA and the old one and is sent to everybody, then the server's certificate changes.
"""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from vfl.errors import MissingDataError, UserError
from vfl.storage import write_bytes
from vfl.transport.certificates import AUTHORITY_DAYS, SERVER_DAYS, Authority, node_key_pair

#: From so many days before its end on, a certificate is spoken of.
WARN_DAYS = 30
_NEW_CA = "make a new one with: vfl renew PROJECT --authority"
_PEM = serialization.Encoding.PEM


def days_left(path: Path) -> int:
    """Whole days until the first certificate of a PEM file ends; negative once it has.

    Raises:
        MissingDataError: there is no such file.
        UserError: it holds no certificate.
    """
    end = _certificates(path)[0].not_valid_after_utc
    return (end - datetime.datetime.now(datetime.UTC)) // datetime.timedelta(days=1)


def expiry_warning(path: Path, fix: str) -> str | None:
    """One line about a certificate that has ended or soon will; None while there is time."""
    left = days_left(path)
    if left >= WARN_DAYS:
        return None
    when = "has expired" if left < 0 else f"expires in {left} days"
    return f"warning: the certificate {path} {when}; {fix}"


def renew_server(folder: Path, days: int = SERVER_DAYS) -> int:
    """Replace server.pem and server.key: the same names, the CA whose key is ca.key.

    From then on ca.pem holds that CA alone.

    Returns:
        How many days the new certificate is good for, which the CA's own end may shorten.

    Raises:
        MissingDataError: a file is missing; without ca.key nothing can be signed.
        UserError: ca.key does not belong to ca.pem, or that CA has expired.
    """
    old = _certificates(folder / "server.pem")[0]
    names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    authority = _authority(folder)
    new = authority.issue(list(names), days)
    # The key first: with one file old and one new the server does not start, and says so.
    write_bytes(folder / "server.key", new.key_pem)
    write_bytes(folder / "server.pem", new.cert_pem)
    write_bytes(folder / "ca.pem", authority.ca_pem)
    return days_left(folder / "server.pem")


def replace_authority(folder: Path, days: int = AUTHORITY_DAYS) -> None:
    """Put a new CA into ca.pem, before the old ones, and its key into ca.key.

    Raises:
        MissingDataError: there is no ca.pem.
    """
    known = b"".join(each.public_bytes(_PEM) for each in _certificates(folder / "ca.pem"))
    authority = Authority.new("vfl CA", days)
    write_bytes(folder / "ca.key", authority.key_pem)
    write_bytes(folder / "ca.pem", authority.ca_pem + known)


def renew_node_key(private: Path, public: Path) -> None:
    """Replace a SuperNode's key; its public part is for the label party to register."""
    private_key, public_key = node_key_pair()
    write_bytes(public, public_key)
    write_bytes(private, private_key)


def _authority(folder: Path) -> Authority:
    """The CA in ca.pem that ca.key belongs to."""
    path = folder / "ca.key"
    key_pem = _read(path, "bring the key of the authority back, or make a new one with --authority")
    try:
        public = serialization.load_pem_private_key(key_pem, None).public_key()
    except (ValueError, TypeError):
        raise UserError("this is no private key", where=str(path)) from None
    for each in _certificates(folder / "ca.pem"):
        if each.public_key() == public:
            if each.not_valid_after_utc <= datetime.datetime.now(datetime.UTC):
                raise UserError("the authority has expired", where=str(folder), fix=_NEW_CA)
            return Authority(each.public_bytes(_PEM), key_pem)
    raise UserError("ca.key belongs to no certificate of ca.pem", where=str(folder), fix=_NEW_CA)


def _certificates(path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(_read(path))
    except ValueError:
        raise UserError("this is no PEM certificate", where=str(path)) from None


def _read(path: Path, fix: str | None = None) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise MissingDataError(
            "a certificate or key is missing", where=str(path), fix=fix
        ) from None
