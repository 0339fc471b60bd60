"""HTTP with a `Front`, the object that limits connections: vfl accepts connections for uvicorn.

uvicorn receives a TLS connection only after the handshake, and waits for a request head without a
time limit. This module therefore accepts connections itself: each connection has one deadline for
TLS and its first request head together, and a deadline for every later head. An application calls
`welcome(scope)` when a request has presented a valid credential, which lifts some limits of the
connection.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.config import create_ssl_context
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from vfl.core.errors import UserError
from vfl.core.processes import looks
from vfl.transport.front import CONNECTION, Front, Visitor, whole_number
from vfl.transport.stream import listen

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: Largest number of connections that are accepted in one iteration of the event loop, and seconds
#: of the pause when the process has no free file descriptor.
_AT_ONCE, _REST_S = 64, 0.05
#: Time limit in seconds for the closing handshake of a TLS connection.
_CLOSE_S = 2.0
_START_S, _TICK_S = 10.0, 0.01


def http_config(
    app: Any,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
    client_ca: str | None = None,
    **options: Any,
) -> uvicorn.Config:
    """Return the uvicorn configuration of vfl's HTTP servers: no access log, TLS 1.3 only.

    Proxy headers stay disabled, because a client could forge its address with them.

    Args:
        app: an ASGI application.
        certificate: PEM file of the server's certificate; None serves HTTP without TLS.
        key: PEM file of the certificate's private key.
        client_ca: PEM file of the CA that must have signed clients' certificates; None requires no
            client certificate.
        options: other options of `uvicorn.Config`; they replace the options of this function.
    """
    own: dict[str, Any] = {
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "log_level": "critical",
        "access_log": False,
    }
    config = uvicorn.Config(
        app,
        server_header=False,
        proxy_headers=False,
        ssl_certfile=certificate,
        ssl_keyfile=key,
        ssl_ca_certs=client_ca,
        ssl_cert_reqs=ssl.CERT_REQUIRED if client_ca else ssl.CERT_NONE,
        **{**own, **options},
    )
    if certificate is not None:
        config.load()
        assert config.ssl is not None, "a certificate was given"
        config.ssl.minimum_version = ssl.TLSVersion.TLSv1_3
    return config


class RefusedBodyError(Exception):
    """Error: the body of a request is larger than its limit, or did not arrive in time.

    Attributes:
        status: HTTP status of the refusal: 413 if the body is too large, 408 if it is too late.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


