"""A party's files: who can read what, which keys and certificates are there and until when."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import (
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)

from vfl.doctor.check import Check

_SOON = timedelta(days=14)


def data_file(path: Path) -> Check:
    """The party's table."""
    if not path.is_file():
        return Check("data", "FAIL", f"there is no {path}", "see [data] source in party.toml")
    if not os.access(path, os.R_OK):
        return Check("data", "FAIL", f"{path} cannot be read", f"chmod u+r {path}")
    return Check("data", "OK", f"{path}, {path.stat().st_size / 1e6:.1f} MB")


def store(folder: Path) -> Check:
    """Where weights and run records go."""
    existing = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        return Check("store", "FAIL", f"{existing} cannot be written", f"chmod u+rwx {existing}")
    return Check("store", "OK", f"{folder}" + ("" if folder.exists() else ", not made yet"))


def private(name: str, path: Path, missing: str) -> Check:
    """A file that only its owner may read.

    Args:
        name: what it is.
        path: the file.
        missing: what to do without it; an empty text if it is made when it is needed.
    """
    if not path.exists():
        if not missing:
            return Check(name, "OK", "not made yet")
        return Check(name, "FAIL", f"there is no {path}", missing)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        found = f"{path} has mode {mode:04o}: others on this machine can reach it"
        return Check(name, "FAIL", found, f"chmod 600 {path}")
    return Check(name, "OK", f"{path}, mode {mode:04o}")


def certificate(name: str, path: Path, hosts: Sequence[str] = ()) -> Check:
    """A certificate: readable, valid today, and made for every host it is reached by."""
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as problem:
        cure = "copy it from the project folder that vfl init wrote"
        return Check(name, "FAIL", f"{path}: {problem.strerror}", cure)
    except ValueError:
        return Check(name, "FAIL", f"{path} is no certificate", "it begins with -----BEGIN")
    now, last = datetime.now(UTC), found.not_valid_after_utc
    until = f"{path}, valid until {last:%Y-%m-%d}"
    if now > last:
        return Check(name, "FAIL", f"{until}: expired", "make a new one, and copy its ca.pem")
    if now < found.not_valid_before_utc:
        first = f"{found.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        return Check(name, "FAIL", f"{path}, valid from {first} on", "is this clock right?")
    absent = sorted(set(hosts) - set(_names(found)))
    if absent:
        cure = "make one with these names, or use a name it has"
        return Check(name, "FAIL", f"{until}, but not for {', '.join(absent)}", cure)
    if last - now < _SOON:
        return Check(name, "WARN", until, "it ends soon: make a new one, and copy its ca.pem")
    return Check(name, "OK", until)


def signed_by(certificate: Path, authority: Path) -> Check:
    """Whether the authority that parties trust has signed the server's certificate."""
    try:
        server = x509.load_pem_x509_certificate(certificate.read_bytes())
        server.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.read_bytes()))
    except OSError as problem:
        return Check("signature", "FAIL", f"{problem.filename}: {problem.strerror}")
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as problem:
        found = f"{certificate.name} is not signed by {authority.name} ({type(problem).__name__})"
        return Check("signature", "FAIL", found, "both come from one vfl init, or one authority")
    return Check("signature", "OK", f"{authority.name} signed {certificate.name}")


def node_key(path: Path) -> Check:
    """A SuperNode's private key, in the form Flower reads."""
    there = private("node key", path, "copy it from the project folder that vfl init wrote")
    if there.state == "FAIL":
        return there
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError, OSError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, EllipticCurvePrivateKey):
        cure = "ssh-keygen -t ecdsa -b 384 makes one; give the label party its .pub"
        return Check("node key", "FAIL", f"{path} is no OpenSSH ECDSA private key", cure)
    return there


def public_key(party: str, path: Path) -> Check:
    """A feature party's public key at the label party, in the form Flower registers."""
    name = f"key of {party}"
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except FileNotFoundError:
        cure = f"ask {party} for its public key and save it there"
        return Check(name, "FAIL", f"there is no {path}", cure)
    except (ValueError, OSError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, EllipticCurvePublicKey):
        return Check(name, "FAIL", f"{path} is no OpenSSH ECDSA public key", "one line ecdsa-sha2-")
    return Check(name, "OK", str(path))


def _names(found: x509.Certificate) -> list[str]:
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return [*names.get_values_for_type(x509.DNSName), *addresses]
