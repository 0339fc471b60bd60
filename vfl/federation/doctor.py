"""Checks of a party's machine, files and network for ``vfl doctor``; the checks change nothing.

The path that the user gives decides which checks run: checks of the machine only, checks of a label
party's project, or checks of another party's folder. The versions of packages are read without
importing the packages, and only the addresses in the user's own files are contacted.
"""

from __future__ import annotations

import os
import platform
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import (
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from packaging.requirements import Requirement  # flwr depends on packaging
from packaging.specifiers import SpecifierSet

from vfl.config import PartyFile, read_party_file
from vfl.core.address import Address, parse_address
from vfl.core.errors import PeerError, RunFolderError
from vfl.core.processes import usable_cores
from vfl.core.sources import is_database
from vfl.core.storage import existing_folder
from vfl.core.version import VERSION
from vfl.federation.project import LabelFolder, node_parties
from vfl.transport.certificates import ends_soon, fingerprint
from vfl.transport.probe import (
    AHEAD_TOLERANCE_S,
    CLOCK_TOLERANCE_S,
    DATE_ERROR_S,
    Probe,
    port_is_free,
    probe_https,
)
from vfl.transport.router import router_port

_LITTLE_ROOM_BYTES = 1_000_000_000
_NO_ROOM_BYTES = 50_000_000
_CLOCK_WARNING_S = 30
#: The doctor warns if earlier sessions have spent this fraction of `consent.max_epsilon`.
_NEARLY_SPENT = 0.8

State = Literal["OK", "WARN", "FAIL"]


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check.

    Attributes:
        name: name of the check, one or two words.
        state: OK, WARN if trouble is possible later, or FAIL if vfl will not work.
        found: text about the check's result; it contains names, counts and paths only.
        fix: command or change that solves the problem; empty if the check found no problem.
    """

    name: str
    state: State
    found: str
    fix: str = ""


def examine(path: Path | None = None) -> Iterator[Check]:
    """Run the checks that fit a path; yield the result of each check.

    Args:
        path: a project or its label folder, a party's own file, or None to check the machine only.

    Raises:
        ConfigError, RunFolderError: the path is neither a project, a label folder nor a party's
            file.
    """
    if path is None:
        yield from _machine(Path())
    elif path.is_dir():
        yield from _label_party(LabelFolder.find(path))
    elif (path.resolve().parent / "app" / "experiment.toml").exists():
        yield from _label_party(LabelFolder(path.resolve().parent))
    else:
        yield from _feature_party(read_party_file(path))


def _machine(folder: Path) -> Iterator[Check]:
    yield from versions()
    yield cores()
    yield room(folder)


def _own_files(party: PartyFile) -> Iterator[Check]:
    if party.role == "data":
        yield data_file(party.source_path)
    yield store(party.store_path)
    yield private("secret", party.store_path / "secret", missing="")
    if party.consent.max_epsilon is not None:
        yield epsilon(party)


def _feature_party(party: PartyFile) -> Iterator[Check]:
    ca = party.beside(party.node.ca)
    yield from _machine(party.store_path)
    yield from _own_files(party)
    trusted = certificate("ca", ca)
    yield trusted
    yield node_key(party.beside(party.node.key))
    yield private("identity key", party.beside(party.identity.key), missing="")
    if trusted.state != "FAIL":
        yield from superlink_from_afar(party.node.superlink, ca)


def _label_party(label: LabelFolder) -> Iterator[Check]:
    experiment, party = label.experiment(), label.party()
    federation = experiment.federation
    host, _ = parse_address(federation.superlink)
    ca, server = label.certificates / "ca.pem", label.certificates / "server.pem"
    yield from _machine(party.store_path)
    yield from _own_files(party)
    yield certificate("ca", ca)
    yield certificate("certificate", server, [host])
    yield signed_by(server, ca)
    yield private(
        "server key",
        label.certificates / "server.key",
        "vfl init makes this key and its certificate",
    )
    for name in node_parties(experiment):
        accepted = label.accepted_keys().get(name, "")
        yield public_key(name, label.keys / f"{name}.pub", accepted)
    yield from superlink_here(federation.superlink, federation.bind_host, ca)
    at = federation.bind_host or federation.stream_host
    yield stream_port(at, federation.stream_port, label.streams)


# --- the machine ---------------------------------------------------------------------------------


def versions() -> Iterator[Check]:
    """Report vfl's version; compare Python and every required package with the requirements."""
    try:
        about = metadata.metadata("vfl")
    except metadata.PackageNotFoundError:
        found = f"{VERSION}, run from a folder: its requirements are not recorded"
        yield Check("vfl", "WARN", found, "pip install it")
        return
    yield Check("vfl", "OK", VERSION)
    python = platform.python_version()
    wanted = about["Requires-Python"] or ""
    fits = SpecifierSet(wanted).contains(python, prereleases=True)
    yield Check("python", "OK", python) if fits else _wrong("python", python, wanted)
    for line in metadata.requires("vfl") or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield _package(requirement)


def _package(requirement: Requirement) -> Check:
    name, wanted = requirement.name, str(requirement.specifier)
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        return _wrong(name, "not installed", wanted)
    if requirement.specifier.contains(installed, prereleases=True):
        return Check(name, "OK", installed)
    upper = [bound for bound in requirement.specifier if bound.operator in ("<", "<=")]
    if upper and all(
        bound in upper or bound.contains(installed, prereleases=True)
        for bound in requirement.specifier
    ):
        found = f"{installed}, newer than the version that vfl was tested with ({wanted})"
        return Check(name, "WARN", found, f"pip install '{name}{wanted}', if something fails")
    return _wrong(name, installed, wanted)


def _wrong(name: str, found: str, wanted: str) -> Check:
    cure = "use a Python of this version" if name == "python" else f"pip install '{name}{wanted}'"
    return Check(name, "FAIL", f"{found}, but vfl needs {wanted or 'it'}", cure)


def cores() -> Check:
    """Check that torch has no more threads than the machine has cores."""
    count = usable_cores()
    threads = os.environ.get("OMP_NUM_THREADS")
    found = f"{count} cores, OMP_NUM_THREADS {threads or 'not set (vfl uses one thread)'}"
    if threads and threads.isdigit() and int(threads) > count:
        return Check("cores", "WARN", found, "more threads than cores slow each other down")
    return Check("cores", "OK", found)


def room(folder: Path) -> Check:
    """Check the free disk space of a folder, or of its nearest existing parent."""
    free = shutil.disk_usage(existing_folder(folder)).free
    found = f"{free / 1e9:.1f} GB free at {folder}"
    if free < _NO_ROOM_BYTES:
        return Check(
            "disk", "FAIL", found, "free some disk space; otherwise vfl cannot write checkpoints"
        )
    if free < _LITTLE_ROOM_BYTES:
        return Check(
            "disk", "WARN", found, "free some disk space; checkpoints and run folders may need more"
        )
    return Check("disk", "OK", found)


# --- files ---------------------------------------------------------------------------------------


def data_file(source: Path | str) -> Check:
    """Check that the file of the party's table can be read."""
    path = Path(source)
    # the address of a database may contain a password, so this check does not use the address
    if is_database(source):
        return Check("data", "OK", "a database; vfl check party.toml queries it")
    if not path.is_file():
        return Check("data", "FAIL", f"there is no {path}", "see [data] source in party.toml")
    if not os.access(path, os.R_OK):
        return Check("data", "FAIL", f"{path} cannot be read", f"chmod u+r {path}")
    return Check("data", "OK", f"{path}, {path.stat().st_size / 1e6:.1f} MB")


def store(folder: Path) -> Check:
    """Check that vfl can write to the folder that stores the party's weights and run records."""
    existing = existing_folder(folder)
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        return Check("store", "FAIL", f"{existing} cannot be written", f"chmod u+rwx {existing}")
    return Check("store", "OK", f"{folder}" + ("" if folder.exists() else ", not made yet"))


def private(name: str, path: Path, missing: str) -> Check:
    """Check that only the owner of a file may access it.

    Args:
        name: name of the check.
        path: the file.
        missing: remedy to print if the file does not exist; empty if vfl makes the file when it is
            needed.
    """
    if not path.exists():
        if not missing:
            return Check(name, "OK", "not made yet")
        return Check(name, "FAIL", f"there is no {path}", missing)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        found = f"{path} has mode {mode:04o}: other users of this machine can access it"
        return Check(name, "FAIL", found, f"chmod 600 {path}")
    return Check(name, "OK", f"{path}, mode {mode:04o}")


def certificate(name: str, path: Path, hosts: Sequence[str] = ()) -> Check:
    """Check that a certificate is readable, valid today, and issued for all these host names."""
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as problem:
        cure = "copy ca.pem from the label party; restore server.pem from a backup"
        return Check(name, "FAIL", f"{path}: {problem.strerror}", cure)
    except ValueError:
        return Check(name, "FAIL", f"{path} is no certificate", "it begins with -----BEGIN")
    now, last = datetime.now(UTC), found.not_valid_after_utc
    until = f"{path}, valid until {last:%Y-%m-%d}"
    if now > last:
        cure = "vfl renew PROJECT; for ca.pem, vfl renew PROJECT --authority"
        return Check(name, "FAIL", f"{until}: expired, today is {now:%Y-%m-%d}", cure)
    if now < found.not_valid_before_utc:
        first = f"{found.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        return Check(name, "FAIL", f"{path}, valid from {first} on", "is this clock right?")
    absent = sorted(set(hosts) - set(_names(found)))
    if absent:
        cure = "make a certificate with these names, or use a name that this certificate has"
        return Check(name, "FAIL", f"{until}, but not for {', '.join(absent)}", cure)
    if ends_soon(path):
        cure = "vfl up renews server.pem if ca.key exists; vfl renew --authority renews ca.pem"
        return Check(name, "WARN", f"{until}: it ends soon", cure)
    return Check(name, "OK", until)


def signed_by(certificate: Path, authority: Path) -> Check:
    """Check that the project's certificate authority has signed the SuperLink's certificate."""
    try:
        server = x509.load_pem_x509_certificate(certificate.read_bytes())
        server.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.read_bytes()))
    except OSError as problem:
        return Check("signature", "FAIL", f"{problem.filename}: {problem.strerror}")
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as problem:
        found = f"{certificate.name} is not signed by {authority.name} ({type(problem).__name__})"
        return Check(
            "signature",
            "FAIL",
            found,
            "one authority, made by one vfl init, must have issued both certificates",
        )
    return Check("signature", "OK", f"{authority.name} signed {certificate.name}")