async def read_body(scope: Scope, receive: Receive, most: int, patience_s: float) -> bytes | None:
    """Read the whole body of a request; return None if the client disconnects earlier.

    If the head of the request announces too many bytes, the function reads no byte of the body.

    Args:
        scope: ASGI scope of the request. If the scope shows that the whole body has already
            arrived, the time limit is not applied.
        receive: the ASGI receive function of the request.
        most: largest accepted size in bytes.
        patience_s: time limit in seconds for the whole body.

    Raises:
        RefusedBodyError: the body is larger than the limit, or did not arrive in time.
    """
    announced = [value for key, value in scope["headers"] if key == b"content-length"]
    if any(whole_number(each, most) is None for each in announced):
        raise RefusedBodyError(413)
    body = bytearray()
    connection = scope.get("state", {}).get(CONNECTION)
    here = connection is not None and connection.whole
    try:
        async with nullcontext() if here else asyncio.timeout(patience_s):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                body += message.get("body", b"")
                if len(body) > most:
                    raise RefusedBodyError(413)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise RefusedBodyError(408) from None


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI receive function that first returns the given body, which was already read."""
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> MutableMapping[str, Any]:
        return pending.pop() if pending else await receive()

    return receive_again


class Connection:
    """One connection of an HTTP server; only the server's event loop may use the object.

    Args:
        server: server that accepted the connection.
        accepted: its socket.

    Attributes:
        whole: whether every request that started on this connection has arrived completely.
    """

    def __init__(self, server: HttpServer, accepted: socket.socket) -> None:
        self.visitor: Visitor | None = None
        self.whole = False
        self._server, self._socket = server, accepted
        self._limits = server.front.limits
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.BaseTransport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._answering, self._head_bytes = False, 0
        self._task: asyncio.Task[None] | None = None
        self._ended = False

    def open(self, visitor: Visitor) -> None:
        """Start the TLS handshake, or HTTP if the server has no TLS."""
        self.visitor, visitor.idle = visitor, True
        self._server.opening.add(self)
        self._arm()
        self._task = self._loop.create_task(self._open())

    def welcome(self) -> None:
        """Record that a request on this connection has presented a valid credential."""
        if self.visitor is not None:
            self.visitor.welcome()

    def end(self) -> None:
        """Close the connection; any thread may call this method."""
        with suppress(RuntimeError):  # the server has ended, so the event loop is closed
            self._loop.call_soon_threadsafe(self.close)

    def opened(self, transport: asyncio.BaseTransport) -> None:
        """Record that the connection is open for HTTP: TLS is established, if there is TLS."""
        self._transport = transport
        self._server.opening.discard(self)

    def received(self, size: int, whole_head: bool) -> None:
        """Record received bytes, and whether they complete the head of a request."""
        if whole_head:
            self.begin()
        elif not self._answering:
            self._head_bytes += size
            known = self.visitor is not None and self.visitor.known
            if self._head_bytes > self._limits.head_bytes and not known:
                self.close()
            elif self._timer is None:
                self._arm()

    def begin(self) -> None:
        """Record that a request is in progress."""
        self._answering, self._head_bytes = True, 0
        self._disarm()
        if self.visitor is not None:
            self.visitor.idle = False

    def answered(self) -> None:
        """Record that no request is in progress any more."""
        self._answering = False
        if self.visitor is not None:
            self.visitor.idle = True

    def left(self) -> None:
        """Remove the ended connection from the server's lists."""
        self._disarm()
        self._server.opening.discard(self)
        if self.visitor is not None:
            self.visitor.leave()

    def close(self) -> None:
        """Close the connection immediately."""
        self.left()
        if self._ended:
            return
        self._ended = True
        if self._transport is not None:
            self._transport.abort()  # type: ignore[attr-defined]
        else:  # during TLS
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    async def _open(self) -> None:
        """Do the TLS handshake, if any, and pass the socket to uvicorn's protocol object."""
        context = self._server.context()
        patience = self._limits.head_s if context else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._server.protocol(self),
                self._socket,
                ssl=context,
                ssl_handshake_timeout=patience,
                ssl_shutdown_timeout=_CLOSE_S if context else None,
            )
        except OSError:  # TLS failed, or took too long
            self.close()

    def _arm(self) -> None:
        self._timer = self._loop.call_later(self._limits.head_s, self.close)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class HttpServer(uvicorn.Server):
    """uvicorn's server for connections that a `Front` admits.

    Args:
        config: configuration of uvicorn; the server listens only at its host and port.
        front: object that limits connections of clients without a valid credential.
        signals: whether the server handles SIGINT and SIGTERM; if not, the caller handles them.

    Attributes:
        front: the argument.
        opening: connections whose TLS handshake has not ended.
    """

    def __init__(
        self, config: uvicorn.Config, front: Front | None = None, *, signals: bool = True
    ) -> None:
        super().__init__(config)
        self.front = front or Front()
        self.opening: set[Connection] = set()
        self._signals, self._files = signals, _stamps(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and listen."""
        listening = sockets or [listen(self.config.host, self.config.port)]
        self.config.loaded_app = _Noted(self.config.loaded_app)
        self._listeners = [_Listener(each, self) for each in listening]
        await super().startup(sockets=[])
        if not self.should_exit:
            for each in self._listeners:
                each.open()
            self.servers.extend(self._listeners)  # type: ignore[arg-type]

    def capture_signals(self) -> Any:
        """See `uvicorn.Server`."""
        return super().capture_signals() if self._signals else nullcontext()

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context for a new connection; it contains the present certificate file.

        Open connections keep the context with which they started. While a certificate is renewed,
        certificate and key may not match for a moment; meanwhile, the method returns the previous
        context.
        """
        config, now = self.config, _stamps(self.config)
        if config.ssl is not None and now and now != self._files:
            try:
                renewed = create_ssl_context(
                    certfile=str(config.ssl_certfile),
                    keyfile=None if config.ssl_keyfile is None else str(config.ssl_keyfile),
                    password=config.ssl_keyfile_password,
                    ssl_version=config.ssl_version,
                    cert_reqs=config.ssl_cert_reqs,
                    ca_certs=None if config.ssl_ca_certs is None else str(config.ssl_ca_certs),
                    ciphers=config.ssl_ciphers,
                )
            except (OSError, ssl.SSLError):
                return config.ssl
            renewed.minimum_version = config.ssl.minimum_version
            config.ssl, self._files = renewed, now
        return config.ssl

    def start(self, listening: socket.socket, name: str) -> None:
        """Run the server in a thread with this name; return when the server accepts connections.

        Raises:
            UserError: the server does not start within ten seconds.
        """
        self._thread = threading.Thread(
            target=self.run, args=([listening],), name=name, daemon=True
        )
        self._thread.start()
        for _ in looks(_START_S, _TICK_S):
            if self.started:
                return
            if not self._thread.is_alive():
                break
        raise UserError("an HTTP server did not start", where=name)

    def stop(self) -> None:
        """Stop the thread that `start` began; a second call has no effect."""
        self.should_exit = True
        self._thread.join(_START_S)

    def protocol(self, connection: Connection) -> asyncio.Protocol:
        """Return the protocol object that handles HTTP on a connection."""
        return _Protocol(
            connection,
            config=self.config,
            server_state=self.server_state,
            app_state={**self.lifespan.state, CONNECTION: connection},
        )


def _stamps(config: uvicorn.Config) -> tuple[int, ...]:
    """Return the modification times of the certificate file and the key file; empty without TLS."""
    files = [one for one in (config.ssl_certfile, config.ssl_keyfile) if one is not None]
    try:
        return tuple(Path(one).stat().st_mtime_ns for one in files)
    except OSError:
        return ()


class _Listener:
    """A listening socket, with the methods that uvicorn calls on items of `Server.servers`."""

    def __init__(self, listening: socket.socket, server: HttpServer) -> None:
        listening.setblocking(False)
        self.sockets = (listening,)
        self._socket, self._server = listening, server
        self._closed = False

    def open(self) -> None:
        """Start to accept connections."""
        if not self._closed:
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def close(self) -> None:
        """Stop accepting."""
        self._closed = True
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        for connection in list(self._server.opening):
            connection.close()

    async def wait_closed(self) -> None:
        """Do nothing, because `close` has already ended the accepting."""

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # usually the process has no free file descriptor
                self._server.front.make_room(error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._socket)
                loop.call_later(_REST_S, self.open)
                return
            accepted.setblocking(False)
            connection = Connection(self._server, accepted)
            visitor = self._server.front.enter(address[0], connection.end)
            if visitor is None:
                accepted.close()
            else:
                connection.open(visitor)


class _Noted:
    """ASGI application that records, for each connection, whether a request is in progress."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        connection: Connection = scope["state"][CONNECTION]
        connection.begin()
        try:
            await self._app(scope, receive, send)
        finally:
            connection.answered()
            # Uvicorn has passed the connection to its websocket protocol object.
            if scope["type"] == "websocket":
                connection.left()


class _Joined:
    """A transport that combines all writes of one iteration of the event loop into one write.

    uvicorn writes the head and the body of a response separately. The first write would wake the
    client's process, which on a busy machine would delay the second write.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._held = transport, list[bytes]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._held:
            asyncio.get_running_loop().call_soon(self._flush)
        self._held.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._held:
            self._transport.write(b"".join(self._held))
            self._held.clear()


class _Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's HTTP protocol, with deadlines for request heads, and one write per response."""

    def __init__(self, connection: Connection, **options: Any) -> None:
        super().__init__(**options)
        self._connection = connection

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._connection.opened(transport)
        super().connection_made(_Joined(transport))

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        self._connection.whole = self.cycle is not None and not self.cycle.more_body
        self._connection.received(len(data), self.cycle is not before)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.left()
        super().connection_lost(exc)
