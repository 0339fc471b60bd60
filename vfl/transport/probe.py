"""One careful look at an address: does it answer, with which certificate, and what is its time?"""

from __future__ import annotations

import errno
import http.client
import socket
import ssl
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from vfl.errors import AuthenticationError, LostPeerError, PeerError, ProtocolError, UserError


@dataclass(frozen=True, slots=True)
class Probe:
    """What one address answered.

    Attributes:
        connect_s: until the TCP connection stood.
        clock_s: how far the peer's clock is ahead of ours, to a second or so; None if the answer
            had no ``Date``.
    """

    connect_s: float
    clock_s: float | None


def probe_https(host: str, port: int, ca_file: str, timeout_s: float = 5.0) -> Probe:
    """Connect, check the certificate against a CA and a host name, and ask for the time.

    Args:
        host: name or address, as the certificate must have it.
        port: of a server that speaks HTTPS, as a SuperLink does.
        ca_file: PEM file of the authority to trust, and no other.
        timeout_s: for each wait.

    Raises:
        AuthenticationError: another authority, an expired certificate or another name.
        ProtocolError: somebody answers, but not with TLS.
        LostPeerError: nobody answers.
    """
    where = f"{host}:{port}"
    try:
        return _probe(host, port, ca_file, timeout_s)
    except ssl.SSLCertVerificationError as problem:
        raise AuthenticationError(
            "its certificate is not trusted",
            where=where,
            got=problem.verify_message,
            fix="get ca.pem from the label party anew; its certificate must have this host's name",
        ) from None
    except ssl.SSLError as problem:
        raise ProtocolError(
            "it answers, but not with TLS",
            where=where,
            got=problem.reason,
            fix="is this the SuperLink's port?",
        ) from None
    except OSError as problem:
        raise LostPeerError(
            "it cannot be reached",
            where=where,
            got=problem.strerror or type(problem).__name__,
            fix="does vfl superlink run there? is the port open in every firewall between?",
        ) from None


def check_server(name: str, address: str, ca_file: Path) -> None:
    """`probe_https` for somebody who wants to know nothing but that it answers and is trusted.

    Args:
        name: what messages call it.
        address: host:port.
        ca_file: PEM file of the authority to trust.

    Raises:
        PeerError: as `probe_https`, with the name.
    """
    host, port = split_address(address)
    try:
        probe_https(host, port, str(ca_file))
    except PeerError as problem:
        told = {"where": problem.where, "got": problem.got, "fix": problem.fix}
        raise type(problem)(f"{name}: {problem.what}", **told) from None


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``; an IPv6 host may stand in brackets.

    Raises:
        UserError: the text is of another form.
    """
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit() and 0 < int(port) < 65536):
        raise UserError("this is not the address of a SuperLink", got=address, want="host:port")
    return host.strip("[]"), int(port)


def _probe(host: str, port: int, ca_file: str, timeout_s: float) -> Probe:
    started = time.monotonic()
    with socket.create_connection((host, port), timeout=timeout_s):
        connect_s = time.monotonic() - started
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca_file)
    connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
    try:
        connection.connect()
        return Probe(connect_s, _clock(connection))
    finally:
        connection.close()


def port_is_free(host: str, port: int) -> bool:
    """Whether a service could listen there; True for addresses this machine does not have."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as problem:
            return problem.errno != errno.EADDRINUSE
    return True


def _clock(connection: http.client.HTTPSConnection) -> float | None:
    """Seconds the peer is ahead, by the ``Date`` of its answer to a HEAD; None without one."""
    try:
        connection.request("HEAD", "/")
        answer = connection.getresponse()
        told = parsedate_to_datetime(answer.headers["Date"])
    except (http.client.HTTPException, OSError, TypeError, ValueError):
        return None
    return (told - datetime.now(UTC)).total_seconds()
