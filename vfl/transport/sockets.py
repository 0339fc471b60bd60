"""Sockets as the links want them: tuned, and TLS 1.3 or nothing."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from ipaddress import ip_address

from vfl.errors import AuthenticationError, LostPeerError, UserError
from vfl.transport.base import Timeouts
from vfl.transport.stream import Stream

_BACKLOG = 128
_ROUND_TRIPS = 5
_KEEPALIVE_S = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


def require_loopback(host: str) -> None:
    """Refuse a stream without TLS whose other end may be another machine.

    Raises:
        UserError: `host` is no loopback address, nor the name of one.
    """
    try:
        local = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise UserError(
            "a stream without TLS stays on its own machine",
            got=host,
            want="a certificate, or a loopback address",
        )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        UserError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise UserError(
            "cannot listen for the other parties",
            where=f"{host}:{port}",
            got=getattr(error, "strerror", None) or str(error),
            fix="choose another port, or 0 for a free one",
        ) from error


def dial(host: str, port: int, context: ssl.SSLContext | None, timeouts: Timeouts) -> Stream:
    """A stream to a listening hub, TLS done.

    Raises:
        AuthenticationError: the hub's certificate is not trusted.
        ConnectionError, TimeoutError, OSError: nobody there, or nobody who answers.
    """
    connection = socket.create_connection((host, port), timeout=timeouts.connect_s)
    try:
        stream = open_stream(connection, context, server_hostname=host)
    except BaseException:
        connection.close()
        raise
    try:
        stream.handshake(time.monotonic() + timeouts.handshake_s)
    except ssl.SSLCertVerificationError as error:
        stream.end()
        raise AuthenticationError(
            "the hub's certificate is not trusted",
            where=f"{host}:{port}",
            got=error.verify_message,
            want="a certificate for this host name, signed by the CA of the session message",
        ) from error
    except BaseException:
        stream.end()
        raise
    return stream


def round_trip_s(address: str, timeout_s: float = 2.0) -> float:
    """How long a packet takes there and back: the fastest of a few TCP connections.

    Args:
        address: host:port of something that listens; nothing is sent to it.
        timeout_s: for all of them together.

    Raises:
        LostPeerError: nobody answered in time.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout_s
    trips: list[float] = []
    try:
        for _ in range(_ROUND_TRIPS):
            started = time.monotonic()
            left_s = deadline - started
            if trips and left_s < trips[0]:
                break
            socket.create_connection((host, int(port)), max(left_s, 0.001)).close()
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


def open_stream(
    connection: socket.socket,
    context: ssl.SSLContext | None,
    *,
    server_hostname: str | None = None,
) -> Stream:
    """A connected socket as a stream; with TLS its handshake is still to be done."""
    _tune(connection)
    if context is not None:
        connection = context.wrap_socket(
            connection,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
            do_handshake_on_connect=False,
        )
    return Stream(connection)


def client_context(ca_pem: bytes) -> ssl.SSLContext:
    """TLS 1.3 towards a hub whose certificate must come from this CA.

    Raises:
        AuthenticationError: these bytes are no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # host name and certificate are checked
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cadata=ca_pem.decode())
    except (ssl.SSLError, ValueError) as error:
        raise AuthenticationError("the session's CA certificate cannot be read") from error
    return context


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE_S.items():
        with contextlib.suppress(AttributeError):  # not every system names all three
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
