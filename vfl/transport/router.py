"""Router: accepts the TCP streams of all sessions of a label party at one port.

Each session runs in a separate process, with its own hub (server for the streams of this session).
The SuperLink opens the port, and keeps it open as long as it runs. The SuperLink's `StreamRouter`
accepts a connection and reads the first TLS message (the ClientHello, RFC 8446, section 4.1.2)
without removing it from the connection. The ALPN field (RFC 7301) of this message names the
session. The router passes the connection to this session's process through a Unix socket of the
same user. The router decrypts nothing, and has no key. The ALPN name only selects a hub; this hub
then checks certificate, token and greeting, as a hub without a router does.
"""

from __future__ import annotations

import hashlib
import os
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from vfl.core.storage import private_folder, write_text
from vfl.transport.front import Front, FrontLimits, Visitor
from vfl.transport.local_socket import connected_to, is_ours, listen_in
from vfl.transport.stream import listen, stop_accepting

#: Environment variable with the folder in which a router and its sessions find each other's
#: sockets; a SuperLink sets it for all its child processes.
ROUTER_VARIABLE = "VFL_STREAM_ROUTER"
_PREFIX = "vfl/"
_ROUTE_DIGITS = 32
_ADDRESS_FILE = "address"
_TICK_S = 0.05
_BACKLOG = 1024
#: Largest size in bytes of a ClientHello that the router accepts: one TLS record with its header.
_HELLO_BYTES = 5 + 16 * 1024
_HANDSHAKE, _CLIENT_HELLO, _ALPN = 22, 1, 16


def route_of(session: str, rank: int = 0) -> str:
    """Return the ALPN name of a session's stream; anyone on the network path can read this name.

    The name is a digest, so it does not disclose the session's identifier, which is the key of
    digests of rows.

    >>> route_of("0" * 32)
    'vfl/17b129271c2cf12351b279a1faa83dbc'
    """
    digest = hashlib.sha256(f"stream {rank} of {session}".encode()).hexdigest()
    return f"{_PREFIX}{digest[:_ROUTE_DIGITS]}"


class Listener(Protocol):
    """Source of connections for a hub."""

    port: int

    def accept(self) -> tuple[socket.socket, str]:
        """Accept the next connection; return the connection and the network address of its source.

        Raises:
            TimeoutError: no connection arrived within a short time.
            OSError: the listener is closed, or the process has no free file descriptor.
        """

    def stop(self) -> None:
        """Stop accepting; any thread may call this method while another one waits in `accept`."""

    def close(self) -> None:
        """Close the listener; no thread may be in `accept`."""


class PortListener:
    """A listening port that belongs to one hub.

    Args:
        host: address at which to listen.
        port: port at which to listen; with 0, the operating system chooses a free port.

    Raises:
        UserError: this process cannot listen at the address.
    """

    def __init__(self, host: str, port: int) -> None:
        self._listening = listen(host, port)
        self._listening.settimeout(_TICK_S)
        self.port: int = self._listening.getsockname()[1]

    def accept(self) -> tuple[socket.socket, str]:
        """See `Listener`."""
        connection, (address, *_) = self._listening.accept()
        return connection, address

    def stop(self) -> None:
        """See `Listener`."""
        stop_accepting(self._listening)

    def close(self) -> None:
        """See `Listener`."""
        self._listening.close()


class RoutedListener:
    """Listener that receives the connections that a router passes to one session.

    Args:
        folder: folder in which the router finds the sockets of sessions.
        route: route name of the session, see `route_of`.
        port: port at which the router listens.
    """

    def __init__(self, folder: Path, route: str, port: int) -> None:
        self.port = port
        self._path = folder / route.removeprefix(_PREFIX)
        self._listening = listen_in(folder, self._path.name, _BACKLOG)
        self._listening.settimeout(_TICK_S)

    def accept(self) -> tuple[socket.socket, str]:
        """See `Listener`."""
        courier, _ = self._listening.accept()
        with courier:
            courier.settimeout(_TICK_S)
            if not is_ours(courier):
                raise TimeoutError("the sender of the connection is not the router")
            try:
                connection, (address, *_) = _received(courier)
            except ConnectionAbortedError:
                raise TimeoutError("the router passed no connection") from None
        return connection, str(address)

    def stop(self) -> None:
        """See `Listener`."""
        # shutdown does not wake `accept` of a Unix socket, but a connection without content does
        with connected_to(self._path.parent, self._path.name, 0):
            pass

    def close(self) -> None:
        """See `Listener`."""
        self._path.unlink(missing_ok=True)
        self._listening.close()