def node_key(path: Path) -> Check:
    """Check that a SuperNode's private key has the format that Flower needs."""
    there = private("node key", path, f"vfl join {path.parent} makes this key")
    if there.state == "FAIL":
        return there
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError, OSError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, EllipticCurvePrivateKey):
        cure = "vfl renew party.toml makes a new key, which the label party must accept"
        return Check("node key", "FAIL", f"{path} is no OpenSSH ECDSA private key", cure)
    return there


def public_key(party: str, path: Path, accepted: str) -> Check:
    """Check that a party's public key has the right format and is the key that was accepted.

    Args:
        party: name of the party.
        path: the file.
        accepted: fingerprint of the key that the label party accepted; empty if it accepted no key.
    """
    name = f"key of {party}"
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except FileNotFoundError:
        cure = f"ask {party} for {party}.pub, which vfl join writes there, and save it here"
        return Check(name, "FAIL", f"there is no {path}", cure)
    except (ValueError, OSError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, EllipticCurvePublicKey):
        return Check(name, "FAIL", f"{path} is no OpenSSH ECDSA public key", "one line ecdsa-sha2-")
    if fingerprint(path.read_bytes()) != accepted:
        cure = f"vfl party accept {path} PROJECT, as {party} reads its fingerprint aloud"
        return Check(name, "WARN", f"{path} is not a key that this party has accepted", cure)
    return Check(name, "OK", str(path))


