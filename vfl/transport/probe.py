"""One careful look at an address: does it answer, with which certificate, and what is its time?"""

from __future__ import annotations

import errno
import http.client
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from vfl.core.address import Address, parse_address
from vfl.core.errors import AuthenticationError, LostPeerError, ProtocolError
from vfl.transport.stream import family_of

_PATIENCE_S = 5.0
_ROUND_TRIPS = 5


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


def check_server(name: str, address: str, ca_pem: str) -> None:
    """Connect and make the TLS handshake, before something that explains less tries to.

    Args:
        name: what messages call the server.
        address: host:port.
        ca_pem: the authority that must have signed its certificate, and no other.

    Raises:
        AuthenticationError: its certificate has expired, is for another host, or is not signed
            by this authority.
        ProtocolError: somebody answers, but not with TLS.
        LostPeerError: nobody answers.
    """
    with _explained(name, address):
        _connect(parse_address(address), ca_pem).close()


def probe_https(name: str, address: Address, ca_pem: str) -> Probe:
    """`check_server`, how long a connection takes, and what time it is there.

    Raises:
        PeerError: as `check_server`.
    """
    with _explained(name, str(address)):
        started = time.monotonic()
        with socket.create_connection(address, timeout=_PATIENCE_S):
            connect_s = time.monotonic() - started
        connection = _connect(address, ca_pem)
        try:
            return Probe(connect_s, _clock(connection))
        finally:
            connection.close()


def round_trip_s(address: str, timeout_s: float = 2.0) -> float:
    """How long a packet takes there and back: the fastest of a few TCP connections.

    Args:
        address: host:port of something that listens; nothing is sent to it.
        timeout_s: for all of them together.

    Raises:
        LostPeerError: nobody answered in time.
    """
    deadline = time.monotonic() + timeout_s
    trips: list[float] = []
    try:
        for _ in range(_ROUND_TRIPS):
            started = time.monotonic()
            left_s = deadline - started
            if trips and left_s < trips[0]:
                break
            socket.create_connection(parse_address(address), max(left_s, 0.001)).close()
            trips.append(time.monotonic() - started)
    except (OSError, ValueError, OverflowError) as error:
        raise LostPeerError(
            "the round trip cannot be measured",
            where=address,
            got=type(error).__name__,
            want=f"a TCP connection within {timeout_s:g} s",
            fix="is the SuperLink running, and does the firewall let this machine in?",
        ) from error
    return min(trips)


def port_is_free(host: str, port: int) -> bool:
    """Whether a service could listen there; True for addresses this machine does not have."""
    try:
        family = family_of(host)
    except OSError:
        return True
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as problem:
            return problem.errno != errno.EADDRINUSE
    return True


def _connect(address: Address, ca_pem: str) -> http.client.HTTPSConnection:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=ca_pem)
    connection = http.client.HTTPSConnection(*address, timeout=_PATIENCE_S, context=context)
    connection.connect()
    return connection


@contextmanager
def _explained(name: str, where: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLCertVerificationError as problem:
        raise AuthenticationError(
            f"the certificate of {name} is not accepted",
            where=where,
            got=problem.verify_message,
            want="one that is valid today, for this host, signed by the authority in ca.pem",
            fix="see that the clocks agree, get ca.pem anew, or renew it: vfl renew PROJECT",
        ) from None
    except ssl.SSLError as problem:
        raise ProtocolError(
            f"{name} answers, but not with TLS",
            where=where,
            got=problem.reason,
            fix="is this the SuperLink's port?",
        ) from None
    except OSError as problem:
        raise LostPeerError(
            f"{name} cannot be reached",
            where=where,
            got=problem.strerror or type(problem).__name__,
            fix="see that it runs, and that the port is open in every firewall between",
        ) from None


def _clock(connection: http.client.HTTPSConnection) -> float | None:
    """Seconds the peer is ahead, by the ``Date`` of its answer to a HEAD; None without one."""
    try:
        connection.request("HEAD", "/")
        answer = connection.getresponse()
        date = parsedate_to_datetime(answer.headers["Date"])
    except (http.client.HTTPException, OSError, TypeError, ValueError):
        return None
    return (date - datetime.now(UTC)).total_seconds()