def router_port(folder: Path, host: str, port: int) -> int | None:
    """Return the port at which the router of a folder listens, if it listens at the given address.

    Args:
        folder: folder in which the router finds the sockets of sessions.
        host: address at which the router should listen.
        port: port at which the router should listen; 0 stands for any free port.

    Returns:
        The port; None if no router uses this folder, or if its router listens at another address.
    """
    path = folder / _ADDRESS_FILE
    at, _, found = path.read_text().rpartition(" ") if path.exists() else ("", "", "0")
    return int(found) if at == f"{host}:{port}" else None


def routed_listener(session: str, host: str, port: int, rank: int = 0) -> RoutedListener | None:
    """Return a listener behind this process's router; None if no router listens at this address.

    Args:
        session: identifier of the session.
        host: address at which other parties reach the sessions.
        port: port at this address; 0 stands for any free port.
        rank: number of the label party's rank that listens.
    """
    if named := os.environ.get(ROUTER_VARIABLE):
        folder = Path(named)
        if routed := router_port(folder, host, port):
            return RoutedListener(folder, route_of(session, rank), routed)
    return None


@dataclass(slots=True)
class _Waiting:
    """A connection whose ClientHello has not arrived completely yet."""

    connection: socket.socket
    until: float
    visitor: Visitor | None = None
    seen: int = field(default=0)


class OtherConnections:
    """Connections that a router passes to a server in the same process.

    An object has the methods of a socket.
    """

    def __init__(self) -> None:
        self._in, self._out = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._in.setblocking(False)

    def take(self, connection: socket.socket) -> bool:
        """Pass a connection to the server.

        Return False if too many connections wait for the server.
        """
        try:
            return _sent(self._in, connection)
        except OSError:
            return False

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection and its address, as `socket.socket.accept` does."""
        return _received(self._out)

    def fileno(self) -> int:
        """File descriptor that becomes readable if a connection waits for `accept`."""
        return self._out.fileno()

    def setblocking(self, flag: bool) -> None:
        """Set whether `accept` waits for a connection."""
        self._out.setblocking(flag)

    def close(self) -> None:
        """Stop passing connections to the server."""
        self._in.close()
        self._out.close()


class StreamRouter:
    """Accepts the connections for the streams of all sessions, in its own thread.

    Args:
        host: address at which to listen.
        port: port at which to listen; with 0, the operating system chooses a free port.
        folder: folder of the sessions' sockets; the router removes the files of an earlier router.
        front: object that limits connections until the router has passed them on.
        others: object that receives the TLS connections that name no session, if a server shares
            the port; see `OtherConnections`.

    Attributes:
        port: number of the port at which the router listens.

    Raises:
        UserError: this process cannot listen at the address.
    """

    def __init__(
        self,
        host: str,
        port: int,
        folder: Path,
        front: Front | None = None,
        others: OtherConnections | None = None,
    ) -> None:
        self._others = others
        self._listening = listen(host, port)
        self._listening.setblocking(False)
        self.port: int = self._listening.getsockname()[1]
        self._folder, self._front = folder, front or Front(FrontLimits())
        private_folder(folder)
        for stale in folder.iterdir():
            stale.unlink()
        write_text(folder / _ADDRESS_FILE, f"{host}:{port} {self.port}")
        self._closed = threading.Event()
        self._evicted: list[_Waiting] = []
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._listening, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._route, name="vfl-router", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; connections that were already passed to sessions remain open."""
        self._closed.set()
        stop_accepting(self._listening)  # wakes the selector
        self._thread.join()

    def _route(self) -> None:
        while not self._closed.is_set():
            for key, _ in self._ready.select(_TICK_S):
                if key.data is None:
                    self._accept()
                else:
                    self._look(key.data)
            now = time.monotonic()
            waiting = [key.data for key in self._ready.get_map().values() if key.data]
            for one in waiting:
                if now > one.until or one in self._evicted:
                    self._end(one)
            self._evicted.clear()
        (self._folder / _ADDRESS_FILE).unlink(missing_ok=True)
        for one in [key.data for key in self._ready.get_map().values() if key.data]:
            self._end(one)
        self._listening.close()
        self._ready.close()

    def _accept(self) -> None:
        try:
            connection, (address, *_) = self._listening.accept()
        except BlockingIOError:
            return
        except OSError as error:  # usually the process has no free file descriptor
            self._front.make_room(error)
            self._closed.wait(_TICK_S)
            return
        connection.setblocking(False)
        one = _Waiting(connection, time.monotonic() + self._front.limits.head_s)
        one.visitor = self._front.enter(address, lambda: self._evicted.append(one))
        if one.visitor is None:
            connection.close()
        else:
            self._ready.register(connection, selectors.EVENT_READ, one)

    def _look(self, one: _Waiting) -> None:
        """Pass on a connection whose ClientHello is complete.

        With an invalid ClientHello, the function closes the connection.
        """
        try:
            hello = one.connection.recv(_HELLO_BYTES, socket.MSG_PEEK)
            whole = 5 + int.from_bytes(hello[3:5]) if len(hello) >= 5 else 5
            if len(hello) < whole <= _HELLO_BYTES and len(hello) > one.seen:
                # Linux wakes the router again when this many bytes have arrived, or when no more
                # bytes can arrive.
                one.seen = len(hello)
                one.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, whole)
                return
            one.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            route = next((name for name in alpn_of(hello) if name.startswith(_PREFIX)), None)
            if route is not None:
                handed = self._hand_over(one.connection, route.removeprefix(_PREFIX))
            else:
                handed = self._others is not None and self._others.take(one.connection)
        except (OSError, ValueError):
            handed = False
        self._end(one, failed=not handed)

    def _hand_over(self, connection: socket.socket, name: str) -> bool:
        """Pass a connection to a session's process; return whether this process has received it."""
        if len(name) != _ROUTE_DIGITS or not set(name) <= set("0123456789abcdef"):
            return False
        with connected_to(self._folder, name, 0) as session:
            if session is None:
                return False
            return _sent(session, connection)

    def _end(self, one: _Waiting, *, failed: bool = True) -> None:
        assert one.visitor is not None, "it was let in"
        if failed:
            self._front.failed(one.visitor.source)
        else:
            # after this, the limits of the session's hub apply to the connection
            one.visitor.welcome()
        one.visitor.leave()
        self._ready.unregister(one.connection)
        one.connection.close()


