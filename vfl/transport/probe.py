"""One careful look at an address: does it answer, with which certificate, and what is its time?"""

from __future__ import annotations

import errno
import http.client
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from vfl.core.address import Address, parse_address
from vfl.core.errors import (
    AuthenticationError,
    ClockError,
    LostPeerError,
    ProtocolError,
    VFLError,
)
from vfl.transport.proxies import connect
from vfl.transport.stream import family_of

#: Flower refuses the signature of a node whose clock differs by more (TIMESTAMP_TOLERANCE).
CLOCK_TOLERANCE_S = 300
_TIME = "%Y-%m-%d %H:%M:%S UTC"
#: OpenSSL's codes of a certificate that is not valid yet, or no more.
_OUT_OF_TIME = (9, 10)
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


def check_server(name: str, address: str, ca_pem: str, *, clock: bool = False) -> None:
    """Connect and make the TLS handshake, before something that explains less tries to.

    Args:
        name: what messages call the server.
        address: host:port.
        ca_pem: the authority that must have signed its certificate, and no other.
        clock: whether it is asked for its time as well.

    Raises:
        ClockError: its clock and ours are too far apart, or that is why its certificate fails.
        AuthenticationError: its certificate has expired, is for another host, or is not signed
            by this authority.
        ProtocolError: somebody answers, but not with TLS.
        LostPeerError: nobody answers.
    """
    where = parse_address(address)
    with _explained(name, where), closing(_connect(where, ca_pem)) as connection:
        if clock and (theirs := _time_at(connection)):
            check_clocks(name, address, datetime.now(UTC), theirs)


def probe_https(name: str, address: Address, ca_pem: str) -> Probe:
    """`check_server`, how long a connection takes, and what time it is there.

    Raises:
        PeerError: as `check_server`.
    """
    with _explained(name, address):
        started = time.monotonic()
        with connect(*address, _PATIENCE_S):
            connect_s = time.monotonic() - started
        connection = _connect(address, ca_pem)
        try:
            theirs = _time_at(connection)
            ahead = None if theirs is None else (theirs - datetime.now(UTC)).total_seconds()
            return Probe(connect_s, ahead)
        finally:
            connection.close()


def round_trip_s(address: str, timeout_s: float = 2.0) -> float:
    """How long a packet takes there and back: the fastest of a few TCP connections.

    A proxy on the way opens a connection of its own behind ours, which counts as well.

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
            connect(*parse_address(address), max(left_s, 0.001)).close()
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


def check_clocks(name: str, where: str, ours: datetime, theirs: datetime) -> None:
    """Refuse two clocks that are too far apart for signed times and certificates.

    Raises:
        ClockError: with both clocks.
    """
    if abs((ours - theirs).total_seconds()) <= CLOCK_TOLERANCE_S:
        return
    raise ClockError(
        f"the clocks of this machine and of {name} differ",
        where=where,
        got=f"{ours:{_TIME}} here, {theirs:{_TIME}} there",
        want=f"at most {CLOCK_TOLERANCE_S} s apart",
        fix="set the clock that is wrong, by NTP for example; vfl doctor party.toml shows the "
        "difference",
    )


def _connect(address: Address, ca_pem: str | None) -> http.client.HTTPSConnection:
    """A connection to a server; without an authority to anybody, to ask and to rely on nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca_pem is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        context.load_verify_locations(cadata=ca_pem)
    connection = http.client.HTTPSConnection(*address)
    plain = connect(*address, _PATIENCE_S)
    try:
        connection.sock = context.wrap_socket(plain, server_hostname=address.host)
    except BaseException:
        plain.close()
        raise
    return connection


@contextmanager
def _explained(name: str, address: Address) -> Iterator[None]:
    where = str(address)
    try:
        yield
    except ssl.SSLCertVerificationError as problem:
        if problem.verify_code in _OUT_OF_TIME and (theirs := _unproven_time(address)):
            check_clocks(name, where, datetime.now(UTC), theirs)
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


def _time_at(connection: http.client.HTTPSConnection) -> datetime | None:
    """The peer's time, to a second, by the ``Date`` of its answer to a HEAD; None without one."""
    try:
        connection.request("HEAD", "/")
        answer = connection.getresponse()
        return parsedate_to_datetime(answer.headers["Date"]).astimezone(UTC)
    except (http.client.HTTPException, OSError, TypeError, ValueError, OverflowError):
        return None


def _unproven_time(address: Address) -> datetime | None:
    """What somebody at an address says of the time, who has proved nothing."""
    try:
        with closing(_connect(address, None)) as connection:
            return _time_at(connection)
    except (VFLError, OSError):
        return None
