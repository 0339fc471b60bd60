"""Probe of a network address: does a server answer, with which certificate and time?"""

from __future__ import annotations

import errno
import http.client
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
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
from vfl.transport.stream import client_context, family_of

#: Largest number of seconds by which a SuperNode's clock may be behind the SuperLink's clock, and
#: largest number of seconds by which it may be ahead of it; Flower refuses the signatures of other
#: SuperNodes (TIMESTAMP_TOLERANCE and SYSTEM_TIME_TOLERANCE).
CLOCK_TOLERANCE_S, AHEAD_TOLERANCE_S = 300, 5
#: Largest error in seconds of a server's clock time, which comes in whole seconds from the header
#: ``Date`` of a response, after the response has arrived.
DATE_ERROR_S = 2
_TIME = "%Y-%m-%d %H:%M:%S UTC"
#: OpenSSL's error codes for a certificate that is not valid yet, or that has expired.
_OUT_OF_TIME = (9, 10)
_PATIENCE_S = 5.0
_ROUND_TRIPS = 5


@dataclass(frozen=True, slots=True)
class Probe:
    """Result of a probe of one network address.

    Attributes:
        connect_s: time in seconds until the TCP connection was established.
        clock_s: number of seconds by which the server's clock is ahead of this machine's clock,
            accurate to about one second; None if the server's response contained no ``Date``.
    """

    connect_s: float
    clock_s: float | None


def check_server(name: str, address: str, ca_pem: str, *, clock: bool = False) -> None:
    """Connect and make the TLS handshake; raise clearer errors than a library would.

    Args:
        name: name of the server, for error messages.
        address: host:port.
        ca_pem: certificate of the only CA that may have signed the server's certificate.
        clock: whether to compare the clock of the server with this machine's clock, too, as a
            SuperLink does with the time of each request of a SuperNode.

    Raises:
        ClockError: the clocks differ too much, or a wrong clock makes the certificate appear
            invalid.
        AuthenticationError: the server's certificate has expired, was issued for a different host,
            or is not signed by this CA.
        ProtocolError: a server answers at the address, but does not use TLS.
        LostPeerError: no server answers at the address.
    """
    where = parse_address(address)
    with _explained(name, where, ca_pem), closing(_connect(where, ca_pem)) as connection:
        if clock and (theirs := _time_at(connection)):
            check_clocks(name, address, datetime.now(UTC), theirs, AHEAD_TOLERANCE_S)


def probe_https(name: str, address: Address, ca_pem: str) -> Probe:
    """Check the server as in `check_server`.

    Measure the time to connect, and read the server's clock.

    Raises:
        PeerError: see `check_server`.
    """
    with _explained(name, address, ca_pem):
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
    """Return the round-trip time of a packet in seconds: the shortest of a few connections.

    If a proxy is used, the time includes the proxy's own connection to the address.

    Args:
        address: host:port of a server; the function only connects, and sends no data.
        timeout_s: time limit for all connections together.

    Raises:
        LostPeerError: no server answered at the address in time.
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
            "the round-trip time cannot be measured",
            where=address,
            got=type(error).__name__,
            want=f"a TCP connection within {timeout_s:g} s",
            fix="check that the SuperLink is running, and that its firewall lets this machine "
            "connect",
        ) from error
    return min(trips)


def port_is_free(host: str, port: int) -> bool:
    """Return whether a service could listen at this port; the result is True for other machines."""
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


def check_clocks(
    name: str, where: str, ours: datetime, theirs: datetime, ahead_s: int = CLOCK_TOLERANCE_S
) -> None:
    """Refuse clocks whose difference is too large for signed requests and certificates.

    Args:
        name: name of the server, for error messages.
        where: address of the server.
        ours: time of this machine's clock.
        theirs: time of the server's clock.
        ahead_s: largest number of seconds by which this machine's clock may be ahead.

    Raises:
        ClockError: the clocks differ too much; the error states the times of both clocks.
    """
    if -CLOCK_TOLERANCE_S <= (ours - theirs).total_seconds() <= ahead_s + DATE_ERROR_S:
        return
    raise ClockError(
        f"the clocks of this machine and of {name} differ",
        where=where,
        got=f"{ours:{_TIME}} here, {theirs:{_TIME}} there",
        want=f"a clock here at most {ahead_s} s ahead and {CLOCK_TOLERANCE_S} s behind",
        fix="set the clock that is wrong, for example by NTP; vfl doctor party.toml shows the "
        "difference",
    )


def _connect(address: Address, ca_pem: str, *, proven: bool = True) -> http.client.HTTPSConnection:
    """Connect to a server.

    With `proven=False`, accept every server; its answers are then not authenticated.
    """
    context = client_context(ca_pem.encode())
    if not proven:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(*address)
    plain = connect(*address, _PATIENCE_S)
    try:
        connection.sock = context.wrap_socket(plain, server_hostname=address.host)
    except BaseException:
        plain.close()
        raise
    return connection


@contextmanager
def _explained(name: str, address: Address, ca_pem: str) -> Iterator[None]:
    where = str(address)
    try:
        yield
    except ssl.SSLCertVerificationError as problem:
        if problem.verify_code in _OUT_OF_TIME and (theirs := _unproven_time(address, ca_pem)):
            check_clocks(name, where, datetime.now(UTC), theirs)
        raise AuthenticationError(
            f"the certificate of {name} is not accepted",
            where=where,
            got=problem.verify_message,
            want="a certificate that is valid today, issued for this host, and signed by the "
            "authority in ca.pem",
            fix="check that the clocks agree; get a new copy of ca.pem; or renew the certificate: "
            "vfl renew PROJECT",
        ) from None
    except ssl.SSLError as problem:
        raise ProtocolError(
            f"{name} answers, but does not use TLS",
            where=where,
            got=problem.reason,
            fix="check that this is the SuperLink's port",
        ) from None
    except OSError as problem:
        raise LostPeerError(
            f"{name} cannot be reached",
            where=where,
            got=problem.strerror or type(problem).__name__,
            fix="check that the server runs, and that each firewall between the machines lets "
            "connections to this port pass",
        ) from None


def _time_at(connection: http.client.HTTPSConnection) -> datetime | None:
    """Return the server's clock time, from the header ``Date`` of a HEAD response.

    The result is None without this header.
    """
    try:
        connection.request("HEAD", "/")
        answer = connection.getresponse()
        return parsedate_to_datetime(answer.headers["Date"]).astimezone(UTC)
    except (http.client.HTTPException, OSError, TypeError, ValueError, OverflowError):
        return None


def _unproven_time(address: Address, ca_pem: str) -> datetime | None:
    """Return the clock time that a server reports; the server is not authenticated."""
    try:
        with closing(_connect(address, ca_pem, proven=False)) as connection:
            return _time_at(connection)
    except (VFLError, OSError):
        return None


def free_ports(count: int) -> list[int]:
    """Choose different free ports; all sockets remain open until the last port is chosen."""
    with ExitStack() as held:
        ports = []
        for _ in range(count):
            listener = held.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            ports.append(listener.getsockname()[1])
    return ports