def _names(found: x509.Certificate) -> list[str]:
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return [*names.get_values_for_type(x509.DNSName), *addresses]


def epsilon(party: PartyFile) -> Check:
    """Check how much of the privacy budget `consent.max_epsilon` earlier sessions have spent."""
    from vfl.federation.monitor import Epsilon  # imported here because the ledger imports torch

    try:
        known = Epsilon.of(party)
    except RunFolderError as problem:
        return Check("epsilon", "FAIL", f"{problem.what}: {problem.where}", problem.fix or "")
    assert known.most is not None, "asked above"
    found = f"{known.spent:.4g} of {known.most:g} spent"
    if known.spent >= _NEARLY_SPENT * known.most:
        cure = (
            "vfl refuses sessions that would spend more: vfl sessions party.toml lists the sessions"
        )
        return Check("epsilon", "WARN", found, cure)
    return Check("epsilon", "OK", found)


# --- the network ---------------------------------------------------------------------------------


def superlink_from_afar(address: str, ca: Path) -> Iterator[Check]:
    """Check a feature party's connection to the SuperLink: TCP, the project's CA and the clocks."""
    try:
        answer = probe_https("the SuperLink", parse_address(address), ca.read_text())
    except PeerError as problem:
        found = f"{address}: {problem.what} ({problem.got})"
        yield Check("superlink", "FAIL", found, problem.fix or "")
        yield Check("clock", "WARN", "not measured: the SuperLink did not answer")
    else:
        yield Check("superlink", "OK", f"{address} answers in {answer.connect_s * 1e3:.1f} ms, TLS")
        yield _clock(answer)


