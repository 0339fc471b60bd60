"""Workers in browser pages: a server delivers a page, which connects to it by a WebSocket.

The page (`page.html`) is a worker: it holds additive shares and computes on them, with the messages
of a share holder in `vfl.mpc.many.members.Member`. The page accepts only the requests in its table
ASKED. The server listens only on this machine, because its WebSocket connections have no TLS.
The web address of each page contains a secret.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from vfl.core.errors import LostPeerError, MissingPackageError, MissingPartyError
from vfl.core.frame import LIMIT_BYTES, Frame, Kind
from vfl.transport.front import welcome
from vfl.transport.stream import listen

_PAGE = Path(__file__).parent / "page.html"
_TICK_S = 0.02
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
)


class PageLink:
    """The pool's link to a worker page; see `vfl.transport.PolledLink`."""

    patience_s = 600.0

    def __init__(self, name: str) -> None:
        self.name, self.attached = name, threading.Event()
        self._frames: deque[bytes] = deque()
        self._read, self._write = os.pipe()
        self._ended: LostPeerError | None = None
        self._say: Any = None

    # Methods that the web server calls in its own thread.

    def attach(self, say: Any) -> None:
        """Record that the page has connected; `say` is the function that sends it a message."""
        self._say = say
        self.attached.set()

    def came(self, raw: bytes) -> None:
        """Handle a message that came from the page."""
        self._frames.append(raw)
        os.write(self._write, b"x")

    def left(self) -> None:
        """Record that the page's WebSocket has disconnected."""
        self._ended = self._ended or self._closed()
        os.write(self._write, b"x")

    # Pool side.

    def send(self, frame: Frame) -> None:
        """See `Link`."""
        if self._ended is not None:
            raise self._ended
        if self._say is None:
            raise LostPeerError(f"no browser has opened the page of worker {self.name}")
        try:
            self._say(bytes(frame.payload))
        except Exception:  # The web server raises various kinds of errors if the page was closed.
            self.left()
            raise self._closed() from None

    def receive(self) -> Frame:
        """See `Link`."""
        while (frame := self.poll()) is None:
            time.sleep(_TICK_S)
        return frame

    def poll(self) -> Frame | None:
        """See `PolledLink`."""
        if self._frames:
            os.read(self._read, 1)
            return Frame(Kind.PROTOCOL, 0, self._frames.popleft())
        if self._ended is not None:
            raise self._ended
        return None

    def fileno(self) -> int:
        """See `PolledLink`."""
        return self._read

    def fail(self, error: Exception) -> None:
        """See `TransportLink`."""
        self.close()

    def close(self) -> None:
        """See `Link`."""
        self._ended = self._ended or self._closed()

    def _closed(self) -> LostPeerError:
        return LostPeerError(f"the browser page in which worker {self.name} runs was closed")


class Pages:
    """The web server for a pool's pages, in its own thread; it listens only on this machine.

    Raises:
        MissingPackageError: a package that the web server needs is not installed.
    """

    def __init__(self) -> None:
        try:
            import uvicorn  # noqa: F401
            import websockets  # noqa: F401
            from fastapi import FastAPI, Request, WebSocket, WebSocketDisconnect
            from fastapi.responses import HTMLResponse, Response
        except ImportError as error:
            raise MissingPackageError(
                "worker pages need a web server",
                got=f"no package {error.name}",
                fix="pip install 'vfl[serve]'",
            ) from None
        import anyio.from_thread

        from vfl.transport.http import HttpServer, http_config

        app = FastAPI(openapi_url=None)
        self._links: dict[str, PageLink] = {}
        headers = {"content-security-policy": _POLICY, "referrer-policy": "no-referrer"}

        async def page(request: Request, token: str) -> Response:
            if token not in self._links:
                return Response(status_code=404)
            welcome(request.scope)
            return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers=headers)

        async def socket(websocket: WebSocket, token: str) -> None:
            link, origin = self._links.get(token), websocket.headers.get("origin")
            here = origin == f"http://127.0.0.1:{self._port}"
            if link is None or not here or link.attached.is_set():
                await websocket.close(1008)
                return
            welcome(websocket.scope)
            await websocket.accept()
            portal = anyio.from_thread.BlockingPortal()
            async with portal:
                link.attach(lambda raw: portal.call(websocket.send_bytes, raw))
                try:
                    while True:
                        link.came(await websocket.receive_bytes())
                except (WebSocketDisconnect, KeyError, RuntimeError):
                    link.left()

        page.__annotations__["request"] = Request
        socket.__annotations__["websocket"] = WebSocket
        app.add_api_route("/{token}", page, response_class=HTMLResponse)
        app.add_api_websocket_route("/{token}/socket", socket)
        config = http_config(app, ws="websockets-sansio", ws_max_size=LIMIT_BYTES)
        listening = listen("127.0.0.1", 0)
        self._port = listening.getsockname()[1]
        self._server = HttpServer(config)
        self._server.start(listening, "vfl-pages")

    def add(self, name: str) -> tuple[str, PageLink]:
        """Return the web address of a new page, and the pool's link to this page."""
        token = secrets.token_urlsafe(24)
        link = self._links[token] = PageLink(name)
        return f"http://127.0.0.1:{self._port}/{token}", link

    def wait(self, timeout_s: float) -> None:
        """Wait until every page has connected to the server.

        Raises:
            MissingPartyError: a page did not connect in time; the error names it.
        """
        deadline = time.monotonic() + timeout_s
        for link in self._links.values():
            if not link.attached.wait(max(0.0, deadline - time.monotonic())):
                raise MissingPartyError(
                    f"no browser opened the page of worker {link.name} within {timeout_s:g} s",
                    fix="open the address that Pool.page returned in a browser on this machine",
                )

    def close(self) -> None:
        """Stop the server, which closes the connections of all pages."""
        self._server.stop()