def _sent(channel: socket.socket, connection: socket.socket) -> bool:
    """Pass a connection through a Unix socket; return whether the socket took it."""
    return bool(socket.send_fds(channel, [b"\0"], [connection.fileno()]))


def _received(channel: socket.socket) -> tuple[socket.socket, Any]:
    """Receive a connection that was passed through a Unix socket, and the address of its source.

    Raises:
        ConnectionAbortedError: the sender passed no connection, or the connection has ended.
    """
    _, files, _, _ = socket.recv_fds(channel, 1, 1)
    if not files:
        raise ConnectionAbortedError("the sender passed no connection")
    connection = socket.socket(fileno=files[0])
    try:
        return connection, connection.getpeername()
    except OSError:
        connection.close()
        raise ConnectionAbortedError("the connection ended while it was waiting") from None


def alpn_of(hello: bytes) -> list[str]:
    """Return the ALPN names in the first TLS record of a connection.

    Args:
        hello: bytes of the whole first TLS record.

    Raises:
        ValueError: the bytes are not a ClientHello, or the lengths of its fields are inconsistent.

    >>> alpn_of(b"GET / HTTP/1.1")
    Traceback (most recent call last):
    ...
    ValueError: this is not a ClientHello message
    """
    if len(hello) < 9 or hello[0] != _HANDSHAKE or hello[5] != _CLIENT_HELLO:
        raise ValueError("this is not a ClientHello message")
    record = _Fields(_Fields(hello[3:]).vector(2))
    record.take(1)
    body = _Fields(record.vector(3))
    body.take(2 + 32)  # skip version and random
    for length in (1, 2, 1):  # skip session id, cipher suites and compression methods
        body.vector(length)
    extensions = _Fields(body.vector(2))
    while extensions.left:
        kind, content = int.from_bytes(extensions.take(2)), extensions.vector(2)
        if kind == _ALPN:
            names, found = _Fields(_Fields(content).vector(2)), list[str]()
            while names.left:
                found.append(names.vector(1).decode("ascii"))
            return found
    return []


class _Fields:
    """Reads the fields of a TLS structure one after another."""

    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 0

    @property
    def left(self) -> int:
        return len(self._content) - self._at

    def take(self, count: int) -> bytes:
        """Read the next `count` bytes."""
        if count > self.left:
            raise ValueError("a field of the ClientHello is longer than its container")
        self._at += count
        return self._content[self._at - count : self._at]

    def vector(self, length_bytes: int) -> bytes:
        """Read a TLS vector: first its length, then this many bytes."""
        return self.take(int.from_bytes(self.take(length_bytes)))