def superlink_here(address: str, bind_host: str, ca: Path) -> Iterator[Check]:
    """Check that the SuperLink's port at the label party is free or used by vfl's SuperLink."""
    host, port = parse_address(address)
    if port_is_free(bind_host or host, port):
        yield Check("superlink port", "OK", f"{port} is free; vfl up will listen there")
        return
    local = "127.0.0.1" if bind_host in ("0.0.0.0", "::") else host
    try:
        answer = probe_https("the SuperLink", Address(local, port), ca.read_text())
    except PeerError:
        found = f"{port} is used by a program that lacks the project's certificate"
        yield Check("superlink port", "FAIL", found, "end that program, or change superlink's port")
        return
    yield Check("superlink port", "OK", f"this project's SuperLink listens on {port}")
    yield _clock(answer)


def stream_port(host: str, port: int, router: Path) -> Check:
    """Check the label party's port for the streams (TCP connections) of sessions."""
    if port == 0:
        found = "0: the operating system chooses a free port at each start"
        cure = "set federation.stream_port if a firewall must allow it"
        return Check("stream port", "OK", found, cure)
    if port_is_free(host, port):
        return Check("stream port", "OK", f"{port} is free; vfl up will listen there")
    if router_port(router, host, port) == port:
        return Check(
            "stream port", "OK", f"this project's SuperLink listens on {port} for all sessions"
        )
    found = f"{port} is used by another program"
    return Check("stream port", "FAIL", found, "end that program, or change federation.stream_port")


def _clock(answer: Probe) -> Check:
    if answer.clock_s is None:
        return Check("clock", "WARN", "not measured: the peer's answer had no date")
    way = "behind" if answer.clock_s > 0 else "ahead of"
    found = f"{abs(answer.clock_s):.0f} s {way} the peer's clock"
    refused = f"{AHEAD_TOLERANCE_S} s ahead of the SuperLink's, or {CLOCK_TOLERANCE_S} s behind it"
    if not -AHEAD_TOLERANCE_S - DATE_ERROR_S <= answer.clock_s <= CLOCK_TOLERANCE_S:
        cure = f"set the clocks: Flower refuses a node whose clock is {refused}"
        return Check("clock", "FAIL", found, cure)
    if not -DATE_ERROR_S <= answer.clock_s <= _CLOCK_WARNING_S:
        cure = f"set the clocks before a node's clock is {refused}"
        return Check("clock", "WARN", found, cure)
    return Check("clock", "OK", found)
