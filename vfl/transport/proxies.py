"""Connections to other hosts: direct, or through a CONNECT proxy (RFC 9110, 9.3.6).

Both connections of a party, to the SuperLink and to the stream port, use the same environment
variables as Flower's own client: `HTTPS_PROXY`, or else `ALL_PROXY`, and `NO_PROXY`. The proxy sees
only host names, and times and sizes of messages: TLS begins inside the tunnel, and certificates are
checked in the same way as without a proxy. Connections to the loopback address use no proxy.
"""

from __future__ import annotations

import socket
import time
from base64 import b64encode
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from vfl.core.address import Address, is_loopback, parse_host
from vfl.core.errors import AuthenticationError, ConfigError, LostPeerError
from vfl.core.text import printable

_HEAD_BYTES = 16 * 1024
_SETTING = "HTTPS_PROXY (or ALL_PROXY) of the environment"
_LOCAL = ("localhost", "127.0.0.1", "::1")
#: HTTP status codes of a proxy that cannot reach the target now, but may reach it later.
_LATER = (502, 503, 504)
_WANTS_PASSWORD = 407


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy that opens tunnels with the method CONNECT.

    Attributes:
        address: host and port of the proxy.
        credentials: value of the header Proxy-Authorization; empty if the proxy needs none.
    """

    address: Address
    credentials: str = field(default="", repr=False)


def proxy_for(host: str) -> Proxy | None:
    """Return the proxy that the environment variables set for a host; None if they set none.

    Raises:
        ConfigError: the environment variable names a proxy of a kind that vfl does not support.
    """
    found = getproxies_environment()
    url = found.get("https") or found.get("all")
    if not url or is_loopback(host) or proxy_bypass(host):
        return None
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        address = Address(parse_host(parts.hostname or ""), parts.port or 80)
    except ValueError:  # do not quote it: it may contain a password
        raise ConfigError(
            "this is not the address of a proxy",
            where=_SETTING,
            want="http://HOST:PORT, or http://NAME:PASSWORD@HOST:PORT",
            fix="escape special characters of a password as %40, at least @ and /",
        ) from None
    if parts.scheme != "http":
        raise ConfigError(
            "streams support only proxies that accept CONNECT requests without TLS",
            where=_SETTING,
            got=f"{printable(parts.scheme, 20)}://",
            want="http://HOST:PORT",
            fix="list hosts that need no proxy in NO_PROXY",
        )
    if parts.username is None:
        return Proxy(address)
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return Proxy(address, f"Basic {b64encode(pair.encode()).decode()}")


def local_is_direct() -> dict[str, str]:
    """Return variables with which Flower's client uses no proxy for this machine."""
    named = getproxies_environment().get("no", "").replace(" ", "")
    known = list(filter(None, named.split(",")))
    hosts = named if "*" in known else ",".join(dict.fromkeys([*known, *_LOCAL]))
    return {"NO_PROXY": hosts, "no_proxy": hosts}


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Open a TCP connection to a host, through a proxy if the environment sets one.

    Raises:
        ConfigError: the proxy cannot be used.
        AuthenticationError: the proxy requires a different user name or password.
        LostPeerError: the proxy refuses to open a tunnel to the host.
        OSError: the host or the proxy cannot be reached, or takes too long.
    """
    proxy = proxy_for(host)
    if proxy is None:
        return socket.create_connection((host, port), timeout_s)
    deadline = time.monotonic() + timeout_s
    try:
        connection = socket.create_connection(proxy.address, timeout_s)
    except OSError as problem:
        why = problem.strerror or type(problem).__name__
        raise ConnectionError(problem.errno, f"the proxy {proxy.address}: {why}") from None
    try:
        connection.sendall(_request(Address(host, port), proxy))
        head = _head(connection, deadline)
        connection.settimeout(timeout_s)
        _check(head, Address(host, port), proxy)
    except BaseException:
        connection.close()
        raise
    return connection


def _request(target: Address, proxy: Proxy) -> bytes:
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
    if proxy.credentials:
        lines.append(f"Proxy-Authorization: {proxy.credentials}")
    return "\r\n".join([*lines, "", ""]).encode()


def _head(connection: socket.socket, deadline: float) -> bytes:
    """Read the head of the proxy's response; the target sends nothing before this party does."""
    head = bytearray()
    while not head.endswith(b"\r\n\r\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        more = connection.recv(_HEAD_BYTES - len(head))
        head += more
        if not more or len(head) == _HEAD_BYTES:
            raise ConnectionError("the proxy closed the connection before its answer was complete")
    return bytes(head)


def _check(head: bytes, target: Address, proxy: Proxy) -> None:
    first = head.partition(b"\r\n")[0].decode("latin-1").split(maxsplit=2)
    code = int(first[1]) if len(first) > 1 and first[1].isdecimal() else 0
    if 200 <= code < 300 and first[0].startswith("HTTP/1."):
        return
    where, got = f"the proxy {proxy.address}", printable(" ".join(first[1:]), 100) or "no HTTP"
    if code == _WANTS_PASSWORD:
        raise AuthenticationError(
            "the proxy requires a different user name or password",
            where=where,
            got=got,
            fix="HTTPS_PROXY=http://NAME:PASSWORD@HOST:PORT; special characters as %40",
        )
    if code in _LATER:
        raise ConnectionError(None, f"{where}: {got}")
    raise LostPeerError(
        "the proxy refuses a tunnel",
        where=where,
        got=got,
        want=f"CONNECT {target}",
        fix="ask the proxy's administrator to allow the tunnel, or list the host in NO_PROXY",
    )
